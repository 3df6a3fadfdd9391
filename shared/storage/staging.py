"""Requests between a worker and its host, as files next to a job's log.

Only the host has a store's credentials: the worker requests missing artifacts, and the host stages them in the shared
cache and answers. In the other direction, the host requests a trace of steps.
"""

import errno
from pathlib import Path
from typing import Literal

from pydantic import Field

from longshore.fields import Artifact, Frozen
from shared.errors import CorruptArtifact, DiskFull, InvalidInput
from shared.field_rules import Reason


class StageRequest(Frozen):
    """A worker's request for artifacts. `command`: the number of the session's command that names them; None: the job
    does.
    """

    artifacts: tuple[Artifact, ...] = Field(min_length=1)
    command: int | None = None

    @staticmethod
    def path(log: str) -> Path:
        return Path(log).with_name("wanted.json")


class StageAnswer(Frozen):
    """The answer: everything is in the cache; or the error, in the form of a job's `failed` event."""

    kind: Literal["invalid_input", "corrupt_artifact", "disk_full", "error"] | None = None
    message: Reason = ""

    @staticmethod
    def path(log: str) -> Path:
        return Path(log).with_name("staged.json")

    @classmethod
    def of(cls, error: Exception) -> "StageAnswer":
        match error:
            case CorruptArtifact():
                return cls(kind="corrupt_artifact", message=str(error))
            case InvalidInput():
                return cls(kind="invalid_input", message=str(error))
            case DiskFull() | OSError(errno=errno.ENOSPC | errno.EDQUOT):
                return cls(kind="disk_full", message=str(error))
            case _:
                return cls(kind="error", message=str(error))


PROFILE_ID = r"^[0-9a-f]{16}$"
MAX_PROFILED_STEPS = 10


class ProfileRequest(Frozen):
    """A request to a worker for torch's trace of a running job's next optimizer steps.

    `profile_id`: the name of the resulting trace.
    """

    profile_id: str = Field(pattern=PROFILE_ID)
    steps: int = Field(ge=1, le=MAX_PROFILED_STEPS)

    @staticmethod
    def path(log: str) -> Path:
        """The request's path. The host writes the file; rank 0 deletes it when the trace begins."""
        return Path(log).with_name("profile.json")

    def trace(self, log: str) -> Path:
        """The trace's path. Rank 0 writes it atomically: Chrome's JSON, compressed by gzip."""
        return Path(log).with_name(f"profile-{self.profile_id}.json.gz")
