"""The kill matrix: whoever is killed in whichever phase of whichever kind of work, its outcome has the bits of an
undisturbed one, and nothing is left behind.

A kind of work is a function that does it on a stack and returns its outcome. It names its phases to `Kills` as it comes
to them: undisturbed these do nothing; else each waits until its phase is seen from outside, and kills a victim there.
`MATRIX` says which victims die in which phases. `make test` draws kinds until each victim has died once, `make
test-deep` tries all cells. Kills at random moments of several runs at once: tests/chaos.
"""

import ctypes
import json
import os
import random
import secrets
import shutil
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from longshore.client import Client, Session
from longshore.commands import Asked
from longshore.losses import Reinforce
from longshore.runs import RLRun
from longshore.training import Layout, Lora
from shared.storage.artifacts import sha256_file
from tests.activities.groups import random_groups, write_groups
from tests.chaos.trial import forget, lose_power
from tests.depth import IS_DEEP, SEED
from tests.end_to_end.conftest import LETTERS
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.test_answers import asking, chat
from tests.end_to_end.test_rollouts import hashes_of_versions, steps_of
from tests.end_to_end.test_sessions import Sender, commands_of, final_state, opened, told
from tests.end_to_end.test_tinker import adapter_of, finished, hub_below, lines_of, recipe, started
from tests.end_to_end.victims import (
    Victim,
    a_rank,
    control_host,
    gpu_host,
    halt,
    kill,
    launcher,
    ranks,
    sampler,
    sampler_host,
    sandboxes,
    signal_all,
    temporal_server,
    web_service,
)
from tests.megatron_worker.rows import distinct_model, model_with_tower, talking_model

pytestmark = [pytest.mark.slow, pytest.mark.drawn, pytest.mark.timeout(3600)]


# Victims that are no process of a role.


def everything(stack: Stack) -> list[psutil.Process]:
    """Every process of the stack at once; then it is started again."""
    return stack.processes()


def link(stack: Stack) -> list[psutil.Process]:
    """The connections between trainer and sampler are cut, while both live."""
    return [*ranks(stack), *sampler(stack)]


def writer(stack: Stack) -> list[psutil.Process]:
    """The process that has a file of an export open."""
    return [
        each
        for host in control_host(stack)
        for each in host.children(recursive=True)
        if any("/export" in path for path in _files(each))
    ]


def _files(process: psutil.Process) -> list[str]:
    try:
        return [opened.path for opened in process.open_files()]
    except psutil.Error:
        return []


T = TypeVar("T")
Cell = tuple[str, Victim]
"""A phase, and who dies in it."""


@dataclass
class Kills:
    """The cells of one trial, each phase at most once. Without any: nothing is disturbed."""

    stack: Stack
    left: dict[str, Victim]
    is_none: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_none = not self.left

    def at(self, phase: str, is_there: Callable[[], object] = lambda: True, every_s: float = 0.01) -> bool:
        """Kill whoever is to die in this phase, as soon as it is there. Returns whether somebody was to."""
        victim = self.left.pop(phase, None)
        if victim is None:
            return False
        wait_until(is_there, phase, every_s=every_s)
        print(f"{phase}: ", end="")
        if victim is everything:
            lose_power(self.stack)
        elif victim is link:
            _cut(self.stack)
        else:
            kill(self.stack, victim, patience_s=0 if victim is writer else 120)
        return True


@dataclass
class Place:
    """Where a kind of work is done, and who is killed meanwhile. `shared` and `made` are those of all trials."""

    stack: Stack
    model: Path
    chats: Path
    folder: Path
    kills: Kills
    shared: Path
    made: dict[str, Any]

    def once(self, name: str, make: Callable[[Path], T]) -> T:
        """What the trials of a kind have in common, in a folder of its own."""
        if name not in self.made:
            (folder := self.shared / name).mkdir()
            self.made[name] = make(folder)
        made: T = self.made[name]
        return made

    def submit(self, kind: str, *options: str, model: Path | None = None) -> str:
        return self.stack.cli("submit", kind, "--json", "--model", str(model or self.model), *options).json["run_id"]

    def ended(self, run_id: str) -> Answer:
        """Follow a run to its end; a web service that is down for a moment is the client's to bear."""
        answer = self.stack.cli("watch", run_id, "--json")
        assert answer.json["status"] == "succeeded", answer
        return answer

    def adapter(self, run_id: str) -> str:
        return self.stack.adapter_sha256(self.ended(run_id))

    def run(self, run_id: str) -> Path:
        return self.stack.root / "store" / "runs" / run_id

    def count(self, pattern: str) -> int:
        """Files of the store."""
        return len(_found(self.stack.root / "store", pattern))

    def num_steps(self, run_id: str) -> int:
        return self.count(f"runs/{run_id}/steps/*.json")

    def is_over(self, run_id: str) -> bool:
        return (self.run(run_id) / "result.json").exists()


def _found(folder: Path, pattern: str) -> list[Path]:
    """Files below a folder; none if a part of it vanished under the search."""
    try:
        return list(folder.glob(pattern))
    except FileNotFoundError:
        return []


# Runs on data: each phase is found by looking at the worker's folder, as an outsider can.

_SFT = ("--steps", "60", "--batch-size", "32", "--max-tokens", "256", "--checkpoint-every", "10", "--seed", "7")
_LORA = ("--lora-rank", "4", "--learning-rate", "0.01")


