"""Datasets from files, S3 and the web: what arrives, what resumes, what is refused, and where a URI may lead."""

import gzip
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from temporalio.activity import ActivityCancellationDetails
from temporalio.common import RetryPolicy
from temporalio.exceptions import CancelledError
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext, locked
from activities.sources.download import Download, DownloadRequest
from longshore.dataset_runs import DatasetSource
from shared.errors import DiskFull, InvalidInput, StoreUnavailable
from shared.storage.artifacts import sha256_file, stage
from shared.storage.paths import LEFT, RunKeys
from shared.storage.store import LocalStore, uri_of
from shared.storage.stored_bytes import stored_of_run
from tests.activities.sources.downloads import ROWS, download, files_of, refusal, scratch_of, with_limits
from tests.activities.web_server import Page, WebServer, serve_pages

# Files


def test_a_file(settings, tmp_path) -> None:
    (tmp_path / "data" / "rows.jsonl").write_bytes(ROWS)
    downloaded = download(settings, f"file://{tmp_path}/data/rows.jsonl")
    assert files_of(settings, downloaded) == {"rows.jsonl": ROWS}
    assert (downloaded.num_files, downloaded.num_bytes) == (1, len(ROWS))
    assert downloaded.dataset.uri == f"{settings.store}/runs/sft-1/dataset/train"
    assert scratch_of(settings) == []


def test_a_folder_with_names_of_any_letters(settings, tmp_path) -> None:
    folder = tmp_path / "data" / "ein Ordner"
    (folder / "ü").mkdir(parents=True)
    (folder / "a b.jsonl.gz").write_bytes(gzip.compress(ROWS))
    (folder / "ü" / "日本.jsonl").write_bytes(ROWS)
    (folder / "_SUCCESS").touch()
    (folder / ".hidden").write_bytes(b"x")
    downloaded = download(settings, f"file://{tmp_path}/data/ein%20Ordner")
    assert files_of(settings, downloaded) == {"a b.jsonl": ROWS, "ü/日本.jsonl": ROWS}


def test_a_second_attempt_returns_what_stands(settings, tmp_path) -> None:
    path = tmp_path / "data" / "rows.jsonl"
    path.write_bytes(ROWS)
    first = download(settings, f"file://{path}")
    path.unlink()
    assert download(settings, f"file://{path}") == first


def test_a_file_outside_the_roots_is_refused(settings, tmp_path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "folder").mkdir()
    (tmp_path / "data" / "folder" / "link").symlink_to(tmp_path / "secret")
    for path in ("secret", "data/../secret", "data/link", "data/folder", "data%2F..%2Fsecret"):
        assert "download.file_roots" in refusal(settings, f"file://{tmp_path}/{path}")


def test_a_link_is_of_the_kind_of_the_file_that_it_leads_to(settings, tmp_path) -> None:
    """Named as text, a key or a program would be shown line by line. The hub's cache names its files by links alone."""
    data, blobs = tmp_path / "data", tmp_path / "data" / ".hub" / "datasets--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123").write_bytes(b"words")
    (data / ".hub" / "rows.key").write_bytes(b"secret")
    (data / "a.txt").symlink_to(data / ".hub" / "rows.key")
    (data / "b.txt").symlink_to(blobs / "0123")
    assert set(files_of(settings, download(settings, data.as_uri()))) == {"rows.key", "b.txt"}
    found = download(settings, (data / "a.txt").as_uri(), "sft-2")
    assert set(files_of(settings, found)) == {"rows.key"}


def test_without_roots_only_uploads_are_open(settings, tmp_path) -> None:
    (tmp_path / "data" / "rows.jsonl").write_bytes(ROWS)
    upload = settings.root_path / "store" / "tenants" / "default" / "uploads" / "abc" / "rows.jsonl"
    upload.parent.mkdir(parents=True)
    upload.write_bytes(ROWS)
    closed = with_limits(settings, file_roots=())
    assert "download.file_roots" in refusal(closed, f"file://{tmp_path}/data/rows.jsonl")
    assert files_of(closed, download(closed, f"file://{upload}")) == {"rows.jsonl": ROWS}


