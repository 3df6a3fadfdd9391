"""Hosts as jobs of a real Slurm: one controller and one node, on this machine."""

import asyncio
import getpass
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.launching import Launching, slurm_hosts
from service.sealing.keys import seal_keys
from tests.conftest import free_port
from tests.workflows.leases.test_come_and_go import is_at, steps
from tests.workflows.stack import eventually, started
from tests.workflows.stand_in import REPOSITORY

SCRIPT = REPOSITORY / "infra" / "slurm" / "host.sbatch"
MISSING = [name for name in ("slurmctld", "slurmd", "munged", "mungekey", "sbatch") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurmctld slurmd munge"),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd starts jobs of users: it wants to be root"),
]
CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=30
NodeName=localhost CPUs={cpus} State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster whose commands are configured by the environment."""
    root = tmp_path / "slurm"
    for folder in (root, root / "state", root / "spool"):
        folder.mkdir(mode=0o755)
    config = root / "slurm.conf"
    config.write_text(
        CONFIG.format(
            controller=free_port(), node=free_port(), user=getpass.getuser(), root=root, cpus=os.cpu_count() or 1
        )
    )
    (root / "cgroup.conf").write_text("")
    subprocess.run(["mungekey", "--create", f"--keyfile={root}/munge.key"], check=True)
    of_munge = [
        f"--{name}={root}/munge.{suffix}"
        for name, suffix in (
            ("key-file", "key"),
            ("socket", "sock"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    ]
    monkeypatch.setenv("SLURM_CONF", str(config))
    commands = [
        ["munged", "--foreground", "--force", *of_munge],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", "localhost"],
    ]
    with (root / "log").open("wb") as log:
        processes = []
        try:
            for command in commands:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
                _wait_for(root / "munge.sock")
            yield root
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait(60)


def _wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{path} is not there")


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def jobs() -> dict[str, str]:
    """The names of the jobs that have not ended, by their ids."""
    return dict(line.split() for line in said("squeue", "--noheader", "--format=%A %j").splitlines())


async def test_a_run_has_a_job_of_slurm_and_another_when_that_is_told_to_leave(
    slurm: Path, temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await eventually(lambda: "idle" in said("sinfo", "--noheader", "--format=%T"), "a node", 60)
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
        await eventually(lambda: first not in jobs(), "its end", 120)
        left_at = max(await asyncio.to_thread(steps, stack, handle.id))
        await eventually(lambda: is_at(stack, handle.id, left_at + 5), "steps in another job", 240)
        [second] = jobs()
        assert second != first
        await handle.cancel()
        await eventually(lambda: not jobs(), "the end of jobs without a lease", 120)
        stopped.set()
        await looking
        status = await stack.result(handle.id)
        done = steps(stack, handle.id)
        assert done == [*range(1, len(done) + 1)], "none twice, none left out"
        assert (status.state, status.epoch, status.workers_lost) == ("cancelled", 2, 0)
