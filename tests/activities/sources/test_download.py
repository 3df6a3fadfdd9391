"""Datasets from files, web servers and S3: what arrives, what resumes, what is refused."""

import gzip
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from shared.errors import DiskFull
from shared.storage.paths import LEFT, RunKeys
from shared.storage.store import LocalStore, uri_of
from shared.storage.stored_bytes import stored_of_run
from tests.activities.sources.downloads import ROWS, download, files_of, refusal, scratch_of, with_limits
from tests.activities.web_server import Page

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


@pytest.mark.parametrize("name", ["nothing.jsonl", "nothing"])
def test_a_missing_file_is_named(settings, tmp_path, name) -> None:
    message = refusal(settings, f"file://{tmp_path}/data/{name}")
    assert f"{name}: there is no such file or folder" in message


@pytest.mark.parametrize("content", [b"", gzip.compress(b""), zstandard.compress(b"")], ids=["plain", "gzip", "zstd"])
def test_an_empty_file_is_named(settings, tmp_path, content) -> None:
    (tmp_path / "data" / "empty.jsonl").write_bytes(content)
    assert "empty.jsonl: the file is empty" in refusal(settings, f"file://{tmp_path}/data/empty.jsonl")


def test_an_empty_folder_is_named(settings, tmp_path) -> None:
    assert "there is nothing here" in refusal(settings, f"file://{tmp_path}/data")


@pytest.mark.parametrize(
    "uri", ["ftp://host/x", "rows.jsonl", "/data/rows.jsonl", "gopher://x", "data:,x", "file://h/x"]
)
def test_other_schemes_are_refused(settings, uri) -> None:
    assert "file://" in refusal(settings, uri) or "three slashes" in refusal(settings, uri)


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
