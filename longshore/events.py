"""Events: one JSON object per line in a job's `log_path`; `seq` has no gaps from 1; the terminal event comes last."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from longshore.fields import Fence, Frozen, Reason, Sha256, added
from longshore.training import SyncOutcome

Device = Literal["released", "held"]


class _Event(Frozen):
    seq: int = Field(ge=1)
    time: float = Field(description="seconds since 1970, UTC")


class Started(_Event):
    """The worker has claimed the job. `first_step`: the step that it starts from, 0 or the checkpoint's.

    `code`: a hash of the code that it runs (shared/provenance.py); None from workers that did not report it.
    `seconds`: durations of the phases before this, in order.
    """

    event: Literal["started"] = "started"
    run_id: str
    job_id: str
    fence: Fence
    first_step: int
    num_steps: int
    device: str
    world_size: int
    code: Sha256 | None = None
    seconds: dict[str, float] = Field(default_factory=dict)


class Step(_Event):
    """One optimizer step is done; `step` counts done steps from 1. Metrics are reduced over all ranks."""

    event: Literal["step"] = "step"
    step: int
    metrics: dict[str, float]


class Saved(_Event):
    """A checkpoint is durable on the worker's disk: its manifest is written, with this hash."""

    event: Literal["saved"] = "saved"
    step: int
    path: str
    manifest_sha256: Sha256


class Kept(_Event):
    """The checkpoint of `step` is kept besides the newest: a session's client has asked for the state after that
    command, or the evaluation after that step is the best so far.
    """

    event: Literal["kept"] = "kept"
    step: int


class EvaluationSample(Frozen):
    """One greedy completion of a prompt. `evaluation`: the name of its held-out data, if that has one."""

    prompt: str
    completion: str
    reference: str | None = None
    evaluation: str = added("")


class Evaluating(_Event):
    """Progress of the evaluation after `step` steps, every few seconds: first of rows, then of samples."""

    event: Literal["evaluating"] = "evaluating"
    step: int
    fraction: float
    part: Literal["rows", "samples"] = "rows"


class Evaluated(_Event):
    """Held-out metrics and samples of the weights after `step` steps.

    `drawn`: URIs of the samples that samplers drew from them, by name: `eval`, or `eval_NAME`.
    """

    event: Literal["evaluated"] = "evaluated"
    step: int
    metrics: dict[str, float]
    samples: tuple[EvaluationSample, ...] = ()
    drawn: dict[str, str] = added({})


class Probed(_Event):
    """The log-probabilities of the job's probe under the weights after `step` steps: of each token except the first,
    given those before it, in nats, at temperature 1."""

    event: Literal["probed"] = "probed"
    step: int
    logprobs: tuple[float, ...]


class Synced(_Event):
    """The weights after `step` steps were sent to the samplers of the job's plan."""

    event: Literal["synced"] = "synced"
    step: int
    outcome: SyncOutcome


class Applied(_Event):
    """A session's command is done, and its result is written. `step` events of a session count commands, too."""

    event: Literal["applied"] = "applied"
    command: int
    kind: str
    failed: bool = False


class Offloaded(_Event):
    """The accelerator's memory is free. Bytes on the device before and after, bytes in declared host buffers."""

    event: Literal["offloaded"] = "offloaded"
    device_bytes_before: int
    device_bytes_after: int
    host_bytes: int
    duration_s: float


class Best(Frozen):
    """The best evaluation of a job that keeps the weights of it: those after `step` steps."""

    step: int
    metric: str
    value: float


class Succeeded(_Event):
    """All steps are done, or `early_stop` has ended them. `best`: the evaluation whose weights are published.

    `awaits_grades`: not all are done, as samplers are to answer held-out prompts with the weights of this step; the
    run's next job continues with what they found.
    """

    event: Literal["succeeded"] = "succeeded"
    step: int
    device: Device
    best: Best | None = None
    awaits_grades: bool = added(False)


class Failed(_Event):
    """All ranks agree that the job cannot continue. `invalid_input`: the user must fix it; never retried.

    `corrupt_artifact`: an input's bytes do not match its manifest.
    """

    event: Literal["failed"] = "failed"
    step: int
    kind: Literal["invalid_input", "corrupt_artifact", "not_finite", "disk_full", "stale_fence", "crowded", "error"]
    message: Reason
    device: Device


class Cancelled(_Event):
    event: Literal["cancelled"] = "cancelled"
    step: int
    device: Device


Terminal = Succeeded | Failed | Cancelled
Event = Annotated[
    Started
    | Step
    | Saved
    | Kept
    | Evaluating
    | Evaluated
    | Probed
    | Synced
    | Applied
    | Offloaded
    | Succeeded
    | Failed
    | Cancelled,
    Field(discriminator="event"),
]
_event: TypeAdapter[Event] = TypeAdapter(Event)


def parse_event(line: str | bytes) -> Event:
    """Read one line of a log. Raises pydantic.ValidationError: the line is no event of this schema."""
    return _event.validate_json(line)


class RunEvent(Frozen):
    """An event of one attempt at a job, and the cursor after it."""

    cursor: str
    job_id: str
    fence: Fence
    event: Event
