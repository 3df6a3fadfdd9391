"""Leases of samplers that answer users: a model's serving workflow is started, and asked for its sampler."""

import asyncio
import time
from dataclasses import dataclass

from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from service.temporal import LOST_UPDATES, PATIENCE, Temporal, causes_of
from shared.errors import InvalidInput, SamplerUnavailable
from shared.jobs.leases import LeaseGrant, SamplerKey
from shared.runs.serving import ServeRequest, ServingStart
from shared.runs.start import timing_of
from shared.settings import Settings
from shared.storage.paths import content_key

SERVING_WORKFLOW = "ServingWorkflow"
_CONTROL_PATIENCE_S = 15.0  # beyond a question's own: of hosts that run workflows
_MAX_REUSE_S = 10.0
WAITS_S = 15.0
_TRIES = 3
_REFUSALS = ("invalid_input", "corrupt_artifact")


@dataclass(frozen=True)
class SamplerLease:
    """A sampler's lease: its serving workflow, and the grant with the host's queue. Good until the sampler is lost."""

    serving_id: str
    grant: LeaseGrant


class SamplerLeases:
    """One question of a model asks for the lease; others wait for the same answer, and use it for a few seconds.

    So many questions at once cost one update: Temporal takes ten of a workflow at a time.
    """

    def __init__(self, settings: Settings, temporal: Temporal) -> None:
        self._settings = settings
        self._temporal = temporal
        self._asking: dict[str, asyncio.Task[LeaseGrant]] = {}
        self._asked_at: dict[str, float] = {}
        self._known: dict[str, tuple[LeaseGrant, float]] = {}
        self._reuse_s = min(_MAX_REUSE_S, settings.serving.idle_s / 3)

    async def lease(self, key: SamplerKey) -> SamplerLease:
        """A sampler that is up.

        Raises:
            SamplerUnavailable: none was, in time. InvalidInput: none can use the model.
            TemporalUnavailable: the server, or every host that runs workflows, is away.
        """
        serving_id = f"serving-{content_key(key, self._settings.shape)}"
        grant, until = self._known.get(serving_id, (None, 0.0))
        if grant is None or time.monotonic() > until:
            grant = await asyncio.shield(self._ask_once(serving_id, key))
        return SamplerLease(serving_id, grant)

    def forget(self, lease: SamplerLease) -> None:
        """The sampler was lost, for all one knows."""
        self._known.pop(lease.serving_id, None)

    def waiting(self) -> frozenset[str]:
        """The serving workflows of models whose questions have waited for longer than a sampler takes to start."""
        now = time.monotonic()
        return frozenset(serving_id for serving_id, since in self._asked_at.items() if now - since > WAITS_S)

    def _ask_once(self, serving_id: str, key: SamplerKey) -> asyncio.Task[LeaseGrant]:
        if serving_id not in self._asking:
            task = asyncio.create_task(self._ask(serving_id, key))
            self._asking[serving_id] = task
            self._asked_at[serving_id] = time.monotonic()
            task.add_done_callback(lambda task: self._asked(serving_id, task))
        return self._asking[serving_id]

    def _asked(self, serving_id: str, task: asyncio.Task[LeaseGrant]) -> None:
        del self._asking[serving_id], self._asked_at[serving_id]
        if not task.cancelled() and task.exception() is None:
            self._known[serving_id] = (task.result(), time.monotonic() + self._reuse_s)

    async def _ask(self, serving_id: str, key: SamplerKey) -> LeaseGrant:
        patience_s = self._settings.serving.patience_s
        async with self._temporal.client() as client:
            try:
                async with asyncio.timeout(patience_s + _CONTROL_PATIENCE_S):
                    for _ in range(_TRIES):
                        if grant := await self._serve(client, serving_id, patience_s):
                            return grant
                        await self._start(client, serving_id, key)
            except TimeoutError:
                raise SamplerUnavailable("no control host answers") from None
        raise SamplerUnavailable("the sampler's workflow ended as often as it was started")

    async def _serve(self, client: Client, serving_id: str, patience_s: float) -> LeaseGrant | None:
        """Ask the serving workflow for its sampler; None where there is no workflow, or it has just ended."""
        handle = client.get_workflow_handle(serving_id)
        try:
            request = ServeRequest(patience_s=patience_s)
            grant: LeaseGrant = await handle.execute_update("serve", request, result_type=LeaseGrant)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return None
            raise
        except WorkflowUpdateFailedError as error:
            _refuse(error)
            return None
        return grant

    async def _start(self, client: Client, serving_id: str, key: SamplerKey) -> None:
        settings = self._settings
        start = ServingStart(
            serving_id=serving_id,
            key=key,
            shape=settings.shape,
            timing=timing_of(settings),
            idle_s=settings.serving.idle_s,
            share_s=settings.serving.share_s,
        )
        await client.start_workflow(
            SERVING_WORKFLOW,
            start,
            id=serving_id,
            task_queue=settings.control_queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            rpc_timeout=PATIENCE,
        )


def _refuse(error: WorkflowUpdateFailedError) -> None:
    """Raise what a question was refused with, unless it came to nothing."""
    for cause in causes_of(error):
        match cause:
            case ApplicationError(type=kind) if kind in LOST_UPDATES:
                return
            case ApplicationError(type=kind) if kind in _REFUSALS:
                raise InvalidInput(cause.message, "model") from None
            case ApplicationError():
                raise SamplerUnavailable(cause.message) from None
    raise error
