"""Sends updates to runs' workflows. An update may be sent repeatedly, and takes effect once."""

import asyncio
from datetime import timedelta
from typing import Any

from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from longshore.fields import Frozen
from service.accounts import audit
from service.errors import Conflict, TemporalUnavailable
from service.runs.runs import Runs
from service.temporal import LOST_UPDATES, Temporal, causes_of
from shared.errors import InvalidInput
from shared.runs.requests import RunRecord

_PATIENCE = timedelta(seconds=20)
_TRIES, _PAUSE_S = 4, 0.2


async def update_run(
    runs: Runs, temporal: Temporal, record: RunRecord, name: str, *messages: Frozen, place: str = "", sure: bool = False
) -> Any:
    """Update a run's workflow. A lost update is sent again: the run may just have moved on to a new execution, or
    Temporal may have been killed. A run that was paused while its client was away is resumed for new work.

    Args:
        place: the field that a refusal is about.
        sure: the caller assumes that Temporal knows the run, so this is not checked first.

    Raises:
        InvalidInput, Conflict: the run refuses it, or has ended.
        TemporalUnavailable: no host takes it.
        QuotaExceeded: the run has to be resumed, and has no place.
    """
    run_id = record.run_id

    async def is_resumed() -> bool:
        return name != "finish" and await runs.resume_for_client(record.tenant, run_id)

    audit.touched(run_id)
    if not sure:
        await runs.make_sure(record)
    async with temporal.client() as client:
        for attempt in range(_TRIES):
            await asyncio.sleep(attempt * _PAUSE_S)
            try:
                return await client.get_workflow_handle(run_id).execute_update(
                    name, args=messages, rpc_timeout=_PATIENCE
                )
            except WorkflowUpdateRPCTimeoutOrCancelledError:
                break
            except WorkflowUpdateFailedError as error:
                refusal = _refusal(error, place)
                if refusal and not (isinstance(refusal, Conflict) and await is_resumed()):
                    raise refusal from None
            except RPCError as error:
                if error.status == RPCStatusCode.FAILED_PRECONDITION:  # its workflow task failed
                    continue
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
                if (await runs.view(record.tenant, run_id)).state != "running" and not await is_resumed():
                    raise Conflict(f"{run_id} has ended") from None
                await runs.make_sure(record)
    raise TemporalUnavailable(f"{run_id} does not answer: is a control host up?")


def _refusal(error: WorkflowUpdateFailedError, place: str) -> Exception | None:
    """Return a refused update's reason as an error of the service; None if the update was lost."""
    for cause in causes_of(error):
        match cause:
            case ApplicationError(type="InvalidInput"):
                return InvalidInput(cause.message, place)
            case ApplicationError(type="Conflict"):
                return Conflict(cause.message)
            case ApplicationError(type=kind) if kind in LOST_UPDATES:
                return None
    return error
