"""What happens to the processes of a stack: they are killed or stopped for a while, one of a kind or all at once."""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from service.dev.supervisor import supervisor
from tests.end_to_end.stack import Stack
from tests.end_to_end.victims import (
    Victim,
    a_rank,
    control_host,
    gpu_host,
    launcher,
    sampler,
    sampler_host,
    signal_all,
    temporal_server,
    wandb_writer,
    web_service,
)

KINDS: tuple[Victim, ...] = (
    *(web_service, temporal_server, control_host, gpu_host, sampler_host),
    *(launcher, a_rank, sampler, wandb_writer),
)
EVERYTHING = "everything at once"
_SHARE_STOPPED = 0.2
_SHARE_EVERYTHING = 0.06
_LONGEST_STOP_S = 8.0  # longer than a heartbeat may be late
_LONGEST_PAUSE_S = 4.0
# Runs are given up after five losses in a row without a new checkpoint. So that none is, whatever the machine, at most
# so many things happen before something new stands in the store.
_AT_MOST_IN_A_ROW = 3
_LOOK_EVERY_S = 0.1


@dataclass
class Disturber:
    """Disturbs a stack until it is told that all is over, or as often as was asked for. `told` counts what happened."""

    stack: Stack
    chance: random.Random
    most: int
    everything_at: int | None = None
    told: Counter[str] = field(default_factory=Counter)

    @property
    def is_spent(self) -> bool:
        return self.told.total() >= self.most

    def disturb(self, is_over: Callable[[], bool]) -> None:
        made, in_a_row = self._made(), 0
        while not self.is_spent and not is_over():
            time.sleep(self.chance.uniform(0.0, _LONGEST_PAUSE_S))
            in_a_row = 0 if made < (now := self._made()) else in_a_row
            made |= now
            if in_a_row >= self.chance.randint(1, _AT_MOST_IN_A_ROW):
                time.sleep(_LOOK_EVERY_S)
                continue
            self._act()
            in_a_row += 1

    def _act(self) -> None:
        if self.everything_at == self.told.total() or (
            self.everything_at is None and self.chance.random() < _SHARE_EVERYTHING
        ):
            self._tell(f"killed {EVERYTHING}")
            lose_power(self.stack)
            return
        there = {kind.__name__: found for kind in KINDS if (found := kind(self.stack))}
        if not there:
            return
        name = self.chance.choice(sorted(there))
        if self.chance.random() < _SHARE_STOPPED:
            self._tell(f"stopped {name}")
            signal_all(there[name], signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.1, _LONGEST_STOP_S))
            signal_all(there[name], signal.SIGCONT)
        else:
            self._tell(f"killed {name}")
            signal_all(there[name], signal.SIGKILL)

    def _tell(self, what: str) -> None:
        self.told[what] += 1
        print(f"{self.told.total()}: {what}", flush=True)

    def _made(self) -> set[Path]:
        """What gets ahead leaves something new."""
        runs = self.stack.root / "store" / "runs"
        patterns = ("*/checkpoints/*/*/manifest.json", "*/steps/*.json", "*/result.json")
        return {path for pattern in patterns for path in _found(runs, pattern)}


def lose_power(stack: Stack) -> None:
    """Every process ends at once; then the stack is started again."""
    if (process := supervisor(stack.root)) is not None:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    while left := stack.processes():
        signal_all(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=5)
    start(stack)


def start(stack: Stack, patience_s: float = 300) -> None:
    """As a user does it; on a slow machine more than once."""
    deadline = time.monotonic() + patience_s
    while (answer := stack.cli("dev", "--detach", "--root", str(stack.root), check=False)).code != 0:
        if supervisor(stack.root) is not None:
            return  # it takes longer than the command waits
        assert time.monotonic() < deadline, answer


def _found(folder: Path, pattern: str) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from folder.glob(pattern)
