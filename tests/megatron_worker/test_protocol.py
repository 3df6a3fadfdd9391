"""The job protocol with real processes: launcher, signals, /proc. Nothing here looks inside the worker."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from activities.hosts import programs
from longshore.events import Cancelled, Failed, Saved, Started, Step, Succeeded
from longshore.fields import Artifact, Fence
from longshore.training import Layout
from megatron_worker.process.startup import is_alive
from shared.jobs.job import WORKER_ID_VARIABLE, Job, LeaseMark, WorkerKey, WorkerRecord
from shared.storage.artifacts import sha256_file
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
from tests.depth import drawn
from tests.megatron_worker.launch import REPOSITORY, environment, ranks_command, torchrun
from tests.megatron_worker.workshop import Workshop, make_workshop, read_log, submit

WORKER = "tests.megatron_worker.tiny_engine"
TERMINAL = (Succeeded, Failed, Cancelled)
# What would make gloo listen where other machines reach it.
ON_THE_NETWORK = {
    "GLOO_SOCKET_IFNAME": next((name for name in psutil.net_if_addrs() if not name.startswith("lo")), "lo")
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def long_workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("long-workshop"), num_steps=32)


class Host:
    """What a host does to its worker, and no more: launch, write files, read the log, send signals."""

    def __init__(self, root: Path, num_ranks: int, **variables: str) -> None:
        self.paths = WorkerPaths(root)
        self.num_ranks = num_ranks
        self.worker_id = f"test-{os.getpid()}-{time.monotonic_ns()}"
        root.mkdir(parents=True)
        variables |= {WORKER_ID_VARIABLE: self.worker_id, "LONGSHORE_ROOT": str(root / "home")}
        python, *arguments = ranks_command(WORKER, "--root", str(root), num_ranks=num_ranks)
        with self.paths.output.open("wb") as output:
            said = output.fileno()
            self.process = programs.start([python, "-P", *arguments], environment(**variables), said, said)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.paths.output.read_text()
            assert time.monotonic() < deadline, self.paths.output.read_text()
            time.sleep(0.02)

    def wait_for_end(self, job: Job) -> None:
        log = Path(job.log_path)
        self.wait_for(lambda: log.exists() and b'"event":"' in log.read_bytes() and has_ended(log))

    def wait_for_step(self, job: Job, step: int) -> None:
        log = Path(job.log_path)
        self.wait_for(lambda: log.exists() and f'"step":{step},'.encode() in log.read_bytes())

    def ranks(self) -> list[psutil.Process]:
        """Every process of this worker; where there are several, the launcher left out."""
        return [p for p in of_worker(self.paths.root) if p.pid != self.process.pid or self.num_ranks == 1]

    def wait_until_no_rank_is_left(self, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.ranks():
            assert time.monotonic() < deadline, self.paths.output.read_text()
            psutil.wait_procs(left, timeout=1)

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        for process in of_worker(self.paths.root):
            process.kill()
        self.process.wait()


def has_ended(log: Path) -> bool:
    last = log.read_bytes().splitlines()[-1]
    return any(f'"event":"{name}"'.encode() in last for name in ("succeeded", "failed", "cancelled"))


def of_worker(root: Path) -> list[psutil.Process]:
    """The processes whose command line has this folder: of a forked one it is the title."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"--root {root}" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A resident worker of two ranks that the tests of this file share."""
    host = Host(
        tmp_path_factory.mktemp("workers") / "shared", num_ranks=2, TINY_ENGINE_SECONDS_PER_BIN="0.1", **ON_THE_NETWORK
    )
    host.wait_for(host.paths.ready.exists)
    yield host
    host.close()


