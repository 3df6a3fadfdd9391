"""The object store: one Protocol, plain files for `file://`, boto3 for `s3://`."""

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol
from urllib.parse import quote, unquote, urlsplit

from shared.errors import DiskFull, InvalidInput, NotFound, StoreUnavailable
from shared.settings import S3Settings
from shared.storage.files import copy_file, fsync_folder, go_on, open_regular, replacing, write_atomically

if TYPE_CHECKING:
    from botocore.exceptions import _ResponseMetadataTypeDef
    from mypy_boto3_s3 import S3Client


Check = Callable[[], None]


@dataclass(frozen=True)
class ObjectInfo:
    """An object of a store: its key, its size in bytes, and an opaque tag that differs when its content does.

    `modified`: when it was written, in seconds since 1970, by the store's clock.
    """

    key: str
    size: int
    etag: str | None = None
    modified: float = field(default=0.0, compare=False)


class ObjectStore(Protocol):
    """Blobs under keys. An object appears whole or not at all. Blocking: call it from a thread.

    Errors: `NotFound` for a missing object, `StoreUnavailable` when the store cannot be reached or refuses us.
    `check`: called for each piece of a file, from any thread. Its errors end the call.
    """

    uri: str

    def put_bytes(self, key: str, data: bytes) -> None: ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object unless its key is taken; True if this call created it."""
        ...

    def put_file(self, key: str, path: Path, check: Check = go_on) -> None: ...

    def get_bytes(self, key: str) -> bytes: ...

    def get_file(self, key: str, path: Path, check: Check = go_on) -> None: ...

    def read_range(self, key: str, start: int, length: int) -> bytes: ...

    def head(self, key: str) -> ObjectInfo | None: ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with the prefix, in order of key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        ...


def uri_of(store: ObjectStore, key: str) -> str:
    return f"{store.uri}/{quote(key)}"


def open_uri(uri: str, s3: S3Settings) -> tuple[ObjectStore, str]:
    """The store that holds a URI, and the URI's key in it.

    Raises InvalidInput: a scheme that is neither `file` nor `s3`, or a URI with no bucket.
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
    """Objects as files below a folder. Names like `.*.tmp` are its own, for files that are not whole yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = "file://" + quote(str(root)).rstrip("/")

    def put_bytes(self, key: str, data: bytes) -> None:
        with disk_errors(self._path(key)) as path:
            write_atomically(path, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with disk_errors(self._path(key)) as path:
            temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(path.parent)
            return True

    def put_file(self, key: str, path: Path, check: Check = go_on) -> None:
        with path.open("rb") as source, disk_errors(self._path(key)) as target, replacing(target) as copy:
            copy_file(source, copy, check)

    def get_bytes(self, key: str) -> bytes:
        with self._open(key) as file:
            return file.read()

    def get_file(self, key: str, path: Path, check: Check = go_on) -> None:
        with self._open(key) as source, disk_errors(path), replacing(path) as copy:
            copy_file(source, copy, check)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._open(key) as file:
            file.seek(start)
            return file.read(length)

    def head(self, key: str) -> ObjectInfo | None:
        try:
            status = self._path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _object_info(key, status) if S_ISREG(status.st_mode) else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        return self._walk(self._path(folder) if folder else self.root, f"{folder}/" if folder else "", prefix)

    def _walk(self, folder: Path, folder_key: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below a folder in order of key. Folders sort with a slash after their name, as in S3."""
        try:
            with os.scandir(folder) as scan:
                entries = {entry.name + "/" * entry.is_dir(follow_symlinks=False): entry for entry in scan}
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, entry in sorted(entries.items()):
            key = folder_key + name
            if name.endswith("/") and (key.startswith(prefix) or prefix.startswith(key)):
                yield from self._walk(folder / name, key, prefix)
            elif key.startswith(prefix) and not _is_temporary(name):
                with suppress(FileNotFoundError):  # it was deleted since it was listed
                    if S_ISREG((status := entry.stat()).st_mode):
                        yield _object_info(key, status)

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._path(key).unlink()

    def _open(self, key: str) -> BinaryIO:
        try:
            return open_regular(self._path(key))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFound(f"no object {key} in {self.uri}") from error

    def _path(self, key: str) -> Path:
        return self.root / _checked(key)


