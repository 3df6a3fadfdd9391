"""Middleware of every request: request id, Host header, key, rate and size; and the audit log."""

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlencode

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.accounts import audit
from service.accounts.audit import Audit
from service.accounts.keys import COOKIE, CSRF_HEADER, Keys, Principal, SignIns, is_from_page, sent_key
from service.accounts.limits import RateLimit
from service.apis import errors as problems
from service.apis import page as pages
from service.apis.art.wandb_artifacts import TELEMETRY, WANDB, wandb_key
from service.apis.native.installation import CODEC
from service.apis.tinker.wire import BATCH_PATHS, TINKER, TINKER_FILES, tinker_key
from service.apis.tinker.wire import MAX_MESSAGE_BYTES as MAX_BATCH_BYTES
from service.inference.episodes import ADDRESS, AGENTS, PATHS, Episodes
from shared.errors import DatabaseUnavailable

logger = logging.getLogger("longshore.service")

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = (*pages.HEALTH_PATHS, "/api/v1/health", f"{TINKER}/healthz", *pages.OPEN_PATHS, *TELEMETRY)
_LOOKS = ("GET", "HEAD")
UPLOAD_PATHS = re.compile(
    r"/api/v1/files|/v1/files|/v1/uploads/[^/]+/parts|/v1/preview/training-jobs"
    rf"|{WANDB}/artifacts/[^/]+/[^/]+|{WANDB}/files/[^/]+/[^/]+/[^/]+/file_stream"
)
_LONGEST_PATH = 2048
_RECHECK_S = 2.0  # between checks of a request's key: when it is revoked, streams and long answers end
_SILENCE_S = 30.0  # a client that sends nothing for this long in the middle of a body is refused
_BODY_S = 60.0  # for a body, plus the time that it takes at _SLOWEST_BYTES_PER_S
_SLOWEST_BYTES_PER_S = 16 << 10
_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_KEY_UNKNOWN = "this API key is not known here, was revoked, or has expired"
_KEY_MISSING = "send an API key: Authorization: Bearer <key>"
_EPISODE_OVER = "there is no episode of this address, or it has ended"
_SESSION_OVER = "this session has ended, or its key has: sign in again"
_HOST = re.compile(r"^\[?(?P<name>[^\]]*?)\]?(:\d+)?$")


