"""Sweeps for the APIs, and the activities of their workflows: start, follow and prune trials, and find the best.

Nothing is remembered but caches. A sweep is a record; its trials are runs whose ids follow from the sweep's and whose
records have their values; which one is pruned and which is best follows from their metrics.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from temporalio import activity
from temporalio.exceptions import WorkflowAlreadyStartedError

from longshore.fields import Artifact
from service.accounts import audit
from service.accounts.keys import Principal
from service.accounts.tenants import Access, Quotas
from service.automation.sweep_views import SweepView, Trial, best_of, reports_of, sweep_view
from service.database.engine import KeyedLocks
from service.decoding import Decoding, while_connected
from service.errors import Conflict, QuotaExceeded
from service.inference.published_models import NamedModels
from service.runs.history import Histories
from service.runs.rows import IndexedRun
from service.runs.runs import Runs, new_run_id
from service.temporal import Temporal
from shared.automation import (
    BestRequest,
    Reports,
    Space,
    Sweep,
    SweepEnd,
    SweepEnding,
    SweepRecord,
    SweepRef,
    SweepTurn,
    Values,
    candidates,
    grid_values,
    pruned,
    with_values,
)
from shared.errors import InvalidInput, NotFound
from shared.runs.acceptance import check_startable
from shared.runs.requests import Source, SweepTrial
from shared.settings import SamplingSettings, Settings
from shared.storage.artifacts import read_record
from shared.storage.paths import SweepKeys, content_key
from shared.storage.store import ObjectStore

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


# --- The values of a sweep's next trial ---
# By Optuna's samplers, in a study that is rebuilt from the recorded trials.


def may_start(sweep: Sweep, trials: Sequence[Trial]) -> bool:
    """True if the trial after these may begin: there is room, and those that its sampler is to know have ended."""
    has_room = sum(not trial.has_ended for trial in trials) < sweep.parallel
    is_known = sweep.sampler != "tpe" or all(trial.has_ended for trial in trials[: _num_known(sweep, len(trials))])
    return len(trials) < sweep.num_trials and has_room and is_known


def next_values(sweep: Sweep, trials: Sequence[Trial], attempt: int = 0) -> Values:
    """Return the values of the next trial. They depend on the trials alone, not on the time of the call.

    `attempt`: counts values that did not fit together.

    TPE sees the results of trials at least `parallel` before the next one, which have always ended; of later ones,
    which may or may not have ended, it sees the values. Blocking.
    """
    if sweep.sampler == "grid":
        return grid_values(sweep, len(trials))
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = int(content_key(f"{sweep.seed} {len(trials)} {attempt}")[:8], 16)
    samplers = optuna.samplers
    sampler = samplers.RandomSampler(seed) if sweep.sampler == "random" else samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, direction="maximize" if sweep.maximizes else "minimize")
    spaces = {path: _distribution(space) for path, space in sweep.parameters.items()}
    if sweep.sampler == "tpe":
        num_known = _num_known(sweep, len(trials))
        told = (_told(sweep, trial, spaces, trial.number < num_known) for trial in trials)
        study.add_trials([each for each in told if each is not None])
    drawn = study.ask(spaces).params
    return {path: _value(space, drawn[path]) for path, space in sweep.parameters.items()}


def _num_known(sweep: Sweep, number: int) -> int:
    return max(0, number - sweep.parallel + 1)


def _told(sweep: Sweep, trial: Trial, spaces: "dict[str, BaseDistribution]", is_known: bool) -> "FrozenTrial | None":
    """Return an Optuna trial; None if it has no information: it failed, or reported no number."""
    from optuna.trial import TrialState, create_trial

    value, state = trial.value(sweep.measured), TrialState.RUNNING
    if is_known and value is None:
        return None
    given: dict[str, Any] = {}
    if is_known and trial.pruned_by is not None:
        state, given = TrialState.PRUNED, {"intermediate_values": {trial.pruned_by.step: value}}
    elif is_known and trial.run.status.state == "succeeded":
        state, given = TrialState.COMPLETE, {"value": value}
    elif is_known:
        return None
    params = {path: _param(sweep.parameters[path], value) for path, value in trial.values.items()}
    return create_trial(state=state, params=params, distributions=spaces, **given)


def _distribution(space: Space) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if space.choices is not None:
        return CategoricalDistribution(range(len(space.choices)))  # by index: a choice may be a list or an object
    low, high = space.ends
    return (IntDistribution if space.integer else FloatDistribution)(low, high, log=space.log)  # type: ignore[arg-type]


def _value(space: Space, param: Any) -> Any:
    return param if space.choices is None else space.choices[param]


def _param(space: Space, value: Any) -> Any:
    return value if space.choices is None else [*map(json.dumps, space.choices)].index(json.dumps(value))


SWEEP_WORKFLOW = "SweepWorkflow"
_MOST_OPEN = 16
_TURN_S, _LOOK_EVERY_S = 15.0, 0.5
_MOST_KEPT = 4096
_MOST_DRAWN = 16  # values that do not fit together are drawn again


@dataclass(frozen=True, eq=False)
class Sweeps:
    """Creates, lists, shows and cancels sweeps, and looks after their trials. Those of other tenants are not found."""

    _settings: Settings
    _store: ObjectStore
    _temporal: Temporal
    _runs: Runs
    _names: NamedModels
    _histories: Histories
    _access: Access
    _quotas: Quotas
    _decoding: Decoding
    _locks: KeyedLocks = field(default_factory=KeyedLocks)
    _reported: dict[tuple[str, float], dict[int, float]] = field(default_factory=dict)  # of trials that have ended
    _told_to_end: set[str] = field(default_factory=set)
    _waiting: dict[str, str] = field(default_factory=dict)  # the exceeded quota, while this process advances the sweep

    async def create(
        self, asking: Principal, sweep: Sweep, idempotency_key: str | None = None, request: Request | None = None
    ) -> SweepView:
        """Accept a sweep and begin it. The same key gives the same sweep.

        Args:
            request: while its client waits, the values of trials are checked.

        Raises:
            Busy: the tenant has as much checked as it may.
            Conflict: too many of the tenant's sweeps are going on.
            InvalidInput: values that the run's model or this installation refuses, a URI that the tenant may not read.
            QuotaExceeded
        """
        tenant = asking.tenant
        if idempotency_key is None:
            await self._check_open(tenant)
        await asyncio.to_thread(self._check_names, tenant, sweep)
        limits = self._settings.max_ranks, self._settings.max_hosts, self._settings.sampling.url
        checking = self._decoding.call_for(tenant, check_trials, sweep.model_dump_json(exclude_unset=True), *limits)
        await (checking if request is None else while_connected(request, checking))
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
            await self._check_open(tenant, sweep_id)
            await self._quotas.put_record(tenant, key, data, only_new=True)
        await self._begin(tenant, sweep_id)
        return await self.show(tenant, sweep_id)

    async def _check_open(self, tenant: str, sweep_id: str = "") -> None:
        others = await asyncio.to_thread(self._open, f"{tenant}/")
        if len(others) >= _MOST_OPEN and (tenant, sweep_id) not in others:
            raise Conflict(f"{_MOST_OPEN} of {tenant}'s sweeps are going on: wait for one, or cancel it")

    async def of(self, tenant: str, limit: int) -> tuple[SweepView, ...]:
        """The tenant's last sweeps, newest first."""
        ids = await asyncio.to_thread(self._ids, SweepKeys.ALL, f"{tenant}/")
        return tuple([await self.show(tenant, sweep_id) for _, sweep_id in sorted(ids, reverse=True)[:limit]])

    async def show(self, tenant: str, sweep_id: str) -> SweepView:
        """Return a sweep and its trials, as they stood a second ago at most. Raises NotFound."""
        record = await asyncio.to_thread(self._read, tenant, sweep_id)
        end = await asyncio.to_thread(self._end, tenant, sweep_id)
        view = sweep_view(record, await self._trials(record, end), end)
        return view if end is not None else view.model_copy(update={"problem": self._waiting.get(sweep_id)})

    async def cancel(self, tenant: str, sweep_id: str) -> SweepView:
        """Start no more trials, and cancel the active ones. Raises NotFound; Conflict when the sweep has ended."""
        await asyncio.to_thread(self._read, tenant, sweep_id)
        if await asyncio.to_thread(self._end, tenant, sweep_id) is not None:
            raise Conflict(f"{sweep_id} has ended")
        audit.touched(sweep_id)
        await asyncio.to_thread(self._store.put_bytes, SweepKeys(tenant, sweep_id).is_cancelled, b"")
        return await self.show(tenant, sweep_id)

    async def restore(self) -> None:
        """Start the workflow of every active sweep that Temporal has lost."""
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
        until, problem = time.monotonic() + _TURN_S, None
        while time.monotonic() < until:
            activity.heartbeat()
            trials = await self._trials(record, None)
            is_cancelled = await asyncio.to_thread(self._is_cancelled, ref)
            for trial in trials:
                if not trial.has_ended and (is_cancelled or trial.pruned_by is not None):
                    await self._end_trial(trial.run)
            if not is_cancelled and problem is None and may_start(record.sweep, trials):
                try:
                    await self._start_next(record, trials)
                    self._waiting.pop(ref.sweep_id, None)
                    continue
                except InvalidInput as error:  # a published name may be gone
                    problem = f"trial {len(trials)} cannot be started: {error}"
                except QuotaExceeded as error:
                    self._waiting[ref.sweep_id] = str(error)
            is_whole = is_cancelled or problem or len(trials) == record.sweep.num_trials
            if is_whole and all(trial.has_ended for trial in trials):
                return _ended(record, trials, problem, is_cancelled)
            await asyncio.sleep(_LOOK_EVERY_S)
        return SweepTurn()

    @activity.defn(name="end_sweep")
    async def end_sweep(self, ending: SweepEnding) -> None:
        """Record the end of a sweep."""
        data = ending.end.model_dump_json(indent=1).encode()
        await asyncio.to_thread(self._store.put_if_absent, SweepKeys(ending.tenant, ending.sweep_id).end, data)

    async def _trials(self, record: SweepRecord, end: SweepEnd | None) -> list[Trial]:
        """Return the trials that have begun, in order; with a sweep's end, those that it says were pruned as such."""
        ids = [record.trial_id(number) for number in range(record.sweep.num_trials)]
        runs = {run.run_id: run for run in await self._runs.of(record.tenant, ids)}
        begun = [runs[run_id] for run_id in takewhile(runs.__contains__, ids)]
        found = end.pruned if end is not None else {}
        if end is None and (halving := record.sweep.halving) is not None:
            reports = [await self._reports(record.sweep, Trial(number, run)) for number, run in enumerate(begun)]
            found = pruned(reports, halving, record.sweep.maximizes)
        return [Trial(number, run, found.get(number)) for number, run in enumerate(begun)]

    async def _reports(self, sweep: Sweep, trial: Trial) -> Reports:
        key = trial.run.run_id, trial.run.updated_at
        reports = self._reported.get(key)
        if reports is None:
            reports = reports_of(trial.run, await self._histories.of(trial.run.run_id), sweep.measured)
        if trial.has_ended:
            self._reported[key] = reports
            while len(self._reported) > _MOST_KEPT:
                self._reported.pop(next(iter(self._reported)))
        return Reports(reports, trial.has_ended)

    async def _start_next(self, record: SweepRecord, trials: list[Trial]) -> None:
        """Start the next trial. Raises QuotaExceeded; InvalidInput: all values that were drawn for it are refused."""
        number, tenant = len(trials), record.tenant
        for attempt in range(_MOST_DRAWN):
            values = await asyncio.to_thread(next_values, record.sweep, trials, attempt)
            try:
                run = with_values(record.sweep.run, values)
                run = await asyncio.to_thread(self._names.resolved, tenant, run, "run.")
                await self._runs.check_run(tenant, run, "run.")
                break
            except InvalidInput:
                if record.sweep.sampler == "grid" or attempt == _MOST_DRAWN - 1:
                    raise
        source = Source(trial=SweepTrial(sweep=record.sweep_id, number=number, values=values))
        accepted, _ = await self._runs.accept(record.trial_id(number), run, tenant, record.owner, source)
        await self._runs.make_sure(accepted)
        await self._runs.record(tenant, accepted.run_id)  # if it was accepted before, its row may be lost

    async def _end_trial(self, run: IndexedRun) -> None:
        """Cancel a run, once: it takes a while to end."""
        if run.run_id not in self._told_to_end:
            with suppress(Conflict, NotFound):  # it has just ended
                await self._runs.cancel(run.record.tenant, run.run_id)
            self._told_to_end.add(run.run_id)

    # Blocking.

    def _check_names(self, tenant: str, sweep: Sweep) -> None:
        """Refuse names and URIs that the tenant's runs may not have: each is looked at once, not once a trial."""
        self._names.resolved(tenant, sweep.run, "run.")
        self._access.check(tenant, sweep)
        for path, space in sweep.parameters.items():
            for value in space.choices or ():
                self._access.check_value(tenant, value, f"run.{path}")

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

    def _is_cancelled(self, ref: SweepRef) -> bool:
        return self._store.head(SweepKeys(ref.tenant, ref.sweep_id).is_cancelled) is not None