def sft(at: Place) -> object:
    run_id = at.submit("sft", "--dataset", str(at.chats), *_SFT, *_LORA)
    _training(at, run_id)
    return at.adapter(run_id)


def reward_model(at: Place) -> object:
    """Its head included, which is no other run's."""
    rows = [{"prompt": f"Ship {n}?", "chosen": f"{n} z" * 2, "rejected": f"{n} crates"} for n in range(64)]
    run_id = at.submit("reward", "--dataset", str(jsonl(at.folder / "rows.jsonl", rows)), *_SFT, *_LORA)
    _training(at, run_id)
    return at.adapter(run_id)


def of_family(family: str) -> Callable[[Place], object]:
    """A model of another family, one with a tower of vision, which answers in the end."""

    def work(at: Place) -> object:
        def make(folder: Path) -> Path:
            if family == "qwen3_5":
                return model_with_tower(folder, family)[1]
            return distinct_model(folder, family, family.startswith("gemma"))

        run_id = at.submit("sft", "--dataset", str(at.chats), *_SFT, *_LORA, model=at.once(family, make))
        _training(at, run_id)
        adapter = at.adapter(run_id)
        said = at.stack.cli("chat", run_id, "How many crates are on quay 3?", "--temperature", "0", "--max-tokens", "8")
        assert said.stdout.strip()
        return adapter, said.stdout

    work.__name__ = family
    return work


def _num_logged(stack: Stack, run_id: str, event: str) -> int:
    """How often the log of the run's newest fence says it, as far as it is written."""
    logs = _found(stack.host_paths.workers, f"*/outputs/{run_id}/*/*/log.jsonl")
    newest = max(logs, key=lambda log: log.parent.name, default=None)
    return _read(newest).count(f'"event":"{event}"') if newest else 0


def _training(at: Place, run_id: str) -> None:
    workers = at.stack.host_paths.workers
    logged = partial(_num_logged, at.stack, run_id)

    def is_unsealed() -> bool:
        """Checkpoints grow in the scratch folder of the job, and move with their manifest. One worker: one job."""
        folders = _found(workers, "*/scratch/*/step-*")
        return any(_found(f, "*") and not (f / "manifest.json").exists() for f in folders)

    def is_held_unsealed() -> bool:
        """Stop the ranks the moment a checkpoint is being written, and look whether its manifest is still missing."""
        if not is_unsealed():
            return False
        signal_all(stopped := ranks(at.stack), signal.SIGSTOP)
        if is_unsealed():
            return True
        signal_all(stopped, signal.SIGCONT)
        return False

    def has_succeeded() -> bool:
        """On the host, or a moment later in the store alone."""
        carried = _found(at.run(run_id), "logs/*/*/log.jsonl")
        return logged("succeeded") > 0 or any('"event":"succeeded"' in _read(log) for log in carried)

    # Looking takes the machine away from the run: only what lasts for milliseconds is looked for all the time.
    at.kills.at("before the claim", lambda: _found(workers, f"*/leases/{run_id}.json"))
    at.kills.at("mid-step", lambda: logged("saved") and logged("step") >= 13)  # so that it goes on from a checkpoint
    if at.kills.at("between save and manifest", is_held_unsealed, every_s=0.001):
        signal_all(ranks(at.stack), signal.SIGCONT)
    at.kills.at("after save", lambda: logged("saved"))
    at.kills.at("at the sentinel", has_succeeded)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def graded_sft(at: Place) -> object:
    """Samplers answer held-out prompts between the parts of its job: which step was best, by what grades, its bits."""
    rows = [{"messages": [{"role": "user", "content": f"How many crates are on quay {n}?"}]} for n in range(300, 324)]
    prompts = at.once("held out", lambda folder: jsonl(folder / "prompts.jsonl", rows))
    graded = ("--eval-samples", "4", "--eval-temperature", "1", "--grader", json.dumps(LETTERS), "--keep", "best")
    graded += ("--eval-prompts", str(prompts), "--eval-prompts-every", "20", "--max-completion-tokens", "32")
    run_id = at.submit("sft", "--dataset", str(at.chats), *_SFT, *_LORA, *graded)

    def sampling(num_graded: int) -> bool:
        return at.count("graded/*/manifest.json") >= num_graded and at.count("sampled/*-parts/*.json") > 0

    at.kills.at("sampling before any step", lambda: sampling(0))
    at.kills.at("training", lambda: _num_logged(at.stack, run_id, "step") >= 3)
    at.kills.at("sampling after step 20", lambda: sampling(1))
    at.kills.at("graded after step 40", lambda: at.count("graded/*/manifest.json") >= 3)
    answer = at.ended(run_id)
    found = at.stack.cli("metrics", run_id, "--json").json["evaluations"]
    return at.stack.adapter_sha256(answer), [(each["step"], each["metrics"]["reward_mean"]) for each in found]


