"""Calls in a thread, for work that waits for a store, a disk or a network while passes of other jobs are done."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from megatron_worker.process.faults import CancelledEarly
from megatron_worker.process.ranks import WorkerRanks

T = TypeVar("T")
Check = Callable[[], None]
"""Raises Abandoned if nobody waits for the result of the call any more; a call checks this now and then."""
Awaited = Callable[[], bool]
"""Returns True on rank 0 once the thing that a job waits for is there. It does not block."""
_PATIENCE_S = 0.02  # a step whose inputs are cached needs less, and so does not yield


class Abandoned(Exception):
    """Nobody waits for the result of this call any more."""


class BackgroundCall(Generic[T]):
    """A call in a separate daemon thread."""

    def __init__(self, call: Callable[[Check], T]) -> None:
        self._is_abandoned = threading.Event()
        self._future: Future[T] = Future()
        self.result = self._future.result
        threading.Thread(target=self._do, args=(call,), name="background", daemon=True).start()

    def is_done(self, patience_s: float = 0.0) -> bool:
        """Return True if the call has ended, or ends within `patience_s` seconds."""
        return bool(wait([self._future], patience_s).done)

    def abandon(self) -> None:
        """Make the call's next check raise. This does not wait for the thread."""
        self._is_abandoned.set()

    def _do(self, call: Callable[[Check], T]) -> None:
        try:
            self._future.set_result(call(self._check))
        except BaseException as error:
            self._future.set_exception(error)

    def _check(self) -> None:
        if self._is_abandoned.is_set():
            raise Abandoned


def in_background(
    call: Callable[[Check], T], ranks: WorkerRanks, cancelled: Callable[[], bool]
) -> Generator[Awaited, None, T]:
    """Make a call on every rank, in a thread. Yields as long as some rank's has not ended, and returns the result.

    Args:
        call: it is given a check, to be called as often as it can end early. It may use no collective.

    Raises:
        JobFailed: the call failed on some rank.
        CancelledEarly: the job was cancelled first. The thread ends at its next check.
    """
    background = BackgroundCall(call)
    try:
        while ranks.largest([int(not background.is_done(_PATIENCE_S))])[0]:
            if cancelled():
                raise CancelledEarly
            yield background.is_done
        return ranks.agree(background.result)
    finally:
        background.abandon()
