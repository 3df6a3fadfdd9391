"""The service's connection to Temporal: made at first use, and a server that is away is an error of ours."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio.client import Client
from temporalio.common import Priority
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from service.errors import TemporalUnavailable
from service.seals import UNSEALED
from service.temporal_client import connect_once
from shared.settings import Settings

PATIENCE = timedelta(seconds=5)
QUERY_PATIENCE = timedelta(seconds=2)
# A thousand runs are listed in a tenth of a second, or in half a minute while all start. A listing that is given up
# goes on in the server: asked again and again, it would never end.
LIST_PATIENCE = timedelta(seconds=60)
AWAY = (
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.RESOURCE_EXHAUSTED,
)
# What the server itself says of an update that came to nothing: its workflow ended under it; or a workflow task was
# answered without it, as one that was under way when the server was killed. The next one like it is as new.
LOST_UPDATES = ("AcceptedUpdateCompletedWorkflow", "UnprocessedUpdate")


def share_of(tenant: str) -> Priority:
    """What a tenant's workflow is started with, and all that it starts inherits: of tasks that wait in a queue, such as
    leases of GPU hosts, tenants get theirs by turns. The server has to be told (docs/operations.md).
    """
    return Priority(fairness_key=tenant)


class Temporal:
    """One client for everything that the service asks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._address = settings.temporal_address
        self._client: Client | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """The client. Inside the block, calls that get no answer raise TemporalUnavailable."""
        if self._client is None:
            self._client = await self._connect()
        try:
            yield self._client
        except RPCError as error:
            if error.status in AWAY:
                raise TemporalUnavailable(self._away) from error
            raise
        except ApplicationError as error:
            if error.type == UNSEALED:
                message = f"the Temporal server at {self._address} answers with what this installation did not seal"
                raise TemporalUnavailable(message) from error
            raise

    async def check(self) -> None:
        """Raises TemporalUnavailable when the server does not answer."""
        async with self.client() as client:
            await client.service_client.check_health(timeout=QUERY_PATIENCE)

    async def _connect(self) -> Client:
        try:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                return await connect_once(self._settings)
        except (RuntimeError, TimeoutError) as error:
            raise TemporalUnavailable(self._away) from error

    @property
    def _away(self) -> str:
        return f"the Temporal server at {self._address} does not answer"
