"""What one tenant may occupy at once of what all of them share: what it asks beyond that waits in a line of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.errors import Busy


class FairShare:
    """Places of one kind, a number for each tenant, in this process."""

    def __init__(self, kind: str, places: int, patience_s: float) -> None:
        """
        Args:
            kind: what takes a place, for the message.
            places: of one tenant, at once.
            patience_s: how long one more waits for a place.
        """
        self._kind = kind
        self._places = places
        self._patience_s = patience_s
        self._waiting = 8 * places
        self._tenants: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place. Raises Busy when none came free in time, or too many wait for one already."""
        free, users = self._tenants.get(tenant, (asyncio.Semaphore(self._places), 0))
        if users >= self._places + self._waiting:
            raise self._busy()
        self._tenants[tenant] = free, users + 1
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    await free.acquire()
            except TimeoutError:
                raise self._busy() from None
            try:
                yield
            finally:
                free.release()
        finally:
            free, users = self._tenants[tenant]
            if users == 1:
                del self._tenants[tenant]
            else:
                self._tenants[tenant] = free, users - 1

    def _busy(self) -> Busy:
        return Busy(f"{self._places} {self._kind} of yours are going on, and as many as may wait do: ask again later")