def limited(at: Place) -> object:
    """A limit of spending is set, holds and is raised: no step beyond it, no step lost. Undisturbed there is none."""
    if at.kills.is_none:
        return sft(at)
    tenant = f"thrifty-{uuid.uuid4().hex[:6]}"
    key = _asked(at, "POST", "/tenants", {"tenant": tenant, "title": "Thrifty"})["key"]["key"]
    theirs = replace(at, stack=Stack(at.stack.root, {"LONGSHORE_API_KEY": key}))
    run_id = theirs.submit("sft", "--dataset", str(at.chats), *_SFT, *_LORA)

    def view() -> dict[str, Any]:
        return _asked(at, "GET", f"/runs/{run_id}", key=key)

    def paused() -> dict[str, Any] | None:
        return found if (found := view())["state"] == "paused" else None

    wait_until(lambda: _num_logged(at.stack, run_id, "step") >= 3, "mid-step", every_s=0.01)
    signal_all(ranks(at.stack), signal.SIGSTOP)  # or the run might end before the limit reaches it
    _asked(at, "PUT", f"/tenants/{tenant}/quotas", {"spending": 1e-6})
    at.kills.at("the limit is set")
    wait_until(lambda: view()["paused_by"], "the limit reaches the run")
    kill(at.stack, gpu_host)  # it dies before it hears of the limit
    held = wait_until(paused, "the limit pauses it")
    assert held["paused_by"].startswith(f"quota spending: {tenant}'s runs of the last 30 days cost")
    assert held["step"] < 60
    at.kills.at("the limit holds")
    assert paused() == held
    again = theirs.stack.cli("resume", run_id, check=False)
    assert again.code != 0 and "quota spending" in again.stderr, again
    _asked(at, "PUT", f"/tenants/{tenant}/quotas", {})
    at.kills.at("the limit is raised")
    wait_until(lambda: not paused(), "it goes on")
    return theirs.adapter(run_id)


def _asked(at: Place, method: str, path: str, body: object = None, key: str | None = None) -> dict[str, Any]:
    """What the service answers, as soon as it is there: its operator, or whose key it is."""
    headers = {"authorization": f"Bearer {key or at.stack.connection.api_key}"}

    def answer() -> httpx.Response | None:
        with suppress(httpx.TransportError):
            address = f"{at.stack.connection.api_url}/api/v1{path}"
            return httpx.request(method, address, json=body, headers=headers, timeout=60, trust_env=False)
        return None

    found = wait_until(answer, f"{method} {path}")
    assert found.is_success, found.text
    answered: dict[str, Any] = found.json()
    return answered


# Runs that draw their own samples: each phase is found by what stands in the store, and what does not yet.


