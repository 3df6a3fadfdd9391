"""One suite over both stores, plain files and S3: objects, and artifacts in every way in which they can be damaged."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from longshore.fields import Artifact
from longshore.views import FileEntry
from shared.errors import CorruptArtifact, DiskFull, InvalidInput, NotFound, StoreUnavailable
from shared.settings import S3Settings
from shared.storage.artifacts import (
    RANGE_BYTES,
    Fetched,
    Manifest,
    fetch,
    find_artifact,
    manifest_of,
    open_artifact,
    read_manifest,
    refer,
    remember_checked,
    seal,
    sha256_file,
    sha256_object,
    stage,
    staged,
    upload_artifact,
)
from shared.storage.paths import MANIFEST
from shared.storage.store import LocalStore, ObjectStore, S3Store, open_store, open_uri, uri_of


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path) -> ObjectStore:
    if request.param == "local":
        return open_store(f"file://{tmp_path}/a%20store", S3Settings())
    server = request.getfixturevalue("s3_server")
    return open_store(f"{server.uri}/{uuid.uuid4().hex}/a%20store", server.settings)


def keys_of(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_what_is_put_is_got(store, tmp_path) -> None:
    store.put_bytes("a/b", b"one")
    store.put_bytes("a/b", b"two")
    (tmp_path / "file").write_bytes(b"three")
    store.put_file("a/c", tmp_path / "file")
    store.get_file("a/c", tmp_path / "deep" / "copy")
    assert store.get_bytes("a/b") == b"two"
    assert (tmp_path / "deep" / "copy").read_bytes() == b"three"
    store.delete("a/b")
    assert store.head("a/b") is None and keys_of(store) == ["a/c"]


@pytest.mark.parametrize("key", ["spaces and ünïcode/日本 語.jsonl", "100%25/a+b&c=d#e?f", "quotes/'\"`", "~tilde/[x]"])
def test_keys_may_be_of_any_letters(store, s3, key) -> None:
    store.put_bytes(key, b"x")
    assert store.get_bytes(key) == b"x"
    assert keys_of(store, key[:4]) == [key]
    other, found = open_uri(uri_of(store, key), s3)
    assert other.get_bytes(found) == b"x"


def _settings(store: S3Store) -> S3Settings:
    return S3Settings(endpoint_url=store._client.meta.endpoint_url, region="us-east-1")


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/./b", "", "a/..", "a\0b", "a/.x.tmp"]
)
def test_a_key_that_leaves_the_store_is_refused(store, key) -> None:
    for attempt in (
        lambda: store.put_bytes(key, b"x"),
        lambda: store.put_if_absent(key, b"x"),
        lambda: store.get_bytes(key),
        lambda: store.head(key),
        lambda: store.delete(key),
    ):
        with pytest.raises(InvalidInput):
            attempt()


def test_ranges(store) -> None:
    store.put_bytes("k", b"0123456789")
    assert store.read_range("k", 3, 4) == b"3456"
    assert store.read_range("k", 8, 10) == b"89"
    assert store.read_range("k", 10, 5) == b""


def test_what_is_missing_is_not_found(store, tmp_path) -> None:
    for attempt in (
        lambda: store.get_bytes("no/such"),
        lambda: store.read_range("no/such", 0, 1),
        lambda: store.get_file("no/such", tmp_path / "copy"),
    ):
        with pytest.raises(NotFound, match="no/such"):
            attempt()
    assert store.head("no/such") is None
    assert not (tmp_path / "copy").exists()
    store.delete("no/such")


def test_a_folder_is_no_object(store) -> None:
    store.put_bytes("folder/file", b"x")
    assert store.head("folder") is None
    with pytest.raises(NotFound):
        store.get_bytes("folder")
    store.delete("folder")
    assert store.get_bytes("folder/file") == b"x"


def test_head_tells_size_and_change(store) -> None:
    store.put_bytes("k", b"one")
    first = store.head("k")
    time.sleep(0.02)
    store.put_bytes("k", b"two")
    assert (first.key, first.size) == ("k", 3)
    assert first.etag and first.etag != store.head("k").etag


def test_a_list_is_in_order_and_of_its_prefix(store) -> None:
    keys = ["a/b/c", "a/b.txt", "a.txt", "a/b/a", "a/c", "ab/x", "a/b-1", "b", "é/x", "a/B"]
    for key in keys:
        store.put_bytes(key, b"xy")
    assert keys_of(store) == sorted(keys)
    assert keys_of(store, "a/b") == ["a/b-1", "a/b.txt", "a/b/a", "a/b/c"]
    assert keys_of(store, "a/b/") == ["a/b/a", "a/b/c"]
    assert keys_of(store, "a") == sorted(k for k in keys if k.startswith("a"))
    assert keys_of(store, "none/such") == []
    assert all(info.size == 2 for info in store.list(""))


NAMES = st.text("ab.-~é0", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
KEYS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.sets(KEYS, max_size=8), prefix=st.one_of(st.just(""), KEYS, KEYS.map(lambda key: f"{key}/")))
def test_local_files_list_as_s3_would(tmp_path, keys, prefix) -> None:
    keys = {key for key in keys if not any(other.startswith(f"{key}/") for other in keys)}
    store = LocalStore(tmp_path / uuid.uuid4().hex)
    for key in keys:
        store.put_bytes(key, b"")
    assert keys_of(store, prefix) == sorted(key for key in keys if key.startswith(prefix))


def test_many_objects_list_whole(store) -> None:
    """More than one page of S3, whose page is 1,000."""
    keys = [f"many/{i:05d}" for i in range(1_050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put_bytes(key, b""), keys))
    assert keys_of(store, "many/") == keys


def test_one_of_many_creates(store) -> None:
    barrier = threading.Barrier(8)

    def create(i: int) -> bool:
        barrier.wait()
        return store.put_if_absent("claims/one", f"writer {i}".encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert store.get_bytes("claims/one") == f"writer {won.index(True)}".encode()
    assert store.put_if_absent("claims/one", b"late") is False
    assert keys_of(store) == ["claims/one"]


def test_readers_see_whole_objects_while_writers_replace_them(store) -> None:
    store.put_bytes("k", b"a" * 100_000)

    def write(letter: bytes) -> None:
        for _ in range(10):
            store.put_bytes("k", letter * 100_000)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, letter) for letter in (b"a", b"b")]
        seen = [set(store.get_bytes("k")) for _ in range(20)]
    assert [writer.result() for writer in writers] == [None, None]
    assert all(len(letters) == 1 for letters in seen)
    assert keys_of(store) == ["k"]


def test_a_large_file_goes_both_ways(store, tmp_path) -> None:
    data = os.urandom(20 << 20)  # several parts of boto3's 8 MiB
    (tmp_path / "large").write_bytes(data)
    store.put_file("large", tmp_path / "large")
    store.get_file("large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


def test_an_error_of_a_check_ends_an_upload_and_a_download(store, tmp_path) -> None:
    class Stopped(Exception): ...

    def stop() -> None:
        raise Stopped

    (tmp_path / "large").write_bytes(bytes(20 << 20))
    store.put_file("there", tmp_path / "large")
    with pytest.raises(Stopped):
        store.put_file("not there", tmp_path / "large", stop)
    with pytest.raises(Stopped):
        store.get_file("there", tmp_path / "folder" / "copy", stop)
    assert keys_of(store) == ["there"]
    assert not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("uri", ["gs://bucket/key", "s3:///key", "/a/path", "", "file://host/path"])
def test_other_uris_are_refused(uri) -> None:
    with pytest.raises(InvalidInput, match="three slashes" if uri.startswith("file:") else None):
        open_uri(uri, S3Settings())


def test_an_unreachable_store_says_so_soon(s3_server) -> None:
    store = S3Store("bucket", "", S3Settings(endpoint_url="http://127.0.0.1:9", region="us-east-1"))
    tries: list[object] = []
    store._client.meta.events.register("before-send.s3", lambda request, **_: tries.append(request))
    with pytest.raises(StoreUnavailable, match=r"s3://bucket/k.*Could not connect.*127\.0\.0\.1:9"):
        store.put_bytes("k", b"x")
    assert 1 <= len(tries) <= 3


def test_a_missing_bucket_says_so(s3_server) -> None:
    with pytest.raises(StoreUnavailable, match="there is no such bucket"):
        S3Store("no-such-bucket", "", s3_server.settings).put_bytes("k", b"x")


def test_no_credentials_say_so(s3_server, monkeypatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = S3Store("longshore", "", _another_name(s3_server))
    with pytest.raises(StoreUnavailable, match="Unable to locate credentials"):
        store.get_bytes("k")


def test_wrong_credentials_say_so_and_are_not_shown(s3_server, monkeypatch) -> None:

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONGWRONGWRONG0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-that-nobody-shows")
    store = S3Store("longshore", uuid.uuid4().hex, _another_name(s3_server, "region-of-wrong-keys"))
    with _authentication(s3_server):
        for attempt in (lambda: store.put_bytes("k", b"x"), lambda: store.head("k"), lambda: list(store.list(""))):
            with pytest.raises(StoreUnavailable, match="refuses our credentials") as refusal:
                attempt()
            assert "WRONG" not in str(refusal.value) and "nobody-shows" not in str(refusal.value)


def _another_name(server, region: str = "us-west-2") -> S3Settings:
    """Clients are shared by endpoint and region, and keep the credentials that they were made with."""
    return S3Settings(endpoint_url=server.endpoint_url, region=region)


class _authentication:
    """moto checks keys and permissions from now on."""

    def __init__(self, server) -> None:
        self.url = f"{server.endpoint_url}/moto-api/reset-auth"

    def __enter__(self) -> None:
        self._ask("0")

    def __exit__(self, *_) -> None:
        self._ask("inf")

    def _ask(self, count: str) -> None:
        import httpx

        httpx.post(self.url, content=count).raise_for_status()


def test_a_symlink_to_a_file_is_an_object(tmp_path) -> None:
    """As in a Hugging Face cache, whose snapshots are links; a link to a folder is not followed."""
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "model").symlink_to(tmp_path / "blob")
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root")
    assert [(i.key, i.size) for i in LocalStore(tmp_path / "root").list("")] == [("model", 7)]


FULL_DISK = """
import resource, sys
from pathlib import Path
from shared.errors import DiskFull
from shared.storage.store import LocalStore
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store = LocalStore(Path(sys.argv[1]))
large = Path(sys.argv[2])
store.put_bytes("small", b"x")
for put in (lambda: store.put_bytes("k", bytes(9999)), lambda: store.put_if_absent("k", bytes(9999)),
            lambda: store.put_file("k", large), lambda: LocalStore(large.parent).get_file("large", store.root / "k")):
    try:
        put()
    except DiskFull as error:
        print(error)
