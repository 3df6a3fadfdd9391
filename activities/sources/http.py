"""Files behind http(s) URIs. A user's URI may not reach into our own network, whatever names and redirects lead to."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from activities.sources.transfer import Broken, Piece
from shared.addresses import is_public, private_host
from shared.errors import InvalidInput
from shared.settings import DownloadSettings

_MAX_REDIRECTS = 5
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
        return shown(self.uri)

    @contextmanager
    def open(self, start: int, validator: str | None) -> Iterator[Piece]:
        """Follows redirects by hand, so that each hop's address is checked."""
        uri, headers = self.uri, _headers(start, validator)
        for _ in range(_MAX_REDIRECTS + 1):
            connection = open_connection(uri, self.settings)
            try:
                response = _ask(connection, uri, headers)
                if response.status not in _REDIRECTS:
                    yield _piece(response, uri, start)
                    return
            finally:
                connection.close()
            uri = _next_hop(uri, response.getheader("Location"))
        raise InvalidInput(f"more than {_MAX_REDIRECTS} redirects", self.place)


def shown(uri: str) -> str:
    """A URI for messages: without a query, where signatures and tokens are."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def checked(uri: str) -> SplitResult:
    """Raises InvalidInput for what is no plain http(s) URI."""
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError as error:
        raise InvalidInput(f"not a URI: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput("only http://host/path and https://host/path are followed", shown(uri))
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("a URI may not carry a user or password: use a presigned URI, or S3", shown(uri))
    return parts


def _headers(start: int, validator: str | None) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity", "User-Agent": "longshore", "Accept": "*/*"}
    if start and validator:
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    return headers


def _next_hop(uri: str, location: str | None) -> str:
    if not location:
        raise InvalidInput("a redirect that names no place", shown(uri))
    target = urljoin(uri, location)
    if urlsplit(uri).scheme == "https" and urlsplit(target).scheme == "http":
        raise InvalidInput("a redirect from https to http is not followed", shown(uri))
    checked(target)
    return target


def _ask(connection: HTTPConnection, uri: str, headers: dict[str, str]) -> HTTPResponse:
    parts = urlsplit(uri)
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = quote(parts.query, safe="/?%:@!$&'()*+,;=~-._")
    try:
        connection.request("GET", f"{path}?{query}" if query else path, headers=headers)
        return connection.getresponse()
    except ssl.SSLCertVerificationError as error:
        raise InvalidInput(f"the server's certificate is not trusted: {error.verify_message}", shown(uri)) from error
    except (OSError, HTTPException) as error:
        raise Broken(f"{shown(uri)}: {_words(error)}") from error


def _words(error: Exception) -> str:
    match error:
        case socket.gaierror():
            return f"no address is known for this host ({error.strerror})"
        case TimeoutError():
            return "the server does not answer in time"
        case _:
            return f"the connection failed ({error or type(error).__name__})"


def _piece(response: HTTPResponse, uri: str, start: int) -> Piece:
    validator = _validator(response)
    match response.status:
        case 200:
            return Piece(_Body(response, uri), 0, _number(response.getheader("Content-Length")), validator)
        case 206:
            first, total = _content_range(response.getheader("Content-Range", ""), uri)
            return Piece(_Body(response, uri), first, total, validator)
        case 416:  # the file is shorter now than what we have: begin again
            return Piece(_Body(response, uri), start, None, None)
        case _:
            raise _refusal(response.status, response.reason, uri)


def _refusal(status: int, reason: str, uri: str) -> Broken | InvalidInput:
    answer = f"the server answered {status} {reason}".rstrip()
    if status >= 500 or status in _WORTH_RETRYING:
        return Broken(f"{shown(uri)}: {answer}")
    return InvalidInput(answer, shown(uri))


def _validator(response: HTTPResponse) -> str | None:
    """A strong ETag, or failing that the date: a weak one does not promise equal bytes (RFC 9110, 13.1.5)."""
    etag = response.getheader("ETag")
    return etag if etag and not etag.startswith("W/") else response.getheader("Last-Modified")


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def _content_range(text: str, uri: str) -> tuple[int, int | None]:
    """First byte and total of `bytes 10-99/100`."""
    span, _, total = text.removeprefix("bytes ").partition("/")
    first = _number(span.partition("-")[0])
    if first is None:
        raise Broken(f"{shown(uri)}: the server's Content-Range makes no sense")
    return first, _number(total)


@dataclass(frozen=True)
class _Body:
    response: HTTPResponse
    uri: str

    def read(self, num_bytes: int, /) -> bytes:
        try:
            return self.response.read1(num_bytes)
        except (OSError, HTTPException, ValueError) as error:
            raise Broken(f"{shown(self.uri)}: {_words(error)}") from error


def open_connection(uri: str, settings: DownloadSettings, opened_by: str = _OPENED_BY) -> HTTPConnection:
    """Checks the address when it connects. Raises InvalidInput for what is no plain http(s) URI.

    Args:
        opened_by: the setting that an error about a private address names.
    """
    parts = checked(uri)
    assert parts.hostname is not None
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    tls = ssl.create_default_context() if secure else None
    return _CheckedConnection(parts.hostname, port, settings, tls, opened_by)


class _CheckedConnection(HTTPConnection):
    """Connects to the very address that was checked: a name that resolves otherwise a moment later changes nothing."""

    def __init__(
        self, host: str, port: int, settings: DownloadSettings, tls: ssl.SSLContext | None, opened_by: str
    ) -> None:
        super().__init__(host, port, timeout=settings.timeout_s)
        self._settings = settings
        self._tls = tls
        self._held: socket.socket | None = None
        self._is_hung_up = False
        self._opened_by = opened_by

    def connect(self) -> None:
        addresses = resolve(self.host, self.port, self._settings.allow_private_addresses, self._opened_by)
        connected = _connect(addresses, self._settings.timeout_s)
        self._held = connected.dup()  # TLS takes the other one over
        with self._deadline():
            self.sock = self._tls.wrap_socket(connected, server_hostname=self.host) if self._tls else connected

    def getresponse(self) -> HTTPResponse:
        """Status and headers, all within the time that a server may be silent: bytes that drip do not prolong it."""
        with self._deadline():
            return super().getresponse()

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """A read that goes on for too long finds the connection closed."""
        timer = threading.Timer(self._settings.timeout_s, self._hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if self._is_hung_up:  # what was cut off may look whole
            raise TimeoutError("the server does not come to its end")

    def close(self) -> None:
        super().close()
        if self._held is not None:
            self._held.close()
            self._held = None

    def _hang_up(self) -> None:
        self._is_hung_up = True
        with suppress(OSError, AttributeError):  # it has just been closed
            self._held.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


def resolve(host: str, port: int, allow_private: bool, opened_by: str = _OPENED_BY) -> list[tuple]:
    """The socket addresses of a host.

    Raises:
        InvalidInput: one of them is not on the public internet.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise InvalidInput("not a host name", host) from error
    addresses = [address for _, _, _, _, address in found]
    for address in addresses:
        if not allow_private and not is_public(str(address[0])):
            raise InvalidInput(private_host(opened_by), host)
    return addresses


def _connect(addresses: list[tuple], timeout_s: float) -> socket.socket:
    failure: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection(address[:2], timeout=timeout_s)
        except OSError as error:
            failure = error
    raise failure
