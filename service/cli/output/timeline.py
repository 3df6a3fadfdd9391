"""Format the duration and the phases of a run."""

import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from service.cli.output.durations import span

if TYPE_CHECKING:
    from service.runs.views import RunView

_OF_DATA = ("downloading", "tokenizing", "packing")
_A_MOMENT_S = 0.5


def took(view: "RunView") -> str | None:
    """Return the duration of a run from its first start, and how much of it the run was stopped."""
    if view.started_at is None:
        return None
    spans = view.timeline
    stopped_s = sum(after.began - before.ended for before, after in pairwise(spans) if before.ended is not None)
    whole = span((view.ended_at or time.time()) - view.started_at)
    return whole + (f", {span(stopped_s)} of it stopped" if stopped_s >= 1 else "")


def phases(view: "RunView") -> list[tuple[str, float, float | None]]:
    """Return the phases of a run in words, with begin and end: seconds since 1970, None for the one that goes on.

    A phase that only got another worker is one; a wait for a worker of a moment is none. What is done twice, for the
    dataset and for held-out rows, says for which.
    """
    found: list[tuple[str, float, float | None]] = []
    times: Counter[str] = Counter()
    is_twice = view.run.kind != "rl" and view.run.eval_dataset is not None
    for each in view.timeline:
        if each.phase == "checking":  # a new execution of the run
            times.clear()
        times[each.phase] += 1
        label = each.phase.replace("_", " ")
        if is_twice and each.phase in _OF_DATA:
            label += " (train)" if times[each.phase] == 1 else " (held out)"
        if found and found[-1][0] == label and found[-1][2] == each.began:
            found[-1] = label, found[-1][1], each.ended
        else:
            found.append((label, each.began, each.ended))
    return [item for item in found if not _is_a_moments_wait(*item)]


def _is_a_moments_wait(label: str, began: float, ended: float | None) -> bool:
    return label == "waiting for worker" and ended is not None and ended - began < _A_MOMENT_S
