"""A GPU or sampler host polls for leases only while it is healthy (activities/hosts/standing.py)."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Self

from temporalio.worker import Worker

from activities.hosts.standing import Standing
from shared.storage.host_states import BEAT_S

_LOOK_S = 0.5
_EXAMINE_AGAIN_S = 60.0  # a host that lacks something
_log = logging.getLogger("longshore.host")


@dataclass(frozen=True)
class IdleExit:
    """The exit of a host that has had no lease for `after_s` seconds: `leave` is called once it has stopped polling."""

    after_s: float
    leave: Callable[[], object]


class LeasePolling:
    """Checks this host, and polls for leases while its health allows that. Used like a Worker.

    `make`: makes a worker of the lease queue, which is shut down if a worker process was lost. Another one is made
    after the host was checked again. `idle`: ends the host after a time without a lease. `begun`: called when it polls.
    """

    def __init__(
        self,
        standing: Standing,
        make: Callable[[], Worker],
        idle: IdleExit | None = None,
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self._standing = standing
        self._make = make
        self._idle = idle
        self._begun = begun
        self._group = asyncio.TaskGroup()  # an error of its tasks ends the host
        self._tasks: list[asyncio.Task[None]] = []
        self._doubted = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._standing.leave = lambda: loop.call_soon_threadsafe(self._doubted.set)
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(self._beat()), self._group.create_task(self._poll())]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()
        await asyncio.to_thread(self._standing.retire)
        await self._group.__aexit__(*error)  # type: ignore[arg-type]

    async def shutdown(self) -> None:
        """Ask for no more leases, and end the one in hand."""
        self._standing.is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.to_thread(self._standing.beat)
            await asyncio.sleep(BEAT_S)

    async def _poll(self) -> None:
        # A host that has passed its check recently takes leases at once, and is checked concurrently.
        is_beside = not self._standing.state.lacks
        while True:
            self._doubted.clear()
            if is_beside:
                self._tasks.append(self._group.create_task(asyncio.to_thread(self._standing.examine)))
            else:
                await asyncio.to_thread(self._standing.examine)
            is_beside = False
            again_at = time.monotonic() + _EXAMINE_AGAIN_S
            while not self._doubted.is_set() and not self._is_due(again_at):
                if self._standing.polls:
                    leaves = await self._ask(again_at)
                else:
                    await asyncio.sleep(_LOOK_S)
                    leaves = self._is_idle()
                if leaves and self._idle is not None:
                    _log.info("no lease for %g s: this host leaves", self._idle.after_s)
                    self._idle.leave()
                    return

    async def _ask(self, again_at: float) -> bool:
        """Poll until a worker was lost, or the host is idle. Returns True if the host is to leave.

        An idle host stops polling first. If Temporal still gives it a lease, it returns the lease at once without
        starting anything, and polls again.
        """
        async with self._make():
            self._begun()
            self._standing.asks()
            await self._until_left(again_at)
            num_offered, leaves = self._standing.num_offered, self._is_idle(close=True)
        self._standing.is_closing = False
        return leaves and self._standing.num_offered == num_offered

    def _is_idle(self, close: bool = False) -> bool:
        return self._idle is not None and self._standing.is_idle(self._idle.after_s, close)

    def _is_due(self, again_at: float) -> bool:
        return bool(self._standing.state.lacks) and time.monotonic() > again_at

    async def _until_left(self, again_at: float) -> None:
        """Wait until a worker was lost, or a host without a lease that lacks something is to be checked again."""
        while not self._is_idle() and not (
            self._standing.state.lacks
            and not self._standing.holds_lease
            and (self._is_due(again_at) or not self._standing.polls)
        ):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubted.wait(), _LOOK_S)
                return


@asynccontextmanager
async def polling(*workers: Worker | LeasePolling) -> AsyncIterator[None]:
    """Poll with all workers, and stop all together, so that none takes a new lease of a run that another gives up."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        try:
            yield
        finally:
            await asyncio.gather(*(worker.shutdown() for worker in workers))