def _rl(at: Place, *options: str) -> str:
    """Sampled one step ahead: while a step trains, the next one is drawn."""
    rows = [{"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in range(50)]
    prompts = at.once("prompts", lambda folder: jsonl(folder / "prompts.jsonl", rows))
    return at.submit(
        *("rl", "--prompts", str(prompts), "--grader", json.dumps(LETTERS), "--loss", "ppo", "--group-size", "4"),
        *("--prompts-per-step", "8", "--max-completion-tokens", "32", "--max-tokens", "80", "--seed", "7"),
        *("--off-policy-steps", "1", *options),
    )


def _sampling_and_training(at: Place, run_id: str, phases: Sequence[str]) -> None:
    """Each phase in a step behind the one before."""
    phase_is_there: dict[str, Callable[[], bool]] = {
        "sampling": lambda: at.count("sampled/*-parts/*.json") > 0,
        "grading": lambda: at.count("sampled/*/samples/manifest.json") > at.count("graded/*/manifest.json"),
        "training": lambda: at.count("packed/*/manifest.json") > at.count(f"runs/{run_id}/logs/*/*/log.jsonl"),
        "publishing": lambda: at.count(f"runs/{run_id}/logs/*/*/log.jsonl") > at.num_steps(run_id),
    }
    for number, phase in enumerate(phases):
        at.kills.at(phase, lambda n=number, phase=phase: at.num_steps(run_id) >= n and phase_is_there[phase]())


def rollouts(at: Place) -> object:
    run_id = _rl(at, *_LORA, "--steps", "10", "--algorithm", "ppo", *_CRITIC)
    _sampling_and_training(at, run_id, ("sampling", "grading", "training", "publishing"))
    answer = at.ended(run_id)
    return at.stack.adapter_sha256(answer), answer.json["policy_version"]


_CRITIC = ("--critic-value-scale", "running", "--critic-warmup-steps", "1")


def rollouts_whose_samples_go_on(at: Place) -> object:
    """Under what the trainer sends, before the step that made it is durable, published or recorded. What was drawn
    depends on when weights came, so no two runs are alike. But what is stored is not drawn again: a client's run of the
    same groups, which nothing happens to, ends in the same bits. No version has two hashes.
    """
    full, num_steps = ("--full", "--learning-rate", "0.0003"), 6
    run_id = _rl(at, *full, *("--steps", str(num_steps), "--sync-in-flight", "continue", "--publish-every", "3"))
    _sampling_and_training(at, run_id, ("training", "sampling", "publishing"))
    answer = at.ended(run_id)
    assert answer.json["version"] == 2
    steps = steps_of(at.stack, run_id)
    assert all(step["metrics"]["staleness_max"] <= 1 for step in steps)
    hashes_of_versions(at.stack, run_id)
    again = _by_a_client(at, run_id, *full, "--publish-every", str(num_steps))
    assert _model(answer) == _model(at.ended(again))
    return None


def _by_a_client(at: Place, run_id: str, *options: str) -> str:
    """A run of the groups of another one's steps, which a client sends."""
    again = at.submit("rl", *options, "--loss", "ppo", "--max-tokens", "80", "--seed", "7")
    for step in steps_of(at.stack, run_id):
        at.stack.cli("step", again, step["groups"].removeprefix("file://"), "--key", step["key"], "--wait")
    at.stack.cli("finish", again)
    return again


def carried_over(name: str, *options: str) -> Callable[[Place], object]:
    """Which prompts a step takes depends on time, but it is decided once: each prompt is trained in one step, whoever
    is killed, and a client's run of the same groups ends in the same bits.
    """

    def work(at: Place) -> object:
        num_steps, seen = 6, dict[str, str]()
        run_id = _rl(at, *options, "--steps", str(num_steps), "--carry-over", "--redraws", "1")
        decided = at.run(run_id) / "admitted"
        for number, phase in enumerate(("a step is decided", "another one", "a third one"), 1):
            is_there = lambda n=number: len(_found(decided, "*.json")) > n  # noqa: E731
            at.kills.at(phase, is_there, every_s=0.005)
            seen |= {path.name: path.read_text() for path in _found(decided, "*.json")}
        answer = at.ended(run_id)
        assert {name: (decided / name).read_text() for name in seen} == seen
        assert len(_found(decided, "*.json")) == num_steps
        groups = (Path(step["groups"].removeprefix("file://")) for step in steps_of(at.stack, run_id))
        rows = [json.loads(line)["metadata"]["row"] for file in groups for line in file.read_text().splitlines()]
        assert len(rows) == len(set(rows)) == 8 * num_steps
        trained = [option for option in options if option not in ("--sync-in-flight", "continue")]
        again = at.ended(_by_a_client(at, run_id, *trained))
        [file] = {path.name for path in Path(answer.json["adapter"].removeprefix("file://")).glob("*model.safetensors")}
        first, second = (Path(one.json["adapter"].removeprefix("file://"), file) for one in (answer, again))
        assert sha256_file(first) == sha256_file(second)
        return None

    work.__name__ = name
    return work


CARRIED_OVER = (
    carried_over("rollouts_carried_over", *_LORA),
    carried_over(
        "rollouts_carried_over_that_go_on", *("--full", "--learning-rate", "0.0003", "--sync-in-flight", "continue")
    ),
)


def _model(answer: Answer) -> str:
    return sha256_file(Path(answer.json["adapter"].removeprefix("file://"), "model.safetensors"))


# Nothing has been said yet; samplers are asked; a bucket travels; all have been sent; nothing is committed yet; the
# samplers have committed, which the trainer has not said yet.
SYNC_PHASES = ("prepare", "connect", "send 1", "settle", "commit", "finalize")


def weight_syncs(at: Place) -> object:
    """Full weights are broadcast from two ranks to a sampler at an address. The trainer is held where a phase begins
    (held_phases/), so that each kill is where it says.
    """
    run_id = _rl(
        *(at, "--full", "--learning-rate", "0.0003", "--steps", str(len(SYNC_PHASES) + 2), "--publish-every", "5"),
        *("--dp", "2", "--off-policy-steps", "0", "--sync-backend", "tcp", "--sync-bucket-bytes", str(1 << 16)),
    )
    folder = at.stack.root / "held"
    is_cut = link in at.kills.left.values()
    for phase in [phase for phase in SYNC_PHASES if phase in at.kills.left]:
        (folder / "hold.tmp").write_text(phase)
        (folder / "hold.tmp").rename(folder / "hold")
        held = folder / "held"
        wait_until(lambda: held.exists() or at.is_over(run_id), f"a sync comes to {phase}", every_s=0.01)  # noqa: B023
        assert held.exists(), f"the run ended, and no sync came to {phase}"
        num_steps = at.num_steps(run_id)
        at.kills.at(phase)
        held.unlink()
        # The rest of that sync comes to later phases without who was killed.
        wait_until(lambda n=num_steps: at.num_steps(run_id) > n or at.is_over(run_id), "the end of the disturbed step")
    answer = at.ended(run_id)
    metrics = [step["metrics"] for step in steps_of(at.stack, run_id)[1:]]
    used = [each.get("sync_used") for each in metrics]
    print(f"weights came by the sync: {used}")
    assert all(each["probe_difference_max"] < 1e-4 for each in metrics)
    assert all(used) if at.kills.is_none else not (is_cut and all(used)), "the store was needed where a link was cut"
    return _model(answer), [(each["grad_norm"], each["reward_mean"]) for each in metrics]


def _cut(stack: Stack) -> None:
    """Shut all TCP connections between trainers and samplers, by duplicates of the trainers' sockets."""

    def found() -> list[tuple[int, int]] | None:
        theirs = {connection.laddr for one in sampler(stack) for connection in one.net_connections("tcp")}
        links = [
            (rank.pid, connection.fd)
            for rank in ranks(stack)
            for connection in rank.net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED and connection.raddr in theirs
        ]
        return links or None

    cut_ones = [_duplicate(*one) for one in wait_until(found, "the trainer's link to the sampler")]
    print(f"cutting {len(cut_ones)} connections")
    for one in cut_ones:
        one.shutdown(socket.SHUT_RDWR)
        one.close()


def _duplicate(pid: int, descriptor: int) -> socket.socket:
    """Another process's socket, by the system call pidfd_getfd."""
    process = os.pidfd_open(pid)
    try:
        copied = ctypes.CDLL(None, use_errno=True).syscall(438, process, descriptor, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return socket.socket(fileno=copied)
    finally:
        os.close(process)


def scored_rollouts(at: Place) -> object:
    """Graded by a reward model on a second sampler, whose base is another folder with the same weights."""

    def make(folder: Path) -> str:
        rows = [{"prompt": f"Name ship {n}.", "chosen": f"{n} eee", "rejected": f"{n} z"} for n in range(32)]
        base = Path(shutil.copytree(at.model, folder / "base"))
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"of": "the reward model"}))
        data = str(jsonl(folder / "rows.jsonl", rows))
        few = ("--steps", "4", "--batch-size", "16", "--max-tokens", "256", *_LORA, "--name", "likes-e")
        at.ended(at.submit("reward", "--dataset", data, *few))
        return json.dumps({"type": "reward_model", "name": "e", "model": "likes-e", "base": str(base)})

    grader = at.once("graded", make)
    with at.stack.another_host("sampler"):
        run_id = _rl(at, "--grader", grader, "--off-policy-steps", "0", "--steps", "4", *_LORA)

        def is_scoring() -> bool:
            drawn, scored = at.count("sampled/*/samples/manifest.json"), at.count("rewarded/*/manifest.json")
            return at.num_steps(run_id) >= 2 and drawn > scored

        at.kills.at("scoring", is_scoring, every_s=0.005)
        return at.adapter(run_id)


