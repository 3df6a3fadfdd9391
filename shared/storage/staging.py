"""What a worker and its host ask of each other by files beside a job's log.

The host alone has a store's credentials: the worker writes what its job lacks, the host stages it in the cache that
both share, and answers. The other way round the host asks for a trace of steps.
"""

import errno
from pathlib import Path
from typing import Literal

from pydantic import Field

from longshore.fields import Artifact, Frozen, Reason
from shared.errors import CorruptArtifact, DiskFull, InvalidInput


class StageRequest(Frozen):
    """What a worker lacks. `command`: the number of the session's command that names it; None: the job does."""

    artifacts: tuple[Artifact, ...] = Field(min_length=1)
    command: int | None = None

    @staticmethod
    def path(log: str) -> Path:
        return Path(log).with_name("wanted.json")


class StageAnswer(Frozen):
    """All is in the cache; or why not, as a job's `failed` event says it."""

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
    """Asks a worker for torch's trace of the next optimizer steps of a live job, by a file beside its log.

    `profile_id`: names the trace that answers it.
    """

    profile_id: str = Field(pattern=PROFILE_ID)
    steps: int = Field(ge=1, le=MAX_PROFILED_STEPS)

    @staticmethod
    def path(log: str) -> Path:
        """Where the host writes it. Rank 0 deletes it when it begins."""
        return Path(log).with_name("profile.json")

    def trace(self, log: str) -> Path:
        """Where rank 0 writes the trace, by rename: Chrome's JSON, as gzip."""
        return Path(log).with_name(f"profile-{self.profile_id}.json.gz")
