"""Messages between the ranks of a worker about its work, never tensors: broadcasts, barriers, agreement on faults."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp, Store

from megatron_worker.process.faults import Fault, JobFailed, fault_of
from megatron_worker.process.process_group import backend, start_group

T = TypeVar("T")

# A rank that dies ends the worker (launcher.py, watchdog.py). These timeouts are for a rank that lives but is stuck.
SETUP_PATIENCE = timedelta(hours=6)
STEP_PATIENCE = timedelta(seconds=30)


class AbsentRank(Exception):
    """A rank did not come to an exchange in time, or ended."""


class WorkerRanks:
    """One per process. With one rank, every method is local and free."""

    def __init__(self, store: Store, rank: int, local_rank: int, world_size: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self._store = store
        self._round = 0
        self._group: ProcessGroup | None = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=SETUP_PATIENCE)

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank."""
        if self.world_size == 1:
            assert data is not None
            return data
        # Sent as a tensor of bytes: torch's broadcast of objects would unpickle what it receives.
        length = torch.tensor([len(data or b"")])
        dist.broadcast(length, 0, self._group)
        if not int(length):
            return b""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(length)).byte()
        dist.broadcast(content, 0, self._group)
        return content.numpy().tobytes()

    def total(self, values: list[int]) -> list[int]:
        return self._reduce(values, ReduceOp.SUM)

    def largest(self, values: list[int]) -> list[int]:
        return self._reduce(values, ReduceOp.MAX)

    def barrier(self) -> None:
        self.total([0])

    def exchange(self, text: str, patience: timedelta) -> list[str]:
        """Return every rank's text. It is sent through the store, so that a missing rank is noticed by a timeout.

        Raises AbsentRank: a rank did not come in time.
        """
        if self.world_size == 1:
            return [text]
        self._round += 1
        keys = [f"exchange/{self._round}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], text)
        try:
            self._store.wait(keys, patience)
        except RuntimeError as error:  # each kind of store has its own
            raise AbsentRank(str(error)) from error
        texts = [self._store.get(key).decode() for key in keys]
        # All ranks have completed the last round by now, so the texts of the round before it can be deleted.
        self._store.delete_key(f"exchange/{self._round - 2}/{self.rank}")
        return texts

    def agree(self, action: Callable[[], T]) -> T:
        """Call `action` on every rank; a fault of one rank is raised on all.

        Raises JobFailed: the fault of the lowest rank that has one.
        """
        try:
            result, fault = action(), None
        except Exception as error:
            result, fault = None, _told(error)
        self.settle(fault, SETUP_PATIENCE)
        return result  # type: ignore[return-value]

    def agree_on(self, error: Exception, patience: timedelta = STEP_PATIENCE) -> JobFailed:
        """Agree with the other ranks on an error of this one. Returns it as a JobFailed that all ranks have.

        If a rank is missing, the error itself is raised, and ends this process.
        """
        try:
            self.settle(_told(error), patience)
        except JobFailed as failed:
            return failed
        except AbsentRank:
            raise error from None
        raise AssertionError("a fault was settled as none")

    def settle(self, fault: Fault | None, patience: timedelta) -> None:
        """Raise JobFailed on all ranks if any of them has a fault."""
        for text in self.exchange(fault.model_dump_json() if fault else "-", patience):
            if text != "-":
                raise JobFailed(Fault.model_validate_json(text))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:  # with an error, peers may never come to the end
            dist.destroy_process_group()

    def _reduce(self, values: list[int], op: ReduceOp.RedOpType) -> list[int]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op, self._group)
        return tensor.tolist()


def _told(error: Exception) -> Fault:
    """Print the trace to the worker's output, and return the fault for the user."""
    traceback.print_exception(error)
    return fault_of(error)


def connect_ranks() -> WorkerRanks:
    """Join the ranks that were started with this one; alone, be a group of one."""
    rank, local_rank, world_size = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    store = start_group(backend())
    return WorkerRanks(dist.PrefixStore("longshore", store), rank, local_rank, max(world_size, 1))
