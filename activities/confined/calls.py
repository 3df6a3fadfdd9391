"""Calls Longshore's own functions on untrusted data, each in a child process under limits of memory and time.

    host ──a socket a call──► fork server (imports done, one thread) ──fork──► child: one call, then it ends

On untrusted data a tokenizer, a Parquet reader or a JSON parser may take any amount of memory, loop, or abort its
process. If the child breaks by itself, its input is at fault: InvalidInput, which is final. If it was killed from
outside, the call may be retried; also if the kernel killed it for lack of memory, unless it used much of it itself.

Requests, signs of life and results are JSON, which pydantic reads (no pickle). The child has no credentials: its caller
stages its inputs from a store, and answers its questions (`answer`). It dies with the fork server, which dies with
its host. When memory runs out, the kernel kills such children first.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, TypeVarTuple

from pydantic import TypeAdapter

from activities.confined.children import AnswerQuestion, Child, ForkServer
from activities.confined.fork_server import types_of
from shared.settings import ConfinedSettings

AnswerT = TypeVar("AnswerT")
Arguments = TypeVarTuple("Arguments")

_SLICE_S = 0.5  # waits are cut into such slices, as a cancellation is raised in a thread only between two waits
_GRADING = 4  # times as many places as for others: graders take little memory, and wait for slow judges

# Modules that calls need, imported once; others would be imported in every child.
_PRELOADED = (
    "numpy",
    "tokenizers",
    "pyarrow",
    "pyarrow.parquet",
    "activities.grading.grade",
    "activities.models.files",
    "activities.models.gguf_file",
    "activities.publishing.export_files",
    "activities.sampling.score",
    "activities.trajectories.pack_trajectories",
    "activities.tokenizing.preview",
    "activities.tokenizing.render_prompts",
    "activities.tokenizing.tokenize",
)

Kind = Literal["short", "dataset", "grading"]


def call(
    settings: ConfinedSettings,
    function: Callable[[*Arguments], AnswerT],
    *arguments: *Arguments,
    kind: Kind = "short",
    answer: AnswerQuestion | None = None,
) -> AnswerT:
    """Call a module-level function in a child process, as soon as a place is free, and return its result.

    Args:
        function: its parameters and its result are annotated with types that JSON can carry.
        kind: `dataset` calls read a whole dataset and always leave one place to other calls; `grading` calls mostly
            wait for judges and have separate places.
        answer: answers the function's questions (`ask` of fork_server.py).

    Raises:
        LongshoreError, OSError: what the function raised. InvalidInput also if the child broke a limit or crashed.
        RuntimeError: the child was killed from outside, or the function has a bug.
    """
    _, result_type = types_of(function)
    [frame] = _frames(settings, function, arguments, kind, answer)
    result: AnswerT = TypeAdapter(result_type).validate_json(frame)
    return result


def stream(
    settings: ConfinedSettings,
    function: Callable[[*Arguments], Iterator[AnswerT]],
    *arguments: *Arguments,
    kind: Kind = "short",
) -> Generator[AnswerT, None, None]:
    """Stream a generator function's items from a child. Raises as `call` does. Close it to end the child."""
    _, answer = types_of(function)
    adapter: TypeAdapter[AnswerT] = TypeAdapter(answer)
    for frame in _frames(settings, function, arguments, kind):
        yield adapter.validate_json(frame)


def prepare() -> None:
    """Start this process's fork server, which the first call would else wait for."""
    threading.Thread(target=_server.start, daemon=True).start()


def _frames(
    settings: ConfinedSettings,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    kind: Kind,
    answer: AnswerQuestion | None = None,
) -> Iterator[bytearray]:
    with _places.one(settings, kind):
        data, status = _server.fork()
        child = Child(data, status, settings)
        try:
            yield from child.ask(function, arguments, answer)
        finally:
            child.close()


class _Places:
    """Bounds the number of this process's children, as they share the machine's memory. Further calls wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[object, Kind] = {}

    @contextmanager
    def one(self, settings: ConfinedSettings, kind: Kind) -> Iterator[None]:
        mine = object()
        try:
            with self._changed:
                while not self._is_free(kind, settings.at_once or _room(settings.memory_bytes)):
                    self._changed.wait(_SLICE_S)
                self._held[mine] = kind
            yield
        finally:
            with self._changed:
                self._held.pop(mine, None)
                self._changed.notify_all()

    def _is_free(self, kind: Kind, at_once: int) -> bool:
        held = Counter(self._held.values())
        match kind:
            case "grading":
                return held["grading"] < _GRADING * at_once
            case "dataset" if held["dataset"] >= at_once - 1:
                return False
            case _:
                return held["short"] + held["dataset"] < at_once


@cache
def _room(memory_bytes: int) -> int:
    """Return how many children fit into the memory of this machine, at least 2."""
    return max(2, machine_bytes() // memory_bytes)


def machine_bytes() -> int:
    """Return the memory of this machine or container."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such container, or "max"
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return available


_server = ForkServer(_PRELOADED)
_places = _Places()
os.register_at_fork(after_in_child=_server.forget_parents)
os.register_at_fork(after_in_child=_places.__init__)  # type: ignore[misc]
