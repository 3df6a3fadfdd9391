"""Calls that wait for a server, on a few threads: results as they come, and no waiting for what is no longer wanted."""

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

A = TypeVar("A")
R = TypeVar("R")
_LISTEN_S = 0.2  # an activity's cancellation is raised in its thread between two waits, and never within one


class _Shared(Iterator[A]):
    """An iterator that threads take turns at."""

    def __init__(self, items: Iterable[A]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> A:
        with self._lock:
            return next(self._items)


def in_parallel(call: Callable[[A], R], arguments: Iterable[A], num_threads: int) -> Iterator[R]:
    """The results of all calls, in the order in which they end.

    Arguments are taken as threads come free, one at a time. The first error of a call, or of `arguments`, is raised.
    When the caller stops early no new call begins; those under way end on their own, and are forgotten.
    """
    shared, stopped = _Shared(arguments), threading.Event()
    told: SimpleQueue[Callable[[], R] | None] = SimpleQueue()  # None: a thread has found nothing more to do

    def work() -> None:
        try:
            for argument in shared:
                if stopped.is_set():
                    return
                result = call(argument)
                told.put(lambda result=result: result)  # type: ignore[misc]
            told.put(None)
        except BaseException as error:  # the edge of the thread: raised again in the caller's
            told.put(_raising(error))

    for _ in range(num_threads):
        threading.Thread(target=work, name="call", daemon=True).start()
    try:
        num_working = num_threads
        while num_working:
            try:
                outcome = told.get(timeout=_LISTEN_S)
            except Empty:
                continue
            if outcome is None:
                num_working -= 1
            else:
                yield outcome()
    finally:
        stopped.set()


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def outcome() -> NoReturn:
        raise error

    return outcome
