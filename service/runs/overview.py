"""The overview next to a list of runs: counts by state, places in the queue for workers, and sparklines of losses."""

import asyncio
import time
from collections import OrderedDict
from typing import Literal

from sqlalchemy import func, select

from longshore.fields import Frozen
from service.database.engine import Database
from service.database.tables import KeyRow, RunRow
from service.runs.rows import IndexedRun
from service.runs.states import SHARED_S
from service.runs.views.history import Histories
from service.runs.views.run_view import IN_QUEUE
from shared.runs.requests import RunId
from shared.runs.status import State, StepStatus
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

_POINTS = 48
_FRESH_S = 5.0
_MOST_KEPT = 2000
_CONCURRENT = 4


class Overview(Frozen):
    """A tenant's runs, counted. `waiting`: places in the installation's queue for workers, from 1, oldest first."""

    counts: dict[State, int]
    waiting: dict[RunId, int]
    owners: dict[str, str]


class Sparkline(Frozen):
    """A run's loss, or the reward of an RL run's train steps, in a few numbers, in order."""

    name: Literal["loss", "reward"]
    values: tuple[float, ...]


class Overviews:
    """Reads counts from the index, and metrics of runs from the store."""

    def __init__(self, database: Database, store: ObjectStore, histories: Histories) -> None:
        self._database = database
        self._store = store
        self._histories = histories
        self._kept: OrderedDict[str, tuple[object, float, Sparkline]] = OrderedDict()
        self._shown: dict[str, tuple[float, Overview]] = {}
        self._places = asyncio.Semaphore(_CONCURRENT)

    async def show(self, tenant: str) -> Overview:
        """Counts, places in the queue, and the titles of keys (owners are ids of keys); at most half a second old."""
        since, overview = self._shown.get(tenant, (0.0, None))
        if overview is None or time.monotonic() - since > SHARED_S:
            asked = time.monotonic()
            overview = await self._look(tenant)
            self._shown[tenant] = asked, overview
        return overview

    async def _look(self, tenant: str) -> Overview:
        counts = select(RunRow.state, func.count()).where(RunRow.tenant == tenant).group_by(RunRow.state)
        waiting = (
            select(RunRow.run_id, RunRow.tenant)
            .where(RunRow.state == "running", RunRow.phase.in_(IN_QUEUE))
            .order_by(RunRow.created_at, RunRow.run_id)
        )
        owners = select(KeyRow.key_id, KeyRow.title).where(KeyRow.tenant == tenant, KeyRow.title != "")
        found = await self._database.reading(
            lambda session: [session.execute(query).all() for query in (counts, waiting, owners)]
        )
        return Overview(
            counts=dict(map(tuple, found[0])),
            waiting={run_id: place for place, (run_id, owner) in enumerate(found[1], 1) if owner == tenant},
            owners=dict(map(tuple, found[2])),
        )

    async def sparkline(self, run: IndexedRun) -> Sparkline:
        """Return a run's sparkline: read once if the run has ended, else every few seconds."""
        stamp = (run.status.state, run.status.step)
        before, since, line = self._kept.get(run.run_id, (None, 0.0, None))
        if line is None or (before != stamp and (not run.is_open or time.monotonic() - since > _FRESH_S)):
            async with self._places:
                if run.record.run.kind == "rl":
                    line = await asyncio.to_thread(self._rewards, run.run_id)
                else:
                    line = await self._losses(run.run_id)
            self._kept[run.run_id] = stamp, time.monotonic(), line
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return line

    async def _losses(self, run_id: str) -> Sparkline:
        steps = (await self._histories.of(run_id)).step_metrics().values()
        losses = [metrics["loss"] for metrics in steps if "loss" in metrics]
        return Sparkline(name="loss", values=tuple(losses[place] for place in _places_of(len(losses))))

    def _rewards(self, run_id: str) -> Sparkline:
        keys = [info.key for info in self._store.list(f"{RunKeys(run_id).steps}/")]
        chosen = [keys[place] for place in _places_of(len(keys))]
        steps = (StepStatus.model_validate_json(self._store.get_bytes(key)) for key in chosen)
        rewards = (step.metrics.get("reward_mean") for step in steps)
        return Sparkline(name="reward", values=tuple(reward for reward in rewards if reward is not None))


def _places_of(number: int) -> list[int]:
    """Choose at most a few dozen indices of a list, evenly spaced, the first and the last among them."""
    if number <= _POINTS:
        return list(range(number))
    return [round(place * (number - 1) / (_POINTS - 1)) for place in range(_POINTS)]