_PLAYS = """
class Environment:
    def reset(self, item, seed):
        self.chance, self.num = seed % 5, 0
        return f"Count to {self.chance}."

    def step(self, answer):
        self.num += 1
        said = {"reward": 1 / (1 + abs(len(answer["content"]) - self.chance)), "done": self.num == 5}
        return said | {"observation": f"That was {len(answer['content'])}."}
"""


def episodes(at: Place) -> object:
    """With an environment: what an answer earned, and what it was told, depend on all the answers before it."""

    def write(folder: Path) -> tuple[Path, Path]:
        (folder / "environment.py").write_text(_PLAYS)
        return talking_model(folder / "model"), folder / "environment.py"

    model, environment = at.once("plays", write)
    rows = [{"messages": [{"role": "user", "content": f"Ship {n}."}]} for n in range(50)]
    prompts = at.once("ships", lambda folder: jsonl(folder / "prompts.jsonl", rows))
    run_id = at.submit(
        *("rl", "--prompts", str(prompts), "--environment", str(environment), "--loss", "ppo", "--group-size", "4"),
        *("--prompts-per-step", "8", "--max-completion-tokens", "48", "--max-tokens", "512", "--seed", "7"),
        *("--steps", "4", "--eval-prompts", str(prompts), "--lora-rank", "4", "--learning-rate", "0.001"),
        model=model,
    )
    for number, phase in enumerate(("played before any step", "played in step 2", "played in step 3")):
        is_played = lambda n=number: at.num_steps(run_id) >= n + (n > 0) and at.count("sampled/*-turns/*.json") > 20  # noqa: E731
        at.kills.at(phase, is_played, every_s=0.005)
    answer = at.ended(run_id)
    kept = [step["metrics"]["episode_kept_share"] for step in steps_of(at.stack, run_id)[1:]]
    assert kept == [1.0] * 4
    return at.stack.adapter_sha256(answer), [step["metrics"]["reward_mean"] for step in steps_of(at.stack, run_id)[1:]]


# What clients drive.

NUM_STEPS = 6


def steps_of_a_client(at: Place) -> object:
    """Each step is sent until it is accepted, and then once more: it is trained exactly once."""

    def make(folder: Path) -> list[str]:
        def groups(number: int) -> str:
            return write_groups(folder / f"{number}.jsonl", *random_groups(seed=number, num_groups=8, size=8))

        return [groups(number) for number in range(NUM_STEPS)]

    fields = {"model": at.model.as_uri(), "trainable": Lora(rank=4), "learning_rate": 1e-3, "max_tokens": 64}
    run = RLRun(**fields, loss=Reinforce(), mini_batches=2, epochs=2, idle_s=30)
    done = []
    with at.stack.client(patience_s=90) as client:
        run_id = client.runs.submit(run, uuid.uuid4().hex).run_id

        def is_training(number: int) -> bool:
            """Or beyond it, as a busy machine may miss the moment."""
            logs = _found(at.stack.host_paths.workers, f"*/outputs/{run_id}/{number:06d}/*/log.jsonl")
            return at.num_steps(run_id) >= number or any('"event":"step"' in _read(log) for log in logs)

        for number, uri in enumerate(at.once("groups", make), start=1):
            step = client.runs.train(run_id, uri, f"key-{number}")
            at.kills.at(f"step {number} is accepted")
            step = client.runs.train(run_id, uri, f"key-{number}")
            at.kills.at(f"step {number} trains", partial(is_training, number))
            while not step.is_final:
                step = client.runs.step(run_id, step.step, wait_s=10)
            assert step.adapter is not None
            done.append((step.step, step.state, step.policy_version, step.optimizer_step, _weights(step.adapter)))
        # What is shown of a run is what was last seen of it while the host of its workflow is being started again.
        wait_until(lambda: client.runs.get(run_id).policy_version == NUM_STEPS, "the run is shown at its last step")
        client.runs.finish(run_id)
    at.ended(run_id)
    records = steps_of(at.stack, run_id)
    assert [(r["step"], r["state"], r["policy_version"], r["optimizer_step"]) for r in records] == [
        each[:4] for each in done
    ]
    assert [each[:4] for each in done] == [(n, "done", n, 4 * n) for n in range(1, NUM_STEPS + 1)]
    return done