"""


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path) -> None:
    """A limit on the size of files stands for the disk: the same code path, with EFBIG for ENOSPC."""
    (tmp_path / "large").write_bytes(bytes(10_000))
    root = tmp_path / "store"
    answer = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(root), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert answer.stderr == ""
    assert answer.stdout.count(f"no space is left on the disk that holds {root}") == 4
    assert [path.name for path in root.iterdir()] == ["small"]


def test_a_full_file_system_is_named_and_nothing_is_left(tmp_path) -> None:
    root = tmp_path / "tiny"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(root)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with pytest.raises(DiskFull, match=os.strerror(errno.ENOSPC)):
            LocalStore(root).put_bytes("k", bytes(1 << 20))
        assert list(root.iterdir()) == []
    finally:
        subprocess.run(["umount", str(root)], check=True)


FILES = {"a.bin": b"a" * 5_000, "deep/ü b.json": b"{}", "empty": b"", "deep/manifest.json": b"not the manifest"}


@pytest.fixture
def s3(store) -> S3Settings:
    return _settings(store) if isinstance(store, S3Store) else S3Settings()


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "folder"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def artifact(store, folder) -> Artifact:
    seal(folder)
    return upload_artifact(store, "an/artifact", folder)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def content_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_what_is_uploaded_is_staged(store, artifact, cache, s3, tmp_path) -> None:
    folder = stage(artifact, cache, s3)
    assert content_of(folder) == FILES
    assert (folder == tmp_path / "a store/an/artifact") == isinstance(store, LocalStore), "used where it lies"
    assert find_artifact(store, "an/artifact") == artifact
    assert find_artifact(store, "an") is None


def test_equal_contents_have_equal_manifests(folder, tmp_path) -> None:
    first = seal(folder)
    os.utime(folder / "a.bin", (0, 0))
    assert seal(folder) == first == sha256_file(folder / MANIFEST)
    (folder / "a.bin").write_bytes(b"b" * 5_000)
    assert seal(folder) != first


def test_hidden_files_stay_outside(folder) -> None:
    (folder / ".cache" / "deep").mkdir(parents=True)
    (folder / ".cache" / "deep" / "file").write_bytes(b"x")
    (folder / ".x.tmp").write_bytes(b"x")
    assert [entry.path for entry in manifest_of(folder).files] == sorted(FILES)


def test_uploading_again_is_harmless(store, artifact, folder) -> None:
    before = {info.key: info.etag for info in store.list("")}
    assert upload_artifact(store, "an/artifact", folder) == artifact
    assert {info.key: info.etag for info in store.list("")} == before


def test_the_manifest_comes_last(store, folder) -> None:
    """An upload that ends early leaves no artifact."""
    seal(folder)
    (folder / "empty").unlink()
    with pytest.raises(CorruptArtifact, match="empty: the file is missing"):
        upload_artifact(store, "an/artifact", folder)
    assert store.head("an/artifact/a.bin") is not None
    assert find_artifact(store, "an/artifact") is None


def test_a_folder_that_changed_after_its_seal_is_refused(store, folder) -> None:
    seal(folder)
    (folder / "a.bin").write_bytes(b"longer" * 5_000)
    with pytest.raises(CorruptArtifact, match=r"a\.bin: the file has 30000 bytes, the manifest says 5000"):
        upload_artifact(store, "an/artifact", folder)


@pytest.mark.parametrize(
    "data", [b"A" * 5_000, b"a" * 4_999, b"a" * 5_001, b"", None], ids=["bit", "cut", "long", "empty", "missing"]
)
def test_a_damaged_or_missing_file_is_named(store, artifact, cache, s3, data) -> None:
    if data is None:
        store.delete("an/artifact/a.bin")
    else:
        store.put_bytes("an/artifact/a.bin", data)
    words = "the file is missing" if data is None else "the file"
    with pytest.raises(CorruptArtifact, match=rf"an/artifact/a\.bin: {words}"):
        stage(artifact, cache, s3)
    assert not list((cache / "artifacts").glob("*"))


def test_damage_after_a_first_check_is_noticed(store, artifact, cache, s3) -> None:
    """Even where size and modification time stay as they were."""
    if not isinstance(store, LocalStore):
        pytest.skip("an S3 object is used from the cache after the first check")
    path = stage(artifact, cache, s3) / "a.bin"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"A" * 5_000)
    os.utime(path, ns=times)
    with pytest.raises(CorruptArtifact, match=r"a\.bin: the file's SHA-256"):
        stage(artifact, cache, s3)


def test_a_missing_or_foreign_manifest_is_named(store, artifact, cache, s3) -> None:
    with pytest.raises(CorruptArtifact, match="is not the one that was asked for"):
        stage(artifact.model_copy(update={"sha256": "0" * 64}), cache, s3)
    store.delete(f"an/artifact/{MANIFEST}")
    with pytest.raises(CorruptArtifact, match=r"manifest\.json: the artifact is missing or was never completed"):
        stage(artifact, cache, s3)


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", "a/../../outside", "", "a//b", "."], ids=lambda path: path or "empty"
)
def test_a_manifest_cannot_name_files_outside(store, s3, cache, tmp_path, path) -> None:
    (tmp_path / "outside").write_bytes(b"x")
    entry = {"path": path, "size": 1, "sha256": sha256_file(tmp_path / "outside")}
    store.put_bytes(f"evil/{MANIFEST}", json.dumps({"schema_version": 1, "files": [entry]}).encode())
    artifact = find_artifact(store, "evil")
    with pytest.raises(CorruptArtifact, match="may not name files outside"):
        stage(artifact, cache, s3)


def test_what_is_no_manifest_is_refused(store, s3) -> None:
    store.put_bytes(f"odd/{MANIFEST}", b"[1, 2")
    with pytest.raises(CorruptArtifact, match="not a manifest"):
        read_manifest(store, "odd", find_artifact(store, "odd").sha256)


# The cache


def test_what_was_staged_is_found_without_the_store(store, artifact, cache, s3) -> None:
    is_remote = isinstance(store, S3Store)
    assert not is_remote or staged(artifact, cache) is None
    stage(artifact, cache, s3, only=("a.bin",))
    assert not is_remote or staged(artifact, cache) is None, "that is not all of it"
    folder, manifest = stage(artifact, cache, s3), open_artifact(artifact, s3)[1]
    if is_remote:
        for key in FILES:
            store.delete(f"an/artifact/{key}")
        assert stage(artifact, cache, s3) == folder, "what was fetched once is not asked for again"
        store.delete(f"an/artifact/{MANIFEST}")
    assert staged(artifact, cache) == (folder, manifest)
    (folder / "a.bin").write_bytes(b"A" * 5_000)
    if is_remote:
        assert staged(artifact, cache) is None, "whoever may read the store is to fetch it again"
    else:
        with pytest.raises(CorruptArtifact, match=r"a\.bin: the file's SHA-256"):
            staged(artifact, cache)


def test_a_reference_is_found_without_the_store_that_holds_it(store, cache, s3, folder) -> None:
    """The files of a model may lie on this machine, and all else of an installation on S3."""
    root = folder.as_uri()
    artifact = refer(store, "a/reference", manifest_of(folder).model_copy(update={"root": root}))
    assert (staged(artifact, cache) is None) == isinstance(store, S3Store)
    assert stage(artifact, cache, s3) == folder
    assert staged(artifact, cache) == (folder, open_artifact(artifact, s3)[1])
    (cache / "manifests" / artifact.sha256).mkdir(parents=True, exist_ok=True)
    (cache / "manifests" / artifact.sha256 / MANIFEST).write_bytes(b"")  # as a machine that lost its power leaves it
    assert (staged(artifact, cache) is None) == isinstance(store, S3Store)


def test_a_spoilt_cache_is_mended(store, artifact, cache, s3) -> None:
    if isinstance(store, LocalStore):
        pytest.skip("a local store needs no cache")
    folder = stage(artifact, cache, s3)
    (folder / "a.bin").write_bytes(b"A" * 5_000)
    assert content_of(stage(artifact, cache, s3)) == FILES
    (folder / "a.bin").unlink()
    assert content_of(stage(artifact, cache, s3)) == FILES
    assert [path.name for path in (cache / "artifacts").iterdir()] == [folder.name]


def test_many_stage_at_once(store, artifact, cache, s3) -> None:
    def use(_: int) -> dict[str, bytes]:
        return content_of(stage(artifact, cache, s3))

    with ThreadPoolExecutor(8) as pool:
        assert all(content == FILES for content in pool.map(use, range(16)))
    folder = stage(artifact, cache, s3)
    if isinstance(store, S3Store):
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def num_bytes_read(of: str = "self") -> int:
    """By this process, or this thread, from files."""
    counters = dict(line.split(": ") for line in Path(f"/proc/{of}/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what Linux says of our reading")
def test_a_first_stage_hashes_once_and_a_second_one_reads_no_file(store, cache, s3, tmp_path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    (large / "weights").write_bytes(os.urandom(20 << 20))
    seal(large)
    artifact = upload_artifact(store, "large", large)
    begun, here = num_bytes_read(), num_bytes_read("thread-self")  # moto's server has threads of its own
    stage(artifact, cache, s3)
    first, begun, here = num_bytes_read() - begun, num_bytes_read(), num_bytes_read("thread-self") - here
    stage(artifact, cache, s3)
    assert first >= 20 << 20
    assert isinstance(store, LocalStore) or 20 << 20 <= here < 40 << 20
    assert num_bytes_read() - begun < 1 << 20


def test_some_files_can_be_staged_alone(store, artifact, cache, s3) -> None:
    folder = stage(artifact, cache, s3, only=("*.json", "empty"))
    staged = content_of(folder)
    assert {name: staged[name] for name in ("deep/ü b.json", "empty")} == {"deep/ü b.json": b"{}", "empty": b""}
    if isinstance(store, S3Store):
        assert "a.bin" not in staged
        assert content_of(stage(artifact, cache, s3)) == FILES


# References


def test_a_reference_uses_files_where_they_are(store, folder, cache, s3, tmp_path) -> None:
    theirs = LocalStore(folder)
    manifest = manifest_of(folder).model_copy(update={"root": theirs.uri})
    artifact = refer(store, "reference", manifest)
    assert stage(artifact, cache, s3) == folder
    assert [info.key for info in store.list("")] == [f"reference/{MANIFEST}"]
    files, again = open_artifact(artifact, s3)
    assert (files.uri, again) == (theirs.uri, manifest)
    (folder / "a.bin").write_bytes(b"A" * 5_000)
    with pytest.raises(CorruptArtifact, match=r"a\.bin: the file's SHA-256"):
        stage(artifact, cache, s3)


def test_a_reference_to_another_store_is_fetched_from_there(store, artifact, cache, s3, tmp_path) -> None:
    ours = LocalStore(tmp_path / "ours")
    _, manifest = open_artifact(artifact, s3)
    reference = refer(ours, "reference", manifest.model_copy(update={"root": artifact.uri}))
    assert content_of(stage(reference, cache, s3)) == FILES


def test_what_the_caller_hashed_is_not_hashed_again(store, folder, artifact, cache, s3) -> None:
    """Told a lie about what was checked, `stage` believes it: so it does not read."""
    if not isinstance(store, LocalStore):
        pytest.skip("S3 has no files on this machine")
    _, manifest = open_artifact(artifact, s3)
    staged = store.root / "an/artifact"
    (staged / "a.bin").write_bytes(b"A" * 5_000)
    remember_checked(staged, manifest, cache)
    assert stage(artifact, cache, s3) == staged


@given(st.lists(st.tuples(st.text("abcé/.", min_size=1), st.integers(0), st.binary(min_size=32, max_size=32))))
def test_manifests_survive_their_encoding(entries) -> None:
    try:
        manifest = Manifest(files=tuple(FileEntry(path=p, size=n, sha256=h.hex()) for p, n, h in entries))
    except ValidationError:
        return
    assert Manifest.model_validate_json(manifest.encoded()) == manifest


def test_objects_are_hashed_in_pieces(store, tmp_path) -> None:
    (tmp_path / "file").write_bytes(os.urandom((17 << 20) + 3))
    store.put_file("k", tmp_path / "file")
    assert sha256_object(store, "k", (17 << 20) + 3) == sha256_file(tmp_path / "file")


class InPieces(LocalStore):
    """A store that notes what is read, and how much of it is asked for at a time; its first answers break off."""

    def __init__(self, root: Path, num_broken: int = 0, num_together: int = 1) -> None:
        super().__init__(root)
        self.read: list[tuple[str, int, int]] = []
        self._num_broken, self._lock, self._together = num_broken, threading.Lock(), threading.Barrier(num_together)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._lock:
            self.read.append((key, start, length))
            is_broken = len(self.read) <= self._num_broken
        if is_broken:
            raise StoreUnavailable("the connection broke")
        self._together.wait(60)  # ends when so many are asked for at the same time
        return super().read_range(key, start, length)


def wanted(tmp_path: Path, **contents: bytes) -> list[Fetched]:
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    return [Fetched(name, len(data), tmp_path / "copies" / name) for name, data in contents.items()]


def test_ranges_of_all_files_come_at_the_same_time(tmp_path) -> None:
    contents = {"one": os.urandom(3 * RANGE_BYTES + 5), "two": b"2", "none": b"", "even": os.urandom(RANGE_BYTES)}
    files = wanted(tmp_path, **contents)
    store = InPieces(tmp_path, num_together=7)
    assert list(fetch(store, files, 7, lambda: None)) == [sha256_file(tmp_path / name) for name in contents]
    assert {name: (tmp_path / "copies" / name).read_bytes() for name in contents} == contents
    assert len(store.read) == 7 and max(length for _, _, length in store.read) == RANGE_BYTES + 1


def test_a_range_that_breaks_off_is_asked_for_again(tmp_path) -> None:
    [file] = wanted(tmp_path, one=b"abc")
    assert list(fetch(InPieces(tmp_path, num_broken=2), [file], 1, lambda: None)) == [sha256_file(tmp_path / "one")]
    file.path.unlink()
    with pytest.raises(StoreUnavailable):
        list(fetch(InPieces(tmp_path, num_broken=4), [file], 1, lambda: None))


def test_after_an_error_nothing_more_is_asked_for(tmp_path) -> None:
    [file] = wanted(tmp_path, one=bytes(5 * RANGE_BYTES))
    (tmp_path / "one").write_bytes(b"cut short")
    store = InPieces(tmp_path)

    def slowly() -> None:
        if store.read:
            time.sleep(1)  # so that the error is heard of before four more are asked for

    with pytest.raises(CorruptArtifact, match="has 9 bytes"):
        list(fetch(store, [file], 1, slowly))
    assert len(store.read) < 5
