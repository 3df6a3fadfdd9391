"""Hosts started by commands, as processes of this machine or as jobs of a real Slurm; gangs. How many: test_helm.py;
while runs come and go: tests/workflows/leases/test_come_and_go.py.
"""

import asyncio
import logging
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from pydantic import SecretStr

from activities.hosts.lease import LeaseRequest
from benchmarks.slurm_cluster import cluster, missing
from longshore.fields import Fence
from longshore.training import Layout
from service.host_http import gangs
from service.host_http.connections import Trust
from service.host_http.gangs import GangMeeting, Gangs
from service.launching import CommandHosts, Launching, LocalHosts, main, slurm_hosts, waiting
from service.sealing import seal_keys
from service.temporal import connect_temporal
from shared.jobs.job import GangLeader, WorkerKey
from shared.settings import Settings
from shared.storage.host_states import HostState, told_file, write_state
from shared.storage.paths import HostPaths, WorkerPaths
from shared.storage.store import open_store
from tests.waiting import eventually, wait_until
from tests.workflows.leases.test_come_and_go import is_at, steps
from tests.workflows.stack import started
from tests.workflows.stand_in import REPOSITORY, artifact
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

    assert [await until_the_next() for _ in range(4)] == pytest.approx([0, 10, 20, 40])  # of a clock of floats
    assert "ended unfit to work; the next is started in 40 s" in caplog.text
    last = started.read_text().split()[-1]
    state = HostState(role="gpu", shape=settings.shape, name="a", queue="a", seen_at=time.time(), launch=last)
    store = open_store(settings.store, settings.s3)
    write_state(store, state.model_copy(update={"lacks": ("cuda:0 fails",)}))
    assert await until_the_next() == 80, "it was up, and found that it cannot work"
    write_state(store, state.model_copy(update={"lease_since": time.time() - 60}))
    assert await loop.look(hosts) == 0 and await until_the_next() == 10, "a host has worked since"


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


KEY, OTHER_KEY = "k" * 64, "o" * 64


def settings_of(folder: Path, key: str = KEY, address: str | None = "127.0.0.1") -> Settings:
    return Settings(root=folder, seal_key=SecretStr(key), host_address=address)


def worker_of(settings: Settings, worker_id: str) -> WorkerPaths:
    paths = HostPaths(settings.root_path).worker(worker_id)
    paths.root.mkdir(parents=True)
    return paths


@contextmanager
def led(tmp_path: Path, num_nodes: int, address: str | None = "127.0.0.1") -> Iterator[tuple[GangMeeting, GangLeader]]:
    settings = settings_of(tmp_path / "machine-0", address=address)
    paths = worker_of(settings, "0" * 32)
    with Gangs(settings).leading(paths, num_nodes) as meeting:
        yield meeting, GangLeader(fence=Fence(epoch=1), worker_id=paths.root.name, at=meeting.at)


def followed(opened: ExitStack, folder: Path, node: int, leader: GangLeader, **how: str | None) -> GangMeeting:
    settings = settings_of(folder, **how)
    return opened.enter_context(Gangs(settings).following(worker_of(settings, f"{node}" * 32), node, leader))


@pytest.mark.parametrize("address", ["127.0.0.1", None], ids=["tls", "socket"])
def test_a_gang_is_whole_when_all_have_come_and_broken_when_one_has_gone(tmp_path: Path, address: str | None) -> None:
    with ExitStack() as opened:
        with led(tmp_path, 3, address) as (meeting, leader):
            assert (leader.at.address is not None) == (address is not None)
            first = followed(opened, tmp_path / "machine-1", 1, leader, address=address)
            wait_until(lambda: meeting._present, "the first")
            assert not meeting.is_whole
            with ExitStack() as leaves:
                second = followed(leaves, tmp_path / "machine-2", 2, leader, address=address)
                wait_until(lambda: meeting.is_whole, "the second")
                assert meeting.broken is None and first.broken is None and not meeting.leaves
                second.is_leaving = True
                wait_until(lambda: meeting.leaves, "what it says")
            assert wait_until(lambda: meeting.broken, "its end") == "the host of machine 2 is gone: it has ended"
            assert first.broken is None
        wait_until(lambda: first.broken, "the end of the first machine's host")


def test_ranks_reach_the_store_of_rank_0_by_a_port_of_their_own_machine(tmp_path: Path) -> None:
    with led(tmp_path, 2) as (meeting, leader), ExitStack() as opened:
        there = followed(opened, tmp_path / "machine-1", 1, leader)
        port = int(there._paths.meeting.read_bytes())
        with socket.create_connection(("127.0.0.1", port)) as rank:
            rank.sendall(b"question")  # before rank 0 serves a store
            with socket.create_server(("127.0.0.1", 0)) as store:
                meeting._paths.meeting.write_text(str(store.getsockname()[1]))
                served, _ = store.accept()
                with served:
                    assert served.recv(64) == b"question"
                    served.sendall(b"answer")
                    assert rank.recv(64) == b"answer"
        assert meeting.has_met and there.has_met


def test_a_silent_host_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "_SILENT_S", 0.5)
    monkeypatch.setattr(gangs, "_BEAT_S", 60.0)  # after the first one
    with led(tmp_path, 2) as (meeting, leader), ExitStack() as opened:
        there = followed(opened, tmp_path / "machine-1", 1, leader)
        ends = wait_until(lambda: meeting.broken and there.broken and (meeting.broken, there.broken), "the silence")
        assert any("was silent for 0.5 s" in end for end in ends), "whoever noticed first"