def test_a_file_that_grows_while_it_is_read_is_refused(settings, tmp_path) -> None:
    """A named pipe of events would do as well: here a thread appends for as long as the download runs."""
    path = tmp_path / "data" / "growing.jsonl"
    path.write_bytes(ROWS * 20_000)
    ended = threading.Event()

    def grow() -> None:
        while not ended.is_set():
            with path.open("ab") as file:
                file.write(b"more\n")

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        assert "changed while it was being read" in refusal(settings, f"file://{path}")
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("file://{data}/nothing.jsonl", "nothing.jsonl: there is no such file or folder"),
        ("file://{data}/nothing", "nothing: there is no such file or folder"),
        ("file://{data}", "there is nothing here"),
        ("file://h/x", "three slashes"),
        ("https://user:hunter2@example.test/x", "may not carry a user or password"),
        *((uri, "file://") for uri in ("ftp://host/x", "rows.jsonl", "/data/rows.jsonl", "gopher://x", "data:,x")),
    ],
)
def test_a_place_with_nothing_to_read_is_named(settings, tmp_path, uri, words) -> None:
    message = refusal(settings, uri.format(data=tmp_path / "data"))
    assert words in message and "hunter2" not in message


@pytest.mark.parametrize("content", [b"", gzip.compress(b""), zstandard.compress(b"")], ids=["plain", "gzip", "zstd"])
def test_an_empty_file_is_named(settings, tmp_path, content) -> None:
    (tmp_path / "data" / "empty.jsonl").write_bytes(content)
    assert "empty.jsonl: the file is empty" in refusal(settings, f"file://{tmp_path}/data/empty.jsonl")


def test_two_files_of_one_name_are_refused(settings, tmp_path) -> None:
    (tmp_path / "data" / "a.jsonl").write_bytes(ROWS)
    (tmp_path / "data" / "a.jsonl.gz").write_bytes(gzip.compress(ROWS))
    assert "the name 'a.jsonl' is taken" in refusal(settings, f"file://{tmp_path}/data")


# Compression

SKIPPED = b"\x5a\x2a\x4d\x18\x05\0\0\0notes"  # a frame of zstd without content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(ROWS)),
        ("a.jsonl", gzip.compress(ROWS)),
        ("a.jsonl.gz", ROWS),
        ("a.jsonl.GZ", b"".join(gzip.compress(ROWS[i : i + 700]) for i in range(0, len(ROWS), 700))),
        ("a.jsonl.zst", zstandard.compress(ROWS)),
        ("a.jsonl.zst", SKIPPED + zstandard.compress(ROWS[:700]) + SKIPPED + zstandard.compress(ROWS[700:]) + SKIPPED),
        ("a.jsonl.gz", gzip.compress(ROWS[:700]) + gzip.compress(ROWS[700:]) + b"\0" * 512),
        ("a.jsonl.zstd", b"".join(zstandard.compress(ROWS[i : i + 700]) for i in range(0, len(ROWS), 700))),
    ],
    ids=["gzip", "gzip-unnamed", "not-gzip", "gzip-members", "zstd", "zstd-skippable", "gzip-zeros", "zstd-frames"],
)
def test_compression_is_known_by_content(settings, tmp_path, name, content) -> None:
    (tmp_path / "data" / name).write_bytes(content)
    assert files_of(settings, download(settings, f"file://{tmp_path}/data/{name}")) == {"a.jsonl": ROWS}


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
@pytest.mark.parametrize("spoil", [lambda data: data[:-5], lambda data: data[:20] + b"\xff\xff\xff" + data[23:]])
def test_damaged_compression_is_named(settings, tmp_path, compress, spoil) -> None:
    (tmp_path / "data" / "a.gz").write_bytes(spoil(compress(os.urandom(5000))))
    message = refusal(settings, f"file://{tmp_path}/data/a.gz")
    assert "a.gz: the compressed data is damaged or cut short" in message


def test_a_truncated_last_member_is_noticed(settings, tmp_path) -> None:
    (tmp_path / "data" / "a.gz").write_bytes(gzip.compress(ROWS) + gzip.compress(ROWS)[:-9])
    assert "cut short" in refusal(settings, f"file://{tmp_path}/data/a.gz")


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_a_bomb_is_refused_before_it_fills_the_disk(settings, tmp_path, compress) -> None:
    (tmp_path / "data" / "bomb").write_bytes(compress(bytes(200 << 20)))
    limited = with_limits(settings, max_decompressed_bytes=10_000_000)
    assert "more than 10,000,000 bytes; the limit is download.max_decompressed_bytes" in refusal(
        limited, f"file://{tmp_path}/data/bomb"
    )


