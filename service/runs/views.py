"""Runs as users see them, and their events in words."""

import time
from collections.abc import Iterable

from longshore import events
from longshore.runs import Run
from longshore.views import Cost, Phase, RunStatus, RunView
from shared.settings import PriceSettings

# --- Views of runs: their state, request and cost; and pages of them ---

IN_QUEUE: tuple[Phase, ...] = ("queued", "waiting_for_worker")
"""Phases in which a running run has a place in the queue for workers."""


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


# --- Formats events and metrics of runs as text for people ---

_MAIN_METRICS = ("reward_mean", "loss", "eval_loss", "preference_accuracy", "tokens_per_s")
_LOOKED_FOR = ("loss", "reward_mean", "eval_loss", "preference_accuracy", "grad_norm", "learning_rate", "tokens_per_s")
SKIPPED = "skipped: no token of it is trained, and no weight changed"


def log_line(item: events.RunEvent) -> str:
    """An event as a line of a log, with its time."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(item.event.time))} {format_event(item.event)}"


def last_lines(view: RunView) -> list[str]:
    """The last lines of a log: the run's end, if it has ended."""
    match view.state:
        case "running":
            return []
        case "cancelled" | "paused":
            return [f"the run was {view.state}" + (f": {view.paused_by}" if view.paused_by else "")]
        case _:
            return [f"the run {view.state}" + (f": {view.problem.message}" if view.problem else "")]


def format_event(event: events.Event) -> str:
    """An event in words, for people who read logs."""
    match event:
        case events.Started():
            where = f"{event.world_size} rank{'s' if event.world_size > 1 else ''} on {event.device}"
            return f"training starts at step {event.first_step} of {event.num_steps}, {where}"
        case events.Step() if "skipped" in event.metrics:
            return f"step {event.step} {SKIPPED}"
        case events.Step():
            return f"step {event.step}: {brief(event.metrics)}"
        case events.Saved():
            return f"checkpoint of step {event.step} saved"
        case events.Kept():
            return f"state of command {event.step} kept"
        case events.Evaluating():
            what = "samples" if event.part == "samples" else "held-out rows"
            return f"evaluating after step {event.step}: {event.fraction:.0%} of the {what}"
        case events.Evaluated():
            samples = f", {len(event.samples)} samples" if event.samples else ""
            return f"evaluated after step {event.step}: {brief(event.metrics)}{samples}"
        case events.Probed():
            return f"probe of {len(event.logprobs) + 1} tokens after step {event.step}"
        case events.Applied():
            return f"command {event.command}: {event.kind}{' failed' if event.failed else ''}"
        case events.Offloaded():
            mib = (event.device_bytes_before - event.device_bytes_after) / 2**20
            return f"device memory released: {mib:.0f} MiB in {event.duration_s:.2f} s"
        case events.Succeeded(awaits_grades=True):
            return f"training waits at step {event.step} for held-out prompts to be sampled and graded"
        case events.Succeeded():
            return f"training succeeded at step {event.step}"
        case events.Failed():
            return f"training failed after step {event.step}: {event.message}"
        case _:
            return f"training stopped after step {event.step}, as it was asked to"


def brief(metrics: dict[str, float]) -> str:
    """Format the most usual metrics; all, if there is none of those."""
    return ", ".join(metric_in_words(name, metrics[name]) for name in looked_for(metrics))


def main_metrics(metrics: dict[str, float]) -> list[str]:
    """Format a few metrics, the most important first."""
    return [metric_in_words(name, metrics[name]) for name in _MAIN_METRICS if name in metrics]


def dropped(metrics: dict[str, float]) -> str | None:
    """The number of a train step's dropped trajectories, and the rules that dropped them; None if none was."""
    if not (num_broken := metrics.get("broken_trajectories")):
        return None
    of = {name.removeprefix("dropped_for_"): n for name, n in metrics.items() if name.startswith("dropped_for_")}
    reasons = ", ".join(f"{rule} {n:.0f}" for rule, n in sorted(of.items(), key=lambda item: (-item[1], item[0])))
    return f"{num_broken:.0f} of {metrics['trajectories']:.0f} trajectories could not be trained: {reasons}"


def metric_in_words(name: str, value: float) -> str:
    """Format a metric with its name, in as many digits as people read."""
    if name == "tokens_per_s":
        return f"{value:,.0f} tokens/s" if value >= 100 else f"{value:.3g} tokens/s"
    return f"{'reward' if name == 'reward_mean' else name} {value:.4g}"


def looked_for(names: Iterable[str]) -> list[str]:
    """Return the usual metrics among these names; all, if there is none of those."""
    found = sorted(names)
    return [name for name in _LOOKED_FOR if name in found] or found
