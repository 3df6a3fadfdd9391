"""Sweeps for the APIs, and the activities of their workflows: start, follow and prune trials, and find the best.

Nothing is remembered but caches. A sweep is a record; its trials are runs whose ids follow from the sweep's and whose
records have their values; which one is pruned and which is best follows from their metrics.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from temporalio import activity
from temporalio.exceptions import WorkflowAlreadyStartedError

from longshore.automation import Report, Space, Sweep, SweepRecord, SweepView, TrialView, Values
from longshore.fields import Artifact, Frozen
from longshore.runs import Source, SweepTrial
from service.accounts import audit
from service.accounts.keys import Principal
from service.accounts.tenants import Access, Documents, Quotas
from service.decoding import Decoding, while_connected
from service.inference.published_models import NamedModels
from service.runs.files import Histories, RunHistory
from service.runs.rows import IndexedRun
from service.runs.runs import Runs, new_run_id
from service.temporal import Temporal
from shared import automation
from shared.errors import Conflict, InvalidInput, NotFound, QuotaExceeded
from shared.runs.acceptance import check_startable
from shared.settings import SamplingSettings, Settings
from shared.storage.paths import content_key

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


@dataclass(frozen=True)
class Trial:
    number: int
    run: IndexedRun
    pruned_by: Report | None = None

    @property
    def has_ended(self) -> bool:
        return self.run.status.state in ("succeeded", "failed", "cancelled")

    @property
    def values(self) -> Values:
        assert self.run.record.source.trial is not None
        return self.run.record.source.trial.values

    def value(self, metric: str) -> float | None:
        found = self.run.status.metrics.get(metric, math.nan) if self.pruned_by is None else self.pruned_by.value
        return found if math.isfinite(found) else None

    def view(self, metric: str) -> TrialView:
        status = self.run.status
        return TrialView(
            number=self.number,
            run_id=self.run.run_id,
            values=self.values,
            state=status.state if self.pruned_by is None else "pruned",
            step=status.step,
            value=self.value(metric),
            gpu_seconds=status.gpu_seconds,
            problem=status.problem.message if status.problem else None,
        )


def best_of(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """Return the best of the trials that succeeded and were not pruned: of equal ones the first."""
    able = [trial for trial in trials if trial.run.status.state == "succeeded" and trial.pruned_by is None]
    valued = [(value, trial) for trial in able if (value := trial.value(sweep.measured)) is not None]
    best = (max if sweep.maximizes else min)(valued, key=lambda each: each[0], default=None)
    return None if best is None else best[1]


def sweep_view(record: SweepRecord, trials: Sequence[Trial], end: automation.SweepEnd | None) -> SweepView:
    sweep, best = record.sweep, best_of(record.sweep, trials)
    return SweepView(
        **dict(record),
        metric=sweep.measured,
        direction="maximize" if sweep.maximizes else "minimize",
        num_trials=sweep.num_trials,
        trials=tuple(trial.view(sweep.measured) for trial in trials),
        best=best.number if best is not None else None,
        state="running" if end is None else end.state,
        **({} if end is None else end.model_dump(include={"ended_at", "problem", "adapter", "version"})),
    )


def reports_of(run: IndexedRun, history: RunHistory, metric: str) -> dict[int, float]:
    """Return a run's metric by train step of an RL run, else by optimizer step. Evaluations' are `eval_...`."""
    found = history.metrics()
    if run.record.run.kind == "rl":
        reported = [(step.step, step.metrics) for step in found.train_steps]
    else:
        reported = [(step.step, step.metrics) for step in found.steps]
        reported += [(e.step, {f"eval_{name}": value for name, value in e.metrics.items()}) for e in found.evaluations]
    return {step: metrics[metric] for step, metrics in reported if metric in metrics}


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
        return automation.grid_values(sweep, len(trials))
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
    found = sweep.parameters.items()
    return {path: drawn[path] if space.choices is None else space.choices[drawn[path]] for path, space in found}


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
    params = dict(trial.values)
    for path, space in sweep.parameters.items():
        if space.choices is not None:
            params[path] = [*map(json.dumps, space.choices)].index(json.dumps(params[path]))
    return create_trial(state=state, params=params, distributions=spaces, **given)


def _distribution(space: Space) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if space.choices is not None:
        return CategoricalDistribution(range(len(space.choices)))  # by index: a choice may be a list or an object
    low, high = space.ends
    return (IntDistribution if space.integer else FloatDistribution)(low, high, log=space.log)  # type: ignore[arg-type]


SWEEP_WORKFLOW = "SweepWorkflow"
_MOST_OPEN = 16
_TURN_S, _LOOK_EVERY_S = 15.0, 0.5
_MOST_KEPT = 4096
_MOST_DRAWN = 16  # values that do not fit together are drawn again


class SweepState(Frozen):
    """An accepted sweep, whether it is to end, and its end."""

    record: SweepRecord
    is_cancelled: bool = False
    end: automation.SweepEnd | None = None


@dataclass(frozen=True, eq=False)
class Sweeps:
    """Creates, lists, shows and cancels sweeps, and looks after their trials. Those of other tenants are not found."""

    _settings: Settings
    _states: Documents[SweepState]
    _open: Documents[automation.SweepRef]  # one for each running sweep
    _temporal: Temporal
    _runs: Runs
    _names: NamedModels
    _histories: Histories
    _access: Access
    _quotas: Quotas
    _decoding: Decoding
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
            _check_open(tenant, await self._open.all(tenant))
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
        if await self._states.find(tenant, sweep_id) is None:
            ref = automation.SweepRef(tenant=tenant, sweep_id=sweep_id)
            await self._open.add(tenant, sweep_id, ref, check=partial(_check_open, tenant))
            await self._states.add(tenant, sweep_id, SweepState(record=record))
        await self._begin(tenant, sweep_id)
        return await self.show(tenant, sweep_id)

    async def of(self, tenant: str, limit: int = 20) -> tuple[SweepView, ...]:
        """List sweeps, newest first."""
        ids = await self._states.keys(tenant)
        return tuple([await self.show(tenant, sweep_id) for sweep_id in ids[: -limit - 1 : -1]])

    async def show(self, tenant: str, sweep_id: str) -> SweepView:
        """Return a sweep and its trials, as they stood a second ago at most. Raises NotFound."""
        state = await self._states.get(tenant, sweep_id)
        view = sweep_view(state.record, await self._trials(state.record, state.end), state.end)
        return view if state.end is not None else view.model_copy(update={"problem": self._waiting.get(sweep_id)})

    async def cancel(self, tenant: str, sweep_id: str) -> SweepView:
        """Start no more trials, and cancel the active ones. Raises NotFound; Conflict when the sweep has ended."""

        def cancelled(before: SweepState) -> SweepState:
            if before.end is not None:
                raise Conflict(f"{sweep_id} has ended")
            return before.model_copy(update={"is_cancelled": True})

        await self._states.change(tenant, sweep_id, cancelled)
        audit.touched(sweep_id)
        return await self.show(tenant, sweep_id)

    async def restore(self) -> None:
        """Start the workflow of every active sweep that Temporal has lost."""
        for tenant, ref in await self._open.everybodys():
            if await self._states.find(tenant, ref.sweep_id) is None:  # its service died before it was accepted
                await self._open.delete(tenant, ref.sweep_id)
            else:
                await self._begin(tenant, ref.sweep_id)

    async def _begin(self, tenant: str, sweep_id: str) -> None:
        ref = automation.SweepRef(tenant=tenant, sweep_id=sweep_id)
        if (await self._states.get(tenant, sweep_id)).end is None:
            with suppress(WorkflowAlreadyStartedError):
                await self._temporal.start(SWEEP_WORKFLOW, ref, f"{tenant}/{sweep_id}", tenant)

    # What a sweep's workflow asks for.

    @property
    def activities(self) -> tuple[Callable[..., Any], ...]:
        return self.advance_sweep, self.end_sweep

    @activity.defn(name="advance_sweep")
    async def advance_sweep(self, ref: automation.SweepRef) -> automation.SweepTurn:
        """Start the trials that may begin and end those that are to; for a while, or until all have ended.

        Repeated, and by several services at once, it starts no trial twice.
        """
        record = (await self._states.get(ref.tenant, ref.sweep_id)).record
        until, problem = time.monotonic() + _TURN_S, None
        while time.monotonic() < until:
            activity.heartbeat()
            trials = await self._trials(record, None)
            is_cancelled = (await self._states.get(ref.tenant, ref.sweep_id)).is_cancelled
            for trial in trials:
                is_to_end = not trial.has_ended and (is_cancelled or trial.pruned_by is not None)
                if is_to_end and trial.run.run_id not in self._told_to_end:  # it takes a while to end
                    with suppress(Conflict, NotFound):  # it has just ended
                        await self._runs.cancel(record.tenant, trial.run.run_id)
                    self._told_to_end.add(trial.run.run_id)
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
        return automation.SweepTurn()

    @activity.defn(name="end_sweep")
    async def end_sweep(self, ending: automation.SweepEnding) -> None:

        def ended(before: SweepState) -> SweepState:
            return before if before.end is not None else before.model_copy(update={"end": ending.end})

        await self._states.change(ending.tenant, ending.sweep_id, ended, always=True)
        await self._open.delete(ending.tenant, ending.sweep_id)

    async def _trials(self, record: SweepRecord, end: automation.SweepEnd | None) -> list[Trial]:
        """Return the trials that have begun, in order; with a sweep's end, those that it says were pruned as such."""
        ids = [automation.trial_id(record, number) for number in range(record.sweep.num_trials)]
        runs = {run.run_id: run for run in await self._runs.of(record.tenant, ids)}
        begun = [runs[run_id] for run_id in takewhile(runs.__contains__, ids)]
        found = end.pruned if end is not None else {}
        if end is None and (halving := record.sweep.halving) is not None:
            reports = [await self._reports(record.sweep, Trial(number, run)) for number, run in enumerate(begun)]
            found = automation.pruned(reports, halving, record.sweep.maximizes)
        return [Trial(number, run, found.get(number)) for number, run in enumerate(begun)]

    async def _reports(self, sweep: Sweep, trial: Trial) -> automation.Reports:
        key = trial.run.run_id, trial.run.updated_at
        reports = self._reported.get(key)
        if reports is None:
            reports = reports_of(trial.run, await self._histories.of(trial.run.run_id), sweep.measured)
        if trial.has_ended:
            self._reported[key] = reports
            while len(self._reported) > _MOST_KEPT:
                self._reported.pop(next(iter(self._reported)))
        return automation.Reports(reports, trial.has_ended)

    async def _start_next(self, record: SweepRecord, trials: list[Trial]) -> None:
        """Start the next trial. Raises QuotaExceeded; InvalidInput: all values that were drawn for it are refused."""
        number, tenant = len(trials), record.tenant
        for attempt in range(_MOST_DRAWN):
            values = await asyncio.to_thread(next_values, record.sweep, trials, attempt)
            try:
                run = automation.with_values(record.sweep.run, values)
                run = await asyncio.to_thread(self._names.resolved, tenant, run, "run.")
                await self._runs.check_run(tenant, run, "run.")
                break
            except InvalidInput:
                if record.sweep.sampler == "grid" or attempt == _MOST_DRAWN - 1:
                    raise
        source = Source(trial=SweepTrial(sweep=record.sweep_id, number=number, values=values))
        accepted, _ = await self._runs.accept(automation.trial_id(record, number), run, tenant, record.owner, source)
        await self._runs.make_sure(accepted)
        await self._runs.record(tenant, accepted.run_id)  # if it was accepted before, its row may be lost

    # Blocking.

    def _check_names(self, tenant: str, sweep: Sweep) -> None:
        """Refuse names and URIs that the tenant's runs may not have: each is looked at once, not once a trial."""
        self._names.resolved(tenant, sweep.run, "run.")
        self._access.check(tenant, sweep)
        for path, space in sweep.parameters.items():
            for value in space.choices or ():
                self._access.check_value(tenant, value, f"run.{path}")


