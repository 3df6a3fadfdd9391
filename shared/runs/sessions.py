"""A session's commands between service, workflow and hosts. What they say is in the store (jobs/commands.py)."""

from typing import Literal

from pydantic import Field

from shared.contract import Artifact, Frozen, Sha256
from shared.models.shape import ModelShape
from shared.runs.status import RunStatus

MAX_WAITING = 256
"""Commands of a session that may wait: a client that is further ahead has to come back."""


class CommandRef(Frozen):
    """A command that was accepted. `sha256`: of its bytes in the store (`RunKeys.command`)."""

    number: int = Field(ge=1, le=99_999_999)
    kind: Literal["forward", "forward_backward", "optim_step", "save_state"]
    sha256: Sha256
    publish: bool = False

    @property
    def changes_state(self) -> bool:
        return self.kind != "forward"


class CommandStatus(Frozen):
    """Where a command is: `done` and `failed` ones have a result in the store, `dropped` ones may be sent again.

    One that never came is `unknown`.
    """

    number: int
    state: Literal["waiting", "done", "failed", "dropped", "unknown"]
    message: str | None = None


class SessionState(Frozen):
    """The state that a session's workflow passes to its next execution, whose history starts empty.

    Attributes:
        next: the number of the command that is done next.
        commands: those that wait, and those that whoever goes on from a checkpoint has to do again.
        saved: the commands of the last two checkpoints, the older one first.
    """

    model: Artifact
    shape: ModelShape
    adapter: Artifact | None = None
    next: int = 1
    commands: tuple[CommandRef, ...] = ()
    saved: tuple[int, int] = (0, 0)
    closing: bool = False
    epoch: int = 0
    status: RunStatus
