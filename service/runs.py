"""Runs behind the API: the only Temporal calls of the service.

A run is accepted once `run.json` stands in the store. Whatever happens after that (the service dies, Temporal is away,
its database is lost) the run is found again by its record, and started.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

from pydantic import Field, ValidationError
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.common import WorkflowIDReusePolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from service.problems import Conflict, TemporalUnavailable
from service.run_views import RunPage, RunView
from shared import paths
from shared.errors import DiskFull, InvalidInput, NotFound, StoreUnavailable
from shared.models import Frozen
from shared.runs import (
    DPORun,
    Problem,
    RLRun,
    RLStart,
    Run,
    RunRecord,
    RunStart,
    RunStatus,
    RunTiming,
    SFTRun,
    State,
)
from shared.settings import Settings
from shared.store import ObjectStore
from workflows.preview import Preview, PreviewRequest

logger = logging.getLogger("longshore.service")

SFT_WORKFLOW = "SFTWorkflow"
RL_WORKFLOW = "RLWorkflow"
PREVIEW_WORKFLOW = "PreviewWorkflow"
_PATIENCE = timedelta(seconds=5)
_PREVIEW_PATIENCE = timedelta(minutes=5)
_QUERY_PATIENCE = timedelta(seconds=2)
_UPDATE_PATIENCE = timedelta(seconds=20)
_STEP_POLL_S = 0.2
_CONCURRENT = 16
_AWAY = (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)


class _Idempotency(Frozen):
    """Which run a key made, and of which request."""

    run_id: str
    request_sha256: str = Field(description="of the run's canonical JSON")


class Runs:
    """Submit, show, list, cancel and resume runs."""

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self._settings = settings
        self._store = store
        self._client: Client | None = None
        self._records: dict[str, RunRecord] = {}  # records never change
        self._waiting: set[str] = set()  # accepted while Temporal was away

    # Submitting.

    async def submit(self, run: Run, idempotency_key: str | None = None) -> RunView:
        """Accept a run and start it. The same key gives the same run.

        Raises:
            InvalidInput: the key was used for another request.
        """
        run_id = new_run_id(run.kind)
        if idempotency_key:
            run_id = await self._claim(idempotency_key, run_id, run)
        record, is_new = await self._accept(run_id, run)
        try:
            # A repeated key may name a run that ended long ago, and that Temporal has forgotten.
            await (self._start(record) if is_new else self.make_sure(record))
        except TemporalUnavailable as error:  # accepted all the same: the sweep starts it when Temporal is back
            logger.warning("%s waits to be started: %s", run_id, error)
            self._waiting.add(run_id)
        return await self.view(run_id)

    async def _claim(self, key: str, run_id: str, run: Run) -> str:
        mine = _Idempotency(run_id=run_id, request_sha256=hashlib.sha256(run.model_dump_json().encode()).hexdigest())
        place = paths.idempotency(key)
        if await asyncio.to_thread(self._store.put_if_absent, place, mine.model_dump_json().encode()):
            return run_id
        first = _Idempotency.model_validate_json(await asyncio.to_thread(self._store.get_bytes, place))
        if first.request_sha256 != mine.request_sha256:
            raise InvalidInput(f"this key was used for another request, which made {first.run_id}", "Idempotency-Key")
        return first.run_id

    async def _accept(self, run_id: str, run: Run) -> tuple[RunRecord, bool]:
        """Put a run on record. Returns what stands there, and whether this call wrote it."""
        threads = max(1, self._settings.cpu_threads // run.layout.world_size)
        record = RunRecord(run_id=run_id, run=run, created_at=time.time(), threads_per_rank=threads)
        data = record.model_dump_json(indent=1).encode()
        await asyncio.to_thread(self._store.put_bytes, paths.run_index(run_id), b"")
        if await asyncio.to_thread(self._store.put_if_absent, paths.RunKeys(run_id).record, data):
            return record, True
        return await self.record(run_id), False

    async def _start(self, record: RunRecord, *, resumed: bool = False) -> None:
        """Start a run's workflow. Raises Conflict when it is to be resumed and is running."""
        name, start = self._workflow(record, resumed)
        policy = WorkflowIDReusePolicy.ALLOW_DUPLICATE if resumed else WorkflowIDReusePolicy.REJECT_DUPLICATE
        async with self.temporal() as client:
            try:
                await client.start_workflow(
                    name,
                    start,
                    id=record.run_id,
                    task_queue=self._settings.control_queue,
                    id_reuse_policy=policy,
                    rpc_timeout=_PATIENCE,
                )
            except WorkflowAlreadyStartedError:
                if resumed:
                    raise Conflict(f"{record.run_id} is running") from None

    def _workflow(self, record: RunRecord, resumed: bool) -> tuple[str, RunStart | RLStart]:
        """The name and input of the workflow that does a run."""
        timing = RunTiming(
            heartbeat_timeout_s=self._settings.heartbeat_timeout_s, cancel_grace_s=self._settings.cancel_grace_s
        )
        given: dict[str, Any] = {
            "run_id": record.run_id,
            "timing": timing,
            "threads_per_rank": record.threads_per_rank,
            "shape": self._settings.shape,
            "resumed": resumed,
        }
        match record.run:
            case SFTRun() | DPORun() as run:
                return SFT_WORKFLOW, RunStart(run=run, **given)
            case RLRun() as run:
                serves_sampler = self._settings.sampling.url is not None
                return RL_WORKFLOW, RLStart(run=run, serves_sampler=serves_sampler, **given)

    # Showing.

    async def record(self, run_id: str) -> RunRecord:
        """What was accepted. Raises NotFound for an unknown run."""
        if run_id not in self._records:
            try:
                data = await asyncio.to_thread(self._store.get_bytes, paths.RunKeys(run_id).record)
            except NotFound:
                raise NotFound(f"there is no run {run_id}") from None
            self._records[run_id] = RunRecord.model_validate_json(data)
        return self._records[run_id]

    async def view(self, run_id: str) -> RunView:
        """A run as it stands: the workflow's own answer while it runs, its result afterwards."""
        record = await self.record(run_id)
        return _view(record, await self._status(record))

    async def _status(self, record: RunRecord) -> RunStatus:
        try:
            return await self._temporal_status(record)
        except TemporalUnavailable:
            if record.run_id in self._waiting:
                return _queued(record)
            result = await self._result(record.run_id)  # an ended run needs no Temporal to be shown
            if result is None:
                raise
            return result

    async def _temporal_status(self, record: RunRecord) -> RunStatus:
        async with self.temporal() as client:
            handle = client.get_workflow_handle(record.run_id)
            try:
                description = await handle.describe(rpc_timeout=_PATIENCE)
            except RPCError as error:
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
                return await self._result(record.run_id) or self._lost(record)
            if description.status == WorkflowExecutionStatus.RUNNING:
                return await _query(handle, record)
            return await self._result(record.run_id) or await self._settle(handle, record, description)

    def _lost(self, record: RunRecord) -> RunStatus:
        """Accepted, not ended, and unknown to Temporal: it is started at the next turn."""
        self._waiting.add(record.run_id)
        return _queued(record)

    async def _settle(
        self, handle: WorkflowHandle[Any, Any], record: RunRecord, ended: WorkflowExecutionDescription
    ) -> RunStatus:
        """Give a run that ended without a result, as when an operator terminated it, the result that it lacks.

        Else it would be taken for a lost one, and started again, once Temporal has forgotten it.
        """
        status = await _query(handle, record)
        if (await handle.describe(rpc_timeout=_PATIENCE)).run_id != ended.run_id:
            return status  # it was resumed since: that is why its result has gone
        if status.state == "running":
            word = ended.status.name.lower().replace("_", " ") if ended.status is not None else "nothing"
            problem = Problem(
                kind="ended_outside", message=f"the workflow ended without a result: Temporal says {word}"
            )
            status = status.model_copy(update={"state": "failed", "problem": problem, "ended_at": time.time()})
        data = status.model_dump_json(indent=1).encode()
        await asyncio.to_thread(self._store.put_if_absent, paths.RunKeys(record.run_id).result, data)
        return status

    async def _result(self, run_id: str) -> RunStatus | None:
        try:
            data = await asyncio.to_thread(self._store.get_bytes, paths.RunKeys(run_id).result)
        except NotFound:
            return None
        return RunStatus.model_validate_json(data)

    async def page(self, *, limit: int, after: str | None = None, state: State | None = None) -> RunPage:
        """Runs, newest first.

        Args:
            after: the run id that the page before ended with.
            state: show these alone.
        """
        ids = [run_id for run_id in await self._ids() if after is None or run_id < after]
        running = await self._running_ids()
        found: list[RunView] = []
        for start in range(0, len(ids), _CONCURRENT):
            chunk = await asyncio.gather(*(self._listed(i, running) for i in ids[start : start + _CONCURRENT]))
            found += [view for view in chunk if view is not None and (state is None or view.state == state)]
            if len(found) > limit:
                break
        runs = tuple(found[:limit])
        has_more = len(found) > limit
        return RunPage(runs=runs, has_more=has_more, next=runs[-1].run_id if has_more else None)

    async def _ids(self) -> list[str]:
        prefix = paths.run_index()
        keys = await asyncio.to_thread(lambda: [item.key for item in self._store.list(prefix)])
        return sorted((key.removeprefix(prefix) for key in keys), reverse=True)

    async def _running_ids(self) -> frozenset[str] | None:
        """Runs that Temporal knows as running; None when it cannot be asked."""
        query = f'WorkflowType IN ("{SFT_WORKFLOW}", "{RL_WORKFLOW}") AND ExecutionStatus = "Running"'
        try:
            async with self.temporal() as client:
                return frozenset([e.id async for e in client.list_workflows(query, rpc_timeout=_PATIENCE)])
        except TemporalUnavailable:
            return None

    async def _listed(self, run_id: str, running: frozenset[str] | None) -> RunView | None:
        try:
            record = await self.record(run_id)
        except NotFound:  # the service died between the index and the record: this run was never accepted
            return None
        # Visibility may lag behind a submission: a run without a result is asked for by name.
        status = None if running and run_id in running else await self._result(run_id)
        if status is None:
            status = _queued(record) if running is None else await self._temporal_status(record)
        return _view(record, status)

    # Ending and going on.

    async def cancel(self, run_id: str) -> RunView:
        """Ask a run to end at its next step boundary. Raises Conflict when it has ended."""
        record = await self.record(run_id)
        await self.make_sure(record)
        view = await self.view(run_id)
        if view.state != "running":
            raise Conflict(f"{run_id} has ended: it {_ended_as(view.state)}")
        async with self.temporal() as client:
            try:
                await client.get_workflow_handle(run_id).cancel(rpc_timeout=_PATIENCE)
            except RPCError as error:
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
                raise Conflict(f"{run_id} has just ended") from None
        return await self.view(run_id)

    async def resume(self, run_id: str) -> RunView:
        """Go on from the last checkpoint. Raises Conflict when the run is running, or succeeded."""
        record = await self.record(run_id)
        view = await self.view(run_id)
        match view.state:
            case "running":
                raise Conflict(f"{run_id} is running")
            case "succeeded":
                raise Conflict(f"{run_id} succeeded: there is nothing to go on with")
            case "failed" | "cancelled":
                await self._start(record, resumed=True)
        return await self.view(run_id)

    # Nothing accepted is lost.

    async def sweep(self) -> None:
        """Find every accepted run that neither ended nor is known to Temporal, and start it."""
        await self.check_temporal()
        for run_id in await self._ids():
            try:
                record = await self.record(run_id)
                if await self._result(run_id) is None:
                    await self._temporal_status(record)
            except NotFound:  # the service died before it was accepted
                continue
            except ValidationError as error:  # one record that cannot be read must not strand the others
                logger.error("%s cannot be looked after: %s", run_id, error)
        await self.start_waiting()

    async def start_waiting(self) -> None:
        """Start what was accepted while Temporal was away."""
        for run_id in sorted(self._waiting):
            await self.make_sure(await self.record(run_id))
            self._waiting.discard(run_id)

    async def make_sure(self, record: RunRecord) -> None:
        """Start an unended run unless Temporal knows it."""
        async with self.temporal() as client:
            try:
                await client.get_workflow_handle(record.run_id).describe(rpc_timeout=_PATIENCE)
                return
            except RPCError as error:
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
        if await self._result(record.run_id) is not None:
            return
        # A lease on record: it ran before, and Temporal lost it. Then it goes on from its last checkpoint.
        leases = paths.RunKeys(record.run_id).leases
        was_leased = await asyncio.to_thread(lambda: any(True for _ in self._store.list(leases)))
        with suppress(Conflict):  # somebody else has just started it
            await self._start(record, resumed=was_leased)
        logger.info("started %s, which was accepted and not known to Temporal", record.run_id)

    # Looking at data before training.

    async def preview(self, request: PreviewRequest) -> Preview:
        """Run PreviewWorkflow and wait for its answer. Raises InvalidInput with what is wrong with the data."""
        async with self.temporal() as client:
            try:
                answer: Preview = await client.execute_workflow(
                    PREVIEW_WORKFLOW,
                    request,
                    id=f"preview-{secrets.token_hex(8)}",
                    task_queue=self._settings.control_queue,
                    execution_timeout=_PREVIEW_PATIENCE,
                    result_type=Preview,
                )
            except WorkflowFailureError as error:
                raise _cause(error) from None
        return answer

    # Temporal.

    async def check_temporal(self) -> None:
        """Raises TemporalUnavailable when the server does not answer."""
        async with self.temporal() as client:
            await client.service_client.check_health(timeout=_QUERY_PATIENCE)

    @asynccontextmanager
    async def temporal(self) -> AsyncIterator[Client]:
        """The client, connected at first use; a server that is away becomes TemporalUnavailable."""
        address = self._settings.temporal_address
        if self._client is None:
            try:
                async with asyncio.timeout(_PATIENCE.total_seconds()):
                    self._client = await Client.connect(
                        address, namespace=self._settings.temporal_namespace, data_converter=pydantic_data_converter
                    )
            except (RuntimeError, TimeoutError) as error:
                raise TemporalUnavailable(f"the Temporal server at {address} does not answer") from error
        try:
            yield self._client
        except RPCError as error:
            if error.status in _AWAY:
                raise TemporalUnavailable(f"the Temporal server at {address} does not answer") from error
            raise


