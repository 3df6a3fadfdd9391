"""The heartbeat that all long activities share: a thread that beats however long one call of the work takes."""

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from temporalio import activity

BEAT_EVERY_S = 1.0
HOST_LEAVES = "the host is shutting down"
"""The reason that a host gives for ending a lease when it shuts down: nothing was lost that ought to have stayed."""
_log = logging.getLogger(__name__)


@contextmanager
def beating(detail: Callable[[], int | str | None] = lambda: None) -> Iterator[None]:
    """Beat once a second until the block ends; `detail` is asked for at every beat.

    Cancellation reaches an activity with a beat, so an activity inside this block hears of it within about a second.
    Outside an activity, as when one is called by hand, nobody is told.
    """
    if not activity.in_activity():
        yield
        return
    ended = threading.Event()
    context = contextvars.copy_context()  # the activity that this thread belongs to

    def beat() -> None:
        while not ended.is_set():
            try:
                activity.heartbeat(detail())
            except Exception as error:  # a busy event loop or a server that is away: the next beat may do better
                _log.warning("a heartbeat was not sent: %r", error)
            ended.wait(BEAT_EVERY_S)

    thread = threading.Thread(target=context.run, args=(beat,), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def host_is_leaving() -> bool:
    """True when this host shuts down, so that the work has to go on elsewhere."""
    details = activity.cancellation_details()
    return activity.is_worker_shutdown() or (details is not None and details.worker_shutdown)
