"""Upgrade and roll back the code under active runs: is any run lost, does any bit of the results change?

    python -m benchmarks.upgrade [--runs 50] [--before REV] [--out FILE.json]

Takes the revision REV (HEAD~1 unless given) out of git beside this checkout; both run on this environment's packages.
On one Temporal server, one store and one database the hosts and the web service of REV, the build `before`, begin a run
of each of six kinds, and when each of these has trained, `--runs` more, each with its own seed. When those are accepted
and one of them has trained, everything moves to this checkout, the build `after`, as docs/operations.md says: control
hosts next to the old ones, `longshore builds use`, new GPU and sampler hosts, a drain of the old ones, and another web
service. One more run of each kind begins there. When those have trained, everything moves back, the web service first,
and one more of each kind begins. Clients of sessions and of RL runs send a third of their work after each move. The
control host of `after` is stopped once `longshore builds ls` shows the build as drained.

Then `after` alone does the same runs, and their published weights are compared. Prints a table by kind, and JSON.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.builds import Build, Installation, checked_out, revision
from benchmarks.machine import commit, provenance, tell, until
from benchmarks.recovery import LETTERS
from benchmarks.rl_step import write_groups
from examples.tiny_model import make_tiny_model
from longshore.client import Client
from longshore.commands import Datum
from longshore.dataset_runs import DPORun, SFTRun
from longshore.losses import PPO
from longshore.runs import RLRun, Run
from longshore.training import Lora, SessionRun
from longshore.views import RunView
from shared.child_environment import Kind
from shared.storage.artifacts import sha256_file

_PATIENCE_S = 1800.0
_LOOK_EVERY_S, _LONG_POLL_S = 1.0, 10.0
_until = partial(until, patience_s=_PATIENCE_S, every_s=_LOOK_EVERY_S)
_MOVES = 2
_PARTS = _MOVES + 1  # of a client's work: before the moves, between them and after
_HOSTS: tuple[Kind, ...] = ("gpu", "sampler")
_ROLES: tuple[Kind, ...] = ("control", "web", *_HOSTS)
_CORPUS = ["how many crates are on the quay? seven crates, and a sack of grain."] * 8


class Moves:
    """How many moves are done. Clients wait for them."""

    def __init__(self, done: int = 0) -> None:
        self._events = [threading.Event() for _ in range(_MOVES)]
        for _ in range(done):
            self.one_is_done()

    def one_is_done(self) -> None:
        next(event for event in self._events if not event.is_set()).set()

    def wait_for(self, number: int) -> None:
        for event in self._events[:number]:
            assert event.wait(_PATIENCE_S), f"move {number} is not done after {_PATIENCE_S:g} s"


@dataclass
class Asked:
    """A requested run and its progress. `kind`: one of `Kinds.all`."""

    kind: str
    seed: int
    run_id: str = ""
    steps: int = 0
    has_ended: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `weights` is a hash of its published weights, None if it did not succeed."""

    asked: Asked
    state: str
    problem: str
    weights: str | None
    workers_lost: int
    build: str


class Kinds:
    """Six kinds of runs of one model, and the work of their clients."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = str(model), folder
        self._chats, self._pairs, self._prompts = (
            self._rows(name, row) for name, row in (("chats", _chat), ("pairs", _pair), ("prompts", _question))
        )
        self.all: Mapping[str, Callable[[int], Run | SessionRun]] = {
            "sft": self._sft,
            "sft with evaluations": self._evaluated,
            "dpo": self._dpo,
            "rl with a grader": self._rollouts,
            "rl of a client": self._episodes,
            "session": self._session,
        }

    def _rows(self, name: str, row: Callable[[int], dict[str, Any]]) -> dict[str, str]:
        path = self._folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(64)))
        return {"uri": path.as_uri()}

    def _on_data(self, seed: int, **changes: Any) -> dict[str, Any]:
        common = {"model": self._model, "trainable": Lora(rank=4), "learning_rate": 0.01, "seed": seed}
        return {**common, "steps": 40, "batch_size": 8, "max_tokens": 128, "checkpoint_every": 10, **changes}

    def _sft(self, seed: int) -> Run:
        return SFTRun.model_validate(self._on_data(seed, dataset=self._chats))

    def _evaluated(self, seed: int) -> Run:
        told = {"eval_dataset": self._chats, "eval_every": 15, "num_samples": 1, "sample_tokens": 8}
        return SFTRun.model_validate(self._on_data(seed, dataset=self._chats, **told))

    def _dpo(self, seed: int) -> Run:
        return DPORun.model_validate(self._on_data(seed, dataset=self._pairs, steps=20))

    def _of_policy(self, seed: int, **changes: Any) -> Run:
        common = {"model": self._model, "trainable": Lora(rank=4), "learning_rate": 0.01, "loss": PPO(), "seed": seed}
        return RLRun.model_validate({**common, "max_tokens": 128, "idle_s": 2, **changes})

    def _rollouts(self, seed: int) -> Run:
        grader = {"type": "python", "name": "letters", "source": LETTERS}
        sizes = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 12}
        return self._of_policy(seed, rollouts={"prompts": self._prompts, "grader": grader, **sizes})

    def _episodes(self, seed: int) -> Run:
        return self._of_policy(seed, mini_batches=2)

    def _session(self, seed: int) -> SessionRun:
        return SessionRun(model=self._model, trainable=Lora(rank=4), max_tokens=64, seed=seed, idle_s=2)

    def groups(self, seed: int, part: int) -> str:
        """The URI of a step's trajectories."""
        return write_groups(self._folder / f"groups-{seed}-{part}.jsonl", seed * _PARTS + part).as_uri()