def new_run_id(kind: str) -> str:
    """The kind + milliseconds since 1970 in 11 hex digits, so that ids sort by time + 6 random ones."""
    return f"{kind}-{int(time.time() * 1000):011x}{secrets.token_hex(3)}"


async def _query(handle: WorkflowHandle[Any, Any], record: RunRecord) -> RunStatus:
    try:
        status: RunStatus = await handle.query("status", result_type=RunStatus, rpc_timeout=_QUERY_PATIENCE)
        return status
    except RPCError as error:
        if error.status in _AWAY or error.status == RPCStatusCode.FAILED_PRECONDITION:
            return _queued(record)  # no host polls yet: the run waits
        raise


def _queued(record: RunRecord) -> RunStatus:
    return RunStatus(run_id=record.run_id, kind=record.run.kind, name=record.run.name or record.run_id)


def _view(record: RunRecord, status: RunStatus) -> RunView:
    return RunView(**dict(status), created_at=record.created_at, run=record.run)


def _ended_as(state: State) -> str:
    return "was cancelled" if state == "cancelled" else state


def _cause(error: WorkflowFailureError) -> Exception:
    """What made a workflow fail, as an error of ours."""
    causes = causes_of(error)
    for cause in causes:
        match cause:
            case ApplicationError(type="InvalidInput" | "CorruptArtifact"):
                return InvalidInput(cause.message)
            case ApplicationError(type="DiskFull"):
                return DiskFull(cause.message)
            case ApplicationError(type="StoreUnavailable"):
                return StoreUnavailable(cause.message)
    return TemporalUnavailable(f"the check did not end: {causes[-1]}")


def causes_of(error: BaseException) -> Sequence[BaseException]:
    """An error of Temporal's and what is behind it, outermost first."""
    found = [error]
    while (cause := getattr(found[-1], "cause", None)) is not None:
        found.append(cause)
    return found
