"""Files behind http(s) URIs. A user's URI may not reach into our own network, also through names or redirects.

It is http.client's connection that is guarded: httpx needs fifty lines more, as it has no limit on the time of a whole
head, hides the certificate's error, and may not be loaded with the workflows, which import this.
"""

import gzip
import hashlib
import shutil
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, cast
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from pydantic import ValidationError

from activities.heartbeats import in_parallel, pause, stop_if_cancelled, when_cancelled
from longshore.fields import Frozen
from shared.addresses import is_public, private_host
from shared.errors import DiskFull, InvalidInput, StoreUnavailable
from shared.settings import DownloadSettings

# --- Resumable transfers of a file to this host in pieces, and its decompression (gzip, zstd) ---
#
# A file beside the data, the part map, is append-only: a validator of the source's content, then the size and SHA-256
# of every part. After a crash only parts with the right hash are used.

_SKIPPABLE = b"\x2a\x4d\x18"  # after 0x50 to 0x5f: a zstd frame without content
_MAGIC: dict[bytes, Literal["gzip", "zstd"]] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_CHUNK_BYTES = 1 << 20
_RESERVE_BYTES = 256 << 20  # left free for the rest of the machine
PART_BYTES = 8 << 20
_MAX_FAILURES = 3  # in a row, without any progress
_MAX_CHANGES = 3
_PAUSE_S = 0.2
_QUOTA = "what the quota stored_bytes leaves"


class Broken(StoreUnavailable):
    """A transfer stopped before its end. It can be resumed."""


@dataclass(frozen=True)
class Piece:
    """A source's answer: bytes from `start` to its end. `stream` raises Broken.

    `validator`: identifies the content, such as an ETag; None if the source cannot tell whether it has changed.
    """

    stream: Iterator[bytes]
    start: int
    total: int | None
    validator: str | None


class Remote(Protocol):
    """A file to be transferred. `place` names it in messages."""

    @property
    def place(self) -> str: ...

    def open(self, start: int, validator: str | None) -> AbstractContextManager[Piece]:
        """Open the file at `start` if its content still matches `validator`, else at 0."""
        ...


class _Content(Frozen):
    validator: str | None = None
    total: int | None = None


class _Part(Frozen):
    size: int
    sha256: str


class PartMap:
    """`data` and `parts.jsonl` in a folder: the parts that have arrived."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "data"
        self._map = folder / "parts.jsonl"
        self.content = _Content()
        self.num_bytes = 0
        self.num_changes = 0
        self.path.touch()
        self._recover()

    @property
    def is_whole(self) -> bool:
        return self.content.total is not None and self.num_bytes == self.content.total

    def begin(self, content: _Content) -> None:
        """Restart with this content: forget the parts that have arrived."""
        self.num_changes += self.num_bytes > 0 and content != self.content
        self.content, self.num_bytes = content, 0
        with self.path.open("r+b") as data:
            data.truncate(0)
        self._map.write_text(content.model_dump_json() + "\n")

    def append(self, part: bytes) -> None:
        """Write the next part and its hash. Raises DiskFull."""
        check_space(self.path, len(part))
        with self.path.open("r+b") as data:
            data.seek(self.num_bytes)
            data.write(part)
        with self._map.open("a") as lines:
            lines.write(_part(part).model_dump_json() + "\n")
        self.num_bytes += len(part)

    def _recover(self) -> None:
        lines = self._map.read_bytes().splitlines() if self._map.exists() else []
        if not lines:
            return
        with suppress(ValidationError):
            self.content = _Content.model_validate_json(lines[0])
        with self.path.open("r+b") as data:
            good = list(_good_parts(lines[1:], data))
            self.num_bytes = sum(part.size for part in good)
            data.truncate(self.num_bytes)
        self._map.write_text("".join(f"{line.model_dump_json()}\n" for line in (self.content, *good)))


def _part(data: bytes) -> _Part:
    return _Part(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _good_parts(lines: list[bytes], data: BinaryIO) -> Iterator[_Part]:
    """The parts up to the first whose line or bytes are damaged."""
    for line in lines:
        stop_if_cancelled()
        try:
            part = _Part.model_validate_json(line)
        except ValidationError:
            return
        if _part(data.read(part.size)) != part:
            return
        yield part


class Allowance:
    """The limits of a dataset's download: bytes transferred, bytes decompressed, and a least speed.

    The least speed is of all transfers together, interruptions included, after a grace of `timeout_s` seconds.
    """

    def __init__(self, limits: DownloadSettings, room: int | None) -> None:
        """`room`: bytes that the tenant's quota leaves; None for no quota."""
        self.transferred, self.transfer_limit = limits.max_bytes, "download.max_bytes"
        self.decompressed, self.size_limit = limits.max_decompressed_bytes, "download.max_decompressed_bytes"
        if room is not None and room < self.transferred:
            self.transferred, self.transfer_limit = room, _QUOTA
        if room is not None and room < self.decompressed:
            self.decompressed, self.size_limit = room, _QUOTA
        self._slowest_bytes_per_s, self._grace_s = limits.slowest_bytes_per_s, limits.timeout_s
        self._begin = time.monotonic()
        self._num_bytes = 0

    def check(self, num_bytes: int, place: str) -> None:
        """Raises InvalidInput for a transfer of more bytes than are left."""
        if num_bytes > self.transferred:
            rule = f"more than {self.transferred:,} bytes to transfer; the limit is {self.transfer_limit}"
            raise InvalidInput(rule, place)

    def brought(self, num_bytes: int, place: str) -> None:
        """Count bytes that have arrived. Raises StoreUnavailable if the download is slower than the least speed."""
        self._num_bytes += num_bytes
        took_s = time.monotonic() - self._begin
        if took_s > self._grace_s + self._num_bytes / self._slowest_bytes_per_s:
            slowest = f"slower than {self._slowest_bytes_per_s:,} a second"
            text = f"{self._num_bytes:,} bytes came in {took_s:.0f} s: {slowest}"
            raise StoreUnavailable(f"{place}: {text}, which is the least (download.slowest_bytes_per_s)")


