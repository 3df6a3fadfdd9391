"""Sessions of the page: browsers that have shown an API key once.

Each carries a random token in a cookie since. A session is its key's: it has the key's tenant and scopes, and ends when
the key does. Hashes alone are kept.
"""

import hashlib
import hmac
import secrets
import time

from sqlalchemy import delete
from sqlalchemy.orm import Session

from service.accounts.keys import Keys, hash_key
from service.accounts.principals import Principal
from service.database.engine import Database
from service.database.tables import SessionRow

COOKIE = "longshore_session"
CSRF_HEADER = "x-csrf-token"
LASTS_S = 7 * 86_400


class Sessions:
    """Needs the database, and the keys of sessions."""

    def __init__(self, database: Database, keys: Keys) -> None:
        self._database = database
        self._keys = keys

    async def begin(self, key: str) -> tuple[str, Principal] | None:
        """A new session's token, and whose it is; None for a key that is not known, or no longer.

        Raises:
            DatabaseUnavailable
        """
        key_sha256 = hash_key(key)
        principal = await self._keys.holder(key_sha256)
        if principal is None:
            return None
        token, now = secrets.token_urlsafe(32), time.time()
        row = SessionRow(sha256=hash_key(token), key_sha256=key_sha256, created_at=now, expires_at=now + LASTS_S)

        def work(session: Session) -> None:
            session.execute(delete(SessionRow).where(SessionRow.expires_at <= now))
            session.add(row)

        await self._database.writing(work)
        return token, principal

    async def find(self, token: str) -> Principal | None:
        """Whose session this is; None for one that has ended, or whose key has. Raises DatabaseUnavailable."""
        sha256 = hash_key(token)
        row = await self._database.reading(lambda session: session.get(SessionRow, sha256))
        if row is None or row.expires_at <= time.time():
            return None
        return await self._keys.holder(row.key_sha256)

    async def end(self, token: str) -> None:
        gone = delete(SessionRow).where(SessionRow.sha256 == hash_key(token))
        await self._database.writing(lambda session: session.execute(gone))


def csrf_token(token: str) -> str:
    """The token that the page sends beside the cookie when it changes something: another site cannot read it."""
    return hmac.new(token.encode(), b"csrf", hashlib.sha256).hexdigest()


def is_from_page(token: str, sent: str | None) -> bool:
    """True if a request that carries a session's cookie comes from the session's own page."""
    return hmac.compare_digest(csrf_token(token).encode(), (sent or "").encode())
