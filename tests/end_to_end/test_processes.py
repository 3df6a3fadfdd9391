"""What every process of a stack listens on and is told, idle and in a run: the table of docs/hardening.md."""

import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from shared.child_environment import Kind, child_environment
from tests.end_to_end.conftest import SECRETS
from tests.end_to_end.stack import Stack, wait_until

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "hardening.md"
# By what their command line holds; the first that fits. Whatever else a stack starts is "any other".
KINDS = {
    "sampler": "-m megatron_worker.sampler ",
    "worker": "-m megatron_worker",
    "W&B writer": "wandb",
    "sandbox": "-m activities.sandbox.child",
    "Temporal": "server start-dev",
    "web service": "-m service.app",
    "host of all roles": "-m service.host",
}
ROLES: dict[str, Kind] = {"control host": "control", "GPU host": "gpu", "sampler host": "sampler"}
WORDS = {
    "LONGSHORE_GRADING__SCORE_MODEL_KEY": "judge",
    "LONGSHORE_SAMPLING__API_KEY": "sampling server",
    "WANDB_API_KEY": "W&B",
    "AWS_SECRET_ACCESS_KEY": "S3",
    "HF_TOKEN": "hub",
    "OTEL_EXPORTER_OTLP_HEADERS": "traces",
}
SUPERVISED = {"Temporal", "web service", "host of all roles"}
ALWAYS_THERE = SUPERVISED | {"sandbox"}


@dataclass
class Seen:
    """Of all processes of one kind: places that they listen on, and secrets in their environment."""

    listens: set[str] = field(default_factory=set)
    secrets: set[str] = field(default_factory=set)


def documented() -> dict[str, Seen]:
    """The table's rows: process, listens on, secrets."""
    section = PAGE.read_text().split("## What listens, and who learns what\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {kind.partition(" (")[0]: Seen(_words(listens), _words(secrets)) for kind, listens, secrets in rows[2:]}


def _words(cell: str) -> set[str]:
    """What stands in brackets is for people."""
    return set(re.sub(r" *\(.*\)", "", cell).split(", ")) - {"nothing"}


def secrets_in(environment: Mapping[str, str]) -> set[str]:
    values = " ".join(environment.values())
    found = {word for name, word in WORDS.items() if SECRETS[name] in values}
    found |= {"S3"} if any(name.startswith("AWS_") for name in environment) else set()
    return found | ({"unknown"} if SECRETS["TOKEN_OF_SOMETHING_ELSE"] in values else set())


class Watch:
    """Looks at all processes below a stack's supervisor, again and again, until the block ends."""

    def __init__(self, stack: Stack) -> None:
        (self._supervisor,) = stack.processes("service.dev")
        self.seen: dict[str, Seen] = defaultdict(Seen)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> "Watch":
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def look(self) -> None:
        for process in self._supervisor.children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a sandbox is nobody's to look into
                addresses = {socket.laddr.ip for socket in process.net_connections("inet") if not socket.raddr}
                self._look_at(process, addresses, process.ppid() == self._supervisor.pid)

    def _look_at(self, process: psutil.Process, addresses: set[str], is_supervised: bool) -> None:
        command = " ".join(process.cmdline())
        environment = process.environ()
        kind = next((kind for kind, words in KINDS.items() if words in command), "any other")
        if not command or (kind in SUPERVISED and not is_supervised):
            return  # a zombie; a child that has not become its own program yet
        seen = self.seen[kind]
        seen.secrets |= secrets_in(environment)
        seen.listens |= {"loopback" if ip in ("127.0.0.1", "::1") else "everywhere" for ip in addresses}

    def _look_on(self) -> None:
        while not self._done.wait(0.5):
            self.look()


def test_idle_it_is_what_the_operators_guide_says(stack: Stack) -> None:
    def processes() -> Watch | None:
        watch = Watch(stack)
        watch.look()
        return watch if watch.seen.keys() >= ALWAYS_THERE else None

    table, seen = documented(), wait_until(processes, "every process of the stack").seen
    assert {kind: seen[kind] for kind in ALWAYS_THERE} == {kind: table[kind] for kind in ALWAYS_THERE}


def test_so_it_is_while_a_run_samples_grades_and_trains_on_two_ranks(stack: Stack, rollout_options: list[str]) -> None:
    with Watch(stack) as watch:
        assert stack.cli(*rollout_options, "--dp", "2", "--wait").json["status"] == "succeeded"
        table = documented()
        # W&B is told of a run after its end.
        awaited = table.keys() - ROLES.keys() - {"any other"}
        wait_until(lambda: watch.seen.keys() >= awaited, "every kind of process is seen")
    beyond = {}
    for kind, seen in watch.seen.items():
        more = (seen.listens - table[kind].listens, seen.secrets - table[kind].secrets)
        if any(more):
            beyond[kind] = more
    assert beyond == {}
    told = {"any other": set[str]()} | {kind: seen.secrets for kind, seen in watch.seen.items()}
    told |= {kind: secrets_in(child_environment(role, SECRETS)) for kind, role in ROLES.items()}
    assert told == {kind: seen.secrets for kind, seen in table.items()}