def _checked(key: str) -> str:
    """Refuse a key that would lead out of its store, or whose file would be hidden or named otherwise."""
    if any(part in ("", ".", "..") for part in key.rstrip("/").split("/")) or "\0" in key:
        raise InvalidInput("a key may not leave its store, nor have empty parts", key)
    if _is_temporary(key.rpartition("/")[2]):
        raise InvalidInput("names like .*.tmp are the store's own", key)
    return key


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _object_info(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"
    return ObjectInfo(key, status.st_size, etag, status.st_mtime)


@contextmanager
def disk_errors(path: Path) -> Iterator[Path]:
    """Raise errors of a full or forbidden disk as our own, with its path.

    Raises:
        DiskFull, StoreUnavailable
    """
    try:
        yield path
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(f"no space is left on the disk that holds {path.parent} ({error.strerror})") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreUnavailable(f"{path} may not be written: {error.strerror}") from error
        raise


class S3Store:
    """Objects below a prefix of an S3 bucket. Credentials come from boto3's own chain, never from us."""

    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{quote(prefix)}".rstrip("/")
        self._settings = settings

    @property
    def _client(self) -> "S3Client":
        """The boto3 client, created at first use, as that is slow; stores of one endpoint share it."""
        return _s3_client(self._settings.endpoint_url, self._settings.region)

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._client.put_object(Bucket=self.bucket, Key=self._key(key), Body=data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._errors(key):
            for pause_s in (0.1, 0.4, 1.0, 0.0):
                refusal = self._refusal(key, data)
                if refusal is None:
                    return True
                if refusal["HTTPStatusCode"] == 412:
                    # boto3 repeats a request whose answer was lost: the object may come from this call's first try.
                    return bool(refusal.get("RetryAttempts")) and self.get_bytes(key) == data
                time.sleep(pause_s)  # 409: another write to this key is under way
        raise StoreUnavailable(f"{self.uri}/{key}: others keep writing this object")

    def _refusal(self, key: str, data: bytes) -> "_ResponseMetadataTypeDef | None":
        from botocore.exceptions import ClientError

        try:
            self._client.put_object(Bucket=self.bucket, Key=self._key(key), Body=data, IfNoneMatch="*")
        except ClientError as error:
            if (answer := error.response["ResponseMetadata"])["HTTPStatusCode"] in (409, 412):
                return answer
            raise
        return None

    def put_file(self, key: str, path: Path, check: Check = go_on) -> None:
        try:
            with self._errors(key):
                self._client.upload_file(str(path), self.bucket, self._key(key), Callback=lambda _: check())
        except StoreUnavailable:
            check()  # its error, which boto3 reports as a failed connection
            raise

    def get_bytes(self, key: str) -> bytes:
        with self._errors(key):
            return self._client.get_object(Bucket=self.bucket, Key=self._key(key))["Body"].read()

    def get_file(self, key: str, path: Path, check: Check = go_on) -> None:
        with disk_errors(path), self._errors(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._client.download_file(self.bucket, self._key(key), str(path), Callback=lambda _: check())

    def read_range(self, key: str, start: int, length: int) -> bytes:
        from botocore.exceptions import ClientError

        with self._errors(key):
            span = f"bytes={start}-{start + length - 1}"
            try:
                return self._client.get_object(Bucket=self.bucket, Key=self._key(key), Range=span)["Body"].read()
            except ClientError as error:
                if error.response["Error"].get("Code") in ("416", "InvalidRange"):
                    return b""
                raise

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors(key):
                answer = self._client.head_object(Bucket=self.bucket, Key=self._key(key))
        except NotFound:
            return None
        return ObjectInfo(key, answer["ContentLength"], _tag(answer), answer["LastModified"].timestamp())

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            for page in pages:
                for item in page.get("Contents", []):
                    key, modified = item["Key"].removeprefix(self.prefix), item["LastModified"].timestamp()
                    yield ObjectInfo(key, item["Size"], _tag(item), modified)

    def delete(self, key: str) -> None:
        with self._errors(key):
            self._client.delete_object(Bucket=self.bucket, Key=self._key(key))

    def _key(self, key: str) -> str:
        return self.prefix + _checked(key)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Raise boto3's errors as our own. Messages keep boto3's error code, never a credential."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        place = f"{self.uri}/{key}"
        try:
            yield
        except ClientError as error:
            raise _refused(place, error.response.get("Error", {}).get("Code", "unknown")) from error
        except (BotoCoreError, Boto3Error) as error:
            raise StoreUnavailable(f"{place}: {error}") from error


def _tag(told: Mapping[str, Any]) -> str | None:
    return (told.get("ETag") or "").strip('"') or None  # some servers quote it only in some answers


def _refused(place: str, code: str) -> NotFound | StoreUnavailable:
    match code:
        case "404" | "NoSuchKey" | "NotFound":
            return NotFound(f"no object {place}")
        case "NoSuchBucket":
            return StoreUnavailable(f"{place}: there is no such bucket, and Longshore makes none: create it")
        case "401" | "403" | "AccessDenied" | "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "ExpiredToken":
            return StoreUnavailable(f"{place}: the store refuses our credentials ({code}); see `longshore doctor`")
        case _:
            return StoreUnavailable(f"{place}: the store answered {code}")


@lru_cache(maxsize=16)
def _s3_client(endpoint_url: str | None, region: str | None) -> "S3Client":
    """One client an endpoint: making one takes a tenth of a second, and all threads may share it."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=region,
        # Stores other than AWS refuse the CRC32 trailers that boto3 sends by default; our manifests hold SHA-256.
        config=Config(
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"total_max_attempts": 3, "mode": "standard"},
            connect_timeout=5,
            read_timeout=60,
            max_pool_connections=32,
        ),
    )