def fetch(remote: Remote, folder: Path, left: Allowance) -> Path:
    """Bring a remote file into a folder. Resumes an earlier attempt there.

    Raises:
        InvalidInput: the file is larger than allowed, or changes all the time.
        StoreUnavailable: it cannot be read now, or arrives too slowly.
    """
    parts = PartMap(folder)
    num_failures, farthest = 0, parts.num_bytes
    while not parts.is_whole:
        try:
            _go_on(remote, parts, left)
            break
        except Broken:
            left.brought(0, remote.place)
            if parts.num_changes >= _MAX_CHANGES:
                raise InvalidInput("the file keeps changing while it is being read", remote.place) from None
            num_failures = 0 if parts.num_bytes > farthest else num_failures + 1
            farthest = max(farthest, parts.num_bytes)
            if num_failures == _MAX_FAILURES:
                raise
            pause(_PAUSE_S * 2**num_failures)
    left.transferred -= parts.num_bytes
    return parts.path


def _go_on(remote: Remote, parts: PartMap, left: Allowance) -> None:
    """Make one request, and read to the end of the file."""
    with remote.open(parts.num_bytes, parts.content.validator) as piece:
        content = _Content(validator=piece.validator, total=piece.total)
        if piece.start != parts.num_bytes or content != parts.content:
            parts.begin(content)
        if piece.start != parts.num_bytes:
            raise Broken(f"{remote.place}: the source changed during the transfer")
        left.check(piece.total or 0, remote.place)
        _read_all(piece.stream, parts, left, remote.place)
    if piece.total is not None and parts.num_bytes != piece.total:
        raise Broken(f"{remote.place}: the transfer broke off at {parts.num_bytes:,} of {piece.total:,} bytes")


def _read_all(stream: Iterator[bytes], parts: PartMap, left: Allowance, place: str) -> None:
    buffer = bytearray()
    try:
        for data in stream:
            stop_if_cancelled()
            buffer += data
            left.brought(len(data), place)
            left.check(parts.num_bytes + len(buffer), place)
            if len(buffer) >= PART_BYTES:
                parts.append(bytes(buffer))
                buffer.clear()
    finally:
        if buffer:
            parts.append(bytes(buffer))


def compression_of(file: BinaryIO) -> Literal["gzip", "zstd"] | None:
    """Detect a file's compression by its first bytes. The file is at its beginning, before and after."""
    start = file.read(4)
    file.seek(0)
    if start[1:] == _SKIPPABLE and start[0] & 0xF0 == 0x50:
        return "zstd"
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


