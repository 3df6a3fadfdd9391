"""Messages about a session between service, workflow and hosts. Commands and results themselves are in the store."""

from pydantic import Field

from longshore.fields import Artifact, Frozen
from shared.models.shape import ModelShape
from shared.runs.status import RunStatus

MAX_WAITING = 256
"""The most commands of a session that may wait; further ones are refused, for the client to send again later."""
MAX_NUMBER = 99_999_999
MOST_TOLD_BYTES = 64 << 10
"""Commands and results of at most so many bytes come along with the news of them (activities/bells.py)."""


class CommandArrived(Frozen):
    """Tells a session's workflow that the command of this number has been stored."""

    number: int = Field(ge=1, le=MAX_NUMBER)


class SessionState(Frozen):
    """The state that a session's workflow passes to its next execution, whose history starts empty.

    Attributes:
        next: the number of the next command to execute, or a later one.
        waiting: the numbers of commands that are known to wait.
        avoid: queues of hosts on which a worker of the session was lost while it started.
    """

    model: Artifact
    shape: ModelShape
    adapter: Artifact | None = None
    next: int = 1
    waiting: tuple[int, ...] = ()
    closing: bool = False
    epoch: int = 0
    avoid: tuple[str, ...] = ()
    status: RunStatus