# The quota


def test_a_copy_of_a_tenants_own_upload_does_not_count_again(settings) -> None:
    """But for what it grows by when it is decompressed."""
    store, packed = LocalStore(settings.root_path / "store"), gzip.compress(ROWS)
    store.put_bytes("tenants/default/uploads/0/rows.jsonl", ROWS)
    store.put_bytes("tenants/default/uploads/1/rows.jsonl.gz", packed)
    plain, compressed = (
        uri_of(store, f"tenants/default/uploads/{name}") for name in ("0/rows.jsonl", "1/rows.jsonl.gz")
    )

    def counted(run_id: str) -> int:
        data = (each.num_bytes for each in stored_of_run(store, "default", run_id) if each.what == "data")
        return sum(data) - store.head(f"{RunKeys(run_id).dataset('train')}/manifest.json").size

    for run_id in ("sft-1", "sft-2", "sft-2"):
        assert download(settings, plain, run_id, most=0).num_bytes == len(ROWS)
        assert counted(run_id) == 0
    grows = len(ROWS) - len(packed)
    download(settings, compressed, "sft-3", most=grows)
    assert counted("sft-3") == grows
    assert "quota stored_bytes" in refusal(settings, compressed, "sft-4", most=grows - 1)


# The disk


def test_parts_leave_room_on_the_disk_for_others(settings, web, small_disk) -> None:
    web.pages["/small"] = Page(os.urandom(100_000))
    with pytest.raises(DiskFull, match=f"no space is left on the disk that holds {small_disk}"):
        download(settings.model_copy(update={"root": small_disk}), f"{web.uri}/small")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    root = tmp_path / "small disk"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_a_full_disk_is_named_and_nothing_is_left(settings, web, small_disk, tmp_path) -> None:
    """While the parts arrive, and while a file is unpacked."""
    web.pages["/big"] = Page(os.urandom(3 << 20))
    (tmp_path / "data" / "rows.jsonl").write_bytes(ROWS)
    small = settings.model_copy(update={"root": small_disk})
    for uri in (f"{web.uri}/big", f"file://{tmp_path}/data/rows.jsonl"):
        with pytest.raises(DiskFull, match=f"no space is left on the disk that holds {small_disk}"):
            download(small, uri)
        assert scratch_of(small) == []


def hub_folder(tmp_path: Path, *names: str) -> str:
    for name in names:
        (tmp_path / "data" / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "hub" / name).write_bytes(ROWS)
    return f"file://{tmp_path}/data/hub"


OF_SPLITS = tuple(f"data/{split}-00000-of-00001.jsonl" for split in ("train", "validation", "test"))


def test_of_a_folder_with_splits_one_is_taken_and_the_others_are_named(settings, tmp_path) -> None:
    uri = hub_folder(tmp_path, *OF_SPLITS, "README.md", "extra.jsonl")
    taken = {"train": OF_SPLITS[0], "eval": OF_SPLITS[1]}
    for split, name in taken.items():
        for _ in range(2):  # a second attempt says the same
            downloaded = download(settings, uri, split=split)
            assert {*files_of(settings, downloaded)} == {name, LEFT} and downloaded.num_files == 1
            [notice] = downloaded.notices
            read, _, others = notice.partition(" were read")
            assert name in read and all(each in others for each in {*OF_SPLITS, "README.md", "extra.jsonl"} - {name})


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("train/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow"), ["train/data-00000-of-00001.arrow"]),
        (("my_train.jsonl", "my_dev.jsonl"), ["my_train.jsonl"]),
        (("test/a.jsonl", "test/b.jsonl"), ["test/a.jsonl", "test/b.jsonl"]),
        (("2024/a.jsonl", "2025/b.jsonl"), ["2024/a.jsonl", "2025/b.jsonl"]),
        (("wiki-00000-of-00002.jsonl", "books-00000-of-00001.jsonl"), None),
    ],
)
def test_splits_are_told_by_names_as_datasets_tells_them(settings, tmp_path, names, taken) -> None:
    found = files_of(settings, download(settings, hub_folder(tmp_path, *names)))
    assert {*found} - {LEFT} == {*(taken or names)}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("en/train-00000-of-00001.jsonl", "de/train-00000-of-00001.jsonl"), "configurations 'de', 'en'"),
        (("validation.jsonl", "test.jsonl"), "splits test, validation, and not train"),
        (("rows.jsonl", "test.jsonl"), "splits (none), test, and not train"),
        (("train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"), "train_gen, train_sft"),
    ],
)
def test_files_of_which_nobody_can_say_the_split_are_refused_until_a_pattern_names_them(
    settings, tmp_path, names, words
) -> None:
    uri = hub_folder(tmp_path, *names)
    assert words in (told := refusal(settings, uri)) and "a URI names others by a pattern" in told
    folder, _, last = names[0].rpartition("/")
    named = download(settings, f"{uri}/{folder}{'/' * bool(folder)}{last[:6]}*")
    assert last in files_of(settings, named) and not named.notices


