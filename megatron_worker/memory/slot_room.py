"""Counts the bytes that slots hold on a device, against the bytes that there are for them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from longshore.training import LINEARS, Full, Lora
from megatron_worker.process.faults import Fault, JobFailed

PASSES_SHARE = 10
"""By default a tenth of a CUDA device's memory is left to passes; the base and slots have the rest."""


@dataclass(frozen=True)
class SlotNeed:
    """Bytes of a slot that is trained, by part, each on the rank with the most.

    `weights` are also those of the adapter that is its loss's reference.
    """

    trainable: Lora | Full
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        match self.trainable:
            case Lora(rank=rank, targets=targets):
                beside = "every linear" if targets == LINEARS else ", ".join(targets)
                what = f"a slot of rank {rank} beside {beside}"
            case Full():
                what = "a slot of all weights"
        parts = f"weights {self.weights:,}, gradients {self.gradients:,}, optimizer state {self.optimizer:,}"
        return f"{what} takes {self.total:,} bytes on a rank ({parts})"


@dataclass
class SlotRoom:
    """The slots of a rank's device. Every rank has the same numbers, those of the fullest one.

    Attributes:
        limit: bytes for slots; None: no limit.
        needs: what the slots of runs in hand take, and those that are kept, by run.
        on_device: the runs whose slots are on the device, or will be as soon as they are made.
    """

    limit: int | None = None
    needs: dict[str, SlotNeed] = field(default_factory=dict)
    on_device: set[str] = field(default_factory=set)

    def has_room(self, run_id: str, need: SlotNeed) -> bool:
        """Return True if a run's slots fit on the device together with all others."""
        return self.limit is None or need.total <= self.limit - self._of_others(run_id)

    def reserve(self, run_id: str, need: SlotNeed) -> None:
        self.needs[run_id] = need
        self.on_device.add(run_id)

    def forget(self, run_id: str) -> None:
        self.needs.pop(run_id, None)
        self.on_device.discard(run_id)

    def total(self, run_ids: Iterable[str]) -> int:
        """Return the bytes of some runs' slots, wherever they are."""
        return sum(self.needs[run_id].total for run_id in run_ids)

    def check_alone(self, need: SlotNeed) -> None:
        """Raise JobFailed (`invalid_input`) if a slot would not fit on an empty device."""
        if self.limit is not None and need.total > self.limit:
            message = f"trainable: {need}, and there are {self.limit:,} for slots: none of its kind fits"
            raise JobFailed(Fault(kind="invalid_input", message=message))

    def crowded(self, run_id: str, need: SlotNeed) -> JobFailed:
        """Return the fault of a run whose slot would fit alone, but not with the others."""
        assert self.limit is not None
        message = (
            f"{need}; of {self.limit:,} for slots other runs have {self._of_others(run_id):,}: "
            f"{self.limit // need.total} of its kind fit at once"
        )
        return JobFailed(Fault(kind="crowded", message=message))

    def _of_others(self, run_id: str) -> int:
        return self.total(self.on_device - {run_id})
