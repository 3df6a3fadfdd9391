"""Starts hosts while runs wait for them: `python -P -m longshore.server service.launching --role gpu|sampler`.

It asks Temporal how many leases wait in the queue of its shape, as KEDA's scaler does, and has a launcher start as many
hosts, none twice for one lease. A host ends by itself when it has had none for a while (`--exit-when-idle`), so that
nothing here ends one. On Kubernetes KEDA takes this program's place (docs/kubernetes.md).
"""

import argparse
import asyncio
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, get_args

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.client import Client
from temporalio.service import RPCError

from service.temporal import connect_temporal, described
from shared.errors import LongshoreError
from shared.log_lines import escape_output, start_logging
from shared.settings import Settings
from shared.storage.host_states import LeasingRole, read_states
from shared.storage.store import ObjectStore, open_store

_COMMAND_S = 60.0
# Temporal's figures of a queue may be 5 s old (its matching.TaskQueueInfoByBuildIdTTL): a lease taken since then
# counts as waiting.
_OLD_S = 10.0
_GLANCE_S = 1.0
_LONGEST_REST_S = 300.0
_TYPES = (TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW)
_log = logging.getLogger("longshore.launching")


class Launcher(Protocol):
    """A source of hosts."""

    def launched(self) -> frozenset[str]:
        """Return the names of the hosts that were asked for and have not ended, whether or not they are up."""

    def launch(self, name: str) -> None:
        """Ask for one more host. It carries `name` as its setting `launch`. Raises OSError, SubprocessError."""


class LocalHosts:
    """Hosts as processes of this machine. They outlive the launcher: one that is started again does not know them."""

    def __init__(self, role: LeasingRole, idle_s: float) -> None:
        self._command = [sys.executable, "-P", "-m", "service.host", "--role", role, "--exit-when-idle", f"{idle_s:g}"]
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}

    def launched(self) -> frozenset[str]:
        self._hosts = {name: host for name, host in self._hosts.items() if host.poll() is None}
        return frozenset(self._hosts)

    def launch(self, name: str) -> None:
        self._hosts[name] = subprocess.Popen(self._command, env=_environment(name), start_new_session=True)


class CommandHosts:
    """Hosts of another system, through two of its commands; Slurm's are `sbatch` and `squeue`.

    Args:
        start: asks for a host named `LONGSHORE_LAUNCH`, which is in its environment; `{name}` in it is that name, too.
        names: prints the names of those that have not ended, one a line; names of anything else are ignored.
    """

    def __init__(self, start: str, names: str) -> None:
        self._start, self._names = shlex.split(start), shlex.split(names)

    def launched(self) -> frozenset[str]:
        return frozenset(_output(self._names, os.environ).split())

    def launch(self, name: str) -> None:
        _output([each.replace("{name}", name) for each in self._start], _environment(name))


def _environment(name: str) -> dict[str, str]:
    return {**os.environ, "LONGSHORE_LAUNCH": name}


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_COMMAND_S,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


def slurm_hosts(script: Path, role: LeasingRole, idle_s: float, options: str = "") -> CommandHosts:
    """Return the launcher of Slurm. `options`: of sbatch, such as `--partition=gpu`."""
    start = f"sbatch --parsable --job-name={{name}} {options} {shlex.quote(str(script))} {role} {idle_s:g}"
    return CommandHosts(start, "squeue --me --noheader --format=%j")


async def waiting(client: Client, queue: str) -> int:
    """Return how many tasks wait in a queue, by the query of KEDA's scaler. Those in progress are not among them."""
    answers = [await described(client, queue, kind, report_stats=True) for kind in _TYPES]
    return sum(answer.stats.approximate_backlog_count for answer in answers)


def num_missing(
    num_waiting: int, launched: frozenset[str], at_work: frozenset[str], most: int, num_warm: int = 0
) -> int:
    """Return how many hosts to start: one for each waiting lease, except those that a free host will take.

    A busy host takes no waiting lease. A host without a lease, or that has just taken one, counts as free.
    `num_warm`: hosts to keep free in addition.
    """
    return max(0, min(num_waiting + num_warm - len(launched - at_work), most - len(launched)))


