"""Models that nobody has trained yet: found and checked by the control host, so that samplers can serve them."""

import time
from datetime import timedelta

from temporalio.client import WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy

from service.runs.runs import cause_of
from service.temporal import PATIENCE, Temporal, share_of
from shared.contract import Artifact
from shared.runs.start import ModelRequest, ResolvedModel
from shared.settings import Settings
from shared.storage.paths import content_key

UNTRAINED_MODEL_WORKFLOW = "UntrainedModelWorkflow"
_PATIENCE = timedelta(hours=2)  # a large model is downloaded first
_TRUSTED_S = 600.0


class UntrainedModels:
    """Asks once for all who want the same model, and trusts the answer for ten minutes."""

    def __init__(self, settings: Settings, temporal: Temporal) -> None:
        self._queue = settings.control_queue
        self._temporal = temporal
        self._known: dict[tuple[str, str], tuple[float, Artifact]] = {}

    async def resolve(self, tenant: str, uri: str) -> Artifact:
        """The files of a hub id, folder or URI that this tenant may read.

        Raises:
            InvalidInput: it is no model that can be used here. TemporalUnavailable: nobody to ask.
        """
        since, known = self._known.get((tenant, uri), (0.0, None))
        if known is not None and time.monotonic() - since < _TRUSTED_S:
            return known
        request = ModelRequest(uri=uri, tenant=tenant)
        async with self._temporal.client() as client:
            handle = await client.start_workflow(
                UNTRAINED_MODEL_WORKFLOW,
                request,
                id=f"untrained-model-{content_key(self._queue, request)}",
                task_queue=self._queue,
                priority=share_of(tenant),
                execution_timeout=_PATIENCE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                result_type=ResolvedModel,
                rpc_timeout=PATIENCE,
            )
            try:
                found: ResolvedModel = await handle.result()
            except WorkflowFailureError as error:
                raise cause_of(error) from None
        self._known[tenant, uri] = time.monotonic(), found.model
        return found.model
