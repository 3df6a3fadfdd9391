"""Estimates of runs before they are started.

Steps and tokens are counted as the run would count them. Time and cost come from the tenant's own earlier runs of the
same model and method; without such runs none are given.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean, median
from typing import Any, Protocol

from longshore.dataset_runs import Dataset, DatasetRun, DatasetSource, RewardRun, named_sources
from longshore.grading import GradeOneRequest, Grader, OneGrade, SampledItem
from longshore.runs import RLRun, Run
from longshore.training import SessionRun
from longshore.views import Cut, Estimate, Preview, PreviewRequest, PreviewStart, shares
from service.accounts.limits import FairShare
from service.accounts.tenants import Quotas
from service.runs.files import Histories, RunHistory
from service.runs.rows import IndexedRun, RunRows
from service.runs.runs import Runs
from service.runs.views import devices_of
from service.temporal import Temporal
from shared.errors import InvalidInput
from shared.jobs.bins import length_of_mixture
from shared.settings import PriceSettings

# --- Checks before a run, done by the control host: a preview of a dataset, a grader tried on one sample ---

PREVIEW_WORKFLOW, GRADER_WORKFLOW = "PreviewWorkflow", "GraderWorkflow"
_PATIENCE = timedelta(minutes=5)
_PLACED = re.compile(r"(?P<place>grader[\w.]*): (?P<message>.*)", re.DOTALL)


class Checks:
    """Runs checks, and keeps nothing of them. Each method raises Busy if a tenant has too many checks open."""

    def __init__(self, runs: Runs, temporal: Temporal, places: FairShare, quotas: Quotas) -> None:
        self._runs = runs
        self._quotas = quotas
        self._temporal = temporal
        self._places = places

    async def preview(self, tenant: str, request: PreviewRequest, cut: Cut | None = None) -> Preview:
        """Tokenize a dataset's first rows; with a cut, return the length of a run on them.

        Raises InvalidInput: the data cannot be read.
        """
        await self._runs.check_access(tenant, request)
        request, room = await self._runs.sealed(tenant, request), await self._quotas.room(tenant)
        start = PreviewStart(tenant=tenant, request=request, cut=cut, room=room)
        async with self._places.place(tenant):
            workflow_id = f"preview-{secrets.token_hex(8)}"
            return await self._temporal.ask(
                PREVIEW_WORKFLOW, start, Preview, workflow_id=workflow_id, tenant=tenant, within=_PATIENCE
            )

    async def grade(self, tenant: str, grader: Grader, sample: SampledItem | None) -> OneGrade:
        """Grade a sample; without one, only load the grader.

        Raises InvalidInput: the grader cannot be used here, with the reason.
        """
        request = GradeOneRequest(grader=grader, sample=sample)
        async with self._places.place(tenant):
            workflow_id = f"grader-{secrets.token_hex(8)}"
            try:
                return await self._temporal.ask(
                    GRADER_WORKFLOW, request, OneGrade, workflow_id=workflow_id, tenant=tenant, within=_PATIENCE
                )
            except InvalidInput as error:  # Temporal carries its place and its message in one text
                found = _PLACED.fullmatch(str(error))
                raise InvalidInput(found["message"], found["place"]) if found else error from None


_MEASURED_RUNS = 3
_LOOKED_AT = 100
_READ_AT_MOST = 12  # histories: each is read from the store
_ALL_ROWS = 1 << 40
_PARTS = ("sampling_seconds", "grading_seconds", "training_seconds", "publishing_seconds")


@dataclass(frozen=True)
class Pace:
    """A median over some runs. `is_alike`: they had the same layout, engine and precision."""

    value: float
    run_ids: tuple[str, ...]
    is_alike: bool


class _Measure(Protocol):
    def __call__(self, run: Run, history: RunHistory, /) -> float | None: ...


class Estimates:
    """Counts datasets on a control host, and reads the events of earlier runs."""

    def __init__(self, checks: Checks, rows: RunRows, histories: Histories, prices: PriceSettings) -> None:
        self._checks = checks
        self._rows = rows
        self._histories = histories
        self._prices = prices

    async def of(self, tenant: str, run: Run) -> Estimate:
        """Estimate a run, whose names were looked up.

        Raises InvalidInput: its dataset or model cannot be read; or its length is its client's affair.
        """
        match run:
            case SessionRun():
                raise InvalidInput("a session is as long as its client makes it", "kind")
            case RLRun():
                found, pace = await self._of_rl(tenant, run), await self._pace(tenant, run, _seconds_per_sample)
            case _:
                found, pace = await self._of_dataset(tenant, run), await self._pace(tenant, run, _tokens_per_s)
        if isinstance(pace, str):
            return found.model_copy(update={"not_measured": pace})
        told: dict[str, object] = {"measured_on": pace.run_ids, "same_layout": pace.is_alike}
        if isinstance(run, RLRun) and run.rollouts is not None:
            step_s = pace.value * run.rollouts.prompts_per_step * run.rollouts.group_size
            seconds, told["seconds_per_step"] = step_s * found.steps, step_s
        else:
            seconds, told["tokens_per_s"] = found.tokens / pace.value, pace.value
        told["seconds"] = seconds
        if self._prices.gpu_hour is not None:
            told["cost"] = seconds * devices_of(run) / 3600 * self._prices.gpu_hour
            told["currency"] = self._prices.currency
        return found.model_copy(update=told)

    async def _of_dataset(self, tenant: str, run: DatasetRun) -> Estimate:
        cut = Cut(
            seed=run.seed, epochs=run.epochs, steps=run.steps, batch_size=run.batch_size, batch_tokens=run.batch_tokens
        )
        numbers = run.number_fields if isinstance(run, RewardRun) else ()
        same = ("max_tokens", "too_long", "max_lost_fraction")
        read = {name: getattr(run, name) for name in same} | {"labels": run.reads_labels, "numbers": numbers}
        return await self._counted(tenant, run.model, run.dataset, cut, read)

    async def _of_rl(self, tenant: str, run: RLRun) -> Estimate:
        rollouts = run.rollouts
        if rollouts is None:
            raise InvalidInput("a run that a client sends groups to is as long as the client makes it", "rollouts")
        if rollouts.steps == 0:
            raise InvalidInput("nothing is trained in a run without steps", "rollouts.steps")
        per_step = rollouts.prompts_per_step
        cut = Cut(seed=run.seed, epochs=rollouts.epochs, steps=rollouts.steps, batch_size=per_step)
        longest = run.max_tokens - rollouts.max_completion_tokens
        read = {"max_tokens": longest, "max_lost_fraction": rollouts.max_lost_fraction, "are_prompts": True}
        found = await self._counted(tenant, run.model, rollouts.prompts, cut, read)
        samples = found.steps * per_step * rollouts.group_size if found.examples else 0
        most = found.tokens + samples * run.longest_answer  # of an episode all that fits, with its observations
        return found.model_copy(update={"samples": samples, "tokens": most, "is_exact": False})

    async def _counted(self, tenant: str, model: str, dataset: Dataset, cut: Cut, read: dict[str, Any]) -> Estimate:
        """Count a dataset, or each source of a mixture. `read`: fields of their PreviewRequest."""
        previews = []
        for source in named_sources(dataset).values():
            request = PreviewRequest(source=source, model_uri=model, num_rows=0, max_rows=_ALL_ROWS, **read)
            previews.append(await self._checks.preview(tenant, request, cut))
        return _counted(previews, cut, dataset, are_prompts="are_prompts" in read)

    async def _pace(self, tenant: str, run: DatasetRun | RLRun, measure: _Measure) -> Pace | str:
        """Measure the tenant's newest runs of the same kind and model: those of the same layout, if there are any.

        Active runs count too, once they have steps.

        Returns the pace, or the reason why there is none.
        """
        found = await self._rows.page(tenant, _LOOKED_AT, kind=run.kind, words=run.model[-128:])
        of_model = [each for each in found if each.record.run.model == run.model and each.status.state != "failed"]
        same = [each for each in of_model if each.record.run.trainable.kind == run.trainable.kind]
        alike = [each for each in same if _machine(each.record.run) == _machine(run)]
        for runs, is_alike in ((alike, True), (same, False)):
            if values := await self._measured(runs, measure):
                return Pace(median(values.values()), tuple(values), is_alike)
        if same:
            return f"{same[0].run_id} and others like it have not done a step that was measured"
        if of_model:
            other = of_model[0].record.run.trainable.kind
            return f"{of_model[0].run_id} trained {other}, this one trains {run.trainable.kind}"
        return f"no {run.kind} run of yours with {run.model} has trained"

    async def _measured(self, runs: list[IndexedRun], measure: _Measure) -> dict[str, float]:
        """Return the measure of each of the newest runs that have any."""
        found: dict[str, float] = {}
        for each in runs[:_READ_AT_MOST]:
            value = measure(each.record.run, await self._histories.of(each.run_id))
            if value is not None:
                found[each.run_id] = value
            if len(found) == _MEASURED_RUNS:
                break
        return found


def _counted(previews: Sequence[Preview], cut: Cut, dataset: Dataset, are_prompts: bool = False) -> Estimate:
    """Estimate a run from a preview of its dataset, or of each source of a mixture."""
    reports = [preview.report for preview in previews]
    if isinstance(dataset, DatasetSource):
        length = previews[0].length
        assert length is not None, "a cut was sent"
    else:
        sources = shares(dataset, [max(1, report.num_kept) for report in reports])
        means = [max(1.0, report.num_tokens / max(1, report.num_kept)) for report in reports]
        length = length_of_mixture(means, cut.model_copy(update={"sources": sources}), are_prompts)
    tokens = sum(report.num_tokens for report in reports)
    return Estimate(
        problem=next((preview.problem for preview in previews if preview.problem), None),
        is_complete=all(preview.is_complete for preview in previews),
        rows=sum(report.num_rows for report in reports),
        examples=sum(report.num_kept for report in reports),
        dataset_tokens=tokens,
        trained_fraction=sum(report.num_targets for report in reports) / max(1, tokens),
        epochs=length.epochs,
        steps=length.steps,
        tokens=length.tokens,
        is_exact=length.is_exact,
    )


def _machine(run: Run) -> tuple[object, ...]:
    return run.engine, run.layout, run.dtype, run.quantize_base


def _tokens_per_s(run: Run, history: RunHistory) -> float | None:
    rates = [metrics["tokens_per_s"] for metrics in history.step_metrics().values() if "tokens_per_s" in metrics]
    return median(rates) if rates else None


def _seconds_per_sample(run: Run, history: RunHistory) -> float | None:
    """Return the seconds of a run's train steps, all their parts together, for each sample that was drawn."""
    rollouts = run.rollouts if run.kind == "rl" else None
    done = (step.metrics for step in history.steps if step.step and step.state == "done")
    steps = [sum(metrics.get(part, 0.0) for part in _PARTS) for metrics in done if "training_seconds" in metrics]
    if rollouts is None or not steps:
        return None
    return mean(steps) / (rollouts.prompts_per_step * rollouts.group_size)