def unpack(source: BinaryIO, target: Path, left: Allowance, place: str) -> int:
    """Write an open file's content to `target`, decompressed (one layer, any number of members). Returns its bytes.

    Raises:
        InvalidInput: it is damaged, cut short, or larger than allowed.
        DiskFull: it would fill the disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with _content(source) as content, target.open("wb") as file:
        while chunk := _read(content, place):
            stop_if_cancelled()
            size += len(chunk)
            if size > left.decompressed:
                raise InvalidInput(f"more than {left.decompressed:,} bytes; the limit is {left.size_limit}", place)
            check_space(target, len(chunk))
            file.write(chunk)
    return size


@contextmanager
def _content(source: BinaryIO) -> Iterator[BinaryIO]:
    # Both decompress bounded pieces, notice truncation, and read all members of a file. Arrow's own gzip does not take
    # the zeros that tapes and block devices leave at a file's end.
    match compression_of(source):
        case None:
            yield source
        case "gzip":
            with gzip.GzipFile(fileobj=source) as stream:
                yield cast(BinaryIO, stream)
        case "zstd":
            import pyarrow

            with pyarrow.CompressedInputStream(source, "zstd") as stream:
                yield stream


def _read(content: BinaryIO, place: str) -> bytes:
    try:
        return content.read(_CHUNK_BYTES)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise InvalidInput(f"the compressed data is damaged or cut short: {error}", place) from error


def check_space(target: Path, num_bytes: int) -> None:
    """Raise DiskFull if writing `num_bytes` to `target` would leave its disk too little space."""
    if shutil.disk_usage(target.parent).free < num_bytes + _RESERVE_BYTES:
        raise DiskFull(f"no space is left on the disk that holds {target.parent}")


_MAX_REDIRECTS = 5
_READ_BYTES = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_WORTH_RETRYING = (408, 425, 429)
_OPENED_BY = "download.allow_private_addresses"


@dataclass(frozen=True)
class HttpSource:
    """One file behind an http(s) URI."""

    uri: str
    settings: DownloadSettings

    @property
    def place(self) -> str:
        return shown_uri(self.uri)

    @contextmanager
    def open(self, start: int, validator: str | None) -> Iterator[Piece]:
        """Request the file. Redirects are followed here, so that the address of each hop is checked."""
        uri, headers = self.uri, {"Accept-Encoding": "identity", "User-Agent": "longshore", "Accept": "*/*"}
        if start and validator:
            headers |= {"Range": f"bytes={start}-", "If-Range": validator}
        with ExitStack() as stack:
            for _ in range(_MAX_REDIRECTS + 1):
                stack.close()
                response = stack.enter_context(_answered(uri, self.settings, headers))
                if response.status not in _REDIRECTS:
                    yield _piece(response, uri, start)
                    return
                uri = _next_hop(uri, response.getheader("Location"))
        raise InvalidInput(f"more than {_MAX_REDIRECTS} redirects", self.place)


def shown_uri(uri: str) -> str:
    """Return a URI for messages: without its query, which may hold signatures, and without a password."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def parse_http_uri(uri: str) -> SplitResult:
    """Parse an http(s) URI. Raises InvalidInput for any other, and for one with a user or password."""
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError as error:
        raise InvalidInput(f"not a URI: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput("only http://host/path and https://host/path are followed", shown_uri(uri))
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("a URI may not carry a user or password: use a presigned URI, or S3", shown_uri(uri))
    return parts


def _next_hop(uri: str, location: str | None) -> str:
    if not location:
        raise InvalidInput("a redirect that names no place", shown_uri(uri))
    target = urljoin(uri, location)
    if urlsplit(uri).scheme == "https" and urlsplit(target).scheme == "http":
        raise InvalidInput("a redirect from https to http is not followed", shown_uri(uri))
    parse_http_uri(target)
    return target


@contextmanager
def _answered(uri: str, settings: DownloadSettings, headers: dict[str, str]) -> Iterator[HTTPResponse]:
    """Make a request. Raises InvalidInput for an untrusted certificate, Broken for other errors of the connection."""
    with ExitStack() as stack:
        try:
            response = stack.enter_context(requested("GET", uri, settings, headers))
        except ssl.SSLCertVerificationError as error:
            rule = f"the server's certificate is not trusted: {error.verify_message}"
            raise InvalidInput(rule, shown_uri(uri)) from error
        except (OSError, HTTPException) as error:
            raise Broken(f"{shown_uri(uri)}: {_words(error)}") from error
        yield response


def _words(error: Exception) -> str:
    match error:
        case socket.gaierror():
            return f"no address is known for this host ({error.strerror})"
        case TimeoutError():
            return "the server does not answer in time"
        case _:
            return f"the connection failed ({error or type(error).__name__})"


def _piece(response: HTTPResponse, uri: str, start: int) -> Piece:
    # A weak ETag does not promise equal bytes (RFC 9110, 13.1.5).
    etag = response.getheader("ETag")
    validator = etag if etag and not etag.startswith("W/") else response.getheader("Last-Modified")
    match response.status:
        case 200:
            return Piece(_body(response, uri), 0, _number(response.getheader("Content-Length")), validator)
        case 206:
            first, total = _content_range(response.getheader("Content-Range", ""), uri)
            return Piece(_body(response, uri), first, total, validator)
        case 416:  # the file is now shorter than our part of it: begin again
            return Piece(_body(response, uri), start, None, None)
        case status:
            answer = f"the server answered {status} {response.reason}".rstrip()
            if status >= 500 or status in _WORTH_RETRYING:
                raise Broken(f"{shown_uri(uri)}: {answer}")
            raise InvalidInput(answer, shown_uri(uri))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def _content_range(text: str, uri: str) -> tuple[int, int | None]:
    """Parse a Content-Range such as `bytes 10-99/100`: returns the first byte and the total, here 10 and 100."""
    span, _, total = text.removeprefix("bytes ").partition("/")
    first = _number(span.partition("-")[0])
    if first is None:
        raise Broken(f"{shown_uri(uri)}: the server's Content-Range makes no sense")
    return first, _number(total)


def _body(response: HTTPResponse, uri: str) -> Iterator[bytes]:
    try:
        while data := response.read1(_READ_BYTES):
            yield data
    except (OSError, HTTPException, ValueError) as error:
        raise Broken(f"{shown_uri(uri)}: {_words(error)}") from error


@contextmanager
def requested(
    method: str,
    uri: str,
    settings: DownloadSettings,
    headers: Mapping[str, str],
    body: bytes | None = None,
    opened_by: str = _OPENED_BY,
) -> Iterator[HTTPResponse]:
    """Make one request. The connection lasts until the block ends. Redirects are not followed.

    Args:
        opened_by: the setting that an error about a private address names.

    Raises:
        InvalidInput: the URI is not a plain http(s) URI, or leads into a private network.
        OSError, HTTPException: the connection failed.
    """
    parts = parse_http_uri(uri)
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = quote(parts.query, safe="/?%:@!$&'()*+,;=~-._")
    with closing(_CheckedConnection(parts, settings, opened_by)) as connection, when_cancelled(connection.hang_up):
        connection.request(method, f"{path}?{query}" if query else path, body, dict(headers))
        yield connection.getresponse()
        stop_if_cancelled()  # the end of a connection that was shut down may look like the end of the answer


class _CheckedConnection(HTTPConnection):
    """Connects to the IP addresses that were checked, since the name might resolve to others a moment later."""

    def __init__(self, parts: SplitResult, settings: DownloadSettings, opened_by: str) -> None:
        assert parts.hostname is not None
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        super().__init__(parts.hostname, parts.port or (443 if self._tls else 80), timeout=settings.timeout_s)
        self._settings = settings
        self._opened_by = opened_by
        self._to_server: socket.socket | None = None  # `sock` is None while the rest of an answer is read

    def connect(self) -> None:
        # On another thread, since nothing can end a resolver, or a handshake.
        [self.sock] = in_parallel(lambda connect: connect(), [self._connected], 1)
        self._to_server = self.sock

    def _connected(self) -> socket.socket:
        failure: OSError = OSError("no address")
        for address in resolve(self.host, self.port, self._settings.allow_private_addresses, self._opened_by):
            try:
                connected = socket.create_connection(address[:2], timeout=self._settings.timeout_s)
            except OSError as error:
                failure = error
                continue
            # The socket's timeout holds for the whole TLS handshake.
            return self._tls.wrap_socket(connected, server_hostname=self.host) if self._tls else connected
        raise failure

    def hang_up(self) -> None:
        """Have another thread's wait for the server end, with an error or with the answer's apparent end."""
        if self._to_server is not None:
            with suppress(OSError):  # it has just been closed
                socket.socket.shutdown(self._to_server, socket.SHUT_RDWR)  # TLS's own would disturb the reader

    def getresponse(self) -> HTTPResponse:
        """Read status and headers within `timeout_s` in all, even if the server sends them byte by byte."""
        is_late = threading.Event()

        def hang_up() -> None:
            is_late.set()
            self.hang_up()

        timer = threading.Timer(self._settings.timeout_s, hang_up)
        timer.daemon = True
        timer.start()
        try:
            return super().getresponse()
        finally:
            timer.cancel()
            if is_late.is_set():  # headers that were cut off may look complete
                raise TimeoutError("the server does not come to its end")


def resolve(host: str, port: int, allow_private: bool, opened_by: str = _OPENED_BY) -> list[tuple]:
    """Resolve a host name to socket addresses. Raises InvalidInput: one of them is not on the public internet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise InvalidInput("not a host name", host) from error
    addresses = [address for _, _, _, _, address in found]
    for address in addresses:
        if not allow_private and not is_public(str(address[0])):
            raise InvalidInput(private_host(opened_by), host)
    return addresses
