"""A Slurm of one controller and one node on this machine, from Debian's packages, for tests and figures."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch")
_CONFIG = """
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


def missing() -> str | None:
    """Return why no cluster can be started here, if none can."""
    if lacks := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(lacks)}: apt-get install slurmctld slurmd munge"
    return "slurmd starts jobs of users: it wants to be root" if os.getuid() else None


@contextmanager
def cluster(root: Path) -> Iterator[dict[str, str]]:
    """Start a cluster in a folder. Yields the environment variables that Slurm's commands find it by."""
    for folder in (root, root / "state", root / "spool"):
        folder.mkdir(mode=0o755)
    config, cpus = root / "slurm.conf", os.cpu_count() or 1
    ports = {"controller": free_port(), "node": free_port()}
    config.write_text(_CONFIG.format(**ports, user=getpass.getuser(), root=root, cpus=cpus))
    (root / "cgroup.conf").write_text("")
    subprocess.run(["mungekey", "--create", f"--keyfile={root}/munge.key"], check=True)
    files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    commands = [
        ["munged", "--foreground", "--force", *(f"--{name}={root}/munge.{suffix}" for name, suffix in files.items())],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", "localhost"],
    ]
    environment, processes = {"SLURM_CONF": str(config)}, []
    with (root / "log").open("wb") as log:
        try:
            for command in commands:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment))
                _wait_for(root / "munge.sock")
            yield environment
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait(60)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{path} is not there")
