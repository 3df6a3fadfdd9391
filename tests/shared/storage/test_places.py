"""Which places a tenant may read, where the installation itself lies below a file root."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from longshore.dataset_runs import DatasetSource
from shared.errors import InvalidInput
from shared.settings import DownloadSettings, S3Settings, Settings
from shared.storage.paths import query_record
from shared.storage.places import OpenPlaces, with_query, without_queries
from shared.storage.store import LocalStore, S3Store


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The operator's home, which is open to tenants and holds the installation."""
    for name in (
        "root/seal.key", "root/.seal.key.x", "root/hosts/h.json", "root/new.json", "root/data/rows.jsonl",
        "root/data/service/x", "root/store/tenants/eve/x", "root/store/tenants/bob/x", "root/store/runs/x",
        "rows.jsonl",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def places(home: Path, **changes: object) -> OpenPlaces:
    roots = (home, home / "root", home / "root/data", home / "root/hosts")
    return OpenPlaces(Settings(root=home / "root", download=DownloadSettings(file_roots=roots), **changes))


def is_open(found: OpenPlaces, path: Path) -> bool:
    """To eve; and the service says of its URI what a host says of the path."""
    try:
        found.check_file("eve", path, "uri")
    except InvalidInput:
        with pytest.raises(InvalidInput):
            found.check_named("eve", path.as_uri(), "uri")
        return False
    found.check_named("eve", path.as_uri(), "uri")
    return True


@pytest.mark.parametrize(
    "name", ["seal.key", ".seal.key.x", "hosts/h.json", "new.json", "later/x", "store/runs/x", "store/tenants/bob/x"]
)
def test_nothing_of_the_root_is_data(home: Path, name: str) -> None:
    (home / "link.txt").symlink_to(home / "root" / name)
    assert not is_open(places(home), home / "root" / name)
    assert not is_open(places(home), home / "link.txt")


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "root/data/rows.jsonl", "root/data/service/x", "root/store/tenants/eve/x"]
)
def test_what_is_open_is_read(home: Path, name: str) -> None:
    assert is_open(places(home), home / name)


@pytest.mark.parametrize("uri", [
    "FILE://{root}/store/tenants/bob/x", "file:{root}/store/tenants/bob/x", "file://localhost{root}/store/tenants/bob/x",
    "file://{root}/store/tenants/eve%2F..%2Fbob/x", "file://{root}/store/tenants/%62ob/x", "{root}/../link/x",
    "file://{root}/store/tenants/eve-2/x", "{root}/store/tenants/eve", "{root}/store/tenants", "{root}/store", "{root}",
    "file://{root}/store/runs/sft-1/checkpoints/x", "{root}/service/longshore.db", "file://{root}/cache/x", "file:///",
])  # fmt: skip
def test_no_spelling_of_a_place_makes_it_ones_own(home: Path, uri: str) -> None:
    """Any spelling of a path: tests/service/test_parsers.py. Every field of a body: tests/security."""
    (home / "link").symlink_to(home / "root/store/tenants/bob")
    with pytest.raises(InvalidInput):
        places(home).check_named("eve", uri.format(root=home / "root"), "uri")


@pytest.mark.parametrize(
    "uri", ["{root}/../elsewhere/x", "{root}-2/x", "s3://bucket/tenants/bob/x", "org/name@main", "/"]
)
def test_what_is_no_place_of_ours_is_no_concern_of_it(home: Path, uri: str) -> None:
    places(home).check_named("eve", uri.format(root=home / "root"), "uri")


def test_a_folder_of_ours_that_is_a_link_to_another_disk_is_ours(home: Path) -> None:
    (home / "disk").mkdir()
    (home / "root/cache").symlink_to(home / "disk")
    assert not is_open(places(home), home / "disk/x")


def test_a_store_behind_a_link_is_ours(home: Path) -> None:
    (home / "link").symlink_to(home / "root")
    found = places(home, store_uri=(home / "link/store").as_uri())
    for folder in (home / "link/store", home / "root/store"):
        assert found.own_key((folder / "tenants/eve/x").as_uri()) == "tenants/eve/x"
    assert found.own_key((home / "rows.jsonl").as_uri()) is None


@pytest.mark.parametrize("uri", [
    "s3://ours/other/../store/seal", "s3://ours/a/%2e%2e/store/runs/x", "s3://ours/./store/runs/x", "s3://ours/store/..",
    "s3://ours/a//store/runs/x", "s3://ours/a/%252e%252e/store/x", "s3://OURS/store/runs/x", "s3://alias-abc-s3alias/runs",
    "s3://arn:aws:s3:us-east-1:1:accesspoint/p/runs/x", "s3://ours./store/runs/x", "s3://ours%2e/store/runs",
    "s3://ours/store/tenants/bob/x", "s3://ours/store/%74enants/bob/x", "s3://ours/store", "s3://ours/", "s3://ours",
])  # fmt: skip
def test_what_is_ours_in_our_bucket_is_refused_in_any_spelling(home: Path, uri: str) -> None:
    found = places(home, store_uri="s3://ours/store")
    with pytest.raises(InvalidInput):
        found.check_named("eve", uri, "uri")
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    with pytest.raises(InvalidInput):
        found.check_object("eve", S3Store(bucket, "", S3Settings()), unquote(key), "uri")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://ours/store/tenants/eve/x",
        "s3://ours/else/x",
        "s3://ours/storehouse/x",
        "s3://theirs/store/tenants/bob/x",
        "s3://a_b.c/x..y",
    ],
)
def test_other_objects_are_read(home: Path, uri: str) -> None:
    places(home, store_uri="s3://ours/store").check_named("eve", uri, "uri")


@pytest.mark.parametrize("scheme", ["HTTPS", "https", "Http", " https"])
def test_a_query_is_kept_apart_however_its_scheme_is_written(tmp_path: Path, scheme: str) -> None:
    uri, store = f"{scheme}://host/f?X-Amz-Signature=0123", LocalStore(tmp_path)
    named, queries = without_queries(DatasetSource(uri=uri))
    for query_id, kept in queries.items():
        store.put_bytes(query_record(query_id), kept)
    assert "Signature" not in named.uri and with_query(store, named.uri) == uri
