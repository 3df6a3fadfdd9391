"""Activities of control hosts, called with one retry policy and timeout for all workflows, on their pools' queues."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.records import BeginRequest, RunRecords
    from longshore.accounts import Room
    from longshore.fields import Frozen
    from longshore.views import RunStatus
    from shared.runs.start import Start
    from shared.runs.status import RunChange
    from workflows import policies

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")

outside: Callable[[Callable[..., Any], Any], Any] | None = None
"""Does activities outside of workflows: longshore/local.py sets it, whose runs have a workflow's order of steps."""
NOT_STARTED = "NotStartedByTheService"
"""The error type of a workflow that must not run: the service did not ask for it, or its start id was used before."""


async def do(
    activity: Callable[[Any, RequestT], ResultT],
    request: RequestT,
    retry: RetryPolicy = policies.RETRY,
    within: timedelta = policies.DATA_TIMEOUT,
) -> ResultT:
    """Execute an activity on a control host, with a bounded number of retries."""
    answer: ResultT
    if outside is not None and not workflow.in_workflow():
        answer = outside(activity, request)
        return answer
    name = policies.activity_name(activity)
    answer = await workflow.execute_activity_method(
        activity,
        request,
        task_queue=policies.queue_of(name, workflow.info().task_queue),
        start_to_close_timeout=within,
        heartbeat_timeout=policies.DATA_HEARTBEAT,
        retry_policy=retry,
        priority=policies.turn_of(name),
    )
    return answer


async def record(activity: Callable[[Any, RequestT], Any], request: RequestT) -> None:
    """Execute an activity that writes a small record into the store, with retries for about an hour."""
    await do(activity, request, policies.RECORD_RETRY, policies.RECORD_TIMEOUT)


async def ask_service(
    activity: str,
    request: Frozen,
    answer: type[ResultT] | None = None,
    retry: RetryPolicy = policies.ENDLESS,
    within: timedelta = policies.RECORD_TIMEOUT,
    heartbeat: timedelta | None = None,
) -> ResultT:
    """Execute an activity of the web service, which has the database; wait while the service is away."""
    found: ResultT = await workflow.execute_activity(
        activity,
        request,
        result_type=answer,
        task_queue=policies.service_queue(workflow.info().task_queue),
        start_to_close_timeout=within,
        heartbeat_timeout=heartbeat,
        retry_policy=retry,
    )
    return found


async def record_run(status: RunStatus) -> Room:
    """Record a run's status in its row. Returns the room that its tenant has left in the store."""
    change = RunChange(status=status, at=workflow.time())
    return await ask_service("record_run", change, Room, within=policies.ROW_TIMEOUT)


async def begin(start: Start) -> RunStatus | None:
    """Begin a run: check and use up its start id, and move away the result of a run that is resumed.

    Returns:
        The final status of a resumed run's earlier execution, if it ended.

    Raises:
        ApplicationError: the service did not ask for this: the start id was used before, or the run ended otherwise.
    """
    own = {name: getattr(start, name) for name in ("run_id", "start_id", "resumed", "goes_on_from")}
    request = BeginRequest(**own, execution=workflow.info().first_execution_run_id)
    begun = await do(RunRecords.begin, request, policies.RECORD_RETRY, policies.RECORD_TIMEOUT)
    if begun.refusal is not None:
        raise ApplicationError(begun.refusal, type=NOT_STARTED, non_retryable=True)
    return begun.status