def _weights(adapter: str) -> str:
    return sha256_file(Path(adapter.removeprefix("file://"), "adapter_model.safetensors"))


NUM_COMMANDS = 24


def sessions(at: Place) -> object:
    """Three at once; undisturbed each is alone. Every future resolves."""
    commands = [commands_of(number, NUM_COMMANDS, loads=True) for number in range(3)]
    with at.stack.client(patience_s=90) as client:
        if at.kills.is_none:
            return [_all_told(_sent(opened(client, at.model), each), client) for each in commands]
        senders = [Sender(opened(client, at.model, save_after_s=0.5)) for _ in commands]
        for place in range(NUM_COMMANDS):
            for sender, each in zip(senders, commands, strict=True):
                sender.send(each[place])
            waited = senders[place % 3].pending[-1]
            at.kills.at(f"command {place}", lambda waited=waited: waited.result(900))
        return [_all_told(sender, client) for sender in senders]


def _sent(session: Session, commands: Sequence[Asked]) -> Sender:
    sender = Sender(session)
    for asked in commands:
        sender.send(asked)
    return sender


def _all_told(sender: Sender, client: Client) -> object:
    return [told(one.result(900)) for one in sender.pending], final_state(sender.session, client)


def session_on_ranks(layout: Layout) -> Callable[[Place], object]:
    def work(at: Place) -> object:
        commands = commands_of(13, 10)
        with at.stack.client(patience_s=90) as client:
            session = opened(client, at.model, layout=layout, save_after_s=0.2)
            sent = [session.send(asked) for asked in commands[:6]]
            if at.kills.at("command 4", lambda: sent[3].result(600)):
                wait_until(lambda: session.status().epoch > 1, "it was lost")
            sent += [session.send(asked) for asked in commands[6:]]
            return [told(each.result(600)) for each in sent], final_state(session, client)

    work.__name__ = f"session_{layout.label}"
    return work


def tinker_loop(at: Place) -> object:
    process = started(at.stack, at.model, "loop", "10")
    assert process.stdout is not None
    answer: dict[str, Any] = {}
    for line in process.stdout:
        answer = json.loads(line)
        if "step" in answer:
            at.kills.at(f"step {answer['step']}")
        if "adapter" in answer:
            break
    process.wait(900)
    assert len(answer["samples"]) == 2
    return answer["steps"], answer["samples"], answer["adapter"]


def cookbook_loops(at: Place) -> object:
    """The supervised loop ends in the bits of an undisturbed one; that of rewards draws anew, and does its steps."""
    hub = at.once("hub", lambda folder: hub_below(folder, at.model))
    log, num_steps = secrets.token_hex(4), 6
    few = ["lora_rank=4", "batch_size=2"]
    supervised = recipe(at.stack, hub, "sl_loop", [*few, f"max_steps={num_steps}", "save_every=2"], log)
    rl = [*few, "group_size=4", "max_steps=2", "max_tokens=16", "loss_fn=importance_sampling"]
    rewarded = recipe(at.stack, hub, "rl_loop", rl, f"rl-{log}")
    for step in range(1, num_steps):
        at.kills.at(f"step {step}", lambda n=step: len(lines_of(hub, log, "metrics.jsonl")) >= n)
    saved = finished(supervised, hub, log)
    finished(rewarded, hub, f"rl-{log}")
    assert [line["step"] for line in lines_of(hub, f"rl-{log}", "metrics.jsonl")] == [0, 1]
    lines = [(line["step"], line["train_mean_nll"]) for line in lines_of(hub, log, "metrics.jsonl")]
    return adapter_of(at.stack, saved["sampler_path"]), lines


def answers(at: Place) -> object:
    """Fifty at once, streamed: text is that of undisturbed ones."""
    num = 4 if at.kills.is_none else 50
    with asking(at.stack) as ask, ThreadPoolExecutor(num) as threads:
        asked = [threads.submit(chat, ask, number % 4) for number in range(num)]
        at.kills.at("some are answered", lambda: any(one.done() for one in asked))
        return {(number % 4, one.result()) for number, one in enumerate(asked)}


# What is made of many runs, and of what they publish.


def sweep(at: Place) -> object:
    """Three rates, of which the first learns most by far, and halving after the second of four evaluations."""
    run = ("submit", "sft", "--model", str(at.model), "--dataset", str(at.chats), "--steps", "16", "--lora-rank", "4")
    run += ("--eval-dataset", str(at.chats), "--eval-every", "4", "--batch-size", "8", "--max-tokens", "256")
    grid = ("-p", "learning_rate=0.01,0.0001,0.00001", "--sampler", "grid", "--halving", "8/3", "--parallel", "3")
    sweep_id = at.stack.cli("sweep", "create", f"tides-{secrets.token_hex(3)}", *grid, "--", *run).stdout.strip()

    def shown() -> dict[str, Any] | None:
        answer = at.stack.cli("sweep", "show", sweep_id, "--json", check=False)
        return answer.json if answer.code == 0 else None

    at.kills.at("a trial has begun", lambda: any(t["step"] for t in (shown() or {"trials": []})["trials"]))
    view = wait_until(lambda: found if (found := shown()) and found["state"] != "running" else None, "the sweep's end")
    return _weights(view["adapter"]), [(t["number"], t["values"], t["state"], t["value"]) for t in view["trials"]]


