"""What every request passes before the API sees it: a request id, the Host header, the key, the size of the body."""

import logging
import re
import secrets
import time
from collections.abc import Iterable
from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import problems
from service.auth import ApiKeys

logger = logging.getLogger("longshore.service")

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/health", "/api/v1/health")
UPLOAD_PATH = "/api/v1/files"
_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_HOST = re.compile(r"^\[?(?P<name>[^\]]*?)\]?(:\d+)?$")


class Edge:
    """The outermost layer. It refuses, or passes on; it never reads a body itself."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        allowed_hosts: Iterable[str] | None,
        max_body_bytes: int,
        max_upload_bytes: int,
    ) -> None:
        """
        Args:
            allowed_hosts: names that a Host header may carry (DNS rebinding sends others); None for any.
            max_body_bytes: the largest JSON body.
            max_upload_bytes: the largest file.
        """
        self._app = app
        self._keys = keys
        self._hosts = None if allowed_hosts is None else {host.lower() for host in allowed_hosts}
        self._max_body_bytes = max_body_bytes
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = _Exchange(send, _request_id(headers), scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            status, message = refusal
            extra = {"www-authenticate": "Bearer"} if status == 401 else {}
            await problems.answer(status, message, headers=extra)(scope, receive, exchange.send)
            return
        body = _LimitedBody(receive, self._limit(scope))
        try:
            await self._app(scope, body.receive, exchange.send)
        except Exception as error:  # the last edge: whatever gets here has no handler, or its answer had begun
            logger.error("%s failed", exchange, exc_info=error)
            if not exchange.begun:
                text = "the service failed; its log has the reason under this answer's x-request-id"
                await problems.answer(500, text)(scope, receive, exchange.send)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._hosts is not None and _host_name(host) not in self._hosts:
            return 403, f"this service does not answer to the host name {_host_name(host)!r}"
        if scope["path"] not in OPEN_PATHS and not self._keys.accepts(headers.get("authorization")):
            return 401, "send an API key: Authorization: Bearer <key>"
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limit(scope):
            return 413, f"the body has {length} bytes; at most {self._limit(scope)} are taken here"
        return None

    def _limit(self, scope: Scope) -> int:
        return self._max_upload_bytes if scope["path"] == UPLOAD_PATH else self._max_body_bytes


class _Exchange:
    """One request and its answer: adds the request id, logs one line."""

    def __init__(self, send: Send, request_id: str, scope: Scope) -> None:
        self._send = send
        self._request_id = request_id
        self._scope = scope
        self._start = time.monotonic()
        self.begun = False

    def __str__(self) -> str:
        return f"{self._request_id} {self._scope['method']} {self._scope['path']}"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
            duration_ms = (time.monotonic() - self._start) * 1000
            logger.info("%s %s %.0f ms", self, HTTPStatus(message["status"]).value, duration_ms)
        await self._send(message)


class _LimitedBody:
    """Counts a body that does not say its length."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limit:
            # FastAPI takes any other exception from here for a body that is broken.
            raise HTTPException(413, f"the body is larger than the {self._limit} bytes that are taken here")
        return message


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.match(given) else f"req-{secrets.token_hex(8)}"


def _host_name(header: str) -> str:
    found = _HOST.match(header)
    return found["name"].lower() if found else header
