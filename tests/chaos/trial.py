"""Seven kinds of runs of a tiny model at once, disturbed in rounds, held against what they publish undisturbed.

The processes of their stack are killed or stopped for a while, one of a kind or all at once.
"""

import hashlib
import json
import random
import shutil
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from longshore import Client, Conflict, Unreachable
from longshore.dataset_runs import DatasetSource, DPORun, SFTRun
from longshore.losses import PPO
from longshore.runs import RLRun, Run
from longshore.training import Full, Layout, Lora
from longshore.views import RunView
from service.dev import Connection, supervisor
from tests.activities.groups import random_groups
from tests.end_to_end.conftest import LETTERS, QUICK
from tests.end_to_end.stack import Stack, started
from tests.end_to_end.victims import (
    Victim,
    a_rank,
    control_host,
    gpu_host,
    launcher,
    sampler,
    sampler_host,
    sandboxes,
    signal_all,
    temporal_server,
    wandb_writer,
    web_service,
)
from tests.megatron_worker.rows import talking_model

T = TypeVar("T")
CLIENT_DRIVEN = "client-driven RL"
_ASK_AGAIN_S = 0.3
_SILENT_S = 20.0


_COUNTS = """
class Environment:
    def reset(self, item, seed):
        self.chance, self.num = seed % 5, 0

    def step(self, answer):
        self.num += 1
        said = {"reward": 1 / (1 + abs(len(answer["content"]) - self.chance)), "done": self.num == 3}
        return said | {"observation": f"That was {len(answer['content'])}."}
"""


def seven_kinds(model: Path, folder: Path, size: int = 1) -> dict[str, Run]:
    """What is submitted at once, by what it shows. `size`: a multiple of the fewest steps that make sense."""
    chats, pairs, prompts = _write_data(folder)
    common = {"model": str(model), "batch_size": 16, "max_tokens": 128, "seed": 7, "checkpoint_every": 3}
    sft = {**common, "dataset": chats, "learning_rate": 0.01, "steps": 9 * size}
    lora = Lora(rank=4)
    rl = {"model": str(model), "trainable": lora, "learning_rate": 0.01, "max_tokens": 64, "seed": 7, "idle_s": 5}
    rollouts = {
        "prompts": prompts,
        "grader": LETTERS,
        "steps": 2 * size,
        "prompts_per_step": 6,
        "group_size": 4,
        "max_completion_tokens": 16,
    }

    played = {"grader": None, "environment": {"source": _COUNTS, "max_turns": 3}, "max_completion_tokens": 48}

    def sampled(ahead: int, max_tokens: int = 64, **more: object) -> RLRun:
        own = {**rollouts, "off_policy_steps": ahead, **more}
        return RLRun.model_validate({**rl, "rollouts": own, "loss": PPO(), "max_tokens": max_tokens})

    return {
        "LoRA on two ranks": SFTRun.model_validate({**sft, "trainable": lora, "layout": Layout(dp=2)}),
        "full training": SFTRun.model_validate({**sft, "trainable": Full(), "learning_rate": 0.001}),
        "evaluations and checkpoints": SFTRun.model_validate(
            {**sft, "trainable": lora, "eval_dataset": chats, "eval_every": 4, "num_samples": 1, "sample_tokens": 8}
        ),
        "DPO": DPORun.model_validate({**common, "dataset": pairs, "trainable": lora, "steps": 6 * size}),
        "on-policy RL": sampled(0),
        "off-policy episodes": sampled(1, 320, **played),
        CLIENT_DRIVEN: RLRun.model_validate({**rl, "loss": PPO(), "mini_batches": 2}),
    }


