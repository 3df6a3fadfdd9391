"""Rounds of the seven runs, disturbed, held against what they publish when nothing happens."""

import random
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from examples.tiny_model import make_tiny_model
from service.runs.views import RunView
from shared.runs.requests import Run
from tests.chaos.disturbances import Disturber
from tests.chaos.runs import CLIENT_DRIVEN, drive, ended, seven_kinds, submit, weights_sha256
from tests.conftest import CORPUS
from tests.end_to_end.conftest import QUICK
from tests.end_to_end.stack import Stack, started

# Folders of the store that hold what was made of data and policies: found there, it would not be made again.
_FOUND_AGAIN = ("tokenized", "packed", "prompts", "sampled", "graded", "grouped")

_LOGGED_LINES = 80  # of each log, where a round fails


class Trial:
    """A stack in a folder, and what came of the rounds on it. `wrong` says of each run that failed or differs."""

    def __init__(self, folder: Path, chance: random.Random, most: int, size: int = 1, patience_s: float = 1500) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._num_steps = 2 * size
        self._runs = seven_kinds(make_tiny_model(folder / "model", CORPUS), folder, size)
        self._stack = Stack(folder / "stack", {})
        self._undisturbed: dict[str, str] = {}
        self.disturber = Disturber(self._stack, chance, most)
        self.num_rounds = 0
        self.num_equal = 0
        self.wrong: list[str] = []

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The stack is up, and what the runs publish undisturbed is known."""
        with started(self._folder / "stack", **QUICK) as stack:
            self._stack = self.disturber.stack = stack
            began = time.monotonic()
            self._undisturbed = {kind: weights_sha256(view) for kind, view in self._run_all().items()}
            assert len(set(self._undisturbed.values())) >= len(self._runs) - 1, "they say nothing of each other"
            print(f"undisturbed: {time.monotonic() - began:.0f} s", flush=True)
            yield

    def round(self) -> None:
        """All seven at once, and what happens to them."""
        for name in _FOUND_AGAIN:
            shutil.rmtree(self._stack.root / "store" / name, ignore_errors=True)
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
