"""Hosts started by commands, or as processes of this machine. How many: tests/infra/test_helm.py; while runs come and
go: tests/workflows/leases/test_come_and_go.py."""

import asyncio
import logging
import os
import shlex
import signal
import time
import uuid
from pathlib import Path

import pytest

from activities.hosts.lease import LeaseRequest
from longshore.layout import Layout
from service.launching import CommandHosts, Launching, LocalHosts, main, waiting
from service.temporal import connect_temporal
from shared.jobs.job import WorkerKey
from shared.settings import Settings
from shared.storage.host_states import HostState, told_file, write_state
from shared.storage.store import open_store
from tests.waiting import eventually
from tests.workflows.stand_in import artifact
from workflows import policies


@pytest.fixture
def settings(temporal_address: str, tmp_path: Path) -> Settings:
    return Settings(root=tmp_path, temporal_address=temporal_address, shape=uuid.uuid4().hex[:6])


async def ask_for_a_lease(settings: Settings) -> None:
    """As a run's workflow does."""
    client = await connect_temporal(settings)
    store = open_store(settings.store, settings.s3)
    model = artifact(store, settings.root_path / "m", "m", x="x")
    key = WorkerKey(model=model, layout=Layout(), dtype="float32")
    request = LeaseRequest(run_id="r1", epoch=1, key=key, ready_timeout_s=60)
    name = uuid.uuid4().hex
    await client.start_activity(
        "lease", request, id=name, task_queue=settings.lease_queue, start_to_close_timeout=policies.LEASE_TIMEOUT
    )