@dataclass(frozen=True, eq=False)
class Edge:
    """The outermost middleware. It refuses a request or passes it on, and never reads a body itself.

    Args:
        rate_limit: of each key.
        allowed_hosts: names that a Host header may carry, in lower case (DNS rebinding sends others); None for any.
        max_body_bytes: the largest JSON body.
        max_upload_bytes: the largest file.
        in_hand: has an entry for each unanswered request, so that shutdown can wait for the last ones.
        temporal_ui: the origin of a page that may ask the codec with the session of whoever is signed in here.
    """

    app: ASGIApp
    keys: Keys
    sign_ins: SignIns
    episodes: Episodes
    audit: Audit
    rate_limit: RateLimit
    allowed_hosts: Collection[str] | None
    max_body_bytes: int
    max_upload_bytes: int
    in_hand: set[object]
    temporal_ui: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope.setdefault("state", {})
        if scope["path"].startswith(AGENTS):
            _take_secret(scope)
        exchange = _Exchange(send, headers.get("x-request-id", ""), scope, self.audit)
        refusal = await self._refusal(scope, headers, exchange)
        if refusal is not None:
            await refusal(scope, receive, exchange.send)
            return
        body = _LimitedBody(receive, self._limit(scope))
        self.in_hand.add(exchange)
        try:
            await self.app(scope, body.receive, self._while_known(scope, headers, exchange))
        except asyncio.CancelledError:  # the service is shutting down, and its grace time is over
            if exchange.begun or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            text = "the service is leaving, or starting anew: ask again"
            answer = problems.error_response(503, text, headers={"retry-after": "2"}, path=scope["path"])
            await answer(scope, receive, exchange.send)
        except _NoLongerKnown:  # the connection of a stream that has begun is closed
            logger.info("%s: its key or session ended under it", exchange)
            if not exchange.begun:
                text = "the key or session that asked has ended meanwhile"
                await _unauthorized(text, scope["path"])(scope, receive, exchange.send)
        except Exception as error:  # no handler has caught it, or its answer had begun
            logger.error("%s failed", exchange, exc_info=error)
            if not exchange.begun:
                text = "the service failed; its log has the reason under this answer's x-request-id"
                await problems.error_response(500, text, path=scope["path"])(scope, receive, exchange.send)
        finally:
            self.in_hand.discard(exchange)

    def _while_known(self, scope: Scope, headers: Headers, exchange: "_Exchange") -> Send:
        """Return a `send` that checks the key or session again, since streams and waits can last long."""
        if "principal" not in scope["state"]:
            return exchange.send
        checked_at = time.monotonic()

        async def send(message: Message) -> None:
            nonlocal checked_at
            # Each event of a stream is checked, as they are few; pieces of a file only every _RECHECK_S seconds.
            if exchange.is_event_stream or time.monotonic() - checked_at > _RECHECK_S:
                with suppress(DatabaseUnavailable):  # then the last result of the check counts
                    if await self._principal(scope, headers) is None:
                        raise _NoLongerKnown
                checked_at = time.monotonic()
            await exchange.send(message)

        return send

    async def _principal(self, scope: Scope, headers: Headers) -> Principal | None:
        """The principal of a request; None for an unknown key, session or episode. Raises DatabaseUnavailable."""
        path = scope["path"]
        if address := scope["state"].get("address"):
            return await self.episodes.principal(*address)
        if token := _sign_in_token(path, headers):
            return await self.sign_ins.find(token)
        return await self.keys.find(_authorization(path, headers))

    async def _refusal(self, scope: Scope, headers: Headers, exchange: "_Exchange") -> Response | None:
        """Return the answer that refuses a request; None lets it pass, with its principal in the request's state."""
        path, host = scope["path"], headers.get("host", "")
        if named := _HOST.match(host):
            host = named["name"].lower()
        if self.allowed_hosts is not None and host not in self.allowed_hosts:
            return problems.error_response(403, f"this service does not answer to the host name {host!r}", path=path)
        if path not in OPEN_PATHS and not path.startswith((f"{pages.STATIC}/", TINKER_FILES)):
            is_agent = "address" in scope["state"]
            token = "" if is_agent else _sign_in_token(path, headers)
            # Temporal's page, which may ask the codec, is known by a header that pages cannot forge.
            is_from_ui = path.startswith(f"{CODEC}/") and headers.get("origin", "") == self.temporal_ui
            is_ours = is_from_ui or is_from_page(token, headers.get(CSRF_HEADER))
            if token and scope["method"] not in _LOOKS and not is_ours:
                text = f"a session changes things from its own page alone, which sends {CSRF_HEADER}"
                return problems.error_response(403, text, path=path)
            try:
                principal = await self._principal(scope, headers)
            except DatabaseUnavailable as error:
                return problems.error_response(503, str(error), headers={"retry-after": "2"}, path=path)
            if principal is None:
                is_opened = _authorization(path, headers) is None and pages.is_opened(path, headers.get("accept", ""))
                if (is_opened or pages.is_page(path)) and scope["method"] in _LOOKS:
                    return RedirectResponse(f"{pages.SIGN_IN}?{urlencode({'after': path})}", 303)
                text = _KEY_UNKNOWN if sent_key(_authorization(path, headers)) else _KEY_MISSING
                text = _SESSION_OVER if token else _EPISODE_OVER if is_agent else text
                return _unauthorized(text, path)
            scope["state"] |= {"principal": principal, "is_from_page": bool(token), "is_agent": is_agent}
            if wait_s := self.rate_limit.wait_s(principal.key_id):
                text = f"this key asks too often: at most {self.rate_limit} here"
                return problems.error_response(429, text, headers={"retry-after": str(math.ceil(wait_s))}, path=path)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limit(scope):
            text = f"the body has {length} bytes; at most {self._limit(scope)} are taken here"
            return problems.error_response(413, text, path=path)
        return None

    def _limit(self, scope: Scope) -> int:
        if scope["path"] in BATCH_PATHS:
            return MAX_BATCH_BYTES
        return self.max_upload_bytes if UPLOAD_PATHS.fullmatch(scope["path"]) else self.max_body_bytes