@pytest.fixture(scope="module")
def lone_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One of a single rank."""
    host = Host(
        tmp_path_factory.mktemp("workers") / "lone", num_ranks=1, TINY_ENGINE_SECONDS_PER_BIN="0.1", **ON_THE_NETWORK
    )
    yield host
    host.close()


@pytest.fixture
def new_host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def launch(num_ranks: int, **variables: str) -> Host:
        hosts.append(Host(tmp_path / f"worker-{len(hosts)}", num_ranks, **variables))
        return hosts[-1]

    yield launch
    for host in hosts:
        host.close()


def nowhere(workshop: Workshop) -> Artifact:
    return Artifact(uri=f"file://{workshop.root}/nowhere", sha256="0" * 64)


@pytest.mark.parametrize(("ending", "job_id"), [(Succeeded, "000011"), (Failed, "000012"), (Cancelled, "000013")])
def test_when_the_terminal_line_stands_nothing_of_the_job_is_left(
    host: Host, workshop: Workshop, ending: type, job_id: str
):
    """The process group is stopped the moment the line is there; then whatever it still holds can be seen.

    The log itself may still be open: its last line is seen before its fsync returns.
    """
    changes = {"initial_adapter": nowhere(workshop)} if ending is Failed else {}
    plan = workshop.plan(job_id=job_id, layout=Layout(dp=2), **changes)
    job = submit(host.paths, plan)
    if ending is Cancelled:
        host.wait_for_step(job, 1)
        write_atomically(host.paths.cancel("run-1", job_id, job.fence), b"")
    host.wait_for_end(job)
    host.signal_group(signal.SIGSTOP)
    try:
        events = read_log(job.log_path)
        assert isinstance(events[-1], ending), events[-1]
        assert len([e for e in events if isinstance(e, TERMINAL)]) == 1
        assert not Path(job.scratch_dir).exists()
        assert [p.name for p in host.paths.archive.glob(f"*{job_id}*")] == [f"run-1-{job_id}-e000001-a01.json"]
        assert not list(host.paths.claimed.iterdir())
        ranks = host.ranks()
        assert len(ranks) == 2
        for rank in ranks:
            maps = Path(f"/proc/{rank.pid}/maps").read_text()
            opened = [f.path for f in rank.open_files()]
            assert str(workshop.root) not in maps
            assert not [path for path in opened if path.startswith((str(workshop.root), str(job.checkpoint_dir)))]
    finally:
        host.signal_group(signal.SIGCONT)


def test_a_cancel_is_answered_at_the_next_step_and_goes_on_to_the_same_bits(host: Host, workshop: Workshop):
    whole = submit(host.paths, workshop.plan(job_id="000021", layout=Layout(dp=2)))
    host.wait_for_end(whole)
    job = submit(host.paths, workshop.plan(job_id="000022", layout=Layout(dp=2)))
    host.wait_for_step(job, 2)
    write_atomically(host.paths.cancel("run-1", "000022", job.fence), b"")
    asked = time.time()
    host.wait_for_end(job)
    last = read_log(job.log_path)[-1]
    assert isinstance(last, Cancelled)
    late = [e for e in read_log(job.log_path) if isinstance(e, Step) and e.time > asked]
    assert len(late) <= 1, "only the step that was under way"
    assert last.step < 6
    saved = next(e for e in read_log(job.log_path) if isinstance(e, Saved))
    start = Artifact(uri=f"file://{saved.path}", sha256=saved.manifest_sha256)
    fence = Fence(epoch=2)
    resumed = submit(host.paths, workshop.plan(job_id="000022", layout=Layout(dp=2)), fence=fence, start=start)
    host.wait_for_end(resumed)
    assert read_log(resumed.log_path)[0].first_step == last.step
    assert adapter_sha256(resumed.checkpoint_dir) == adapter_sha256(whole.checkpoint_dir)


def test_a_job_of_an_older_fence_is_refused(host: Host, workshop: Workshop):
    lease = LeaseMark(run_id="run-1", fence=Fence(epoch=3))
    write_atomically(host.paths.lease(lease.run_id), lease.model_dump_json().encode())
    plan = workshop.plan(job_id="000031", layout=Layout(dp=2))
    stale, current = submit(host.paths, plan, fence=Fence(epoch=2)), submit(host.paths, plan, fence=Fence(epoch=3))
    host.wait_for_end(stale)
    host.wait_for_end(current)
    shutil.rmtree(host.paths.leases)
    (refused,) = read_log(stale.log_path)
    assert isinstance(refused, Failed)
    assert refused.kind == "stale_fence"
    assert isinstance(read_log(current.log_path)[-1], Succeeded)
    assert (host.paths.archive / "run-1-000031-e000002-a01.json").exists()


def test_a_worker_whose_lease_ends_leaves_its_device_and_is_there_for_the_next(host: Host, workshop: Workshop):
    lease = LeaseMark(run_id="run-1", fence=Fence(epoch=1))
    plan = workshop.plan(job_id="000032", layout=Layout(dp=2), after="keep")
    jobs = []
    for epoch in (1, 2):
        mark = lease.model_copy(update={"fence": Fence(epoch=epoch)})
        write_atomically(host.paths.lease("run-1"), mark.model_dump_json().encode())
        jobs.append(submit(host.paths, plan, fence=mark.fence))
        host.wait_for_end(jobs[-1])
        assert read_log(jobs[-1].log_path)[-1].device == "held"
        assert not host.paths.offloaded.exists(), "the lease's next job finds it on the device"
        host.paths.lease("run-1").unlink()
        host.wait_for(host.paths.offloaded.exists)
        assert int(host.paths.offloaded.read_bytes()) > 0, "bytes of both ranks"
        host.paths.offloaded.unlink()
    shutil.rmtree(host.paths.leases)
    assert len({adapter_sha256(job.checkpoint_dir) for job in jobs}) == 1


def test_half_a_job_file_is_never_read(host: Host, workshop: Workshop):
    plan = workshop.plan(job_id="000041", layout=Layout(dp=2))
    job = submit(host.paths, plan)
    host.wait_for_end(job)
    text = (host.paths.archive / "run-1-000041-e000001-a01.json").read_bytes()
    for half in (".000042-e000001-a01.json.tmp", ".000042-e000001-a01.json"):
        (host.paths.jobs / half).write_bytes(text[: len(text) // 2])
    following = submit(host.paths, workshop.plan(job_id="000043", layout=Layout(dp=2)))
    host.wait_for_end(following)
    assert isinstance(read_log(following.log_path)[-1], Succeeded)
    assert len(list(host.paths.jobs.iterdir())) == 2
    for half in host.paths.jobs.iterdir():
        half.unlink()


def test_an_archived_job_run_again_by_hand_gives_the_same_bytes(host: Host, workshop: Workshop, tmp_path: Path):
    job = submit(host.paths, workshop.plan(job_id="000051", layout=Layout(dp=2)))
    host.wait_for_end(job)
    archived = host.paths.archive / "run-1-000051-e000001-a01.json"
    before = archived.read_bytes()
    torchrun(WORKER, "--once", str(archived), "--into", str(tmp_path), num_ranks=2)
    assert adapter_sha256(tmp_path / "checkpoints") == adapter_sha256(job.checkpoint_dir)
    again, first = read_log(tmp_path / "log.jsonl"), read_log(job.log_path)
    assert [e.metrics["loss"] for e in again if isinstance(e, Step)] == [
        e.metrics["loss"] for e in first if isinstance(e, Step)
    ]
    assert archived.read_bytes() == before
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_while_a_job_runs_nothing_of_a_worker_can_be_reached_from_elsewhere(
    host: Host, lone_host: Host, workshop: Workshop, num_ranks: int
):
    """Told by their environment to use the network, too."""
    host = host if num_ranks > 1 else lone_host
    job = submit(host.paths, workshop.plan(job_id="000071", layout=Layout(dp=num_ranks)))
    host.wait_for_step(job, 1)
    bound = [c for process in of_worker(host.paths.root) for c in process.net_connections("inet") if not c.raddr]
    print([(c.status, c.laddr) for c in bound])
    assert not has_ended(Path(job.log_path)), "it was looked at in the middle of the job"
    assert {c.laddr.ip for c in bound} <= {"127.0.0.1", "::1"}
    host.wait_for_end(job)


def test_stop_lets_the_job_in_hand_end_and_then_leaves(lone_host: Host, workshop: Workshop):
    host = lone_host
    job = submit(host.paths, workshop.plan(job_id="000081"))
    host.wait_for(lambda: Path(job.log_path).exists())
    write_atomically(host.paths.stop, b"")
    assert host.process.wait(300) == 0
    assert isinstance(read_log(job.log_path)[-1], Succeeded)
    assert not host.ranks()


@pytest.mark.parametrize("victim", drawn(["launcher", "host", "rank"], 1))
def test_no_rank_is_left_behind_by_the_death_of(
    new_host: Callable[..., Host], stand_in: subprocess.Popen, long_workshop: Workshop, victim: str
):
    """In the middle of a step, where the others wait in a collective; half a minute of steps is still to come."""
    host, workshop = new_host(2, TINY_ENGINE_SECONDS_PER_BIN="0.5"), long_workshop
    write_atomically(host.paths.record, record_of(host, stand_in.pid, workshop).model_dump_json().encode())
    job = submit(host.paths, workshop.plan(layout=Layout(dp=2)))
    host.wait_for_step(job, 1)
    assert len(host.ranks()) == 2
    killed = {"launcher": host.process.pid, "host": stand_in.pid, "rank": host.ranks()[0].pid}[victim]
    os.kill(killed, signal.SIGKILL)
    if victim == "host":
        stand_in.wait()
    host.wait_until_no_rank_is_left()
    assert not isinstance(read_log(job.log_path)[-1], TERMINAL), "nobody was left to agree on an end"


@pytest.mark.parametrize("victim", drawn(["launcher", "host"], 1))
def test_an_idle_worker_is_not_left_behind_either(
    new_host: Callable[..., Host], stand_in: subprocess.Popen, workshop: Workshop, victim: str
):
    host = new_host(2)
    write_atomically(host.paths.record, record_of(host, stand_in.pid, workshop).model_dump_json().encode())
    host.wait_for(host.paths.ready.exists)
    (stand_in if victim == "host" else host.process).send_signal(signal.SIGKILL)
    (stand_in if victim == "host" else host.process).wait()
    host.wait_until_no_rank_is_left()


@pytest.fixture
def stand_in() -> Iterator[subprocess.Popen]:
    """A process in the place of the host that launched the worker."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def record_of(host: Host, host_pid: int, workshop: Workshop) -> WorkerRecord:
    return WorkerRecord(
        worker_id=host.worker_id,
        pid=host.process.pid,
        started_at=psutil.Process(host.process.pid).create_time(),
        host_pid=host_pid,
        host_started_at=psutil.Process(host_pid).create_time(),
        key=WorkerKey(model=workshop.model, layout=Layout(dp=2), dtype="float32"),
    )


