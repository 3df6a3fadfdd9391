"""Views of runs: their state, request and cost; and pages of them."""

import time

from longshore.fields import Frozen
from shared.limits import PriceSettings
from shared.runs.events import RunEvent
from shared.runs.requests import FIRST_TENANT, Precision, Run, Source, Tenant
from shared.runs.status import Phase, RunStatus, StepStatus

IN_QUEUE: tuple[Phase, ...] = ("queued", "waiting_for_worker")
"""Phases in which a running run has a place in the queue for workers."""


class Cost(Frozen):
    """What a run costs, by the price of a GPU hour.

    `estimated`: at its end, at the pace of its steps so far; None while nobody can say.
    """

    currency: str
    so_far: float
    estimated: float | None = None


class RunView(RunStatus):
    """A run in the API: its status, its request, when it was submitted, and its cost if GPU hours have a price."""

    created_at: float
    tenant: Tenant = FIRST_TENANT
    owner: str | None = None
    source: Source = Source()
    run: Run
    precision: Precision | None = None
    cost: Cost | None = None


def with_cost(view: RunView, prices: PriceSettings) -> RunView:
    """Return a view with the cost of the run so far, and at its end by its own estimate."""
    if prices.gpu_hour is None:
        return view
    so_far, estimated = view.gpu_seconds, None
    if view.state in ("succeeded", "failed", "cancelled"):
        estimated = so_far
    elif (left_s := seconds_left(view, time.time())) is not None:
        estimated = so_far + left_s * devices_of(view.run)
    price = prices.gpu_hour / 3600
    total = None if estimated is None else estimated * price
    return view.model_copy(update={"cost": Cost(currency=prices.currency, so_far=so_far * price, estimated=total)})


def devices_of(run: Run) -> int:
    """Return the devices that a run has while it works: a worker's ranks, and the samplers that it leases."""
    samplers = 0
    if run.kind == "rl" and run.rollouts is not None and run.rollouts.sampler_url is None:
        samplers = 0 if run.rollouts.colocate else run.rollouts.samplers
    return run.layout.world_size + samplers


def seconds_left(view: RunStatus, now: float) -> float | None:
    """Return the seconds to a run's last step, by its own estimate; None without an estimate, or after that time."""
    if view.state != "running" or view.estimated_end is None or view.estimated_end <= now:
        return None
    return view.estimated_end - now


class RunPage(Frozen):
    """Runs, newest first. `next` is the `after` of the following page.

    `num_hidden_sessions`: idle ones that no page has, as they were not asked for.
    """

    runs: tuple[RunView, ...]
    has_more: bool
    next: str | None = None
    num_hidden_sessions: int = 0


class EventPage(Frozen):
    """Events after a cursor. `next` is the cursor to ask with again: the last event's, or the one that was given."""

    events: tuple[RunEvent, ...]
    next: str | None


class StepPage(Frozen):
    """Train steps of an RL run that are on record, in order.

    `next` is the number to ask after, also for steps that are still to come: the last step's, or what was given.
    """

    steps: tuple[StepStatus, ...]
    has_more: bool
    next: int | None = None
