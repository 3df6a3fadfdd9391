"""Start the ranks of one machine, and end all of them when one fails.

    python -m megatron_worker.process.launcher N MODULE …

The ranks meet in a file of a folder that only this user can open (torch's FileStore): unlike with torchrun, no port is
open, and nothing that a stranger could send is ever unpickled. If a worker has ranks on several machines, each machine
has a launcher, and all meet in rank 0's store: LONGSHORE_NODE=1/3 says which of three machines this is, and
LONGSHORE_RENDEZVOUS names the file with the local port of the store (service/host_http/gangs.py).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from shared.log_lines import escape_output
from shared.programs import NODE_VARIABLE, RENDEZVOUS_VARIABLE, become

_TERM_GRACE_S = 1.0


class RankProcesses:
    """The processes of all ranks, by pid. A signal that asks the launcher to leave is passed on to them."""

    def __init__(self) -> None:
        self._living: dict[int, int] = {}
        self._is_asked_to_leave = False

    def start(self, num: int, module: str, arguments: Sequence[str], rendezvous: Path) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)
        signal.signal(signal.SIGALRM, self._kill)
        for rank in range(num):
            environment = {**os.environ, **_place(rank, num), RENDEZVOUS_VARIABLE: str(rendezvous)}
            self._living[_start([sys.executable, "-P", "-m", module, *arguments], environment)] = rank
            if self._is_asked_to_leave:  # between two starts
                self._end()

    def wait(self) -> int:
        """Wait for all. Returns 0, or the exit status of the first that failed: after a signal, 128 more than that."""
        failed = 0
        while self._living:
            pid, status = os.wait()
            rank = self._living.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if rank is None or code == 0 or failed:
                continue
            failed = code if code > 0 else 128 - code
            if code < 0:
                print(f"rank {rank} was ended by signal {-code}", file=sys.stderr, flush=True)
            self._end()
        return failed

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._is_asked_to_leave = True
        self._end()

    def _end(self) -> None:
        """Send SIGTERM now, SIGKILL after a grace."""
        self._signal(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, _TERM_GRACE_S)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for pid in list(self._living):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _start(command: list[str], environment: dict[str, str]) -> int:
    """Start a rank; returns its pid. If this process was forked with everything imported, the rank is forked too."""
    if "megatron_worker.worker" not in sys.modules:
        return subprocess.Popen(command if sys.flags.safe_path else [command[0], *command[2:]], env=environment).pid
    pid = os.fork()
    if not pid:
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(command, environment)
    return pid


def _place(rank: int, num: int) -> dict[str, str]:
    """Return torchrun's variables for a rank's place. `rank`: among the `num` of this machine."""
    node, _, nodes = os.environ.get(NODE_VARIABLE, "0/1").partition("/")
    place = {
        "RANK": int(node) * num + rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": int(nodes) * num,
        "LOCAL_WORLD_SIZE": num,
    }
    return {name: str(value) for name, value in place.items()}


def main() -> int:
    num, module, *arguments = sys.argv[1:]
    ranks = RankProcesses()
    folder = tempfile.mkdtemp(prefix="longshore-ranks-")  # which only this user can open
    try:
        meeting = os.environ.get(RENDEZVOUS_VARIABLE) if NODE_VARIABLE in os.environ else None
        ranks.start(int(num), module, arguments, Path(meeting or f"{folder}/rendezvous"))
        return ranks.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