def exports(form: str, *options: str) -> Callable[[Place], object]:
    """Nothing is offered until it is whole."""

    def publish(at: Place, folder: Path) -> str:
        """An adapter of a model that takes a while to write: 160 MB."""
        from transformers import AutoConfig, AutoModelForCausalLM

        model = Path(shutil.copytree(at.model, folder / "model"))
        wide = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
        config = AutoConfig.from_pretrained(at.model, **wide, layer_types=["full_attention"] * 8)
        for path in model.glob("*.safetensors*"):
            path.unlink()
        AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(model)
        few = ("--steps", "1", "--batch-size", "2", "--max-tokens", "64", "--lora-rank", "2", "--lr", "0.1")
        run_id = at.submit("sft", "--dataset", str(at.chats), *few, model=model)
        at.ended(run_id)
        return f"{run_id}:v1"

    def work(at: Place) -> object:
        exported = at.once("exported", lambda folder: publish(at, folder))
        store, into = at.stack.root / "store", at.folder / secrets.token_hex(4)

        def written(folders: list[Path]) -> bool:
            return any(path.is_file() and path.stat().st_size for folder in folders for path in _found(folder, "**/*"))

        with ThreadPoolExecutor() as beside:
            asked = beside.submit(at.stack.cli, "export", exported, *options, "--into", str(into))
            for phase, root, pattern in (
                ("writing", at.stack.host_paths.scratch, "export*"),
                ("storing", store, f"**/exports/{form}"),
            ):
                is_there = lambda root=root, pattern=pattern: written(_found(root, pattern))  # noqa: E731
                if at.kills.at(phase, is_there, every_s=0.005):
                    assert not _found(store, f"**/exports/{form}/manifest.json"), "it had ended before"
                    assert not _found(into, "*")
            assert asked.result().code == 0
        shutil.rmtree(next(store.glob(f"**/exports/{form}")))
        assert any(into.iterdir())
        return {path.name: sha256_file(path) for path in into.iterdir()}

    work.__name__ = f"export_{form}"
    return work


# The matrix.

Kind = Callable[[Place], object]
Trial = tuple[Kind, list[Cell]]

TRAINERS: tuple[Victim, ...] = (a_rank, gpu_host, control_host, web_service, temporal_server)
SAMPLERS: tuple[Victim, ...] = (sampler, sampler_host, web_service)
SYNCING: tuple[Victim, ...] = (a_rank, launcher, sampler, sampler_host, gpu_host, web_service)
FAMILIES: tuple[str, ...] = (
    *("qwen3_5", "qwen3_5_moe", "gpt_oss", "gemma3", "gemma4", "deepseek_v3", "glm4_moe_lite", "nemotron_h"),
    *("granite", "olmo3", "granitemoehybrid", "lfm2"),
)


def each(phases: Sequence[str], victims: Sequence[Victim]) -> list[Cell]:
    """Every victim in every phase. Trials have each phase once: there victims take turns."""
    turns = range(len(victims))
    return [(phase, victims[(turn + place) % len(victims)]) for turn in turns for place, phase in enumerate(phases)]


EXPORTING = [("writing", writer), *each(("writing", "storing"), [control_host])]
MATRIX: dict[Kind, list[Cell]] = {
    sft: each(("before the claim", "mid-step", "between save and manifest", "after save", "at the sentinel"), TRAINERS),
    reward_model: [("mid-step", a_rank), ("after save", gpu_host)],
    **{of_family(family): [("after save", a_rank)] for family in FAMILIES},
    graded_sft: [
        *(("sampling before any step", sampler), ("training", a_rank), ("sampling after step 20", sampler_host)),
        *(("graded after step 40", gpu_host), ("sampling before any step", temporal_server)),
        *(("sampling after step 20", control_host), ("graded after step 40", control_host)),
    ],
    limited: [
        ("the limit is set", web_service),
        *each(["the limit holds"], (control_host, temporal_server, web_service)),
        *each(["the limit is raised"], (web_service, control_host)),
    ],
    rollouts: [
        *(("sampling", sampler), ("grading", control_host), ("training", a_rank), ("publishing", control_host)),
        *(("sampling", sampler_host), ("training", gpu_host), ("grading", temporal_server)),
        ("publishing", sampler),  # before the proof of what is published
    ],
    rollouts_whose_samples_go_on: [
        *(("training", sampler), ("sampling", sampler), ("publishing", control_host), ("training", gpu_host))
    ],
    CARRIED_OVER[0]: [
        *(("a step is decided", control_host), ("another one", sampler), ("a third one", temporal_server)),
        *(("a step is decided", sampler_host), ("another one", gpu_host)),
    ],
    CARRIED_OVER[1]: [("a step is decided", gpu_host), ("another one", sampler), ("a third one", control_host)],
    weight_syncs: [*((phase, link) for phase in SYNC_PHASES[2:5]), *each(SYNC_PHASES, SYNCING)],
    scored_rollouts: each(["scoring"], (sampler, control_host, sampler_host)),
    episodes: [
        *(("played before any step", sampler), ("played in step 2", sandboxes), ("played in step 3", sampler_host)),
        *(("played before any step", temporal_server), ("played in step 2", control_host)),
    ],
    steps_of_a_client: each(
        [*("step 2 is accepted", "step 3 trains", "step 4 is accepted", "step 6 trains")], (*TRAINERS, everything)
    ),
    sessions: each(("command 5", "command 12", "command 20"), TRAINERS),
    session_on_ranks(Layout(dp=2)): [("command 4", a_rank)],
    session_on_ranks(Layout(tp=2)): [("command 4", a_rank)],
    tinker_loop: each(("step 2", "step 5", "step 7"), (*TRAINERS, sampler_host)),
    cookbook_loops: each(("step 1", "step 3"), (*TRAINERS, sampler_host)),
    answers: each(["some are answered"], SAMPLERS),
    sweep: each(["a trial has begun"], TRAINERS),
    exports("merged", "--merged"): EXPORTING,
    exports("gguf-f16", "--gguf", "--type", "f16"): EXPORTING,
}
CHECKS_ITSELF: tuple[Kind, ...] = (rollouts_whose_samples_go_on, *CARRIED_OVER)
"""No two runs of it are alike: it is held against what its own stored samples make."""


