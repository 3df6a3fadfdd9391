"""How a run can end before its time, and what is told of it."""

from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    FailureError,
    TimeoutError,
    TimeoutType,
)

from shared.runs import Problem
from workflows.policies import FINAL_ERRORS

_KINDS = {
    "InvalidInput": "invalid_input",
    "CorruptArtifact": "corrupt_artifact",
    "StoreUnavailable": "store_unavailable",
    "DiskFull": "disk_full",
    "WorkerLost": "worker_lost",
}
_TIMEOUTS = {
    TimeoutType.HEARTBEAT: "its host went silent",
    TimeoutType.SCHEDULE_TO_START: "its host did not take it",
}


class RunFailed(Exception):
    """The run cannot go on. `problem` is what its user is told."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class RunCancelled(Exception):
    """The run's job has ended because it was asked to."""


def problem_of(error: BaseException) -> Problem:
    """An error in words for the run's user: without a stack trace."""
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
    """Whether doing it again could only fail again."""
    return isinstance(error.cause, ApplicationError) and error.cause.type in FINAL_ERRORS


def was_cancelled(error: BaseException) -> bool:
    return isinstance(error, ActivityError) and isinstance(error.cause, CancelledError)


def _text(error: ApplicationError) -> str:
    if error.type in _KINDS or error.type is None:
        return error.message
    return f"{error.type}: {error.message}"
