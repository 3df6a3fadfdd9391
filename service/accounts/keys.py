"""API keys, `ls-<prefix>-<secret>`, and the page's sessions of signed-in browsers. Only hashes are stored."""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Literal, TypeGuard, get_args

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from longshore.fields import Frozen
from service.accounts import audit
from service.database.engine import Database, KeyRow, SignInRow
from service.errors import Conflict, DatabaseUnavailable, Forbidden
from shared.errors import InvalidInput, NotFound
from shared.runs.requests import FIRST_TENANT, Tenant
from shared.settings import Settings
from shared.storage import paths
from shared.storage.store import ObjectStore

# --- Principals ---
# The tenant and the scopes of a request's API key. The edge finds them; endpoints declare what they need.
#
# Dependencies are coroutines, though they wait for nothing: FastAPI calls a plain function on a thread, each time.

Scope = Literal["read", "write", "inference", "admin"]
"""`admin`: the tenant's keys and audit log; in the first tenant also tenants, quotas and Temporal's payloads. No scope
contains another."""
ALL_SCOPES: tuple[Scope, ...] = get_args(Scope)


class Principal(Frozen):
    """The holder of an API key."""

    tenant: Tenant
    key_id: str
    title: str = ""
    scopes: frozenset[Scope]

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


Demand = Callable[[Request], Awaitable[None]]


def require(*scopes: Scope) -> Demand:
    """A dependency: the key must have this scope, or one of these."""

    async def demand(request: Request) -> None:
        asking = await principal(request)
        if not asking.scopes & set(scopes):
            asking.demand(scopes[0])

    return _noted(demand)


def require_operator(what: str) -> Demand:
    """A dependency: the key must be of an admin of the first tenant. `what`: what only they may do, for the message."""

    async def demand(request: Request) -> None:
        if not (await principal(request)).is_operator:
            raise Forbidden(f"{what} the first tenant's admins")

    return _noted(demand)


async def reads_or_writes(request: Request) -> None:
    """A FastAPI dependency: GET and HEAD need the scope `read`, other methods `write`. Raises Forbidden."""
    (await principal(request)).demand("read" if request.method in ("GET", "HEAD") else "write")


def is_demand(call: object) -> TypeGuard[Demand]:
    """True for a dependency that demands a scope of the request's key."""
    return call in _demands


_demands: set[object] = set()


def _noted(demand: Demand) -> Demand:
    _demands.add(demand)
    return demand


_noted(reads_or_writes)


logger = logging.getLogger("longshore.service")

BOOTSTRAP = "bootstrap"
"""The id of the key in the service's settings. It is an admin's key of the first tenant, and has no row in a table."""
_MADE_HERE = re.compile(r"^(?P<shown>ls-[0-9a-f]{12})-[A-Za-z0-9_-]{43}$")
_TRUSTED_S = 2.0  # a revocation by another process takes effect here within this time
_USE_NOTED_S = 60.0
COOKIE = "longshore_session"
CSRF_HEADER = "x-csrf-token"
LASTS_S = 7 * 86_400
_LINK_LASTS_S = 600.0
_MOST_KEYS = 10_000  # a tenant whose quota of bytes is used up may have to change its keys, so they do not count there


class KeyRecord(Frozen):
    """A key's record in the store. `prefix`: its first characters, for its holder to recognise it."""

    key_id: str
    tenant: Tenant
    title: str = ""
    prefix: str
    sha256: str
    scopes: tuple[Scope, ...]
    created_by: str | None = None
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def row(self) -> KeyRow:
        return KeyRow(**self.model_dump() | {"scopes": list(self.scopes)})


class KeyView(Frozen):
    """A key as the API shows it. `last_used_at` is at most a minute old."""

    key_id: str
    tenant: Tenant
    title: str
    prefix: str
    scopes: tuple[Scope, ...]
    created_by: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class NewKey(KeyView):
    """A key that was just made. No other answer shows it."""

    key: str