def test_a_pattern_leads_nowhere_else(settings, tmp_path) -> None:
    hub_folder(tmp_path, "train.jsonl")
    hub_folder(tmp_path, "my rows 1.jsonl")
    assert {*files_of(settings, download(settings, f"file://{tmp_path}/data/hub/my%20ro*"))} == {"my rows 1.jsonl"}
    for pattern in ("data/hub/test*", "data/*/none", "*"):
        assert refusal(settings, f"file://{tmp_path}/{pattern}", "sft-2")


@pytest.fixture
def bucket(s3_server, settings):
    """Settings with this S3 server, and a prefix of this test's own in a bucket that is not the store's."""
    import boto3

    client = boto3.client("s3", endpoint_url=s3_server.endpoint_url)
    client.create_bucket(Bucket="elsewhere")
    for item in client.list_objects_v2(Bucket="elsewhere").get("Contents", []):
        client.delete_object(Bucket="elsewhere", Key=item["Key"])
    return client, settings.model_copy(update={"s3": s3_server.settings})


def test_an_s3_object(bucket) -> None:
    client, settings = bucket
    client.put_object(Bucket="elsewhere", Key="a b/rows.jsonl.gz", Body=gzip.compress(ROWS))
    downloaded = download(settings, "s3://elsewhere/a%20b/rows.jsonl.gz")
    assert files_of(settings, downloaded) == {"rows.jsonl": ROWS}


@pytest.mark.parametrize("uri", ["s3://elsewhere/set", "s3://elsewhere/set/"])
def test_an_s3_prefix(bucket, uri) -> None:
    client, settings = bucket
    for key in ("set/1.jsonl", "set/deep/2.jsonl.gz", "set/", "set/_SUCCESS", "settings/3.jsonl"):
        client.put_object(Bucket="elsewhere", Key=key, Body=gzip.compress(ROWS) if key.endswith("gz") else ROWS)
    assert files_of(settings, download(settings, uri)) == {"1.jsonl": ROWS, "deep/2.jsonl": ROWS}


def test_an_s3_prefix_with_splits_and_a_pattern(bucket) -> None:
    client, settings = bucket
    for name in ("train-0", "train-1", "test-0"):
        client.put_object(Bucket="elsewhere", Key=f"hub/{name}.jsonl", Body=ROWS)
    taken = files_of(settings, download(settings, "s3://elsewhere/hub"))
    assert {*taken} == {"train-0.jsonl", "train-1.jsonl", "_left.txt"}
    assert {*files_of(settings, download(settings, "s3://elsewhere/hub/te*", "sft-2"))} == {"test-0.jsonl"}


def test_a_missing_s3_object_is_named(bucket) -> None:
    _, settings = bucket
    assert "s3://elsewhere/none: there is nothing here" in refusal(settings, "s3://elsewhere/none")


def test_a_large_s3_object_into_an_s3_store(bucket, s3_server) -> None:
    client, settings = bucket
    data = os.urandom(20 << 20)
    client.put_object(Bucket="elsewhere", Key="large", Body=data)
    settings = settings.model_copy(update={"store_uri": f"{s3_server.uri}/store"})
    downloaded = download(settings, "s3://elsewhere/large", run_id="sft-s3")
    folder = stage(downloaded.dataset, settings.root_path / "cache", settings.s3)
    assert (folder / "large").read_bytes() == data
    assert downloaded.dataset.uri == "s3://longshore/store/runs/sft-s3/dataset/train"
    assert sha256_file(folder / "large") in (folder / "manifest.json").read_text()


