"""The connection to Temporal: address, namespace, TLS and key from the settings; every payload is encrypted."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from cryptography import x509
from temporalio.api.deployment.v1 import WorkerDeploymentInfo
from temporalio.api.enums.v1 import TaskQueueKind, TaskQueueType, VersionDrainageStatus
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeTaskQueueRequest,
    DescribeTaskQueueResponse,
    DescribeWorkerDeploymentRequest,
    SetWorkerDeploymentCurrentVersionRequest,
)
from temporalio.client import (
    Client,
    Interceptor,
    WorkflowExecution,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import Priority, VersioningBehavior, WorkerDeploymentVersion
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode, TLSConfig
from temporalio.worker import WorkerDeploymentConfig

from longshore.fields import Frozen
from service.sealing import UNSEALED, SealKeys, sealed_data_converter
from service.telemetry import sdk_runtime, tracing_interceptors
from shared.errors import DiskFull, InvalidInput, NotFound, StoreUnavailable, TemporalUnavailable, WrongSealKey
from shared.settings import Settings

# --- Builds of control hosts, side by side ---
# A run ends on the build that it began on (Temporal's worker versioning).
#
# A control host with `build_id` takes work of runs that began on its build, and of services that move to the newest.
# One build is current: new runs begin on it. Another one drains, until its last run has ended; then its hosts may be
# stopped.

_LOOK_EVERY_S = 0.2
BuildState = Literal["current", "draining", "drained", "waiting"]


class Build(Frozen):
    """`draining`: it still has active runs; `drained`: it has none; `waiting`: it has not been current yet."""

    build_id: str
    state: BuildState


def deployment(settings: Settings) -> WorkerDeploymentConfig | None:
    """Return how a control host's workers are versioned; None: they are not, as without `build_id`."""
    if settings.build_id is None:
        return None
    version = WorkerDeploymentVersion(_name(settings), settings.build_id)
    return WorkerDeploymentConfig(version, True, VersioningBehavior.PINNED)


async def builds(client: Client, settings: Settings) -> tuple[Build, ...]:
    """Return the builds whose hosts have polled, newest first; none if hosts have no `build_id`."""
    info = await _described(client, settings)
    if info is None:
        return ()
    current = info.routing_config.current_deployment_version.build_id
    found = sorted(info.version_summaries, key=lambda each: each.create_time.ToNanoseconds(), reverse=True)
    return tuple(
        Build(
            build_id=(build_id := each.deployment_version.build_id),
            state="current" if build_id == current else _state(each.drainage_info.status),
        )
        for each in found
    )


async def make_current(client: Client, settings: Settings, build_id: str) -> None:
    """Let new runs begin on a build, and services move to it. Raises NotFound: none of its hosts has polled."""
    request = SetWorkerDeploymentCurrentVersionRequest(
        namespace=client.namespace, deployment_name=_name(settings), build_id=build_id
    )
    try:
        await client.workflow_service.set_worker_deployment_current_version(request)
    except RPCError as error:
        if error.status not in (RPCStatusCode.NOT_FOUND, RPCStatusCode.FAILED_PRECONDITION):
            raise
        raise NotFound(f"no host of build {build_id} polls {settings.control_queue}: {error.message}") from error


async def begin_with(client: Client, settings: Settings) -> None:
    """Make a polling host's own build current if none is: the first one of an installation.

    Does nothing if `deployment` is set: another program then makes builds current, once hosts are ready.
    """
    while settings.build_id is not None and settings.deployment is None:
        info = await _described(client, settings)
        if info is not None and info.routing_config.current_deployment_version.build_id:
            return
        try:
            await make_current(client, settings, settings.build_id)
        except NotFound:  # Temporal has not heard of its polls yet
            await asyncio.sleep(_LOOK_EVERY_S)


async def _described(client: Client, settings: Settings) -> WorkerDeploymentInfo | None:
    request = DescribeWorkerDeploymentRequest(namespace=client.namespace, deployment_name=_name(settings))
    try:
        return (await client.workflow_service.describe_worker_deployment(request)).worker_deployment_info
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return None
        raise


def _name(settings: Settings) -> str:
    return settings.deployment or f"longshore-{settings.control_queue}"


def _state(status: VersionDrainageStatus.ValueType) -> BuildState:
    match status:
        case VersionDrainageStatus.VERSION_DRAINAGE_STATUS_DRAINING:
            return "draining"
        case VersionDrainageStatus.VERSION_DRAINAGE_STATUS_DRAINED:
            return "drained"
        case _:
            return "waiting"


T = TypeVar("T")

