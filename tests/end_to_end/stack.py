"""A whole Longshore on this machine, as a user starts it, and the processes of it that tests kill."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import httpx
import psutil
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from temporalio.client import Client, WorkflowHistory

import longshore
from longshore.accounts import new_key
from service.cli.command import main
from service.dev import Connection, Ports
from shared.child_environment import STACK_MARK, child_environment
from shared.storage.artifacts import sha256_file
from shared.storage.paths import HostPaths
from tests import forks, waiting
from tests.ended import end, living
from tests.forks import Answer

T = TypeVar("T")
# Where something hangs, it is noticed. A machine that is shared with others may be many times slower than a quiet one,
# and a run that still goes on is not wrong.
PATIENCE_S = 1800.0
LONGSHORE = str(Path(sys.executable).parent / "longshore")


class Stack:
    """`longshore dev` in a folder of its own."""

    def __init__(self, root: Path, settings: dict[str, str]) -> None:
        self.root = root
        opened = {"LONGSHORE_DOWNLOAD__FILE_ROOTS": '["/"]'}  # tests' models and data are in folders of their own
        self._environment = {**os.environ, "LONGSHORE_ROOT": str(root), **opened, **settings}

    def cli(self, *arguments: str, timeout_s: float = PATIENCE_S + 60, check: bool = True) -> Answer:
        """`longshore` with these arguments."""
        answer = self._forked(arguments, timeout_s)
        assert not check or answer.code == 0, answer
        return answer

    @contextmanager
    def with_environment(self, **more: str) -> Iterator[None]:
        """Commands of the block have more variables, and are processes of their own: libraries read some at import."""
        before, forked = self._environment, self._forked
        self._environment, self._forked = before | more, self._started  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._environment, self._forked = before, forked  # type: ignore[method-assign]

    def _started(self, arguments: Sequence[str], timeout_s: float) -> Answer:
        done = subprocess.run(
            [LONGSHORE, *arguments],
            env=self._environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def _forked(self, arguments: Sequence[str], timeout_s: float) -> Answer:
        # A stack's processes are to send traces, and commands are not.
        kept = {n: v for n, v in self._environment.items() if arguments[0] == "dev" or not n.startswith("OTEL_")}
        return forks.captured(main, ["longshore", *arguments], kept, self.root, timeout_s)

    def metrics(self) -> dict[str, dict[str, float]]:
        """What each process that shows metrics counts now, by the sample with its labels."""
        return {process: _samples(families) for process, families in self._scraped().items()}

    def names_of_metrics(self) -> set[str]:
        """The names that samples have or would have, as nothing may have been counted yet."""
        metrics = [family for families in self._scraped().values() for family in families]
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
        return {metric.name + end for metric in metrics for end in ends.get(metric.type, ("",))}

    def _scraped(self) -> dict[str, list[Metric]]:
        first = int(self._environment["LONGSHORE_METRICS__PORT"])
        found = {}
        for place, process in enumerate(("web", "host")):
            text = httpx.get(f"http://127.0.0.1:{first + place}/metrics").raise_for_status().text
            found[process] = list(text_string_to_metric_families(text))
        return found

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living processes of this stack whose command line holds all of the words."""
        return living(self.root, "LONGSHORE_ROOT", *words)

    def most_attempts(self, run_id: str) -> int:
        """How often a run tried the activity that it tried most often."""
        starts = (event.activity_task_started_event_attributes for event in self.history(run_id).events)
        return max(start.attempt for start in starts)

    def history(self, run_id: str) -> WorkflowHistory:
        """The history of a run's newest execution."""

        async def ask(address: str) -> WorkflowHistory:
            return await (await Client.connect(address)).get_workflow_handle(run_id).fetch_history()

        return asyncio.run(ask(self.connection.temporal_address))

    @property
    def connection(self) -> Connection:
        connection = Connection.read(self.root)
        assert connection is not None
        return connection

    def http(self, path: str = "") -> httpx.Client:
        """A client of the web service, or of what lies below a path of it, with the operator's key."""
        headers = {"authorization": f"Bearer {self.connection.api_key}"}
        return httpx.Client(base_url=f"{self.connection.api_url}{path}", headers=headers, timeout=300, trust_env=False)

    def client(self, **settings: float) -> longshore.Client:
        return longshore.Client(self.connection.api_url, self.connection.api_key, **settings)

    @contextmanager
    def another_host(self, role: Literal["sampler", "gpu"]) -> Iterator[None]:
        """A second sampler or GPU host of this stack, on this machine."""
        address = {"LONGSHORE_TEMPORAL_ADDRESS": self.connection.temporal_address}
        environment = child_environment(role, self._environment | address | {STACK_MARK: str(self.root)})
        command = [sys.executable, "-P", "-m", "service.host", "--role", role]
        with (self.root / "logs" / f"{role}2.log").open("ab") as log:
            host = subprocess.Popen(command, env=environment, cwd=self.root, stdout=log, stderr=log)
        try:
            yield
        finally:
            end(host)

    @property
    def host_paths(self) -> HostPaths:
        return HostPaths(self.root)

    def adapter_sha256(self, answer: Answer) -> str:
        folder = Path(answer.json["adapter"].removeprefix("file://"))
        return sha256_file(folder / "adapter_model.safetensors")


@cache
def _ports() -> Ports:
    """Ports of this process's stacks, which are theirs until it ends: also between a stack's kill and its next start,
    when no supervisor holds them and another stack would be taken for it.
    """
    folder = Path(tempfile.gettempdir(), "longshore-test-stacks")
    folder.mkdir(exist_ok=True)
    return Ports(folder)


def metrics_port() -> int:
    """The first of two ports in a row: of the web service, and of the host."""
    taken = [_ports().take(20_050 + os.getpid() % 100 * 100)]
    while len(taken) < 2 or taken[-1] - taken[-2] != 1:
        taken.append(_ports().take(taken[-1] + 1))
    return taken[-2]


def _samples(families: list[Metric]) -> dict[str, float]:
    return {_labelled(sample.name, sample.labels): sample.value for family in families for sample in family.samples}


def _labelled(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def _settle(root: Path) -> None:
    """As if the stack had run before: a supervisor takes the ports of last time."""
    first = 20_000 + os.getpid() % 100 * 100
    temporal, api = (f"127.0.0.1:{_ports().take(first)}" for _ in range(2))
    last = Connection(
        root=str(root),
        api_url=f"http://{api}",
        api_key=new_key()[0],
        temporal_address=temporal,
        temporal_ui=None,
        pid=None,
    )
    last.write()


@contextmanager
def started(root: Path, **settings: str) -> Iterator[Stack]:
    root.mkdir(parents=True, exist_ok=True)
    stack = Stack(root, settings)
    if Connection.read(root) is None:
        _settle(root)
    try:
        stack.cli("dev", "--detach", "--root", str(root))
        yield stack
    finally:
        stack.cli("dev", "--stop", "--root", str(root))


def wait_until(condition: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.1) -> T:
    """`waiting.wait_until` with the patience that a whole stack needs."""
    return waiting.wait_until(condition, what, timeout_s, every_s)