async def test_a_warm_pool_is_there_before_anything_waits_and_is_filled_again(
    settings: Settings, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    started.touch()
    hosts = CommandHosts(f"sh -c 'echo $LONGSHORE_LAUNCH >> {started}'", f"cat {shlex.quote(str(started))}")
    loop = await launching(settings.model_copy(update={"warm_hosts": 2}), most=3)
    assert await loop.look(hosts) == 2 and await loop.look(hosts) == 0
    first = started.read_text().split()[0]
    state = HostState(role="gpu", shape=settings.shape, name="a", queue="a", seen_at=time.time(), launch=first)
    taken = state.model_copy(update={"lease_since": time.time() - 60})
    write_state(open_store(settings.store, settings.s3), taken)
    assert await loop.look(hosts) == 1, "one is at work, so that one is warm"
    assert await loop.look(hosts) == 0
    assert len(started.read_text().split()) == 3


async def test_hosts_that_die_as_they_start_are_started_ever_less_often(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = tmp_path / "started"
    started.touch()
    hosts = CommandHosts(f"sh -c 'echo $LONGSHORE_LAUNCH >> {started}'", "true")
    loop, now = await launching(settings.model_copy(update={"warm_hosts": 1})), time.monotonic()
    monkeypatch.setattr("service.launching.time.monotonic", lambda: now)

    async def until_the_next() -> float:
        nonlocal now
        began = now
        while not await loop.look(hosts):
            now += 1
        return now - began

    assert [await until_the_next() for _ in range(4)] == [0, 10, 20, 40]
    assert "ended before saying anything; the next is started in 40 s" in caplog.text
    last = started.read_text().split()[-1]
    state = HostState(role="gpu", shape=settings.shape, name="a", queue="a", seen_at=time.time(), launch=last)
    write_state(open_store(settings.store, settings.s3), state)
    assert await loop.look(hosts) == 1, "it was up: what it died of is another matter"
    assert await until_the_next() == 10


async def test_what_comes_between_two_looks_is_seen_at_once(settings: Settings, tmp_path: Path) -> None:
    started, looked, stopped = tmp_path / "started", tmp_path / "looked", asyncio.Event()
    started.touch()
    hosts = CommandHosts(
        f"sh -c 'echo $LONGSHORE_LAUNCH >> {started}'", f"sh -c 'touch {looked}; cat {shlex.quote(str(started))}'"
    )
    looking = asyncio.create_task((await launching(settings)).look_each(3600, hosts, stopped))
    await eventually(looked.exists, "a look")
    await ask_for_a_lease(settings)
    await eventually(lambda: bool(started.read_text()), "a host, long before the next look")
    stopped.set()
    await looking
    assert len(started.read_text().split()) == 1


async def launching(settings: Settings, most: int = 4) -> Launching:
    client = await connect_temporal(settings)
    return Launching(client, open_store(settings.store, settings.s3), settings, "gpu", most)


async def test_commands_start_as_many_hosts_as_leases_wait_and_not_one_twice(
    settings: Settings, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    started.touch()
    start = f"sh -c 'echo $LONGSHORE_LAUNCH >> {started}; test $0 = $LONGSHORE_LAUNCH' {{name}}"
    hosts = CommandHosts(start, f"cat {shlex.quote(str(started))}")
    loop = await launching(settings)
    assert await loop.look(hosts) == 0, "none at rest"
    for _ in range(2):
        await ask_for_a_lease(settings)
    client = await connect_temporal(settings)

    async def wait(num: int) -> bool:
        return await waiting(client, settings.lease_queue) == num

    await eventually(lambda: wait(2), "two that wait")
    assert await loop.look(hosts) == 2 and await loop.look(hosts) == 0, "two are on their way"
    await ask_for_a_lease(settings)
    await eventually(lambda: wait(3), "three that wait")
    assert await loop.look(hosts) == 1
    with started.open("a") as file:
        file.write("somebody-elses-job\n")
    first = started.read_text().split()[0]
    state = HostState(role="gpu", shape=settings.shape, name="a", queue="a", seen_at=time.time(), launch=first)
    store = open_store(settings.store, settings.s3)
    write_state(store, state.model_copy(update={"lease_since": time.time() - 1}))
    assert await loop.look(hosts) == 0, "what it has just taken may be among what waits"
    write_state(store, state.model_copy(update={"lease_since": time.time() - 60}))
    assert await loop.look(hosts) == 1, "what waits is not for the one that is at work"
    assert await loop.look(hosts) == 0, "four is the most"
    assert len(started.read_text().split()) == 5


async def test_hosts_of_a_shape_whose_name_begins_alike_are_not_its_own(settings: Settings, tmp_path: Path) -> None:
    """Slurm lists all of a user's jobs: those of shape `a-large` are no hosts of shape `a`."""
    names = tmp_path / "names"
    names.write_text(f"longshore-{settings.lease_queue}-large-{'0' * 12}\n")
    started = tmp_path / "started"
    loop = await launching(settings, most=1)
    await ask_for_a_lease(settings)
    client = await connect_temporal(settings)

    async def waits() -> bool:
        return await waiting(client, settings.lease_queue) == 1

    await eventually(waits, "a lease that waits")
    assert await loop.look(CommandHosts(f"touch {started}", f"cat {names}")) == 1
    assert started.exists()


async def test_what_fails_is_said_and_tried_again(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await ask_for_a_lease(settings)
    tried, stopped = tmp_path / "tried", asyncio.Event()
    hosts = CommandHosts(f"sh -c 'echo x >> {tried}; test $(wc -l < {tried}) -gt 2 || exit 3'", "true")
    looking = asyncio.create_task((await launching(settings, most=1)).look_each(0.05, hosts, stopped))
    await eventually(lambda: tried.exists() and len(tried.read_text().split()) >= 3, "a third try")
    stopped.set()
    await looking
    assert "no hosts can be started now" in caplog.text and "exit status 3" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--most", "0"], "--most is 1 at least"),
        ([], "--most is 1 at least"),
        (["--role", "sampler"], "--most is 1 at least"),  # LONGSHORE_MAX_HOSTS is of GPU hosts
        (["--most", "1", "--start", "x"], "--start and --names go together"),
        (["--most", "1", "--slurm", "/no/such"], "no such file"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sampler" in arguments:
        monkeypatch.setenv("LONGSHORE_MAX_HOSTS", "2")
    with pytest.raises(SystemExit):
        main(arguments)
    assert rule in capsys.readouterr().err


@pytest.mark.deep
async def test_a_host_of_this_machine_comes_and_is_known_until_it_ends(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("root", "temporal_address", "shape"):
        monkeypatch.setenv(f"LONGSHORE_{name.upper()}", str(getattr(settings, name)))
    hosts = LocalHosts("gpu", idle_s=600)
    hosts.launch("one")
    polls = told_file(settings.root_path, "polls", "gpu")
    assert hosts.launched() == {"one"}
    await eventually(polls.exists, "a host", 300)
    os.kill(hosts._hosts["one"].pid, signal.SIGTERM)
    await eventually(lambda: not hosts.launched(), "its end")