PATIENCE = timedelta(seconds=5)
QUERY_PATIENCE = timedelta(seconds=2)
_CONNECT_PATIENCE_S = 60.0
_POLL_S = 70.0  # a request of a host waits a minute at Temporal
# Listing a thousand runs takes a tenth of a second, or half a minute while all are starting. The server continues a
# listing that timed out, so a short timeout with retries would only add load.
LIST_PATIENCE = timedelta(seconds=60)
AWAY = (
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.RESOURCE_EXHAUSTED,
)
# The server's errors of lost updates, which can be sent again: their workflow ended first, or a workflow task was
# completed without them, such as one that was in progress when the server was killed.
LOST_UPDATES = ("AcceptedUpdateCompletedWorkflow", "UnprocessedUpdate")


def share_of(tenant: str, weight: float = 1.0) -> Priority:
    """Return the priority of a tenant's workflows, which their activities inherit: of tasks in a queue, such as
    leases of GPU hosts, each tenant gets its share by weight, if the server is configured for it (docs/queues.md).
    """
    return Priority(fairness_key=tenant, fairness_weight=None if weight == 1.0 else weight)


async def described(
    client: Client,
    queue: str,
    kind: TaskQueueType.ValueType = TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
    report_stats: bool = False,
) -> DescribeTaskQueueResponse:
    """Return Temporal's description of a queue of activities or workflows. Raises RPCError."""
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=queue, kind=TaskQueueKind.TASK_QUEUE_KIND_NORMAL),
        task_queue_type=kind,
        report_stats=report_stats,
    )
    return await client.workflow_service.describe_task_queue(request, timeout=PATIENCE)


class Backlog(NamedTuple):
    """Activities that no host has taken yet, and the age of the oldest."""

    num: int
    age_s: float


class Temporal:
    """The service's client of Temporal, connected at first use."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._address = settings.temporal_address
        self._client: Client | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Yield the client. In the block, calls without an answer raise TemporalUnavailable."""
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

    async def start(
        self, workflow: str, request: Any, workflow_id: str, tenant: str, weight: float = 1.0, **options: Any
    ) -> WorkflowHandle[Any, Any]:
        """Start a tenant's workflow on a control host. `options`: of `Client.start_workflow`."""
        async with self.client() as client:
            return await client.start_workflow(
                workflow,
                request,
                id=workflow_id,
                task_queue=self._settings.control_queue,
                priority=share_of(tenant, weight),
                rpc_timeout=PATIENCE,
                **options,
            )

    async def ask(
        self,
        workflow: str,
        request: Any,
        answer: type[T],
        workflow_id: str,
        tenant: str,
        within: timedelta,
        **options: Any,
    ) -> T:
        """Run a tenant's workflow, and wait for its result.

        Raises:
            InvalidInput, DiskFull, StoreUnavailable: its activity's error.
            TemporalUnavailable: the server does not answer, or no host did within the time.
        """
        handle = await self.start(
            workflow, request, workflow_id, tenant, execution_timeout=within, result_type=answer, **options
        )
        async with self.client():
            try:
                found: T = await handle.result()
            except WorkflowFailureError as error:
                raise cause_of(error) from None
        return found

    async def check(self) -> None:
        """Raises TemporalUnavailable when the server does not answer."""
        async with self.client() as client:
            await client.service_client.check_health(timeout=QUERY_PATIENCE)

    async def num_polling(self, queue: str) -> int:
        """Count the processes that have asked for activities of a queue within the last minute.

        A host that does as many as it may at once does not ask.
        """
        since, found = time.time() - _POLL_S, await self._describe(queue)
        return len({each.identity for each in found.pollers if each.last_access_time.seconds > since})

    async def backlog(self, queue: str) -> Backlog:
        """Return how many tasks wait in a queue of activities, and for how long the oldest has."""
        found = (await self._describe(queue, report_stats=True)).stats
        return Backlog(found.approximate_backlog_count, found.approximate_backlog_age.ToTimedelta().total_seconds())

    async def _describe(self, queue: str, report_stats: bool = False) -> DescribeTaskQueueResponse:
        async with self.client() as client:
            return await described(client, queue, report_stats=report_stats)

    async def _connect(self) -> Client:
        try:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                return await connect_once(self._settings)
        except (RuntimeError, TimeoutError) as error:
            raise TemporalUnavailable(self._away) from error

    @property
    def _away(self) -> str:
        return f"the Temporal server at {self._address} does not answer"


def cause_of(error: WorkflowFailureError) -> Exception:
    """Return the cause of a workflow's failure as an error of ours."""
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
    """Return an error of Temporal's and its causes, outermost first."""
    found = [error]
    while (cause := getattr(found[-1], "cause", None)) is not None:
        found.append(cause)
    return found


