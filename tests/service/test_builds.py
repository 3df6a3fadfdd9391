"""Control hosts of two builds beside each other: each run ends on the build that it began on, and none is lost."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle

from longshore.server import with_import_path
from service import temporal
from service.host import control_workers
from service.temporal import connect_temporal
from shared.errors import NotFound
from shared.settings import Settings
from tests.service.build_workflows import Moving, Run
from tests.waiting import eventually

NUM_RUNS = 6


@pytest.fixture
async def installation(temporal_address: str, tmp_path: Path) -> AsyncIterator["Installation"]:
    settings = Settings(root=tmp_path, temporal_address=temporal_address, control_queue=f"c-{uuid.uuid4().hex[:8]}")
    async with AsyncExitStack() as hosts:
        yield Installation(settings, await connect_temporal(settings), hosts)


class Installation:
    def __init__(self, settings: Settings, client: Client, hosts: AsyncExitStack) -> None:
        self.settings, self.client, self.hosts = settings, client, hosts

    async def host(self, build_id: str) -> AsyncExitStack:
        """A control host of a build; close what is returned to stop it."""

        @activity.defn
        async def which_build() -> str:
            return build_id

        settings = self.settings.model_copy(update={"build_id": build_id})
        host = await self.hosts.enter_async_context(AsyncExitStack())
        client, build = await connect_temporal(settings), temporal.deployment(settings)
        workers = control_workers(client, settings.control_queue, [which_build], [Run, Moving], build=build)
        await host.enter_async_context(workers)
        await temporal.begin_with(client, settings)
        return host

    async def begin(self, kind: type[Run] = Run) -> WorkflowHandle:
        return await self.client.start_workflow(kind.run, id=uuid.uuid4().hex, task_queue=self.settings.control_queue)

    async def use(self, build_id: str) -> None:
        """Make a build current, once Temporal has heard of its hosts' polls of every queue."""

        async def is_done() -> bool:
            with suppress(NotFound):
                await temporal.make_current(self.client, self.settings, build_id)
                return True
            return False

        await eventually(is_done, f"{build_id} is current")

    async def states(self) -> dict[str, str]:
        return {each.build_id: each.state for each in await temporal.builds(self.client, self.settings)}


async def waits(handle: WorkflowHandle) -> bool:
    """True once its first activity has answered."""
    events = [event async for event in handle.fetch_history_events()]
    return any(event.HasField("activity_task_completed_event_attributes") for event in events)


async def test_runs_end_on_the_build_that_they_began_on_and_services_move(installation: Installation) -> None:
    assert await installation.states() == {}
    old = await installation.host("one")
    assert await installation.states() == {"one": "current"}, "the first build of an installation"
    runs = [await installation.begin() for _ in range(NUM_RUNS)]
    service = await installation.begin(Moving)
    for each in (*runs, service):
        await eventually(lambda each=each: waits(each), "it has begun")
    await installation.host("two")
    assert (await installation.states())["one"] == "current", "a second one waits until it is told"
    await installation.use("two")
    later = await installation.begin()
    await eventually(lambda: waits(later), "it has begun")
    for each in (*runs, service, later):
        await each.signal(Run.go_on)
    assert await asyncio.gather(*(each.result() for each in runs)) == [["one", "one"]] * NUM_RUNS
    assert await later.result() == ["two", "two"]
    assert await service.result() == ["one", "two"]
    assert (await installation.states())["two"] == "current"
    await old.aclose()
    after = await installation.begin()
    await after.signal(Run.go_on)
    assert await after.result() == ["two", "two"]


async def test_back_to_the_build_before(installation: Installation) -> None:
    await installation.host("one")
    await installation.host("two")
    for build_id in ("two", "one"):
        await installation.use(build_id)
        run = await installation.begin()
        await run.signal(Run.go_on)
        assert await run.result() == [build_id] * 2


async def test_a_build_without_hosts_is_not_made_current(installation: Installation) -> None:
    await installation.host("one")
    with pytest.raises(NotFound, match="no host of build three polls"):
        await temporal.make_current(installation.client, installation.settings, "three")
    assert await installation.states() == {"one": "current"}


async def test_a_build_of_a_deployment_that_something_else_looks_after_waits(installation: Installation) -> None:
    """As with Temporal's Worker Controller: its first host is up, and ready, before its build is current."""
    name = f"default/{installation.settings.control_queue}-host"
    installation.settings = installation.settings.model_copy(update={"deployment": name})
    await installation.host("0.1.0-5f6b")

    async def is_known() -> bool:
        return bool(await installation.states())

    await eventually(is_known, "Temporal has heard of its polls")
    assert await installation.states() == {"0.1.0-5f6b": "waiting"}
    await installation.use("0.1.0-5f6b")
    assert await installation.states() == {"0.1.0-5f6b": "current"}
    run = await installation.begin()
    await run.signal(Run.go_on)
    assert await run.result() == ["0.1.0-5f6b"] * 2


@pytest.mark.parametrize("build_id", ["one", ""])
def test_services_move_on_hosts_of_a_build_alone(build_id: str) -> None:
    """A server refuses the tasks of a worker that is of no build, and says how a workflow moves."""
    told = "from workflows.session import SessionWorkflow as S; from workflows.sft import SFTWorkflow as R; "
    told += "print(*(w.__temporal_workflow_definition.versioning_behavior.name for w in (S, R)))"
    environment = with_import_path() | {"LONGSHORE_BUILD_ID": build_id}
    said = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == (["AUTO_UPGRADE", "UNSPECIFIED"] if build_id else ["UNSPECIFIED"] * 2)
