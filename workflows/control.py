"""Activities of control hosts, as every workflow calls them: each from the queue of its pool."""

from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from pydantic import BaseModel

    from activities.record_result import Reopened, ReopenRequest
    from shared.models import Frozen
    from shared.runs import RunStatus
    from workflows import policies

Answer = TypeVar("Answer", bound=BaseModel)


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


async def reopen(run_id: str) -> RunStatus | None:
    """Take away the result of a run that goes on. Returns how it had ended, if it had."""
    request = ReopenRequest(run_id=run_id)
    return (await do("reopen", request, Reopened, policies.RECORD_RETRY, policies.RECORD_TIMEOUT)).status