class Launching:
    """Keeps as many hosts as runs wait for, up to a number."""

    def __init__(self, client: Client, store: ObjectStore, settings: Settings, role: LeasingRole, most: int) -> None:
        self._client, self._store, self._role, self._most = client, store, role, most
        self._shape, self._num_warm = settings.shape, settings.warm_hosts
        self._num_waiting = 0  # at the last look
        # Launched hosts that have not said yet that they are up, or have said that they lack something.
        self._doubtful: set[str] = set()
        self._dead: set[str] = set()
        self._num_dead, self._rests_until = 0, 0.0
        self._queue = settings.lease_queue if role == "gpu" else settings.sampler_queue
        self._prefix = f"longshore-{self._queue}-"
        # Match the whole name: other hosts' names, or another shape's, may have the same prefix.
        self._own = re.compile(rf"{re.escape(self._prefix)}[0-9a-f]{{12}}")

    async def look(self, launcher: Launcher) -> int:
        """Start the hosts that are missing now. Returns their number."""
        launched = frozenset(filter(self._own.fullmatch, await asyncio.to_thread(launcher.launched)))
        # Waiting leases come last: a host that takes one meanwhile still counts as on its way.
        states = await asyncio.to_thread(read_states, self._store, self._shape)
        before = time.time() - _OLD_S  # a lease that is younger may still count as waiting
        held = [state for state in states if state.role == self._role and (state.lease_since or before) < before]
        at_work = frozenset(state.launch for state in held if state.launch)
        unfit = {state.launch for state in states if state.launch and state.lacks and state.role == self._role}
        self._doubtful = (self._doubtful - {state.launch for state in states}) | (unfit - self._dead)
        if at_work:
            self._num_dead = 0
        self._num_waiting = num_waiting = await waiting(self._client, self._queue)
        num = num_missing(num_waiting, launched, at_work, self._most, self._num_warm)
        if num and self._rests(launched):
            return 0
        for _ in range(num):
            name = f"{self._prefix}{uuid.uuid4().hex[:12]}"
            _log.info("%d leases wait in %s, %d hosts: starting %s", num_waiting, self._queue, len(launched), name)
            await asyncio.to_thread(launcher.launch, name)
            self._doubtful.add(name)
        return num

    def _rests(self, launched: frozenset[str]) -> bool:
        """Return True for a while after hosts ended because they lack something, or before they said anything, since
        others would too. The time grows with their number in a row.
        """
        if dead := self._doubtful - launched:
            self._doubtful -= dead
            self._dead |= dead
            self._num_dead += 1
            rest_s = min(_LONGEST_REST_S, 5.0 * 2**self._num_dead)
            self._rests_until = time.monotonic() + rest_s
            _log.warning("%s ended unfit to work; the next is started in %g s", ", ".join(sorted(dead)), rest_s)
        return time.monotonic() < self._rests_until

    async def look_each(self, every_s: float, launcher: Launcher, stopped: asyncio.Event) -> None:
        """Check until `stopped`. If a query or a start fails, the next check tries it again."""
        while not stopped.is_set():
            try:
                await self.look(launcher)
            except (RPCError, LongshoreError, OSError, subprocess.SubprocessError) as error:
                _log.warning("no hosts can be started now: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._until_more_wait(stopped), every_s)

    async def _until_more_wait(self, stopped: asyncio.Event) -> None:
        """Ask Temporal alone, each second, until more leases wait than at the last look, or `stopped`."""
        while not stopped.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _GLANCE_S)
            with suppress(RPCError):  # the next check logs it
                if await waiting(self._client, self._queue) > self._num_waiting:
                    return


async def _main(given: argparse.Namespace, settings: Settings, most: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    launcher: Launcher = LocalHosts(given.role, given.exit_when_idle)
    if given.slurm is not None:
        launcher = slurm_hosts(given.slurm, given.role, given.exit_when_idle, given.sbatch_options)
    elif given.start is not None:
        launcher = CommandHosts(given.start, given.names)
    client = await connect_temporal(settings)
    launching = Launching(client, open_store(settings.store, settings.s3), settings, given.role, most)
    await launching.look_each(given.every, launcher, stopped)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -P -m longshore.server service.launching", description=__doc__)
    parser.add_argument("--role", choices=get_args(LeasingRole), default="gpu")
    parser.add_argument(
        "--most", type=int, help="most hosts at a time; for the role gpu, LONGSHORE_MAX_HOSTS if absent"
    )
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between checks")
    parser.add_argument(
        "--exit-when-idle", type=float, default=300.0, metavar="S", help="of its hosts; not with --start"
    )
    parser.add_argument(
        "--slurm", type=Path, metavar="SCRIPT", help="a host is a job of Slurm: infra/slurm/host.sbatch"
    )
    parser.add_argument(
        "--sbatch-options", default="", metavar="OPTIONS", help="options of each Slurm job: '--partition=gpu'"
    )
    parser.add_argument("--start", metavar="COMMAND", help="the command that starts a host; {name} is its name")
    parser.add_argument("--names", metavar="COMMAND", help="command that prints the names of hosts that have not ended")
    given = parser.parse_args(arguments)
    if (given.start is None) != (given.names is None) or (given.start and given.slurm):
        parser.error("--start and --names go together, and without --slurm")
    if given.slurm is not None and not given.slurm.is_file():
        parser.error(f"--slurm {given.slurm}: no such file")
    settings = Settings()
    most = given.most if given.most is not None else settings.max_hosts if given.role == "gpu" else None
    if most is None or most < 1 or given.every <= 0:
        parser.error("--most is 1 at least, and --every more than 0")
    start_logging()
    asyncio.run(_main(given, settings, most))


if __name__ == "__main__":
    escape_output()
    main()
