"""Downloads from S3."""

import gzip
import os
import threading

import pytest

from shared.errors import InvalidInput, StoreUnavailable
from shared.storage.artifacts import sha256_file, stage
from tests.activities.sources.downloads import ROWS, download, files_of, refusal


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