def test_an_s3_object_that_changes_while_it_is_read_is_never_mixed(bucket) -> None:
    """Somebody replaces the object all the time, by as many bytes of one letter: what arrives is of one letter."""
    client, settings = bucket
    ended = threading.Event()

    def replace() -> None:
        i = 0
        while not ended.is_set():
            client.put_object(Bucket="elsewhere", Key="busy", Body=bytes([97 + i % 26]) * (20 << 20))
            i += 1

    client.put_object(Bucket="elsewhere", Key="busy", Body=b"A" * (20 << 20))
    thread = threading.Thread(target=replace)
    thread.start()
    try:
        content = files_of(settings, download(settings, "s3://elsewhere/busy"))["busy"]
        assert len(set(content)) == 1
    except InvalidInput as error:
        assert "keeps changing" in str(error)
    except StoreUnavailable as error:
        assert "changed" in str(error)
    finally:
        ended.set()
        thread.join()


def test_a_page(settings, web) -> None:
    web.pages["/some/rows.jsonl.zst"] = Page(zstandard.compress(ROWS))
    downloaded = download(settings, f"{web.uri}/some/rows.jsonl.zst?signature=secret")
    assert files_of(settings, downloaded) == {"rows.jsonl": ROWS}
    assert scratch_of(settings) == []


@pytest.mark.parametrize("length", [True, False])
def test_a_page_with_an_odd_name(settings, web, length) -> None:
    web.pages["/"] = Page(ROWS, etag=None, length=length)
    assert files_of(settings, download(settings, web.uri)) == {"dataset": ROWS}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a%00b.jsonl", "a_b.jsonl"), ("%C3%A9" * 80, "\xe9" * 48), ("x" * 300 + ".txt", "x" * 44 + ".txt")],
)
def test_a_url_of_any_name_becomes_a_file(settings, web, name, expected) -> None:
    web.pages[f"/{name}"] = Page(ROWS)
    assert files_of(settings, download(settings, f"{web.uri}/{name}")) == {expected: ROWS}


def test_a_broken_transfer_goes_on_where_it_stopped(settings, web) -> None:
    data = os.urandom(3_000_000)
    web.pages["/big"] = Page(data, breaks=[1_000_000, 500_000])
    downloaded = download(settings, f"{web.uri}/big")
    assert files_of(settings, downloaded) == {"big": data}
    assert web.asked == [("/big", None), ("/big", "bytes=1000000-"), ("/big", "bytes=1500000-")]


def test_a_transfer_goes_on_in_the_next_attempt(settings, web) -> None:
    data = os.urandom(3_000_000)
    web.pages["/big"] = Page(data, breaks=[2_000_000, 0, 0, 0])
    with pytest.raises(StoreUnavailable, match=r"broke off at 2,000,000 of 3,000,000 bytes"):
        download(settings, f"{web.uri}/big")
    web.asked.clear()
    assert files_of(settings, download(settings, f"{web.uri}/big")) == {"big": data}
    assert web.asked == [("/big", "bytes=2000000-")]
    assert scratch_of(settings) == []


@pytest.mark.parametrize(
    ("policy", "attempt", "keeps_parts", "is_left"),
    [
        (RetryPolicy(maximum_attempts=5), 4, True, True),
        (RetryPolicy(maximum_attempts=5), 5, True, False),
        (RetryPolicy(), 100, True, True),
        (RetryPolicy(), 1, False, False),
    ],
)
def test_the_parts_of_a_download_go_with_its_last_attempt(
    settings, web, policy: RetryPolicy, attempt: int, keeps_parts: bool, is_left: bool
) -> None:
    web.pages["/big"] = Page(os.urandom(300_000), breaks=[200_000, 0, 0, 0])
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=attempt, retry_policy=policy)
    request = DownloadRequest(
        run_id="sft-1", tenant="default", split="train", source=DatasetSource(uri=f"{web.uri}/big")
    )
    work = Download(HostContext(settings), keeps_parts=False) if not keeps_parts else Download(HostContext(settings))
    with pytest.raises(StoreUnavailable):
        environment.run(work.download, request)
    assert bool(scratch_of(settings)) == is_left


def test_parts_that_nobody_came_back_for_go_with_a_later_download_and_those_of_a_long_one_stay(settings, web) -> None:
    web.pages["/big"] = Page(os.urandom(300_000), breaks=[200_000, 0, 0, 0] * 2)
    for run_id in ("sft-1", "sft-2"):
        with pytest.raises(StoreUnavailable):
            download(settings, f"{web.uri}/big", run_id)
    folders = sorted((settings.root_path / "scratch" / "downloads").iterdir())
    assert len(folders) == 2
    for folder in folders:
        os.utime(folder, (time.time() - 86_400,) * 2)
    web.pages["/rows.jsonl"] = Page(ROWS)
    with locked(folders[0]):
        download(settings, f"{web.uri}/rows.jsonl", "sft-3")
    assert list((settings.root_path / "scratch" / "downloads").iterdir()) == folders[:1]