def trials() -> list[Trial]:
    """The cells of each kind, shared out among as few trials as have each phase at most once."""
    found: list[Trial] = []
    for kind, cells in MATRIX.items():
        shared_out: list[dict[str, Victim]] = []
        for phase, victim in cells:
            trial = next((one for one in shared_out if phase not in one), None)
            if trial is None:
                shared_out.append(trial := {})
            trial[phase] = victim
        found += [(kind, list(trial.items())) for trial in shared_out]
    return found


def drawn_trials(seed: object) -> list[Trial]:
    """Trials by the seed in which each victim dies: one of any kind, then as few more as it takes."""
    chance, found = random.Random(f"{seed} of kills"), list[Trial]()
    kinds = chance.sample(list(MATRIX), len(MATRIX))
    left = {victim for cells in MATRIX.values() for _, victim in cells}
    kind = kinds[0]
    while left:
        kept: dict[str, Victim] = {}
        victims = [victim for _, victim in MATRIX[kind]]
        for phase, victim in sorted(chance.sample(MATRIX[kind], len(victims)), key=lambda cell: victims.count(cell[1])):
            if victim in left and phase not in kept:
                kept[phase] = victim
                left.remove(victim)
        found.append((kind, list(kept.items())))
        kind = max(kinds, key=lambda kind: len(left & {victim for _, victim in MATRIX[kind]}))
    return found


def _label(trial: Trial) -> str:
    kind, cells = trial
    return f"{kind.__name__}: " + ", ".join(f"{victim.__name__} {phase}" for phase, victim in cells)


@pytest.fixture(scope="module")
def outcomes() -> dict[Kind, object]:
    """What kinds of work come to when nothing happens."""
    return {}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.mark.parametrize("trial", trials() if IS_DEEP else drawn_trials(SEED), ids=_label)
def test_kills_change_nothing(
    fresh_stack: Stack,
    tiny_model: Path,
    chat_dataset: Path,
    tmp_path: Path,
    shared: Path,
    made: dict[str, Any],
    outcomes: dict[Kind, object],
    trial: Trial,
) -> None:
    kind, cells = trial

    def outcome(cells: list[Cell]) -> object:
        forget(fresh_stack)
        (folder := tmp_path / f"{len(cells)}").mkdir()
        kills = Kills(fresh_stack, dict(cells))
        found = kind(Place(fresh_stack, tiny_model, chat_dataset, folder, kills, shared, made))
        assert not kills.left, "the work never came to this"
        return found

    if kind not in CHECKS_ITSELF and kind not in outcomes:
        outcomes[kind] = outcome([])
    assert outcome(cells) == outcomes.get(kind)
    wait_until(lambda: not list(fresh_stack.host_paths.workers.glob("*/scratch/*")), "scratch folders are gone")
    left = ("sampled/*-parts/*.json", "sampled/*-turns/*.json")
    store = fresh_stack.root / "store"
    wait_until(lambda: not any(list(store.glob(pattern)) for pattern in left), "parts are gone")


def test_the_draw_kills_every_victim() -> None:
    everyone = {victim for cells in MATRIX.values() for _, victim in cells}
    for seed in range(20):
        drawn = drawn_trials(seed)
        assert {victim for _, cells in drawn for _, victim in cells} == everyone
        assert all(len({phase for phase, _ in cells}) == len(cells) for _, cells in [*drawn, *trials()])
    assert sum(len(cells) for _, cells in trials()) == sum(map(len, MATRIX.values()))


def test_cancel_frees_the_worker_and_resume_gives_the_same_bits(
    stack: Stack, undisturbed: Answer, sft_options: list[str]
) -> None:
    run_id = stack.cli(*sft_options).json["run_id"]
    wait_until(lambda: _num_logged(stack, run_id, "step") >= 3, "mid-step", every_s=0.01)
    halt(stack, run_id, "cancel")
    ended = stack.cli("watch", run_id, "--json", check=False)
    assert ended.code == 103 and ended.json["steps"] < 60, "it was stopped before its last step"
    assert stack.cli("checkpoints", run_id, "--json").json
    stack.cli("resume", run_id)
    answer = stack.cli("watch", run_id, "--json")
    assert stack.adapter_sha256(answer) == stack.adapter_sha256(undisturbed)
    wait_until(lambda: not list(stack.host_paths.workers.glob("*/scratch/*")), "scratch folders are gone")
