"""The audit log: requests that changed something or were refused. Entries are written before the answers are sent."""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import delete, select

from longshore.accounts import AuditEntry, AuditPage
from service.accounts.limits import RateLimit
from service.database.engine import AuditRow, Database
from shared.errors import DatabaseUnavailable

logger = logging.getLogger("longshore.service")

_REFUSALS = (401, 403, 429)
_LOOKS = ("GET", "HEAD", "OPTIONS")
_TINKER = "/tinker/api/v1"
_QUESTIONS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    *(f"{_TINKER}/{name}" for name in ("retrieve_future", "asample", "session_heartbeat", "telemetry", "get_info")),
    *(f"{_TINKER}/{name}" for name in ("client/config", "client/dynamic_config", "weights_info", "cancel_future")),
)
"""Paths of POST requests that change nothing: questions to models, and polls, which are too many for the log."""
_STEPS_EACH_S = 60.0
_MOST_NOTED = 4096


@dataclass
class Touched:
    """What one request changes: `targets`, and the session whose passes or steps it asks for."""

    targets: list[str] = field(default_factory=list)
    steps_of: str | None = None


_touched: ContextVar[Touched | None] = ContextVar("touched", default=None)


def touched(target: str) -> None:
    """Note which run, key, file or tenant the current request changes. Does nothing outside a request."""
    current = _touched.get()
    if current is not None and target not in current.targets:
        current.targets.append(target)


def steps(run_id: str) -> None:
    """Note that the current request is one of many passes or steps of a session, which the store keeps by number."""
    touched(run_id)
    if (current := _touched.get()) is not None:
        current.steps_of = run_id


def collect_touched() -> Touched:
    """Start a new object for `touched` and `steps` to fill during one request, and return it."""
    current = Touched()
    _touched.set(current)
    return current


class Audit:
    """Keeps the log in the database alone: the store has no record of it."""

    def __init__(self, database: Database, days: float) -> None:
        self._database = database
        self._days = days
        # Refusals are limited for each key, and for all requests without a valid key, lest they fill the disk.
        self._refusals = RateLimit(per_s=1, burst=100)
        self._steps_noted: dict[tuple[str, str], float] = {}

    def wants(self, method: str, path: str, status: int, key_id: str | None, steps_of: str | None = None) -> bool:
        """True for requests that belong into this log. `steps_of`: the session whose passes or steps are asked for.

        Such requests are noted once a minute for each key and session, as a session has many a second.
        """
        if status in _REFUSALS:
            return self._refusals.wait_s(key_id or "") == 0
        if method in _LOOKS or path in _QUESTIONS or key_id is None:
            return False
        if steps_of is None or status >= 400:
            return True
        now = time.monotonic()
        if now - self._steps_noted.get((key_id, steps_of), -_STEPS_EACH_S) < _STEPS_EACH_S:
            return False
        if len(self._steps_noted) >= _MOST_NOTED:
            self._steps_noted.clear()
        self._steps_noted[key_id, steps_of] = now
        return True

    async def note(self, **fields: Any) -> None:
        """Write an entry. If the database cannot be reached, the entry is only in the service's own log.

        NULs, which PostgreSQL does not accept, are replaced: a path may hold any character.
        """
        fields |= {name: text.replace("\0", "\ufffd") for name, text in fields.items() if isinstance(text, str)}
        try:
            await self._database.writing(lambda session: session.add(AuditRow(time=time.time(), **fields)))
        except DatabaseUnavailable:
            logger.error("not in the audit log: %s", fields)

    async def page(self, tenant: str | None, limit: int, before: int | None = None) -> AuditPage:
        """Entries of a tenant, or of everybody, newest first."""
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit + 1)
        if tenant is not None:
            query = query.where(AuditRow.tenant == tenant)
        if before is not None:
            query = query.where(AuditRow.id < before)
        rows = await self._database.reading(lambda session: session.scalars(query).all())
        shown = [AuditEntry.model_validate(row, from_attributes=True) for row in rows[:limit]]
        return AuditPage(entries=tuple(shown), next=shown[-1].id if len(rows) > limit else None)

    async def prune(self) -> None:
        """Drop what is older than the settings say."""
        old = delete(AuditRow).where(AuditRow.time < time.time() - 86_400 * self._days)
        await self._database.writing(lambda session: session.execute(old))
