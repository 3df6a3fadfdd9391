"""Blocking calls on a few threads."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")
_LISTEN_S = 0.2  # waits are cut into such slices, as a cancellation is raised in a thread only between two waits


def in_parallel(call: Callable[[A], R], arguments: Iterable[A], num_threads: int) -> Iterator[R]:
    """The results of all calls, in order of completion.

    Arguments are taken as threads come free, one at a time. The first error of a call, or of `arguments`, is raised.
    When the caller stops early, no new call begins; results of running calls are discarded.
    """
    threads, left, pending = ThreadPoolExecutor(num_threads, "call"), iter(arguments), set[Future[R]]()
    try:
        while True:
            pending |= {threads.submit(call, argument) for argument in islice(left, num_threads - len(pending))}
            if not pending:
                return
            ended, pending = wait(pending, _LISTEN_S, FIRST_COMPLETED)
            for each in ended:
                yield each.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