async def connect_temporal(
    settings: Settings,
    patience_s: float = _CONNECT_PATIENCE_S,
    interceptors: Sequence[Interceptor] = (),
    leave: Callable[[], None] | None = None,
) -> Client:
    """Connect to the Temporal server, as soon as it answers.

    Args:
        leave: called when something was sealed by the key that seals now, and this process lacks it.

    Raises SystemExit: it or the store does not answer, within the patience; or the installation seals with another key.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            return await connect_once(settings, interceptors, leave)
        except WrongSealKey as error:
            raise SystemExit(str(error)) from None
        except (RuntimeError, StoreUnavailable) as error:
            if loop.time() > deadline:
                away = f"Temporal server at {settings.temporal_address}" if isinstance(error, RuntimeError) else "store"
                raise SystemExit(f"no {away} within {patience_s:g} s: {error}") from error
            await asyncio.sleep(0.5)


async def connect_once(
    settings: Settings, interceptors: Sequence[Interceptor] = (), leave: Callable[[], None] | None = None
) -> Client:
    """Connect to the Temporal server.

    Raises:
        RuntimeError: the server does not answer.
        StoreUnavailable: the store does not, which knows the installation's keys.
        WrongSealKey: the installation seals with a key that is not among this process's.
        InvalidInput: a file that the settings name cannot be read.
    """
    key, keys = settings.temporal_api_key, SealKeys.of(settings)
    await asyncio.to_thread(keys.admit)
    try:
        return await Client.connect(
            settings.temporal_address,
            namespace=settings.temporal_namespace,
            data_converter=sealed_data_converter(keys, leave),
            interceptors=[*tracing_interceptors(), *interceptors],
            runtime=sdk_runtime(),
            tls=_tls(settings),
            api_key=key.get_secret_value() if key else None,
        )
    except RuntimeError as error:
        raise RuntimeError(f"{_expiry(settings.temporal_tls_cert)}{error}") from error


def _expiry(certificate: Path | None) -> str:
    """Return a note if our own certificate has expired, since the connection error does not say that."""
    with suppress(OSError, ValueError):
        if certificate is not None:
            until = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
            if until < datetime.now(UTC):
                return f"{certificate} expired at {until:%Y-%m-%d %H:%M} UTC: "
    return ""


def _tls(settings: Settings) -> TLSConfig | bool:
    ca, certificate, key = settings.temporal_tls_ca, settings.temporal_tls_cert, settings.temporal_tls_key
    if not (settings.temporal_tls or ca or certificate or key or settings.temporal_api_key):  # no key in the clear
        return False
    if (certificate is None) != (key is None):
        raise InvalidInput("temporal_tls_cert and temporal_tls_key go together", "temporal_tls_cert")
    try:
        return TLSConfig(
            server_root_ca_cert=ca.read_bytes() if ca else None,
            client_cert=certificate.read_bytes() if certificate else None,
            client_private_key=key.read_bytes() if key else None,
            domain=settings.temporal_tls_name,
        )
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}", str(error.filename)) from error


async def query(handle: WorkflowHandle[Any, Any], name: str, *arguments: Any, result_type: type[T] | None = None) -> T:
    """Query a workflow.

    Raises TemporalUnavailable: no host answers, or its workflow task fails: hosts are being replaced, or its code is
    newer than the workflow's history.
    """
    try:
        found: T = await handle.query(name, args=arguments, result_type=result_type, rpc_timeout=QUERY_PATIENCE)
        return found
    except RPCError as error:
        if error.status in AWAY or error.status == RPCStatusCode.FAILED_PRECONDITION:
            raise TemporalUnavailable(f"{handle.id} does not answer: is a control host up?") from error
        raise
    except (WorkflowQueryFailedError, WorkflowQueryRejectedError) as error:
        raise TemporalUnavailable(f"{handle.id} does not answer its {name}: {error}") from error


@contextmanager
def unless_unknown() -> Iterator[None]:
    """Leave the block without an error if Temporal does not know the workflow or schedule."""
    try:
        yield
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise


async def memo_of(execution: WorkflowExecution, name: str, kind: type[T]) -> T | None:
    """Return a value of a workflow's memo; None if there is none that this process's keys open.

    Without that check, anybody who reaches the server could start a workflow with a false memo, which lists show.
    """
    try:
        value: T | None = await execution.memo_value(name, None, type_hint=kind)
    except WrongSealKey:  # of an ended workflow, from before a rotation
        return None
    except ApplicationError as error:
        if error.type != UNSEALED:
            raise
        return None
    return value