def _write_data(folder: Path) -> tuple[DatasetSource, DatasetSource, DatasetSource]:
    def rows(name: str, row: Callable[[int], dict]) -> DatasetSource:
        path = folder / name
        path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(64)))
        return DatasetSource(uri=path.as_uri())

    def question(number: int) -> dict:
        return {"role": "user", "content": f"How many crates are on quay {number}?"}

    def answer(number: int) -> dict:
        return {"role": "assistant", "content": f"{number * 7 % 50} crates."}

    return (
        rows("chats.jsonl", lambda n: {"messages": [question(n), answer(n)]}),
        rows(
            "pairs.jsonl",
            lambda n: {
                "input": {"messages": [question(n)]},
                "preferred_output": [answer(n)],
                "non_preferred_output": [{"role": "assistant", "content": f"A sack of grain, or {n % 9}."}],
            },
        ),
        rows("prompts.jsonl", lambda n: {"messages": [question(n)]}),
    )


def patiently(root: Path, ask: Callable[[Client], T], patience_s: float) -> T:
    """Ask a stack that may be down, or go down under the question, until it answers."""
    deadline = time.monotonic() + patience_s
    while True:
        connection = Connection.read(root)
        assert connection is not None
        with Client(connection.api_url, connection.api_key, patience_s=2, timeout_s=_SILENT_S) as client:
            try:
                return ask(client)
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
        time.sleep(_ASK_AGAIN_S)


def submit(root: Path, run: Run, patience_s: float) -> str:
    key = uuid.uuid4().hex
    return patiently(root, lambda client: client.runs.submit(run, key), patience_s).run_id


def drive(root: Path, run_id: str, folder: Path, num_steps: int, patience_s: float) -> None:
    """A client's part: a step at a time, each sent until it is done, and the end."""
    for number in range(1, num_steps + 1):
        groups = folder / f"groups-{number}.jsonl"
        groups.write_text("".join(json.dumps(one) + "\n" for one in random_groups(seed=number)))
        uri, deadline = groups.as_uri(), time.monotonic() + patience_s
        sent = patiently(root, lambda client: client.runs.train(run_id, uri, f"key-{number}"), patience_s)  # noqa: B023
        while sent.state not in ("done", "failed"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {number} of {run_id} is {sent.state} after {patience_s:g} s")
            time.sleep(_ASK_AGAIN_S)
            sent = patiently(root, lambda client: client.runs.step(run_id, sent.step), patience_s)  # noqa: B023
        assert sent.state == "done", sent
    try:
        patiently(root, lambda client: client.runs.finish(run_id), patience_s)
    except Conflict:  # refused where an answer was lost: it has ended
        ended(root, run_id, patience_s)


def ended(root: Path, run_id: str, patience_s: float) -> RunView:
    """The run as it has ended."""
    deadline = time.monotonic() + patience_s
    while (view := patiently(root, lambda client: client.runs.get(run_id), patience_s)).state == "running":
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run_id} is {view.phase} at step {view.step} after {patience_s:g} s")
        time.sleep(_ASK_AGAIN_S)
    return view


def weights_sha256(view: RunView) -> str:
    """Of all weights that a run has published last."""
    assert view.state == "succeeded", view
    assert view.adapter is not None
    folder = Path(view.adapter.removeprefix("file://"))
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


KINDS: tuple[Victim, ...] = (
    *(web_service, temporal_server, control_host, gpu_host, sampler_host),
    *(launcher, a_rank, sampler, wandb_writer, sandboxes),
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
    """Disturbs a stack until it is told that all is over, or as often as was asked for. `told` counts what happened.

    `free`: those of the `kinds` whose loss is no run's, so that there may be any number of them in a row.
    """

    stack: Stack
    chance: random.Random
    most: int
    everything_at: int | None = None
    kinds: tuple[Victim, ...] = KINDS
    free: tuple[Victim, ...] = ()
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
            in_a_row += self._act()

    def _act(self) -> bool:
        """Disturb something. Returns False if that is no run's loss."""
        if self.everything_at == self.told.total() or (
            self.everything_at is None and self.chance.random() < _SHARE_EVERYTHING
        ):
            self._tell(f"killed {EVERYTHING}")
            lose_power(self.stack)
            return True
        there = {kind.__name__: found for kind in self.kinds if (found := kind(self.stack))}
        if not there:
            return False
        name = self.chance.choice(sorted(there))
        if self.chance.random() < _SHARE_STOPPED:
            self._tell(f"stopped {name}")
            signal_all(there[name], signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.1, _LONGEST_STOP_S))
            signal_all(there[name], signal.SIGCONT)
        else:
            self._tell(f"killed {name}")
            signal_all(there[name], signal.SIGKILL)
        return name not in {kind.__name__ for kind in self.free}

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