def test_strangers_are_not_served(tmp_path: Path) -> None:
    """One without the installation's key, one with a certificate and no token, and one that says too much."""
    with led(tmp_path, 2) as (meeting, leader), ExitStack() as opened:
        with pytest.raises(ssl.SSLError):
            followed(opened, tmp_path / "stranger", 1, leader, key=OTHER_KEY)
        assert leader.at.address is not None
        host, _, port = leader.at.address.rpartition(":")
        tls = Trust.of(settings_of(tmp_path / "own")).client_context()
        hello = '{"token": "%s", "node": 1, "rank": false}\n'
        words = [hello % ("0" * 64), "GET / HTTP/1.1\r\n\r\n", hello % "", "x" * 200_000 + "\n"]
        for said in words:
            with tls.wrap_socket(socket.create_connection((host, int(port)))) as connection:
                connection.sendall(said.encode())
                assert _until_end(connection) == b"", said[:80]
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall((hello % ("0" * 64)).encode())
            assert b"." not in _until_end(plain), "without TLS"
        assert not meeting.is_whole and meeting.broken is None
        followed(opened, tmp_path / "machine-1", 1, leader)
        wait_until(lambda: meeting.is_whole, "the one who belongs to it")


def test_hosts_of_several_machines_need_an_address(tmp_path: Path) -> None:
    with led(tmp_path, 2, None) as (meeting, leader), ExitStack() as opened:
        elsewhere = leader.model_copy(update={"at": leader.at.model_copy(update={"socket": "/nowhere"})})
        with pytest.raises(OSError, match="LONGSHORE_HOST_ADDRESS, which the first one lacks"):
            followed(opened, tmp_path / "machine-1", 1, elsewhere)
        assert not meeting.is_whole


def _until_end(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(4096):
            data += piece
    except OSError:
        pass
    return data


SCRIPT = REPOSITORY / "infra" / "slurm" / "host.sbatch"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster whose commands are configured by the environment."""
    # In a folder of a short name: Slurm has Unix sockets below it, whose names may have 107 bytes.
    with TemporaryDirectory(prefix="slurm-") as folder, cluster(Path(folder, "root")) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def jobs() -> dict[str, str]:
    """The names of the jobs that have not ended, by their ids."""
    return dict(line.split() for line in said("squeue", "--noheader", "--format=%A %j").splitlines())


@pytest.mark.deep
@pytest.mark.skipif(bool(missing()), reason=missing() or "")
async def test_a_run_has_a_job_of_slurm_and_another_when_that_is_told_to_leave(
    slurm: None, temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await eventually(lambda: "idle" in said("sinfo", "--noheader", "--format=%T"), "a node")
    python = tmp_path / "python"  # the script's own command line, with stand-in workers in place of a device
    code = "import sys; from tests.workflows.stand_in_host import main; sys.argv = ['0.05', '2']; main()"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"service.host --role gpu --exit-when-idle 300") ;; *) exit 9;; esac\n'
        f"exec {sys.executable} -c {shlex.quote(code)}\n"
    )
    python.chmod(0o755)
    async with started(temporal_address, tmp_path / "root", runs_per_worker=1) as stack:
        for name, value in {
            "LONGSHORE_ROOT": str(tmp_path / "machines"),
            "LONGSHORE_STORE_URI": stack.settings.store,
            "LONGSHORE_TEMPORAL_ADDRESS": temporal_address,
            "LONGSHORE_SHAPE": stack.settings.shape,
            "LONGSHORE_SEAL_KEY": seal_keys(stack.settings)[0].secret.decode(),
            "PYTHONPATH": str(REPOSITORY),
            "PYTHON": str(python),
        }.items():
            monkeypatch.setenv(name, value)
        launcher = slurm_hosts(SCRIPT, "gpu", 300, f"--gres=none --mem=0 --cpus-per-task=1 --output={tmp_path}/%j.log")
        launching = Launching(stack.client, stack.store, stack.settings, "gpu", most=2)
        stopped = asyncio.Event()
        assert await launching.look(launcher) == 0 and not jobs(), "none at rest"
        looking = asyncio.create_task(launching.look_each(0.5, launcher, stopped))
        handle = await stack.start(steps=100_000, checkpoint_every=100_000)
        await eventually(lambda: is_at(stack, handle.id, 5), "step 5", 240)
        [first] = jobs()
        assert said("scancel", "--batch", "--signal=TERM", first) == ""
        await eventually(lambda: first not in jobs(), "its end")
        left_at = max(await asyncio.to_thread(steps, stack, handle.id))
        await eventually(lambda: is_at(stack, handle.id, left_at + 5), "steps in another job", 240)
        [second] = jobs()
        assert second != first
        assert [path.name for path in (tmp_path / "machines").iterdir()] == [second], "a job's folder goes with it"
        await handle.cancel()
        await eventually(lambda: not jobs(), "the end of jobs without a lease")
        stopped.set()
        await looking
        status = await stack.result(handle.id)
        done = steps(stack, handle.id)
        assert done == [*range(1, len(done) + 1)], "none twice, none left out"
        assert (status.state, status.epoch, status.workers_lost) == ("cancelled", 2, 0)
