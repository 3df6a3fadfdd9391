"""Artifacts over both stores: sealed, uploaded, found, staged; and every way in which they can be damaged."""

import json
import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from longshore.fields import Artifact
from longshore.views import FileEntry
from shared.errors import CorruptArtifact, StoreUnavailable
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
from shared.storage.store import LocalStore, ObjectStore, S3Store, open_store

FILES = {"a.bin": b"a" * 5_000, "deep/ü b.json": b"{}", "empty": b"", "deep/manifest.json": b"not the manifest"}


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path) -> ObjectStore:
    if request.param == "local":
        return open_store(f"file://{tmp_path}/a%20store", S3Settings())
    server = request.getfixturevalue("s3_server")
    return open_store(f"{server.uri}/{uuid.uuid4().hex}", server.settings)


@pytest.fixture
def s3(store) -> S3Settings:
    if isinstance(store, S3Store):
        return S3Settings(endpoint_url=store._client.meta.endpoint_url, region="us-east-1")
    return S3Settings()


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


def test_what_is_uploaded_is_staged(store, artifact, cache, s3) -> None:
    assert content_of(stage(artifact, cache, s3)) == FILES
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


@pytest.mark.parametrize("data", [b"A" * 5_000, b"a" * 4_999, b"a" * 5_001, b""], ids=["bit", "cut", "long", "empty"])
def test_a_damaged_file_is_named(store, artifact, cache, s3, data) -> None:
    store.put_bytes("an/artifact/a.bin", data)
    with pytest.raises(CorruptArtifact, match=r"an/artifact/a\.bin: the file"):
        stage(artifact, cache, s3)
    assert not list((cache / "artifacts").glob("*")) if cache.exists() else True


def test_a_missing_file_is_named(store, artifact, cache, s3) -> None:
    store.delete("an/artifact/a.bin")
    with pytest.raises(CorruptArtifact, match=r"an/artifact/a\.bin: the file is missing"):
        stage(artifact, cache, s3)


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


def test_an_artifact_of_s3_is_fetched_once(store, artifact, cache, s3) -> None:
    if isinstance(store, LocalStore):
        pytest.skip("files of a local store are used where they lie")
    folder = stage(artifact, cache, s3)
    for name in FILES:
        store.delete(f"an/artifact/{name}")
    assert stage(artifact, cache, s3) == folder


def test_what_was_staged_is_found_without_the_store(store, artifact, cache, s3) -> None:
    is_remote = isinstance(store, S3Store)
    assert not is_remote or staged(artifact, cache) is None
    stage(artifact, cache, s3, only=("a.bin",))
    assert not is_remote or staged(artifact, cache) is None, "that is not all of it"
    folder, manifest = stage(artifact, cache, s3), open_artifact(artifact, s3)[1]
    if is_remote:
        for key in (*FILES, MANIFEST):
            store.delete(f"an/artifact/{key}")
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


def test_a_local_artifact_is_used_where_it_lies(store, artifact, cache, s3) -> None:
    if not isinstance(store, LocalStore):
        pytest.skip("S3 has no files on this machine")
    assert stage(artifact, cache, s3) == store.root / "an/artifact"


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
def test_a_second_stage_reads_no_file(store, cache, s3, tmp_path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    (large / "weights").write_bytes(os.urandom(20 << 20))
    seal(large)
    artifact = upload_artifact(store, "large", large)
    begun = num_bytes_read()
    stage(artifact, cache, s3)
    first, begun = num_bytes_read() - begun, num_bytes_read()
    stage(artifact, cache, s3)
    assert first >= 20 << 20
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


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what Linux says of our reading")
def test_what_is_fetched_is_hashed_once(store, cache, s3, tmp_path) -> None:
    if isinstance(store, LocalStore):
        pytest.skip("a local artifact is not fetched")
    large = tmp_path / "large"
    large.mkdir()
    (large / "weights").write_bytes(os.urandom(20 << 20))
    seal(large)
    artifact = upload_artifact(store, "large", large)
    begun = num_bytes_read("thread-self")  # moto's server, which reads it, too, has threads of its own
    stage(artifact, cache, s3)
    assert 20 << 20 <= num_bytes_read("thread-self") - begun < 40 << 20