class Keys:
    """Keeps keys: their records in the store, and the rows that find them by hash."""

    def __init__(self, settings: Settings, store: ObjectStore, database: Database) -> None:
        self._store = store
        self._database = database
        self._bootstrap = [settings.api_key_sha256] if settings.api_key_sha256 else []
        if settings.api_key:
            self._bootstrap.append(hash_key(settings.api_key))
        self._trusted: dict[str, tuple[float, KeyRow]] = {}
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
        since, row = self._trusted.get(sha256, (0.0, None))
        if row is None or time.monotonic() - since > _TRUSTED_S:
            asked = time.monotonic()
            query = select(KeyRow).where(KeyRow.sha256 == sha256)
            row = await self._database.reading(lambda session: session.scalars(query).one_or_none())
            if row is None:
                self._trusted.pop(sha256, None)
            else:
                self._trusted[sha256] = asked, row
        return row

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
        num_keys = select(func.count()).where(KeyRow.tenant == tenant)
        if await self._database.reading(lambda session: session.scalars(num_keys).one()) >= _MOST_KEYS:
            raise Conflict(f"a tenant makes at most {_MOST_KEYS:,} keys: revoked ones stay on record")
        key, mark = new_key()
        record = KeyRecord(
            key_id=f"key-{mark}",
            tenant=tenant,
            title=title,
            prefix=f"ls-{mark}",
            sha256=hash_key(key),
            scopes=scopes,
            created_by=created_by,
            created_at=time.time(),
            expires_at=expires_at,
        )
        audit.touched(record.key_id)
        await self._put(record)
        # `merge`, since a concurrent `db rebuild` may have added the row from the record.
        row = await self._database.writing(lambda session: session.merge(record.row()))
        return NewKey(**_view(row).model_dump(), key=key)

    async def list(self, tenant: str) -> tuple[KeyView, ...]:
        """List a tenant's keys, newest first, those that are revoked among them."""
        query = select(KeyRow).where(KeyRow.tenant == tenant).order_by(KeyRow.created_at.desc(), KeyRow.key_id)
        rows = await self._database.reading(lambda session: session.scalars(query).all())
        return tuple(_view(row) for row in rows)

    async def revoke(self, tenant: str, key_id: str) -> KeyView:
        """End a key, at once in this process and within two seconds in others. Raises NotFound."""
        row = await self._database.reading(lambda session: session.get(KeyRow, key_id))
        if row is None or row.tenant != tenant:
            raise NotFound(f"there is no key {key_id}")
        audit.touched(key_id)
        if row.revoked_at is None:
            row.revoked_at = time.time()
            await self._put(KeyRecord.model_validate(row, from_attributes=True))
            change = update(KeyRow).where(KeyRow.key_id == key_id).values(revoked_at=row.revoked_at)
            await self._database.writing(lambda session: session.execute(change))
            self._trusted.pop(row.sha256, None)
        return _view(row)

    async def _put(self, record: KeyRecord) -> None:
        data = record.model_dump_json(indent=1).encode()
        await asyncio.to_thread(self._store.put_bytes, paths.key_record(record.key_id), data)


def new_key() -> tuple[str, str]:
    """Make a key of 256 random bits. Returns it, and the part of it that may be shown."""
    mark = secrets.token_hex(6)
    return f"ls-{mark}-{secrets.token_urlsafe(32)}", mark


def sent_key(authorization: str | None) -> str:
    """The key in an Authorization header; empty if it has none."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def shown_prefix(key: str) -> str | None:
    """The part of a key that may be shown; None for text that has not the form of a key that is made here."""
    found = _MADE_HERE.match(key)
    return found["shown"] if found else None


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


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

    async def begin(self, key: str) -> tuple[str, Principal] | None:
        """Begin a session. Returns its token and principal; None for a key that is not known, or no longer.

        Raises DatabaseUnavailable.
        """
        return await self.begin_for(hash_key(key))

    async def begin_for(self, key_sha256: str) -> tuple[str, Principal] | None:
        """Begin a session of the key with this hash. Returns and raises as `begin` does."""
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