def _question(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"How many crates are on quay {number}?"}]}


def _chat(number: int) -> dict[str, Any]:
    answer = {"role": "assistant", "content": f"{number * 7 % 50} crates."}
    return {"messages": [*_question(number)["messages"], answer]}


def _pair(number: int) -> dict[str, Any]:
    rejected = {"role": "assistant", "content": f"A sack of grain, or {number % 9}."}
    chosen = _chat(number)["messages"][-1:]
    return {"input": _question(number), "preferred_output": chosen, "non_preferred_output": [rejected]}


@dataclass
class Trial:
    """Runs on one installation."""

    installation: Installation
    kinds: Kinds
    moves: Moves
    threads: ThreadPoolExecutor
    asked: list[Asked] = field(default_factory=list)
    outcomes: list["Future[Outcome]"] = field(default_factory=list)

    def begin(self, seeds: range) -> list[Asked]:
        """Begin a run for each seed; its kind is the next one in turn."""
        names = list(self.kinds.all)
        begun = [Asked(names[seed % len(names)], seed) for seed in seeds]
        self.asked += begun
        self.outcomes += [self.threads.submit(self._run, each) for each in begun]
        return begun

    def until_trained(self, begun: list[Asked], num_kinds: int) -> None:
        """Wait until all are accepted, and runs of `num_kinds` kinds have done a step. Raises a thread's error."""

        def have() -> bool:
            for outcome in self.outcomes:
                if outcome.done():
                    outcome.result()
            trained = {each.kind for each in begun if each.steps or each.has_ended}
            return all(each.run_id for each in begun) and len(trained) >= num_kinds

        _until(have, f"steps of {num_kinds} kinds")

    @property
    def num_live(self) -> int:
        return sum(not each.has_ended for each in self.asked)

    def _run(self, asked: Asked) -> Outcome:
        run = self.kinds.all[asked.kind](asked.seed)
        with self.installation.client() as client:
            if isinstance(run, SessionRun):
                self._drive_session(run, asked)
            else:
                asked.run_id = client.runs.submit(run, f"seed-{asked.seed}").run_id
                if isinstance(run, RLRun) and run.rollouts is None:
                    self._send_steps(client, asked)
            view = self._watched(client, asked)
            asked.has_ended = True
        build, problem = self.installation.build_of(asked.run_id), str(view.problem or "")
        return Outcome(asked, view.state, problem, _weights(view), view.workers_lost, build)

    def _watched(self, client: Client, asked: Asked) -> RunView:
        deadline = time.monotonic() + _PATIENCE_S
        while (view := client.runs.get(asked.run_id)).state == "running":
            asked.steps = view.step
            if time.monotonic() > deadline:
                raise TimeoutError(f"{asked}: {view.phase} at step {view.step} after {_PATIENCE_S:g} s")
            time.sleep(_LOOK_EVERY_S)
        return view

    def _drive_session(self, run: SessionRun, asked: Asked) -> None:
        installation = self.installation
        with Client(installation.url, installation.key, patience_s=_PATIENCE_S) as client:
            session = client.sessions.open(run, f"seed-{asked.seed}")
            asked.run_id = session.id
            for part in range(_PARTS):
                self.moves.wait_for(part)
                for place in range(3):
                    number = (asked.seed * _PARTS + part) * 3 + place
                    session.forward_backward(
                        [Datum(tokens=tuple((number * 31 + at * 7) % 200 + 3 for at in range(24)))]
                    )
                    session.optim_step(learning_rate=0.01).result(_PATIENCE_S)
                    asked.steps += 1
            session.save_state(publish=True).result(_PATIENCE_S)
            session.close()

    def _send_steps(self, client: Client, asked: Asked) -> None:
        for part in range(_PARTS):
            self.moves.wait_for(part)
            sent = client.runs.train(asked.run_id, self.kinds.groups(asked.seed, part), f"part-{part}")
            while sent.state not in ("done", "failed"):
                sent = client.runs.step(asked.run_id, sent.step, _LONG_POLL_S)
            asked.steps = sent.step
        client.runs.finish(asked.run_id)


