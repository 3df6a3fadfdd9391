"""How a worker has its host stage artifacts, by two files beside a job's log: the host alone has a store's credentials.

The worker writes what its job lacks, the host stages it in the cache that both share, and answers.
"""

import errno
from pathlib import Path
from typing import Literal

from pydantic import Field

from longshore.fields import Artifact, Frozen
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
    message: str = ""

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
