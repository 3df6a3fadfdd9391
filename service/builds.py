"""Builds of control hosts, side by side: a run ends on the build that it began on (Temporal's worker versioning).

A control host with `build_id` takes work of runs that began on its build, and of services that move to the newest. One
build is current: new runs begin on it. Another one drains, until its last run has ended; then its hosts may be stopped.
"""

import asyncio
from typing import Literal

from temporalio.api.deployment.v1 import WorkerDeploymentInfo
from temporalio.api.enums.v1 import VersionDrainageStatus
from temporalio.api.workflowservice.v1 import (
    DescribeWorkerDeploymentRequest,
    SetWorkerDeploymentCurrentVersionRequest,
)
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import WorkerDeploymentConfig

from longshore.fields import Frozen
from shared.errors import NotFound
from shared.settings import Settings

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