def check_trials(sweep: str, max_ranks: int, max_hosts: int | None, sampler_url: str | None) -> None:
    """Refuse values that no run could have. To be called in a child process: each combination is validated separately.

    Args:
        sweep: JSON of a Sweep, with the fields that were sent.

    Raises InvalidInput.
    """
    settings = Settings.model_construct(
        max_ranks=max_ranks, max_hosts=max_hosts, sampling=SamplingSettings(url=sampler_url)
    )
    found = Sweep.model_validate_json(sweep)
    for values in candidates(found):
        check_startable(with_values(found.run, values), settings, "run.")


def _ended(record: SweepRecord, trials: list[Trial], problem: str | None, is_cancelled: bool) -> SweepTurn:
    """Return the end of a sweep whose trials have ended. Nothing is published of one that was cancelled, or failed."""
    found = best_of(record.sweep, trials)
    status, best = found.run.status if found is not None else None, None
    if status is not None and status.adapter and status.adapter_sha256 and not problem and not is_cancelled:
        best = BestRequest(
            tenant=record.tenant,
            name=record.sweep.name,
            run_id=status.run_id,
            kind="adapters" if record.sweep.run.trainable.kind == "lora" else "models",
            artifact=Artifact(uri=status.adapter, sha256=status.adapter_sha256),
        )
    elif not is_cancelled:
        problem = problem or f"no trial succeeded, reported {record.sweep.measured} and published a result"
    end = SweepEnd(
        state="cancelled" if is_cancelled else "failed" if problem else "succeeded",
        pruned={trial.number: trial.pruned_by for trial in trials if trial.pruned_by is not None},
        problem=problem,
        ended_at=time.time(),
    )
    return SweepTurn(end=end, best=best)
