"""The fence: identifies one scheduling of a run's work, so that a worker can refuse an older one."""

from pydantic import Field

from longshore.fields import Frozen


class Fence(Frozen):
    """Identifies one scheduling of a run's work. A worker refuses work with an older fence than its lease's.

    The workflow increments `epoch` at every new lease; `attempt` is Temporal's attempt within an epoch.
    """

    epoch: int = Field(ge=1)
    attempt: int = Field(default=1, ge=1)

    @property
    def label(self) -> str:
        """A path segment that sorts like the fences: `e000003-a01`."""
        return f"e{self.epoch:06d}-a{self.attempt:02d}"

    @classmethod
    def from_label(cls, label: str) -> "Fence":
        """Parse a fence from a path segment. Raises ValueError for any other segment."""
        epoch, attempt = label.split("-")
        fence = cls(epoch=int(epoch.removeprefix("e")), attempt=int(attempt.removeprefix("a")))
        if fence.label != label:
            raise ValueError(f"not a fence: {label}")
        return fence

    def is_older_than(self, other: "Fence") -> bool:
        return (self.epoch, self.attempt) < (other.epoch, other.attempt)