def test_parts_that_were_damaged_since_are_fetched_again(settings, web) -> None:
    data = os.urandom(3_000_000)
    web.pages["/big"] = Page(data, breaks=[2_000_000, 0, 0, 0])
    with pytest.raises(StoreUnavailable):
        download(settings, f"{web.uri}/big")
    [part] = [path for path in scratch_of(settings) if path.name == "data"]
    with part.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"damaged")
    assert files_of(settings, download(settings, f"{web.uri}/big")) == {"big": data}


def test_a_changed_page_is_begun_again(settings, web) -> None:
    page = web.pages["/big"] = Page(b"a" * 3_000_000, breaks=[2_000_000, 0, 0, 0])
    with pytest.raises(StoreUnavailable):
        download(settings, f"{web.uri}/big")
    page.body, page.etag = b"b" * 2_500_000, '"v2"'
    assert files_of(settings, download(settings, f"{web.uri}/big")) == {"big": b"b" * 2_500_000}


@pytest.mark.parametrize(("ranges", "etag"), [(False, '"v1"'), (True, None), (True, 'W/"weak"')])
def test_a_server_that_cannot_resume_is_asked_for_all(settings, web, ranges, etag) -> None:
    data = os.urandom(300_000)
    web.pages["/big"] = Page(data, breaks=[100_000], ranges=ranges, etag=etag)
    assert files_of(settings, download(settings, f"{web.uri}/big")) == {"big": data}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 451])
def test_a_refusal_is_the_users_affair(settings, web, status) -> None:
    web.pages["/x"] = Page(b"no", status=status)
    message = refusal(settings, f"{web.uri}/x?token=secret")
    assert f"{web.uri}/x: the server answered {status}" in message
    assert "secret" not in message
    assert len(web.asked) == 1


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_servers_fault_is_worth_another_try(settings, web, status) -> None:
    web.pages["/x"] = Page(b"no", status=status)
    with pytest.raises(StoreUnavailable, match=f"the server answered {status}"):
        download(settings, f"{web.uri}/x")
    assert len(web.asked) == 3


def test_an_unreachable_server_is_worth_another_try(settings) -> None:
    with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:9/x: the connection failed .*refused"):
        download(settings, "http://127.0.0.1:9/x")


def test_an_unknown_host_is_named(settings) -> None:
    with pytest.raises(StoreUnavailable, match="no address is known for this host"):
        download(settings, "http://no-such-host.invalid/x")


def test_too_many_bytes_are_refused(settings, web) -> None:
    web.pages["/said"] = Page(bytes(2_000))
    web.pages["/unsaid"] = Page(bytes(2_000), length=False)
    limited = with_limits(settings, max_bytes=1_000)
    for path in ("/said", "/unsaid"):
        assert "more than 1,000 bytes to transfer; the limit is download.max_bytes" in refusal(limited, web.uri + path)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:7f00:1]"]
)
def test_our_own_network_is_closed(settings, web, host) -> None:
    web.pages["/x"] = Page(ROWS)
    closed = with_limits(settings, allow_private_addresses=False)
    message = refusal(closed, f"http://{host}:{web.uri.rpartition(':')[2]}/x")
    assert "private network" in message and "download.allow_private_addresses" in message
    assert web.asked == []


def test_a_redirect_is_followed(settings, web) -> None:
    web.pages["/a"] = Page(status=302, location="/b")
    web.pages["/b"] = Page(status=307, location=f"{web.uri}/c")
    web.pages["/c"] = Page(ROWS)
    assert files_of(settings, download(settings, f"{web.uri}/a")) == {"a": ROWS}


def test_each_hop_of_a_redirect_is_checked(settings, web, monkeypatch) -> None:
    """The first name is public by what the resolver says, and is served by the test; the second is private."""
    web.pages["/a"] = Page(status=302, location="http://169.254.169.254/latest/meta-data")
    monkeypatch.setattr("socket.create_connection", _connector(web, monkeypatch, ["93.184.216.34"]))
    closed = with_limits(settings, allow_private_addresses=False)
    assert "169.254.169.254: this host is on a private network" in refusal(closed, "http://example.test/a")
    assert web.asked == [("/a", None)]


