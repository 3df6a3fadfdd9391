"""API keys, `ls-<prefix>-<secret>`, and the page's sessions of signed-in browsers. Only hashes are stored."""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from longshore.accounts import ALL_SCOPES, KeyHolder, KeyView, NewKey, Scope, hash_key, new_key
from longshore.runs import FIRST_TENANT
from service.accounts import audit
from service.database.engine import Database, KeyRow, Recent, SignInRow
from shared.errors import Conflict, DatabaseUnavailable, Forbidden, InvalidInput, NotFound
from shared.settings import Settings

# --- Principals ---
# The tenant and the scopes of a request's API key. The edge finds them; endpoints declare what they need.
#
# Dependencies are coroutines, though they wait for nothing: FastAPI calls a plain function on a thread, each time.


class Principal(KeyHolder):
    """The holder of the API key of a request."""

    @property
    def is_operator(self) -> bool:
        """True for an admin of the whole installation."""
        return self.tenant == FIRST_TENANT and "admin" in self.scopes

    def demand(self, scope: Scope) -> None:
        """Raises Forbidden when the key lacks a scope."""
        if scope not in self.scopes:
            raise Forbidden(f"this key lacks the scope {scope}: it has {', '.join(sorted(self.scopes)) or 'none'}")


BEARER = [Depends(HTTPBearer(auto_error=False, description="an API key"))]
"""A dependency of every operation, only for the API's description: the middleware (edge.py) has checked the key."""


async def principal(request: Request) -> Principal:
    """The request's principal, which the middleware (edge.py) has found."""
    found: Principal = request.state.principal
    return found


Asking = Annotated[Principal, Depends(principal)]


@dataclass(frozen=True)
class Demand:
    """A dependency: raises Forbidden unless the request's key may make the request."""

    check: Callable[[Principal, Request], None]

    async def __call__(self, request: Request) -> None:
        self.check(await principal(request), request)


def require(*scopes: Scope) -> Demand:
    """Return a dependency: the key must have this scope, or one of these."""

    def check(asking: Principal, _: Request) -> None:
        if not asking.scopes & set(scopes):
            asking.demand(scopes[0])

    return Demand(check)


def require_operator(what: str) -> Demand:
    """Return a dependency: the key must be of an admin of the first tenant.

    `what`: what only they may do, for the message.
    """

    def check(asking: Principal, _: Request) -> None:
        if not asking.is_operator:
            raise Forbidden(f"{what} the first tenant's admins")

    return Demand(check)


reads_or_writes = Demand(
    lambda asking, request: asking.demand("read" if request.method in ("GET", "HEAD") else "write")
)
"""A dependency: GET and HEAD need the scope `read`, other methods `write`."""


logger = logging.getLogger("longshore.service")

BOOTSTRAP = "bootstrap"
"""The id of the key in the service's settings. It is an admin's key of the first tenant, and has no row in a table."""
_MADE_HERE = re.compile(r"^(?P<shown>ls-[0-9a-f]{12})-[A-Za-z0-9_-]{43}$")
_USE_NOTED_S = 60.0
COOKIE = "longshore_session"
CSRF_HEADER = "x-csrf-token"
LASTS_S = 7 * 86_400
_LINK_LASTS_S = 600.0
_MOST_KEYS = 10_000  # a tenant whose quota of bytes is used up may have to change its keys, so they do not count there


