"""The object store: one Protocol, plain files for `file://`, boto3 for `s3://`."""

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote, urlsplit

from shared.errors import InvalidInput, NotFound, StoreUnavailable
from shared.paths import write_atomically
from shared.settings import S3Settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@dataclass(frozen=True)
class ObjectInfo:
    """An object of a store: its key and its size in bytes."""

    key: str
    size: int
    etag: str | None = None


class ObjectStore(Protocol):
    """Blobs under keys. An object appears whole or not at all. Blocking: call it from a thread.

    Errors: `NotFound` for a missing object, `StoreUnavailable` when the store cannot be reached or refuses us.
    """

    uri: str

    def put_bytes(self, key: str, data: bytes) -> None: ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object unless its key is taken; True if this call created it."""
        ...

    def put_file(self, key: str, path: Path) -> None: ...

    def get_bytes(self, key: str) -> bytes: ...

    def get_file(self, key: str, path: Path) -> None: ...

    def read_range(self, key: str, start: int, length: int) -> bytes: ...

    def head(self, key: str) -> ObjectInfo | None: ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with the prefix, in order of key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        ...

    def local_path(self, key: str) -> Path | None:
        """The object as a file on this machine, where the store keeps files."""
        ...


def uri_of(store: ObjectStore, key: str) -> str:
    return f"{store.uri}/{quote(key)}"


def open_uri(uri: str, s3: S3Settings) -> tuple[ObjectStore, str]:
    """The store that holds a URI, and the URI's key in it.

    Raises:
        InvalidInput: a scheme that is neither `file` nor `s3`, or a URI with no bucket.
    """
    parts = urlsplit(uri)
    match parts.scheme:
        case "file":
            if parts.netloc not in ("", "localhost"):
                raise InvalidInput("a file URI has three slashes: file:///absolute/path", uri)
            return LocalStore(Path("/")), unquote(parts.path).lstrip("/")
        case "s3":
            if not parts.netloc:
                raise InvalidInput("an S3 URI names its bucket: s3://bucket/key", uri)
            return S3Store(parts.netloc, "", s3), unquote(parts.path).lstrip("/")
        case _:
            raise InvalidInput("a store URI starts with file:// or s3://", uri)


def open_store(uri: str, s3: S3Settings) -> ObjectStore:
    """The store whose keys lie below a URI."""
    store, key = open_uri(uri, s3)
    match store:
        case LocalStore():
            return LocalStore(Path("/") / key)
        case S3Store():
            return S3Store(store.bucket, key.rstrip("/"), s3)
        case _:
            raise AssertionError(store)


class LocalStore:
    """Objects as files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = "file://" + quote(str(root)).rstrip("/")

    def put_bytes(self, key: str, data: bytes) -> None:
        write_atomically(self._path(key), data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        write_atomically(temporary, data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def put_file(self, key: str, path: Path) -> None:
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with path.open("rb") as source, temporary.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)

    def get_bytes(self, key: str) -> bytes:
        with self._open(key) as file:
            return file.read()

    def get_file(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._open(key) as source, path.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._open(key) as file:
            file.seek(start)
            return file.read(length)

    def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        return ObjectInfo(key, path.stat().st_size) if path.is_file() else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = self._path(prefix) if prefix.endswith("/") or not prefix else self._path(prefix).parent
        keys = (
            (os.path.relpath(os.path.join(parent, name), self.root), os.path.join(parent, name))
            for parent, _, names in os.walk(folder)
            for name in names
            if not name.endswith(".tmp")
        )
        for key, path in sorted(keys):
            if key.startswith(prefix):
                yield ObjectInfo(key, os.stat(path).st_size)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def _open(self, key: str):  # noqa: ANN202 - a binary file; typeshed's name for it is private
        try:
            return self._path(key).open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFound(f"no object {key} in {self.uri}") from error

    def _path(self, key: str) -> Path:
        path = Path(os.path.normpath(self.root / key))
        if key.startswith("/") or not path.is_relative_to(self.root):
            raise InvalidInput("a key may not leave its store", key)
        return path


class S3Store:
    """Objects below a prefix of an S3 bucket. Credentials come from boto3's own chain, never from us."""

    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{quote(prefix)}".rstrip("/")
        self._client = _s3_client(settings)

    def put_bytes(self, key: str, data: bytes) -> None:
        with _translated(self.uri, key):
            self._client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        with _translated(self.uri, key):
            try:
                self._client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data, IfNoneMatch="*")
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
                    return False
                raise
        return True

    def put_file(self, key: str, path: Path) -> None:
        with _translated(self.uri, key):
            self._client.upload_file(str(path), self.bucket, self.prefix + key)

    def get_bytes(self, key: str) -> bytes:
        with _translated(self.uri, key):
            return self._client.get_object(Bucket=self.bucket, Key=self.prefix + key)["Body"].read()

    def get_file(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _translated(self.uri, key):
            self._client.download_file(self.bucket, self.prefix + key, str(path))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with _translated(self.uri, key):
            span = f"bytes={start}-{start + length - 1}"
            return self._client.get_object(Bucket=self.bucket, Key=self.prefix + key, Range=span)["Body"].read()

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with _translated(self.uri, key):
                answer = self._client.head_object(Bucket=self.bucket, Key=self.prefix + key)
        except NotFound:
            return None
        return ObjectInfo(key, answer["ContentLength"], answer.get("ETag"))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with _translated(self.uri, prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            for page in pages:
                for item in page.get("Contents", []):
                    yield ObjectInfo(item["Key"].removeprefix(self.prefix), item["Size"], item.get("ETag"))

    def delete(self, key: str) -> None:
        with _translated(self.uri, key):
            self._client.delete_object(Bucket=self.bucket, Key=self.prefix + key)

    def local_path(self, key: str) -> Path | None:
        return None


def _s3_client(settings: S3Settings) -> "S3Client":
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=settings.endpoint_url,
        region_name=settings.region,
        # Stores other than AWS refuse the CRC32 trailers that boto3 sends by default; our manifests hold SHA-256.
        config=Config(
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"max_attempts": 4, "mode": "standard"},
            connect_timeout=10,
            read_timeout=60,
        ),
    )


class _translated:
    """Turns boto3's errors into ours. Messages keep boto3's error code, never a credential."""

    def __init__(self, uri: str, key: str) -> None:
        self._place = f"{uri}/{key}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError

        match error:
            case ClientError() if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
                raise NotFound(f"no object {self._place}") from error
            case ClientError():
                code = error.response.get("Error", {}).get("Code", "unknown")
                raise StoreUnavailable(f"{self._place}: the store answered {code}") from error
            case BotoCoreError() | S3UploadFailedError():
                raise StoreUnavailable(f"{self._place}: {error}") from error
