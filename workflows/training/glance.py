"""A run at a glance: its status in the workflow's memo, and the spans of its phases.

One listing of Temporal's shows the memos of all running workflows, so that nobody has to query each of them.
"""

from collections.abc import Callable

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from shared.runs.start import Start
    from shared.runs.status import STATUS_MEMO, PhaseSpan, RunStatus
    from workflows import control

_MOST_SPANS = 64
# What a resumed run shows until it has something newer.
_GOES_ON = (
    *("started_at", "step", "num_steps", "metrics", "checkpoint", "dataset_report"),
    *("adapter", "adapter_sha256", "name", "version", "policy_version"),
    *("notices", "skipped_steps"),
)


class Glance:
    """What was shown last, and what earlier executions leave to be added to: phases, GPU seconds, lost workers."""

    def __init__(self, before: RunStatus | None) -> None:
        self.has_begun = False
        self.timeline: tuple[PhaseSpan, ...] = before.timeline if before else ()
        self.gpu_seconds_before = before.gpu_seconds if before else 0.0
        self.workers_lost_before = before.workers_lost if before else 0
        self._shown: tuple[str, str, int] | None = None

    async def begin(self, start: Start, show: Callable[..., None]) -> None:
        """Before this nothing is done or shown, and no end recorded: it would be put over the one that stands.

        A run that was resumed goes on from the end that it had.
        """
        before = await control.begin(start)
        self.has_begun = True
        if start.resumed:
            show(phase="checking")
        if before is None:
            return
        self.timeline = before.timeline + self.timeline
        self.gpu_seconds_before = before.gpu_seconds
        self.workers_lost_before = before.workers_lost
        show(**{name: value for name in _GOES_ON if (value := getattr(before, name)) is not None})

    def note(self, status: RunStatus) -> None:
        """Show a status, if its state, phase or lease is another than before."""
        now = (status.state, status.phase, status.epoch)
        if now == self._shown:
            return
        self._shown = now
        time = workflow.time()
        spans = list(self.timeline)
        if spans and spans[-1].ended is None:
            spans[-1] = spans[-1].model_copy(update={"ended": time})
        if status.state == "running":
            spans.append(PhaseSpan(phase=status.phase, began=time, lease=status.epoch))
        self.timeline = tuple(spans[-_MOST_SPANS:])
        workflow.upsert_memo({STATUS_MEMO: status.model_dump(mode="json", exclude={"metrics", "timeline"})})
