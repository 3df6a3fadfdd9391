"""One suite over both stores: plain files, and S3 (moto's server)."""

import errno
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

from shared.errors import DiskFull, InvalidInput, NotFound, StoreUnavailable
from shared.settings import S3Settings
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


@pytest.mark.parametrize("key", ["spaces and ünïcode/日本 語.jsonl", "100%25/a+b&c=d#e?f", "quotes/'\"`", "~tilde/[x]"])
def test_keys_may_be_of_any_letters(store, key) -> None:
    store.put_bytes(key, b"x")
    assert store.get_bytes(key) == b"x"
    assert keys_of(store, key[:4]) == [key]
    other, found = open_uri(uri_of(store, key), S3Settings() if isinstance(store, LocalStore) else _settings(store))
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


def test_deleted_is_gone(store) -> None:
    store.put_bytes("a/k", b"x")
    store.delete("a/k")
    assert store.head("a/k") is None
    assert keys_of(store) == []


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


def test_a_file_uri_has_no_host() -> None:
    with pytest.raises(InvalidInput, match="three slashes"):
        open_uri("file://host/path", S3Settings())


@pytest.mark.parametrize("uri", ["gs://bucket/key", "s3:///key", "/a/path", ""])
def test_other_uris_are_refused(uri) -> None:
    with pytest.raises(InvalidInput):
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