def test_a_name_that_resolves_otherwise_later_changes_nothing(settings, web, monkeypatch) -> None:
    """DNS rebinding: a second look-up would give loopback. Only the address that was checked is connected to."""
    web.pages["/a"] = Page(ROWS)
    connect = _connector(web, monkeypatch, ["93.184.216.34", "127.0.0.1"])
    monkeypatch.setattr("socket.create_connection", connect)
    closed = with_limits(settings, allow_private_addresses=False)
    assert files_of(closed, download(closed, "http://example.test/a")) == {"a": ROWS}
    assert connect.addresses == ["93.184.216.34"]


def _connector(web: WebServer, monkeypatch, answers: list[str]):
    """Stands for the internet: example.test has these addresses in turn; every connection ends at the web server."""
    import socket

    resolve, create = socket.getaddrinfo, socket.create_connection
    port = int(web.uri.rpartition(":")[2])

    def getaddrinfo(host, *arguments, **named):
        return resolve(answers.pop(0) if host == "example.test" else host, *arguments, **named)

    def connect(address, timeout=None):
        connect.addresses.append(address[0])
        return create(("127.0.0.1", port), timeout)

    connect.addresses = []
    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    return connect


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/passwd", "only http://host/path"),
        ("gopher://x/", "only http://host/path"),
        ("/a", "more than 5 redirects"),
        (None, "names no place"),
        ("http://user:password@x/", "may not carry a user"),
        ("http://x:99999/", "not a URI"),
    ],
)
def test_other_redirects_are_refused(settings, web, location, reason) -> None:
    web.pages["/a"] = Page(status=302, location=location)
    assert reason in refusal(settings, f"{web.uri}/a")


@pytest.fixture
def certificate(tmp_path) -> Path:
    """A certificate for `localhost` that nobody has signed, and its key, in one file."""
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")]
    try:
        subprocess.run([*made, *named, *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return tmp_path / "certificate.pem"


def test_https_checks_the_name_in_the_certificate(settings, certificate, tmp_path, monkeypatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "key.pem")
    with serve_pages(context) as web:
        web.pages["/rows.jsonl"] = Page(ROWS)
        web.pages["/down"] = Page(status=302, location="http://127.0.0.1/rows.jsonl")
        uri = web.uri.replace("127.0.0.1", "localhost")
        assert "certificate is not trusted: self-signed" in refusal(settings, f"{uri}/rows.jsonl")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "certificate is not trusted: IP address mismatch" in refusal(settings, f"{web.uri}/rows.jsonl")
        assert "from https to http is not followed" in refusal(settings, f"{uri}/down")
        assert files_of(settings, download(settings, f"{uri}/rows.jsonl")) == {"rows.jsonl": ROWS}


@pytest.mark.parametrize("page", [Page(ROWS * 3_000, trickles=True), Page(drips_headers=True)], ids=["body", "headers"])
def test_a_transfer_that_drips_is_given_up(settings, web, page) -> None:
    """Never silent for long, and never at its end: it would hold a thread for as long as its sender likes."""
    web.pages["/slow"] = page
    pace = with_limits(settings, timeout_s=0.3, slowest_bytes_per_s=1 << 20)
    with pytest.raises(StoreUnavailable) as given_up:
        download(pace, f"{web.uri}/slow")
    if page.trickles:
        assert "download.slowest_bytes_per_s" in str(given_up.value)


@pytest.mark.parametrize("leaving", [False, True])
def test_a_cancelled_download_stops_and_leaves_nothing_but_for_a_restart(settings, web, leaving) -> None:
    web.pages["/slow"] = Page(ROWS * 1_000, trickles=True)
    beats: list[object] = []
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: beats.append(details)
    details = ActivityCancellationDetails(cancel_requested=not leaving, worker_shutdown=leaving)
    timer = threading.Timer(0.5, environment.cancel, [details])
    timer.start()
    request = DownloadRequest(
        run_id="sft-1", tenant="default", split="eval", source=DatasetSource(uri=f"{web.uri}/slow")
    )
    with pytest.raises(CancelledError):
        environment.run(Download(HostContext(settings)).download, request)
    timer.join()
    assert beats
    assert bool(scratch_of(settings)) == leaving