def _check_open(tenant: str, others: Sequence[automation.SweepRef]) -> None:
    if len(others) >= _MOST_OPEN:
        raise Conflict(f"{_MOST_OPEN} of {tenant}'s sweeps are going on: wait for one, or cancel it")


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
    for values in automation.candidates(found):
        check_startable(automation.with_values(found.run, values), settings, "run.")


def _ended(record: SweepRecord, trials: list[Trial], problem: str | None, is_cancelled: bool) -> automation.SweepTurn:
    """Return the end of a sweep whose trials have ended. Nothing is published of one that was cancelled, or failed."""
    found = best_of(record.sweep, trials)
    status, best = found.run.status if found is not None else None, None
    if status is not None and status.adapter and status.adapter_sha256 and not problem and not is_cancelled:
        best = automation.BestRequest(
            tenant=record.tenant,
            name=record.sweep.name,
            run_id=status.run_id,
            kind="adapters" if record.sweep.run.trainable.kind == "lora" else "models",
            artifact=Artifact(uri=status.adapter, sha256=status.adapter_sha256),
        )
    elif not is_cancelled:
        problem = problem or f"no trial succeeded, reported {record.sweep.measured} and published a result"
    end = automation.SweepEnd(
        state="cancelled" if is_cancelled else "failed" if problem else "succeeded",
        pruned={trial.number: trial.pruned_by for trial in trials if trial.pruned_by is not None},
        problem=problem,
        ended_at=time.time(),
    )
    return automation.SweepTurn(end=end, best=best)
