"""Files behind http(s) URIs. A user's URI may not reach into our own network, also through names or redirects.

It is http.client's connection that is guarded: httpx needs fifty lines more, as it has no limit on the time of a whole
head, hides the certificate's error, and may not be loaded with the workflows, which import this.
"""

import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from activities.sources.transfer import Broken, Piece
from shared.addresses import is_public, private_host
from shared.errors import InvalidInput
from shared.settings import DownloadSettings

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
        uri, headers = self.uri, _headers(start, validator)
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


def _headers(start: int, validator: str | None) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity", "User-Agent": "longshore", "Accept": "*/*"}
    if start and validator:
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    return headers


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
    validator = _validator(response)
    match response.status:
        case 200:
            return Piece(_body(response, uri), 0, _number(response.getheader("Content-Length")), validator)
        case 206:
            first, total = _content_range(response.getheader("Content-Range", ""), uri)
            return Piece(_body(response, uri), first, total, validator)
        case 416:  # the file is now shorter than our part of it: begin again
            return Piece(_body(response, uri), start, None, None)
        case _:
            raise _refusal(response.status, response.reason, uri)


def _refusal(status: int, reason: str, uri: str) -> Broken | InvalidInput:
    answer = f"the server answered {status} {reason}".rstrip()
    if status >= 500 or status in _WORTH_RETRYING:
        return Broken(f"{shown_uri(uri)}: {answer}")
    return InvalidInput(answer, shown_uri(uri))


def _validator(response: HTTPResponse) -> str | None:
    """Return the strong ETag or else Last-Modified. (A weak ETag does not promise equal bytes: RFC 9110, 13.1.5.)"""
    etag = response.getheader("ETag")
    return etag if etag and not etag.startswith("W/") else response.getheader("Last-Modified")


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
    with closing(_CheckedConnection(parts, settings, opened_by)) as connection:
        connection.request(method, f"{path}?{query}" if query else path, body, dict(headers))
        yield connection.getresponse()


class _CheckedConnection(HTTPConnection):
    """Connects to the IP addresses that were checked, since the name might resolve to others a moment later."""

    def __init__(self, parts: SplitResult, settings: DownloadSettings, opened_by: str) -> None:
        assert parts.hostname is not None
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        super().__init__(parts.hostname, parts.port or (443 if self._tls else 80), timeout=settings.timeout_s)
        self._settings = settings
        self._opened_by = opened_by

    def connect(self) -> None:
        addresses = resolve(self.host, self.port, self._settings.allow_private_addresses, self._opened_by)
        connected = _connect(addresses, self._settings.timeout_s)
        # The socket's timeout holds for the whole TLS handshake.
        self.sock = self._tls.wrap_socket(connected, server_hostname=self.host) if self._tls else connected

    def getresponse(self) -> HTTPResponse:
        """Read status and headers within `timeout_s` in all, even if the server sends them byte by byte."""
        connection, is_late = self.sock, threading.Event()

        def hang_up() -> None:
            is_late.set()
            with suppress(OSError):  # it has just been closed
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own shutdown would disturb the reader

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


def _connect(addresses: list[tuple], timeout_s: float) -> socket.socket:
    failure: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection(address[:2], timeout=timeout_s)
        except OSError as error:
            failure = error
    raise failure