def test_a_pid_that_was_used_again_is_another_process():
    me = psutil.Process()
    assert is_alive(me.pid, me.create_time())
    assert not is_alive(me.pid, me.create_time() - 60)
    ended = subprocess.Popen(["true"])
    started_at = psutil.Process(ended.pid).create_time()
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not is_alive(ended.pid, started_at), "a zombie has ended"
    ended.wait()
    assert not is_alive(ended.pid, started_at)


def test_a_job_that_cannot_begin_by_hand_says_why_and_leaves_with_2(tmp_path: Path):
    (tmp_path / "job.json").write_text("{}")
    command = ranks_command("megatron_worker", "--once", str(tmp_path / "job.json"))
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "job.json" in done.stderr
    assert "Traceback" not in done.stderr


_ABORTS_IN_FINALIZATION = """
import builtins, ctypes
class Aborts:
    def __del__(self, abort=ctypes.CDLL(None).abort): abort()
builtins.aborts = Aborts()
"""


def test_a_fault_in_the_interpreter_s_finalization_changes_no_exit_status(tmp_path: Path):
    """Threads of torch abort a process there now and then, after its job is done."""
    (tmp_path / "sitecustomize.py").write_text(_ABORTS_IN_FINALIZATION)
    aborting = environment() | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    assert subprocess.run([sys.executable, "-c", ""], env=aborting, check=False).returncode == -signal.SIGABRT
    (tmp_path / "job.json").write_text("{}")
    command = ranks_command("megatron_worker", "--once", str(tmp_path / "job.json"))
    done = subprocess.run(command, cwd=REPOSITORY, env=aborting, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "job.json" in done.stderr, done.stderr


def adapter_sha256(checkpoints: Path | str) -> str:
    (newest,) = sorted(Path(checkpoints).glob("step-*"))[-1:]
    return sha256_file(newest / "weights" / "adapter_model.safetensors")


def test_a_started_event_tells_where_the_job_runs(host: Host, workshop: Workshop):
    job = submit(host.paths, workshop.plan(job_id="000061", layout=Layout(dp=2)))
    host.wait_for_end(job)
    started = read_log(job.log_path)[0]
    assert isinstance(started, Started)
    assert (started.world_size, started.first_step, started.num_steps) == (2, 0, 6)
    shutil.rmtree(Path(job.log_path).parent)