def forget(stack: Stack) -> None:
    """What was made of data and policies: found in the store, it would not be made again."""
    for folder in ("tokenized", "packed", "prompts", "sampled", "graded", "grouped", "rewarded"):
        shutil.rmtree(stack.root / "store" / folder, ignore_errors=True)


_LOGGED_LINES = 80  # of each log, where a round fails


class Trial:
    """A stack in a folder, and what came of the rounds on it. `wrong` says of each run that failed or differs."""

    def __init__(self, folder: Path, chance: random.Random, most: int, size: int = 1, patience_s: float = 1500) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._num_steps = 2 * size
        self._runs = seven_kinds(talking_model(folder / "model"), folder, size)
        self._stack = Stack(folder / "stack", {})
        self._undisturbed: dict[str, str] = {}
        self.disturber = Disturber(self._stack, chance, most)
        self.num_rounds = 0
        self.num_equal = 0
        self.wrong: list[str] = []

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The stack is up, and what the runs publish undisturbed is known."""
        with started(self._folder / "stack", **QUICK, LONGSHORE_SEPARATE_HOSTS="true") as stack:
            self._stack = self.disturber.stack = stack
            began = time.monotonic()
            self._undisturbed = {kind: weights_sha256(view) for kind, view in self._run_all().items()}
            assert len(set(self._undisturbed.values())) >= len(self._runs) - 1, "they say nothing of each other"
            print(f"undisturbed: {time.monotonic() - began:.0f} s", flush=True)
            yield

    def round(self) -> None:
        """All seven at once, and what happens to them."""
        forget(self._stack)
        over = threading.Event()
        began = time.monotonic()
        with ThreadPoolExecutor(1) as threads:
            disturbing = threads.submit(self.disturber.disturb, over.is_set)
            try:
                views = self._run_all()
            except BaseException:
                self._say_what_was_logged()
                raise
            finally:
                over.set()
            disturbing.result()
        self.num_rounds += 1
        print(f"round {self.num_rounds}: {time.monotonic() - began:.0f} s", flush=True)
        for kind, view in views.items():
            self._judge(kind, view)

    def _say_what_was_logged(self) -> None:
        for path in sorted((self._stack.root / "logs").glob("*.log")):
            last = path.read_text(errors="replace").splitlines()[-_LOGGED_LINES:]
            print(f"== {path.name}", *last, sep="\n", flush=True)

    def _judge(self, kind: str, view: RunView) -> None:
        if view.state != "succeeded":
            self.wrong.append(f"{kind}: {view.state}, {view.problem}")
        elif weights_sha256(view) != self._undisturbed[kind]:
            self.wrong.append(f"{kind}: its weights are others, {view.adapter}")
        else:
            self.num_equal += 1

    def _run_all(self) -> dict[str, RunView]:
        with ThreadPoolExecutor(len(self._runs)) as threads:
            views = {kind: threads.submit(self._run, kind, run) for kind, run in self._runs.items()}
            return {kind: view.result() for kind, view in views.items()}

    def _run(self, kind: str, run: Run) -> RunView:
        root = self._stack.root
        run_id = submit(root, run, self._patience_s)
        if kind == CLIENT_DRIVEN:
            drive(root, run_id, self._folder, self._num_steps, self._patience_s)
        return ended(root, run_id, self._patience_s)