class Keys:
    """Keeps keys in the database."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._bootstrap = [settings.api_key_sha256] if settings.api_key_sha256 else []
        if settings.api_key:
            self._bootstrap.append(hash_key(settings.api_key))
        self._recent = Recent[KeyRow]()
        self._noted: dict[str, float] = {}

    @property
    def has_bootstrap(self) -> bool:
        return bool(self._bootstrap)

    async def find(self, authorization: str | None) -> Principal | None:
        """Find the principal of an Authorization header; None for a key that is not known, or no longer.

        Raises DatabaseUnavailable.
        """
        key = sent_key(authorization)
        return await self.holder(hash_key(key), _MADE_HERE.match(key) is not None) if key else None

    async def holder(self, given: str, may_be_ours: bool = True) -> Principal | None:
        """Find the principal of a key's hash; None for a key that is not known, or no longer.

        `may_be_ours`: False if the key has not the form of keys made here, so that the database is not asked.
        """
        if any(hmac.compare_digest(given, known) for known in self._bootstrap):
            return Principal(tenant=FIRST_TENANT, key_id=BOOTSTRAP, scopes=frozenset(ALL_SCOPES))
        row = await self._row(given) if may_be_ours else None
        if row is None or not _is_good(row):
            return None
        await self._note_use(row.key_id)
        return Principal.model_validate(row, from_attributes=True)

    async def is_good(self, key_id: str) -> bool:
        """Return True for a key by its id, unless it was revoked or has expired."""
        if key_id == BOOTSTRAP:
            return self.has_bootstrap
        row = await self._database.reading(lambda session: session.get(KeyRow, key_id))
        return row is not None and _is_good(row)

    async def _row(self, sha256: str) -> KeyRow | None:
        query = select(KeyRow).where(KeyRow.sha256 == sha256)
        find = partial(self._database.reading, lambda session: session.scalars(query).one_or_none())
        return await self._recent.of(sha256, find=find)

    async def _note_use(self, key_id: str) -> None:
        now = time.time()
        if now - self._noted.get(key_id, 0.0) < _USE_NOTED_S:
            return
        self._noted[key_id] = now
        change = update(KeyRow).where(KeyRow.key_id == key_id).values(last_used_at=now)
        try:
            await self._database.writing(lambda session: session.execute(change))
        except DatabaseUnavailable:  # the time of use is not worth refusing the request
            logger.warning("the use of %s could not be noted", key_id)

    async def create(
        self,
        tenant: str,
        *,
        title: str = "",
        scopes: Iterable[Scope] = ALL_SCOPES,
        expires_at: float | None = None,
        created_by: str | None = None,
    ) -> NewKey:
        """Make a key.

        Raises:
            InvalidInput: it would have no scope, or have expired.
            Conflict: the tenant has as many as it may have, those that were revoked among them.
        """
        scopes = tuple(scope for scope in ALL_SCOPES if scope in set(scopes))
        if not scopes:
            raise InvalidInput(f"a key has at least one scope of {', '.join(ALL_SCOPES)}", "scopes")
        if expires_at is not None and expires_at <= time.time():
            raise InvalidInput("this moment has passed: seconds since 1970", "expires_at")
        key, mark = new_key()
        row = KeyRow(
            key_id=f"key-{mark}",
            tenant=tenant,
            title=title,
            prefix=f"ls-{mark}",
            sha256=hash_key(key),
            scopes=list(scopes),
            created_by=created_by,
            created_at=time.time(),
            expires_at=expires_at,
        )

        def add(session: Session) -> None:
            num_keys = session.scalars(select(func.count()).where(KeyRow.tenant == tenant)).one()
            if num_keys >= _MOST_KEYS:
                raise Conflict(f"a tenant makes at most {_MOST_KEYS:,} keys: revoked ones stay on record")
            session.add(row)

        audit.touched(row.key_id)
        await self._database.writing(add)
        return NewKey(**_view(row).model_dump(), key=key)

    async def list(self, tenant: str) -> tuple[KeyView, ...]:
        """List a tenant's keys, newest first, those that are revoked among them."""
        query = select(KeyRow).where(KeyRow.tenant == tenant).order_by(KeyRow.created_at.desc(), KeyRow.key_id)
        rows = await self._database.reading(lambda session: session.scalars(query).all())
        return tuple(_view(row) for row in rows)

    async def revoke(self, tenant: str, key_id: str) -> KeyView:
        """End a key, at once in this process and within two seconds in others. Raises NotFound."""

        def end(session: Session) -> KeyRow:
            row = session.get(KeyRow, key_id)
            if row is None or row.tenant != tenant:
                raise NotFound(f"there is no key {key_id}")
            row.revoked_at = row.revoked_at or time.time()
            return row

        row = await self._database.writing(end)
        audit.touched(key_id)
        self._recent.forget(row.sha256)
        return _view(row)


def sent_key(authorization: str | None) -> str:
    """The key in an Authorization header; empty if it has none."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def shown_prefix(key: str) -> str | None:
    """The part of a key that may be shown; None for text that has not the form of a key that is made here."""
    found = _MADE_HERE.match(key)
    return found["shown"] if found else None


def _view(row: KeyRow) -> KeyView:
    return KeyView.model_validate(row, from_attributes=True)


def _is_good(row: KeyRow) -> bool:
    return row.revoked_at is None and (row.expires_at or float("inf")) > time.time()


class SignIns:
    """Sessions of the page: a browser shows an API key once, and then carries a random token in a cookie.

    A session has its key's tenant and scopes, and ends when the key does.
    """

    def __init__(self, database: Database, keys: Keys) -> None:
        self._database = database
        self._keys = keys

    async def begin(self, key_sha256: str) -> tuple[str, Principal] | None:
        """Begin a session of the key with this hash. Returns its token and principal; None for a key that is not known,
        or no longer.

        Raises DatabaseUnavailable.
        """
        principal = await self._keys.holder(key_sha256)
        if principal is None:
            return None
        token, now = secrets.token_urlsafe(32), time.time()
        row = SignInRow(sha256=hash_key(token), key_sha256=key_sha256, created_at=now, expires_at=now + LASTS_S)

        def work(session: Session) -> None:
            session.execute(delete(SignInRow).where(SignInRow.expires_at <= now))
            session.add(row)

        await self._database.writing(work)
        return token, principal

    async def find(self, token: str) -> Principal | None:
        """Return the principal of a session; None if it, or its key, has ended. Raises DatabaseUnavailable."""
        sha256 = hash_key(token)
        row = await self._database.reading(lambda session: session.get(SignInRow, sha256))
        if row is None or row.expires_at <= time.time():
            return None
        return await self._keys.holder(row.key_sha256)

    async def end(self, token: str) -> None:
        gone = delete(SignInRow).where(SignInRow.sha256 == hash_key(token))
        await self._database.writing(lambda session: session.execute(gone))


class SignInLinks:
    """Tokens that begin one session of a key within ten minutes. They are kept in this process alone."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, float]] = {}  # by the token's hash: the key's hash, and until when

    def make(self, key: str) -> str:
        """Return a new token for the holder of a key."""
        now, token = time.monotonic(), secrets.token_urlsafe(32)
        self._kept = {sha256: kept for sha256, kept in self._kept.items() if kept[1] > now}
        self._kept[hash_key(token)] = hash_key(key), now + _LINK_LASTS_S
        return token

    def take(self, token: str) -> str | None:
        """Return the hash of a token's key, once; None for a token that is not known, was used, or is too old."""
        key_sha256, until = self._kept.pop(hash_key(token), (None, 0.0))
        return key_sha256 if until > time.monotonic() else None


def csrf_token(token: str) -> str:
    """The token that the page sends with the cookie in requests that change something: other sites cannot read it."""
    return hmac.new(token.encode(), b"csrf", hashlib.sha256).hexdigest()


def is_from_page(token: str, sent: str | None) -> bool:
    """True if a request that carries a session's cookie comes from the session's own page."""
    return hmac.compare_digest(csrf_token(token).encode(), (sent or "").encode())
