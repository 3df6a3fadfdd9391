"""An activity's heartbeats, and its cancellation, which activities on threads see only where they look for it.

By default Temporal's SDK raises a cancellation in an activity's thread between any two instructions, also within the
code of a lock, which may then stay locked for ever. So every activity on a thread is defined by `on_thread`, without
that, and whatever waits or works for long looks about once a second: `stop_if_cancelled`.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from typing import ParamSpec, TypeVar

from pydantic import BaseModel
from temporalio import activity
from temporalio.exceptions import CancelledError

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
BEAT_EVERY_S = 1.0
LOOK_EVERY_S = 0.2  # the length of the slices of a wait
HOST_LEAVES = "the host is shutting down"
"""The error message of work that is given up because the host shuts down."""
_log = logging.getLogger(__name__)
_told: contextvars.ContextVar[list[BaseModel]] = contextvars.ContextVar("told")


def tell(progress: BaseModel) -> None:
    """Send this with the current activity's heartbeats from now on: whoever describes its workflow sees the newest."""
    if (told := _told.get(None)) is not None:
        told[:] = [progress]


def on_thread(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Define a function as an activity of this name, on a thread, whose heartbeats are sent as long as it runs.

    Temporal delivers cancellations with heartbeats, so it learns of one within about a second. Outside an activity it
    is called directly.
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **options: P.kwargs) -> R:
            _told.set([])  # before the heartbeat's thread copies the context
            with _beside(_beat, "heartbeat"):
                return function(*args, **options)

        return activity.defn(name=name, no_thread_cancel_exception=True)(run)

    return define


def _beat(ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            activity.heartbeat(*_told.get())
        except Exception as error:  # a busy event loop, or a server that is away: the next heartbeat may succeed
            _log.warning("a heartbeat was not sent: %r", error)
        ended.wait(BEAT_EVERY_S)


@contextmanager
def when_cancelled(end: Callable[[], object]) -> Iterator[None]:
    """Call `end` on another thread, again and again, if the current activity is cancelled before the block ends.

    `end` has a call fail that blocks, for example by shutting its connection down. It must not block itself.
    """

    def watch(ended: threading.Event) -> None:
        while not ended.wait(LOOK_EVERY_S):
            if activity.is_cancelled():
                end()  # each time, as there may be a connection only now

    with _beside(watch, "cancellation"):
        yield


@contextmanager
def _beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Do work of the current activity on another thread, until the block ends and sets the event."""
    if not activity.in_activity():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work, ended), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def is_cancelled() -> bool:
    """Return True if the current activity is cancelled; False outside an activity, as in a local run."""
    return activity.in_activity() and activity.is_cancelled()


def stop_if_cancelled() -> None:
    """Raise CancelledError if the current activity is cancelled, as it also is when its host leaves."""
    if is_cancelled():
        raise CancelledError


def cancellation_check() -> Callable[[], None]:
    """Return a `stop_if_cancelled` of the current activity that any thread may call: for code below the activities."""
    context = contextvars.copy_context()
    return lambda: context.copy().run(stop_if_cancelled)  # a copy, as two threads may not be in one context


def pause(seconds: float) -> None:
    """Sleep, but raise CancelledError as soon as the current activity is cancelled."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        stop_if_cancelled()
        time.sleep(min(left_s, LOOK_EVERY_S))
    stop_if_cancelled()


def in_parallel(call: Callable[[A], R], arguments: Iterable[A], num_threads: int) -> Iterator[R]:
    """The results of all calls, in order of completion. Calls belong to the current activity, and see its cancellation.

    Arguments are taken as threads come free, one at a time. The first error of a call, or of `arguments`, is raised.
    When the caller stops early, or is cancelled, no new call begins; results of running calls are discarded.
    """
    threads, left, pending = ThreadPoolExecutor(num_threads, "call"), iter(arguments), set[Future[R]]()
    context = contextvars.copy_context()
    try:
        while True:
            taken = islice(left, num_threads - len(pending))
            pending |= {threads.submit(context.copy().run, call, argument) for argument in taken}
            if not pending:
                return
            ended, pending = wait(pending, LOOK_EVERY_S, FIRST_COMPLETED)
            stop_if_cancelled()
            for each in ended:
                yield each.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def host_is_leaving() -> bool:
    """True when this host shuts down, so that another host must continue the work. A local run has no host."""
    if not activity.in_activity():
        return False
    details = activity.cancellation_details()
    return activity.is_worker_shutdown() or (details is not None and details.worker_shutdown)
