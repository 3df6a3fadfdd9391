"""Hosts as jobs of a real Slurm: one controller and one node, on this machine."""

import asyncio
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.slurm_cluster import cluster, missing
from service.launching import Launching, slurm_hosts
from service.sealing import seal_keys
from tests.waiting import eventually
from tests.workflows.leases.test_come_and_go import is_at, steps
from tests.workflows.stack import started
from tests.workflows.stand_in import REPOSITORY

SCRIPT = REPOSITORY / "infra" / "slurm" / "host.sbatch"
pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or ""), pytest.mark.deep]


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
