"""Faults: reasons why a job cannot continue, in words for its user."""

import errno
from typing import Literal

from longshore.fields import Frozen
from shared.errors import CorruptArtifact, DiskFull, InvalidInput, LongshoreError

Kind = Literal["invalid_input", "corrupt_artifact", "not_finite", "disk_full", "stale_fence", "crowded", "error"]


class Fault(Frozen):
    kind: Kind
    message: str


class JobFailed(Exception):
    """A fault that all ranks know. The runner ends the job in the usual order, with a `failed` event."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)


class NotFinite(JobFailed):
    """A loss, or a gradient's norm, is not finite. No weight has changed."""

    def __init__(self, what: str, value: float) -> None:
        self.what = f"{what} is {value}"
        super().__init__(Fault(kind="not_finite", message=f"{self.what}; no weight has changed"))


class CancelledEarly(Exception):
    """The job was cancelled before its first step."""


def fault_of(error: Exception) -> Fault:
    match error:
        case JobFailed():
            return error.fault
        case CorruptArtifact():
            return Fault(kind="corrupt_artifact", message=str(error))
        case InvalidInput():
            return Fault(kind="invalid_input", message=str(error))
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            place = f" while writing {error.filename}" if error.filename else ""
            return Fault(kind="disk_full", message=f"no space is left on the worker's disk{place}")
        case DiskFull():
            return Fault(kind="disk_full", message=str(error))
        case LongshoreError():
            return Fault(kind="error", message=str(error))
        case _ if "No space left on device" in str(error):  # safetensors wraps the errno away
            return Fault(kind="disk_full", message="no space is left on the worker's disk")
        case _:
            first_line = (str(error).splitlines() or [""])[0]
            return Fault(kind="error", message=f"{type(error).__name__}: {first_line}")
