"""Ends of runs: errors as problems in words, cancellation, pause, and the workflow's own result."""

import asyncio

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    FailureError,
    TimeoutError,
    TimeoutType,
    is_cancelled_exception,
)

from longshore.views import Problem, RunStatus
from workflows.policies import FINAL_ERRORS

_KINDS = {
    "InvalidInput": "invalid_input",
    "CorruptArtifact": "corrupt_artifact",
    "StoreUnavailable": "store_unavailable",
    "DiskFull": "disk_full",
    "WorkerLost": "worker_lost",
    "LeaseLost": "worker_lost",
    "HostLeft": "worker_lost",
    "SamplerUnavailable": "sampler_unavailable",
    "SamplerMismatch": "sampler_mismatch",
}
_TIMEOUTS = {TimeoutType.HEARTBEAT: "its host went silent", TimeoutType.SCHEDULE_TO_START: "its host did not take it"}


_COUNTED = {
    "skipped_steps": "skipped: nothing in them was to be learned from, and they changed no weight",
    "failed_steps": "not trained: each has the reason in its own record",
    "equal_reward_steps": "of equal rewards: every trajectory had the same one, which says nothing of any of them",
    "zero_gradient_steps": "without any gradient: they made versions of the policy, and their data changed no weight",
}


def with_counts(notices: tuple[str, ...], **counts: int) -> tuple[str, ...]:
    """Return a run's notices with one on each number of steps, named as in its status, that is not 0."""
    for name, num in counts.items():
        if num:
            steps = f"{num} step{'s were' if num > 1 else ' was'} {_COUNTED[name]}"
            notices = (*(notice for notice in notices if not notice.endswith(_COUNTED[name])), steps)
    return notices


class RunFailed(Exception):
    """The run cannot continue. `problem`: the reason, in words for its user."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class RunCancelled(Exception):
    """The run's job has ended on request."""


def ended_early(status: RunStatus, error: BaseException, is_pausing: bool) -> RunStatus:
    """Return the status of a run that an error, a cancellation or a pause has ended."""
    if isinstance(error, RunCancelled) or is_cancelled_exception(error):
        is_cancelled = workflow.cancellation_reason() is not None or not is_pausing
        return status.model_copy(update={"state": "cancelled" if is_cancelled else "paused"})
    problem = problem_of_error(error)
    workflow.logger.warning("the run failed: %s", problem.message, exc_info=problem.kind == "error")
    return status.model_copy(update={"state": "failed", "problem": problem})


def result_or_raise(status: RunStatus) -> RunStatus:
    """Return a run's status as its workflow's result, or raise what makes the workflow cancelled or failed."""
    match status.state:
        case "cancelled":
            raise asyncio.CancelledError
        case "failed":
            assert status.problem is not None
            raise ApplicationError(status.problem.message, type=status.problem.kind, non_retryable=True)
    return status


def problem_of_error(error: BaseException) -> Problem:
    """Describe an error in words for the run's user, without a stack trace."""
    match error:
        case RunFailed():
            return error.problem
        case ActivityError(cause=ApplicationError() as cause):
            return Problem(kind=_KINDS.get(cause.type or "", "error"), message=_text(cause))
        case ActivityError(cause=TimeoutError() as cause):
            why = _TIMEOUTS.get(cause.type, "it took too long") if cause.type is not None else "it took too long"
            return Problem(kind="timeout", message=f"{error.activity_type}: {why}")
        case FailureError():
            return Problem(kind="error", message=error.message)
        case _:
            return Problem(kind="error", message=f"{type(error).__name__}: {error}")


def is_final(error: ActivityError) -> bool:
    """Return True for an error that a retry would only repeat."""
    return isinstance(error.cause, ApplicationError) and error.cause.type in FINAL_ERRORS


def is_mismatch(error: ActivityError) -> bool:
    """Return True if a sampler's answer shows that its weights are not the trainer's."""
    return isinstance(error.cause, ApplicationError) and error.cause.type == "SamplerMismatch"


def was_cancelled(error: BaseException) -> bool:
    return isinstance(error, ActivityError) and isinstance(error.cause, CancelledError)


def _text(error: ApplicationError) -> str:
    if error.type in _KINDS or error.type is None:
        return error.message
    return f"{error.type}: {error.message}"
