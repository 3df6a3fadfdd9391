"""Activities on the control queue, as every run's workflow calls them."""

from typing import TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from pydantic import BaseModel

    from shared.models import Frozen
    from workflows import policies

Answer = TypeVar("Answer", bound=BaseModel)


async def do(name: str, request: Frozen, answer: type[Answer], retry: RetryPolicy = policies.RETRY) -> Answer:
    """One piece of work, retried a bounded number of times."""
    result: Answer = await workflow.execute_activity(
        name,
        request,
        result_type=answer,
        start_to_close_timeout=policies.DATA_TIMEOUT,
        heartbeat_timeout=policies.DATA_HEARTBEAT,
        retry_policy=retry,
    )
    return result


async def check(name: str, subject: Frozen) -> None:
    """Something looked at before it is used. Only an error is said of it."""
    await workflow.execute_activity(
        name,
        subject,
        start_to_close_timeout=policies.DATA_TIMEOUT,
        heartbeat_timeout=policies.DATA_HEARTBEAT,
        retry_policy=policies.RETRY,
    )


async def record(name: str, request: Frozen) -> None:
    """Put something on record in the store: small, and tried for as long as a store may be away."""
    await workflow.execute_activity(
        name, request, start_to_close_timeout=policies.RECORD_TIMEOUT, retry_policy=policies.RECORD_RETRY
    )
