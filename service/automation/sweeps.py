"""Sweeps behind the APIs, and what their workflows ask for: trials are started, followed, pruned, and the best found.

Nothing is remembered but caches. A sweep is a record; its trials are runs whose ids follow from the sweep's and whose
records have their values; which one is pruned and which is best follows from their metrics.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from temporalio import activity
from temporalio.exceptions import WorkflowAlreadyStartedError

from longshore.fields import Artifact
from service.accounts import audit
from service.accounts.access import Access
from service.accounts.principals import Principal
from service.accounts.tenants import Quotas
from service.automation.sweep_views import SweepView, Trial, best_of, reports_of, sweep_view
from service.automation.trial_samplers import may_start, next_values
from service.database.locks import KeyedLocks
from service.errors import Conflict, QuotaExceeded
from service.inference.named_models import NamedModels
from service.runs.rows import IndexedRun
from service.runs.runs import Runs, new_run_id
from service.runs.views.history import Histories
from service.temporal import Temporal
from shared.automation.sweeps import (
    BestRequest,
    Refusal,
    Reports,
    Sweep,
    SweepEnd,
    SweepEnding,
    SweepRecord,
    SweepRef,
    SweepTurn,
    Values,
    candidates,
    pruned,
    with_values,
)
from shared.errors import InvalidInput, NotFound
from shared.runs.acceptance import check_startable
from shared.runs.requests import Source, SweepTrial
from shared.settings import Settings
from shared.storage.artifacts import read_record
from shared.storage.paths import SweepKeys
from shared.storage.store import ObjectStore

SWEEP_WORKFLOW = "SweepWorkflow"
_MOST_OPEN = 16
_TURN_S, _LOOK_EVERY_S = 15.0, 0.5
_MOST_KEPT = 4096


class Sweeps:
    """Creates, lists, shows and cancels sweeps, and looks after their trials. Those of other tenants are not found."""

    def __init__(
        self,
        settings: Settings,
        store: ObjectStore,
        temporal: Temporal,
        runs: Runs,
        names: NamedModels,
        histories: Histories,
        access: Access,
        quotas: Quotas,
    ) -> None:
        self._settings = settings
        self._store = store
        self._temporal = temporal
        self._runs = runs
        self._names = names
        self._histories = histories
        self._access = access
        self._quotas = quotas
        self._locks = KeyedLocks()
        self._reported: dict[tuple[str, float], dict[int, float]] = {}  # of trials that have ended
        self._told_to_end: set[str] = set()

    async def create(self, asking: Principal, sweep: Sweep, idempotency_key: str | None = None) -> SweepView:
        """Accept a sweep and begin it. The same key gives the same sweep.

        Raises:
            Conflict: too many of the tenant's sweeps are going on.
            InvalidInput: values that the run's model or this installation refuses, a URI that the tenant may not read.
            QuotaExceeded
        """
        tenant = asking.tenant
        await asyncio.to_thread(self._check, tenant, sweep)
        sweep_id = new_run_id("sweep")
        if idempotency_key:
            sweep_id = await self._runs.claim(tenant, idempotency_key, sweep_id, sweep)
        audit.touched(sweep_id)
        record = SweepRecord(
            sweep_id=sweep_id,
            tenant=tenant,
            owner=asking.key_id,
            sweep=await self._quotas.sealed(tenant, sweep),
            created_at=time.time(),
        )
        key, data = SweepKeys(tenant, sweep_id).record, record.model_dump_json(indent=1).encode()
        async with self._locks.of(tenant):
            others = await asyncio.to_thread(self._open, f"{tenant}/")
            if len(others) >= _MOST_OPEN and (tenant, sweep_id) not in others:
                raise Conflict(f"{_MOST_OPEN} of {tenant}'s sweeps are going on: wait for one, or cancel it")
            await self._quotas.put_record(tenant, key, data, only_new=True)
        await self._begin(tenant, sweep_id)
        return await self.show(tenant, sweep_id)

    async def of(self, tenant: str, limit: int) -> tuple[SweepView, ...]:
        """The tenant's last sweeps, newest first."""
        ids = await asyncio.to_thread(self._ids, SweepKeys.ALL, f"{tenant}/")
        return tuple([await self.show(tenant, sweep_id) for _, sweep_id in sorted(ids, reverse=True)[:limit]])

    async def show(self, tenant: str, sweep_id: str) -> SweepView:
        """Return a sweep and its trials, as they stood a second ago at most. Raises NotFound."""
        record = await asyncio.to_thread(self._read, tenant, sweep_id)
        end = await asyncio.to_thread(self._end, tenant, sweep_id)
        return sweep_view(record, await self._trials(record, end), end)

    async def cancel(self, tenant: str, sweep_id: str) -> SweepView:
        """Start no more trials, and cancel those that go on. Raises NotFound; Conflict when the sweep has ended."""
        await asyncio.to_thread(self._read, tenant, sweep_id)
        if await asyncio.to_thread(self._end, tenant, sweep_id) is not None:
            raise Conflict(f"{sweep_id} has ended")
        audit.touched(sweep_id)
        await asyncio.to_thread(self._store.put_bytes, SweepKeys(tenant, sweep_id).is_cancelled, b"")
        return await self.show(tenant, sweep_id)

    async def restore(self) -> None:
        """Make sure that every sweep that goes on has its workflow, though Temporal has lost it."""
        for tenant, sweep_id in await asyncio.to_thread(self._open):
            await self._begin(tenant, sweep_id)

    async def _begin(self, tenant: str, sweep_id: str) -> None:
        ref = SweepRef(tenant=tenant, sweep_id=sweep_id)
        if await asyncio.to_thread(self._end, tenant, sweep_id) is None:
            with suppress(WorkflowAlreadyStartedError):
                await self._temporal.start(SWEEP_WORKFLOW, ref, f"{tenant}/{sweep_id}", tenant)

    # What a sweep's workflow asks for.

    @property
    def activities(self) -> tuple[Callable[..., Any], ...]:
        return self.advance_sweep, self.end_sweep

    @activity.defn(name="advance_sweep")
    async def advance_sweep(self, ref: SweepRef) -> SweepTurn:
        """Start the trials that may begin and end those that are to; for a while, or until all have ended.

        Repeated, and by several services at once, it starts no trial twice.
        """
        record = await asyncio.to_thread(self._read, ref.tenant, ref.sweep_id)
        until = time.monotonic() + _TURN_S
        while time.monotonic() < until:
            activity.heartbeat()
            trials = await self._trials(record, None)
            is_cancelled = await asyncio.to_thread(self._is_cancelled, ref)
            for trial in trials:
                if trial.run is not None and not trial.has_ended and (is_cancelled or trial.pruned_by):
                    await self._end_trial(trial.run)
            if not is_cancelled and may_start(record.sweep, trials) and await self._start_next(record, trials):
                continue
            if all(t.has_ended for t in trials) and (is_cancelled or len(trials) == record.sweep.num_trials):
                return SweepTurn(has_ended=True, best=None if is_cancelled else _to_publish(record, trials))
            await asyncio.sleep(_LOOK_EVERY_S)
        return SweepTurn()

    @activity.defn(name="end_sweep")
    async def end_sweep(self, ending: SweepEnding) -> None:
        """Record the end of a sweep whose trials have ended."""
        ref, problem = ending.ref, ending.problem
        record = await asyncio.to_thread(self._read, ref.tenant, ref.sweep_id)
        trials = await self._trials(record, None)
        is_cancelled = await asyncio.to_thread(self._is_cancelled, ref)
        if not is_cancelled and ending.adapter is None and problem is None:
            problem = f"no trial succeeded with {record.sweep.measured}, and published something"
        end = SweepEnd(
            state="cancelled" if is_cancelled and ending.adapter is None else "failed" if problem else "succeeded",
            pruned={trial.number: trial.pruned_by for trial in trials if trial.pruned_by is not None},
            problem=problem,
            adapter=ending.adapter,
            version=ending.version,
            ended_at=time.time(),
        )
        key, data = SweepKeys(ref.tenant, ref.sweep_id).end, end.model_dump_json(indent=1).encode()
        await asyncio.to_thread(self._store.put_if_absent, key, data)

    async def _trials(self, record: SweepRecord, end: SweepEnd | None) -> list[Trial]:
        """Return the trials that have begun, in order, and with a sweep's end those that it says were pruned."""
        ids = [record.trial_id(number) for number in range(record.sweep.num_trials)]
        runs = {run.run_id: run for run in await self._runs.of(record.tenant, ids)}
        trials: list[Trial] = []
        for number, run_id in enumerate(ids):
            run, refusal = runs.get(run_id), None
            if run is None and (refusal := await asyncio.to_thread(self._refusal, record, number)) is None:
                break
            trials.append(Trial(number, run, refusal))
        if end is not None:
            found = end.pruned
        elif (halving := record.sweep.halving) is not None:
            reports = [await self._reports(record.sweep, trial) for trial in trials]
            found = pruned(reports, halving, record.sweep.maximizes)
        else:
            return trials
        return [Trial(trial.number, trial.run, trial.refusal, found.get(trial.number)) for trial in trials]

    async def _reports(self, sweep: Sweep, trial: Trial) -> Reports:
        if trial.run is None:
            return Reports({}, has_ended=True)
        key = trial.run.run_id, trial.run.updated_at
        if (kept := self._reported.get(key)) is not None:
            return Reports(kept, has_ended=True)
        reports = reports_of(trial.run, await self._histories.of(trial.run.run_id), sweep.measured)
        if trial.has_ended:
            self._reported[key] = reports
            while len(self._reported) > _MOST_KEPT:
                self._reported.pop(next(iter(self._reported)))
        return Reports(reports, trial.has_ended)

    async def _start_next(self, record: SweepRecord, trials: list[Trial]) -> bool:
        """Start the next trial, or put on record why it cannot be. False while a quota has no room for it."""
        number, tenant = len(trials), record.tenant
        values = await asyncio.to_thread(next_values, record.sweep, trials)
        try:
            run = await asyncio.to_thread(
                lambda: self._names.resolved(tenant, with_values(record.sweep.run, values), "run.")
            )
            await self._runs.check_run(tenant, run, "run.")
            source = Source(trial=SweepTrial(sweep=record.sweep_id, number=number, values=values))
            accepted, is_new = await self._runs.accept(record.trial_id(number), run, tenant, record.owner, source)
        except QuotaExceeded:
            return False
        except InvalidInput as error:  # values that do not go together, or a name that stands for nothing any more
            await self._refuse(record, number, values, str(error))
            return True
        await self._runs.make_sure(accepted)
        if not is_new:
            await self._runs.record(tenant, accepted.run_id)  # its row may be lost
        return True

    async def _refuse(self, record: SweepRecord, number: int, values: Values, reason: str) -> None:
        key = SweepKeys(record.tenant, record.sweep_id).refusal(number)
        data = Refusal(values=values, reason=reason).model_dump_json().encode()
        await self._quotas.put_record(record.tenant, key, data, only_new=True)

    async def _end_trial(self, run: IndexedRun) -> None:
        """Cancel a run, once: it takes a while to end."""
        if run.run_id not in self._told_to_end:
            with suppress(Conflict, NotFound):  # it has just ended
                await self._runs.cancel(run.record.tenant, run.run_id)
            self._told_to_end.add(run.run_id)

    # Blocking.

    def _check(self, tenant: str, sweep: Sweep) -> None:
        """Refuse values that no run could have, before anything is started."""
        self._names.resolved(tenant, sweep.run, "run.")
        self._access.check(tenant, sweep)
        for values in candidates(sweep):
            run = with_values(sweep.run, values)
            check_startable(run, self._settings, "run.")
            self._access.check(tenant, run)

    def _ids(self, root: str, below: str = "") -> set[tuple[str, str]]:
        """The tenants and ids of sweeps that have something below this key."""
        keys = (info.key.removeprefix(root).split("/") for info in self._store.list(root + below))
        return {(parts[0], parts[1]) for parts in keys}

    def _open(self, below: str = "") -> set[tuple[str, str]]:
        return self._ids(SweepKeys.ALL, below) - self._ids(SweepKeys.ENDS, below)

    def _read(self, tenant: str, sweep_id: str) -> SweepRecord:
        try:
            return read_record(self._store, SweepKeys(tenant, sweep_id).record, SweepRecord)
        except NotFound:
            raise NotFound(f"there is no sweep {sweep_id}") from None

    def _end(self, tenant: str, sweep_id: str) -> SweepEnd | None:
        with suppress(NotFound):
            return read_record(self._store, SweepKeys(tenant, sweep_id).end, SweepEnd)
        return None

    def _refusal(self, record: SweepRecord, number: int) -> Refusal | None:
        with suppress(NotFound):
            return read_record(self._store, SweepKeys(record.tenant, record.sweep_id).refusal(number), Refusal)
        return None

    def _is_cancelled(self, ref: SweepRef) -> bool:
        return self._store.head(SweepKeys(ref.tenant, ref.sweep_id).is_cancelled) is not None


def _to_publish(record: SweepRecord, trials: list[Trial]) -> BestRequest | None:
    best = best_of(record.sweep, trials)
    if best is None or best.run is None or best.run.status.adapter is None or best.run.status.adapter_sha256 is None:
        return None
    status = best.run.status
    return BestRequest(
        tenant=record.tenant,
        name=record.sweep.name,
        run_id=best.run.run_id,
        kind="adapters" if best.run.record.run.trainable.kind == "lora" else "models",
        artifact=Artifact(uri=status.adapter, sha256=status.adapter_sha256),
    )