class _Exchange:
    """One request and its answer: adds the request id, notes it in the audit log, logs one line."""

    def __init__(self, send: Send, request_id: str, scope: Scope, audit_log: Audit) -> None:
        self._send = send
        self._request_id = request_id if _REQUEST_ID.match(request_id) else f"req-{secrets.token_hex(8)}"
        self._scope = scope
        self._start = time.monotonic()
        self._audit = audit_log
        self._touched = audit.collect_touched()
        self.begun = False
        self.is_event_stream = False

    def __str__(self) -> str:
        return f"{self._request_id} {self._scope['method']} {self._scope['path']}"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(scope=message)
            self.is_event_stream = headers.get("content-type", "").startswith("text/event-stream")
            headers["x-request-id"] = self._request_id
            # Browsers must neither guess types nor run anything; pages set a policy of their own.
            headers.setdefault("x-content-type-options", "nosniff")
            headers.setdefault("content-security-policy", "default-src 'none'; frame-ancestors 'none'")
            await self._note(message["status"])
            duration_ms = (time.monotonic() - self._start) * 1000
            logger.info("%s %d %.0f ms", self, message["status"], duration_ms)
        await self._send(message)

    async def _note(self, status: int) -> None:
        """Write the audit entry before the answer is sent."""
        who: Principal | None = self._scope["state"].get("principal")  # set by the middleware, or by a sign-in
        method, path, client = self._scope["method"], self._scope["path"], self._scope.get("client")
        key_id = who.key_id if who else None
        if self._audit.wants(method, path, status, key_id, self._touched.steps_of):
            await self._audit.note(
                tenant=who.tenant if who else None,
                key_id=key_id,
                method=method,
                path=path[:_LONGEST_PATH],
                target=" ".join(self._touched.targets) or None,
                status=status,
                address=client[0] if client else None,
                request_id=self._request_id,
            )


class _LimitedBody:
    """Receives a body, and refuses it if it is too large or too slow."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._num_bytes = 0
        self._begin = time.monotonic()
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:  # only a disconnect can follow
            return await self._receive()
        left_s = self._begin + _BODY_S + self._num_bytes / _SLOWEST_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(left_s, _SILENCE_S))):
                message = await self._receive()
        except TimeoutError:
            self._is_whole = True
            text = f"the body did not come: {self._num_bytes} bytes in {time.monotonic() - self._begin:.0f} s"
            raise HTTPException(408, text, headers={"connection": "close"}) from None
        self._is_whole = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limit:
            # FastAPI would turn any other exception into an error about a malformed body.
            raise HTTPException(413, f"the body is larger than the {self._limit} bytes that are taken here")
        return message


def _take_secret(scope: Scope) -> None:
    """Put the path that an agent asks into its request, and the episode and its secret into the request's state.

    From here on no path has the secret, so no log has it either.
    """
    address = ADDRESS.fullmatch(scope["path"])
    path = address["path"] if address and address["path"] in PATHS else AGENTS
    scope.update({"path": path, "raw_path": path.encode()})
    if address:
        scope["state"]["address"] = address["tenant"], address["episode"], address["secret"]


class _NoLongerKnown(Exception):
    """The key or session of a request has ended since the request came."""


def _authorization(path: str, headers: Headers) -> str | None:
    """Return the Authorization header; below /tinker, /wandb and /v1, the equivalent of their clients' own header."""
    given, api_key = headers.get("authorization"), headers.get("x-api-key", "")
    if api_key and given is None and problems.is_foreign(path):  # Anthropic's clients before 2026-10
        given = f"Bearer {api_key}"
    return tinker_key(path, api_key) or wandb_key(path, given or "") or given


def _sign_in_token(path: str, headers: Headers) -> str:
    """Return the token of the page's session, of a request without a key."""
    is_keyed = _authorization(path, headers) is not None
    return "" if is_keyed else cookie_parser(headers.get("cookie", "")).get(COOKIE, "")


def _unauthorized(text: str, path: str) -> Response:
    return problems.error_response(401, text, headers={"www-authenticate": "Bearer"}, path=path)


class HeadRequests:
    """Answers HEAD: passes the request on as GET, and drops the body.

    FastAPI's routes only handle GET. The application sees a client that disconnected, so that it does not read a file.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        begun = asyncio.Event()
        asked = False

        async def receive_until_answered() -> Message:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                begun.set()

        await self._app({**scope, "method": "GET"}, receive_until_answered, send_head)
