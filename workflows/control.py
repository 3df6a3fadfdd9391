"""Activities of control hosts, as every workflow calls them: each from the queue of its pool."""

from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from pydantic import BaseModel

    from activities.records.record_result import BeginRequest, Begun
    from shared.contract import Frozen
    from shared.runs.start import Start
    from shared.runs.status import RunStatus
    from workflows import policies

Answer = TypeVar("Answer", bound=BaseModel)

NOT_STARTED = "NotStartedByTheService"
"""The type of the error with which a start is refused that was used before."""


async def do(
    name: str,
    request: Frozen,
    answer: type[Answer],
    retry: RetryPolicy = policies.RETRY,
    within: timedelta = policies.DATA_TIMEOUT,
) -> Answer:
    """One piece of work, retried a bounded number of times."""
    result: Answer = await _execute(name, request, answer, retry, within)
    return result


async def check(name: str, subject: Frozen) -> None:
    """Something looked at before it is used. Only an error is said of it."""
    await _execute(name, subject, None, policies.RETRY, policies.DATA_TIMEOUT)


async def _execute(
    name: str, request: Frozen, answer: type[BaseModel] | None, retry: RetryPolicy, within: timedelta
) -> Any:
    return await workflow.execute_activity(
        name,
        request,
        result_type=answer,
        task_queue=policies.queue_of(name, workflow.info().task_queue),
        start_to_close_timeout=within,
        heartbeat_timeout=policies.DATA_HEARTBEAT,
        retry_policy=retry,
    )


async def record(name: str, request: Frozen) -> None:
    """Put something on record in the store: small, and tried for as long as a store may be away."""
    await _execute(name, request, None, policies.RECORD_RETRY, policies.RECORD_TIMEOUT)


async def begin(start: Start) -> RunStatus | None:
    """Before anything else: take away the result of a run that goes on. Returns how it had ended, if it had.

    Raises:
        ApplicationError: the service has not asked for this; somebody has used its start again.
    """
    request = BeginRequest(
        run_id=start.run_id,
        start_id=start.start_id,
        execution=workflow.info().first_execution_run_id,
        resumed=start.resumed,
        goes_on_from=start.goes_on_from,
    )
    begun = await do("begin", request, Begun, policies.RECORD_RETRY, policies.RECORD_TIMEOUT)
    if begun.refusal is not None:
        raise ApplicationError(begun.refusal, type=NOT_STARTED, non_retryable=True)
    return begun.status