def _weights(view: RunView) -> str | None:
    if view.state != "succeeded" or view.adapter is None:
        return None
    return sha256_file(Path(view.adapter.removeprefix("file://"), "adapter_model.safetensors"))


def move(installation: Installation, old: Build, new: Build, goes_back: bool) -> None:
    """Replace a build by another one, as docs/operations.md says: the newer web service starts last, and goes first."""
    installation.start(new, "control")
    if goes_back:
        _replace_service(installation, old, new)
    _until(lambda: installation.longshore(new, "builds", "use", new.name).returncode == 0, f"{new.name} is current")
    for role in _HOSTS:
        installation.start(new, role)
        installation.stop(old, role)
    if not goes_back:
        _replace_service(installation, old, new)


def _replace_service(installation: Installation, old: Build, new: Build) -> None:
    installation.stop(old, "web")
    installation.start(new, "web")


def upgraded(trial: Trial, before: Build, after: Build, num_runs: int) -> dict[str, Any]:
    """Begin runs, move to the other build and back. Returns how many lived at each move, and how long that took."""
    installation, num_kinds = trial.installation, len(trial.kinds.all)
    for role in _ROLES:
        installation.start(before, role)
    trial.until_trained(trial.begin(range(num_kinds)), num_kinds)
    first = num_kinds + num_runs
    trial.until_trained(trial.begin(range(num_kinds, first)), 1)
    live, seconds = list[int](), list[float]()
    for old, new in ((before, after), (after, before)):
        live.append(trial.num_live)
        began = time.monotonic()
        move(installation, old, new, goes_back=new is before)
        trial.moves.one_is_done()
        seconds.append(round(time.monotonic() - began, 1))
        print(f"moved to {new.name}: {live[-1]} runs were live, {seconds[-1]} s", file=sys.stderr, flush=True)
        trial.until_trained(trial.begin(range(first, first + num_kinds)), num_kinds)
        first += num_kinds
    _until(lambda: installation.states(before).get(after.name) == "drained", f"{after.name} has drained")
    installation.stop(after, "control")
    print(f"{after.name} has drained: {trial.num_live} runs are live", file=sys.stderr, flush=True)
    return {"live_at_moves": live, "move_s": seconds}


def compared(outcomes: list[Outcome], alone: list[Outcome]) -> dict[str, dict[str, Any]]:
    """By kind: runs, and of them those that did not succeed, published other bits, or lost a worker."""
    expected = {each.asked.seed: each.weights for each in alone}
    assert all(expected.values()), [each for each in alone if each.weights is None]
    assert len(set(expected.values())) == len(alone), "they say nothing of each other"
    table: dict[str, dict[str, Any]] = {}
    for each in outcomes:
        row = table.setdefault(
            each.asked.kind, {"runs": 0, "lost": 0, "other_bits": 0, "workers_lost": 0, "last_build": Counter()}
        )
        row["runs"] += 1
        row["lost"] += each.state != "succeeded"
        row["other_bits"] += each.state == "succeeded" and each.weights != expected[each.asked.seed]
        row["workers_lost"] += each.workers_lost
        row["last_build"][each.build] += 1
        if each.state != "succeeded":
            print(f"{each.asked}: {each.state}, {each.problem}", file=sys.stderr)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="that live when the code is replaced")
    parser.add_argument("--before", default="HEAD~1", metavar="REV")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        before = Build("before", checked_out(given.before, folder / "before"))
        after = Build("after", Path(__file__).parents[1])
        kinds = Kinds(make_tiny_model(folder / "model", _CORPUS), folder)
        threads = stack.enter_context(ThreadPoolExecutor(given.runs + (1 + _MOVES) * len(kinds.all)))
        with Installation(folder / "both", folder) as installation:
            trial = Trial(installation, kinds, Moves(), threads)
            moved = upgraded(trial, before, after, given.runs)
            outcomes = [each.result() for each in trial.outcomes]
        with Installation(folder / "one", folder) as installation:
            for role in _ROLES:
                installation.start(after, role)
            trial = Trial(installation, kinds, Moves(done=_MOVES), threads)
            trial.begin(range(len(outcomes)))
            table = compared(outcomes, [each.result() for each in trial.outcomes])
    for kind, row in table.items():
        print(f"{kind:<24}{row['runs']:4} runs {row['lost']:3} lost {row['other_bits']:3} of other bits")
    what = "runs while the code under them was replaced and replaced back, by kind"
    builds = {"before": revision(given.before), "after": commit()}
    tell({"what": what, "builds": builds, **moved, "kinds": table, **provenance()}, given.out)
    sys.exit(any(row["lost"] or row["other_bits"] for row in table.values()))


if __name__ == "__main__":
    main()
