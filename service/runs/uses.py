"""Units that are deleted as a whole: who uses them, and who deletes them.

A *unit* is what is used or deleted as a whole: an artifact that several runs may share, or the folder of a run. Before
a run uses a unit, a row says so. Before a process deletes a unit, it claims it, and reads in the same transaction who
uses it. So a run waits until a deletion is over, and makes again what it does not find then; and the process that
deletes leaves what is in use. What is deleted, and when: service/automation/retention.py.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from service.database.engine import Database, UnitRow, UseRow
from shared.errors import StoreUnavailable
from shared.storage.paths import checkpoint_adapter_run, tenant_folder

WORK_S = 60.0
"""Who has claimed a unit deletes of it no longer than this, and leaves the rest to the next time."""
CLAIM_S = 2 * WORK_S
"""An older claim counts no more: its process died. (Clocks of services may differ by WORK_S.)"""


class BeingDeleted(StoreUnavailable):
    """A unit is being deleted. That takes two minutes at most."""


@dataclass
class Claim:
    """A unit that this process may delete until a time.

    Attributes:
        users: the runs that use the unit, each with the time when it last said so, in seconds since 1970.
        is_gone: set by the process when nothing is left of the unit: then its rows go, too.
    """

    until: float
    users: Mapping[str, float]
    is_gone: bool = False


@dataclass(frozen=True, eq=False)
class Uses:
    """Notes who uses units, and claims them. Services of one database do so at once."""

    _database: Database

    async def note(self, unit: str, run_id: str) -> None:
        """Let a run use a unit until it has ended, before anybody looks for the unit on the run's behalf.

        A run that is resumed uses its own folder, before its workflow begins.

        Raises BeingDeleted: in two minutes at most it can be used, or made anew.
        """
        await self.note_all([(unit, run_id)])

    async def note_all(self, uses: Iterable[tuple[str, str]]) -> None:
        """Note uses, by unit and run, as `note` does: all of them, or none."""

        def work(session: Session) -> None:
            for unit, run_id in sorted(uses):  # in one order, for processes that wait for each other
                _note(unit, run_id, session)

        await self._database.writing(work)

    async def last(self) -> float:
        """Return when a run last said that it uses something, in seconds since 1970; 0 if none ever did."""
        return await self._database.reading(lambda session: session.scalar(select(func.max(UseRow.at)))) or 0.0

    @contextmanager
    def claiming(self, *units: str) -> Iterator[tuple[Claim | None, ...]]:
        """Hold the claims of units in the block; None in place of one that another process has. Blocking."""
        now = time.time()
        users = self._database.write(partial(_claim, units, now))
        claims = {unit: Claim(now + WORK_S, of) for unit, of in users.items()}
        try:
            yield tuple(map(claims.get, units))
        finally:
            if claims:
                self._database.write(partial(_release, claims, now))


def checkpoints_named(tenant: str, request: str) -> dict[str, str]:
    """Return the keys of other runs' checkpoints that a run's request names, each with the run that made it."""
    keys = set(re.findall(rf"{tenant_folder(tenant)}/checkpoints/[a-z0-9-]+/[0-9a-f]{{32}}", request))
    return {key: source for key in keys if (source := checkpoint_adapter_run(tenant, key)) is not None}


def _locked(unit: str, session: Session) -> UnitRow:
    """Return the row of a unit, locked. Two that add it at once wait for each other, and the later one does it anew."""
    row = session.get(UnitRow, unit, with_for_update=True)
    if row is None:
        row = UnitRow(unit=unit, claimed_at=0.0)
        session.add(row)
        session.flush()
    return row


def _note(unit: str, run_id: str, session: Session) -> None:
    now = time.time()
    if _locked(unit, session).claimed_at > now - CLAIM_S:
        raise BeingDeleted(f"{unit} is being deleted: in two minutes at most it can be used, or made anew")
    session.merge(UseRow(unit=unit, run_id=run_id, at=now))


def _claim(units: Sequence[str], now: float, session: Session) -> dict[str, dict[str, float]]:
    """Claim the units that nobody else has. Returns who uses each."""
    users: dict[str, dict[str, float]] = {}
    for unit in sorted(units):
        row = _locked(unit, session)
        if row.claimed_at <= now - CLAIM_S:
            row.claimed_at, users[unit] = now, {}
    for use in session.scalars(select(UseRow).where(UseRow.unit.in_(users))):
        users[use.unit][use.run_id] = use.at
    return users


def _release(claims: Mapping[str, Claim], claimed_at: float, session: Session) -> None:
    mine = (UnitRow.unit.in_(claims), UnitRow.claimed_at == claimed_at)  # others found a claim too old, and have it
    held = session.scalars(select(UnitRow).where(*mine).order_by(UnitRow.unit).with_for_update()).all()
    for row in held:
        row.claimed_at = 0.0
        if claims[row.unit].is_gone:
            session.execute(delete(UseRow).where(UseRow.unit == row.unit))
            session.delete(row)
