"""Which stored objects a retention policy expires. Pure: it reads nothing, and `collect.py` checks again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from activities.retention.census import Census, Heap, RunFolder, What, what_of
from shared.limits import RetentionSettings
from shared.storage.paths import RunKeys

_DAY_S = 86_400.0
NUM_STAY = 3
"""Objects that stay of a removed run whose published versions stay: its record, its result, one job."""


@dataclass(frozen=True)
class Due:
    """A unit, or parts of a run's folder, that may go: `heaps` has each of `whats`. `tenants`: whose they are."""

    unit: str
    whats: tuple[What, ...]
    tenants: tuple[str, ...]
    heaps: tuple[Heap, ...]
    run: RunFolder | None = None


def due(census: Census, policy: RetentionSettings, now: float) -> Iterator[Due]:
    """Yield what the policy expires. It never includes anything that a recorded run uses before its end."""
    for run in census.runs.values():
        yield from _of_run(census, run, policy, now)
    days: dict[What, float | None] = {
        "data": policy.data_days,
        "samples": policy.samples_days,
        "models": policy.models_days,
    }
    needed = {run.model for run in census.runs.values() if _needs_its_model(run)}
    for unit, heap in census.shared.items():
        what, users = what_of(unit), census.users_of(unit)
        if unit in needed or any(run.goes_on for run in users):
            continue
        used = max((run.ended_at or 0.0 for run in users), default=0.0)
        if _is_over(days[what], max(heap.newest, used), now):
            tenants = tuple(sorted({run.tenant for run in users}))
            yield Due(unit, (what,), tenants, (heap,))


def _of_run(census: Census, run: RunFolder, policy: RetentionSettings, now: float) -> Iterator[Due]:
    unit = RunKeys(run.run_id).prefix
    if (removed := census.removed.get(run.run_id)) is not None:
        left = _summed(run.heaps.values())
        if left.num_objects > (NUM_STAY if removed.stays_published else 0):
            yield Due(unit, ("removed",), (removed.tenant,), (left,), run)
        return
    others = [user for user in census.users_of(unit) if user is not run]
    if run.end is None or not run.is_on_record or any(user.goes_on for user in others):
        return
    ended_at, found = run.ended_at or now, dict[What, Heap]()
    if _is_over(policy.checkpoints_days, ended_at, now):
        kept = run.whole_checkpoints[-policy.checkpoints_kept :] if policy.checkpoints_kept else []
        going = [heap for place, heap in run.checkpoints.items() if place not in kept]
        if policy.checkpoints_kept == 0 and run.heaps["checkpoints"].num_objects:
            found["checkpoints"] = run.heaps["checkpoints"]
        elif going:
            found["checkpoints"] = _summed(going)
    logs, num_jobs = run.heaps["logs"], int(run.job is not None)  # one job stays: it says what the run trained
    if _is_over(policy.logs_days, ended_at, now) and logs.num_objects > num_jobs:
        found["logs"] = Heap(logs.num_objects - num_jobs, logs.num_bytes - run.job_bytes)
    rest: dict[What, float | None] = {"data": policy.data_days, "sessions": policy.sessions_days}
    for what, days in rest.items():
        if _is_over(days, ended_at, now) and run.heaps[what].num_objects:
            found[what] = run.heaps[what]
    if found:
        yield Due(unit, tuple(found), (run.tenant,), tuple(found.values()), run)


def _summed(heaps: Iterable[Heap]) -> Heap:
    found = list(heaps)
    return Heap(sum(heap.num_objects for heap in found), sum(heap.num_bytes for heap in found))


def _needs_its_model(run: RunFolder) -> bool:
    """True for a run whose checkpoints or published versions depend on the model that its jobs trained."""
    return run.goes_on or bool(run.whole_checkpoints) or (run.end is not None and run.end.adapter is not None)


def _is_over(days: float | None, since: float, now: float) -> bool:
    return days is not None and since < now - days * _DAY_S
