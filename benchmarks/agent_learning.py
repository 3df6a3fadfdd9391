"""Whether an agent of several turns learns: what it earns by step, for several seeds, beside shuffled rewards.

    python -m benchmarks.agent_learning [--seeds 0 1] [--steps 12] [--program | --server]

Starts `longshore dev` in a temporary folder, trains the demonstration's model and adapter for sums
(examples/arithmetic.py), and then runs examples/agent.py from that adapter. Its agent asks for a sum, says whether it
is right, and asks up to twice more. A question that is answered rightly at once earns 1, later 2/3 and 1/3. Each seed
also runs with rewards that are shuffled within their groups, which must not learn. Counts the turns that kept the ids
of the turns before them. With `--program` a run starts examples/program.py, the same agent, for each sample, in a box.
With `--server` an env server of verifiers plays them, by the task set benchmarks/sums_set.py. Prints JSON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import provenance, tell
from benchmarks.rl_learning import Stack
from examples import arithmetic
from examples.tiny_model import make_tiny_model
from service.dev import Connection

_AGENT = Path(__file__).parents[1] / "examples" / "agent.py"
_MEAN_OF = 3  # steps, at the beginning and the end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--program", action="store_true")
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--tasks-per-step", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as entered:
        folder = entered.enter_context(tempfile.TemporaryDirectory())
        if options.server:
            os.environ["LONGSHORE_AGENTS__SERVERS"] = json.dumps({"sums": f"ipc://{folder}/server"})
            entered.enter_context(_env_server(folder))
        stack = entered.enter_context(Stack.started(Path(folder) / "stack"))
        given = _prepared(stack, Path(folder))
        learn = _in_a_run if options.program else _at_a_server if options.server else _at_addresses
        sizes = options.steps, options.tasks_per_step
        whats = [(seed, shuffled) for seed in options.seeds for shuffled in (False, True)]
        runs = [_told(learn(stack, given, *sizes, *what), *what) for what in whats]
        turns = {} if options.program or options.server else _turns(stack)
    what = f"mean reward of the first and last {_MEAN_OF} of {options.steps} steps"
    tell({"what": what, "runs": runs, **turns, **provenance()}, options.out)


@dataclass(frozen=True)
class _Given:
    """A model for sums, an adapter to begin with, and the questions: `messages` and `answer` a line."""

    model: str
    adapter: str
    questions: Path


def _prepared(stack: Stack, folder: Path) -> _Given:
    data = folder / "data"
    arithmetic.write_datasets(data)
    model = make_tiny_model(folder / "model", arithmetic.tokenizer_texts(data), **arithmetic.MODEL)
    sft = ["submit", "sft", "--wait", "--json", "--model"]
    sums = stack.run(*sft, model.as_uri(), *arithmetic.dataset_options(data, "sums"), *arithmetic.SUMS_RUN)
    tally = stack.run(*sft, sums["adapter"], *arithmetic.dataset_options(data, "tally"), *arithmetic.TALLY_RUN)
    return _Given(sums["adapter"], tally["adapter"], data / "prompts_train.jsonl")


def _at_addresses(
    stack: Stack, given: _Given, steps: int, tasks_per_step: int, seed: int, shuffled: bool
) -> list[float]:
    """Return the rewards of each step of examples/agent.py, which drives a run."""
    name = f"agent-{seed}{'-shuffled' if shuffled else ''}"
    options = ["--model", given.model, "--initial-adapter", given.adapter, "--policy", "tally", "--name", name]
    options += ["--questions", str(given.questions), "--steps", str(steps), "--tasks-per-step", str(tasks_per_step)]
    options += ["--mini-batches", "8", "--max-tokens", "96", "--max-completion-tokens", "8", "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, str(_AGENT), *options, *(["--shuffle-rewards"] if shuffled else [])],
        env={**os.environ, "LONGSHORE_ROOT": str(stack.root)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [json.loads(line)["reward"] for line in done.stdout.splitlines()]


def _in_a_run(stack: Stack, given: _Given, steps: int, tasks_per_step: int, seed: int, shuffled: bool) -> list[float]:
    """Return the rewards of each step of a run that starts examples/program.py for each sample."""
    program = (_AGENT.parent / "program.py").read_text()

    def own(question: str, answer: str) -> dict[str, Any]:
        return {"variables": {"ANSWER": answer}, "files": {"program.py": program}}

    return _of_a_run(stack, given, ("--agent", "python3 program.py"), own, steps, tasks_per_step, seed, shuffled)


def _at_a_server(
    stack: Stack, given: _Given, steps: int, tasks_per_step: int, seed: int, shuffled: bool
) -> list[float]:
    """Return the rewards of each step of a run whose episodes an env server plays."""

    def own(question: str, answer: str) -> dict[str, Any]:
        return {"task_data": {"prompt": question, "answer": answer}}

    return _of_a_run(stack, given, ("--agent-server", "sums"), own, steps, tasks_per_step, seed, shuffled)


@contextmanager
def _env_server(folder: str) -> Iterator[None]:
    """Serve the sums, with the verifiers that the tests have."""
    shutil.copy(Path(__file__).with_name("sums_set.py"), folder)  # as modules beside it are named as Python's own
    path = os.pathsep.join([str(_AGENT.parents[1] / ".venv" / "clients" / "verifiers"), folder])
    own = json.dumps({"agent": {"harness": {"id": "sums_set"}}})
    command = [sys.executable, "-P", str(_AGENT.with_name("verifiers_server.py")), "serve", "sums_set", "--env", own]
    environment = {**os.environ, "PYTHONPATH": path, "HOME": folder}
    server = subprocess.Popen([*command, "--address", f"ipc://{folder}/server"], env=environment)
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def _of_a_run(
    stack: Stack,
    given: _Given,
    agent: tuple[str, str],
    own: Callable[[str, str], dict[str, Any]],
    steps: int,
    tasks_per_step: int,
    seed: int,
    shuffled: bool,
) -> list[float]:
    rows = given.questions.with_name("rows.jsonl")
    with rows.open("w") as file:
        for row in map(json.loads, given.questions.read_text().splitlines()):
            question = row["messages"][-1]["content"]
            file.write(json.dumps({"prompt": question, **own(question, row["answer"])}) + "\n")
    options = ["--model", given.model, "--initial-adapter", given.adapter, "--prompts", str(rows), "--seed", str(seed)]
    options += [*agent, "--steps", str(steps), "--prompts-per-step", str(tasks_per_step)]
    options += ["--group-size", "8", "--mini-batches", "8", "--max-tokens", "96", "--max-completion-tokens", "8"]
    options += ["--algorithm", "dr_grpo", "--lr", "1e-4", "--lora-rank", "16", "--lora-alpha", "32"]
    ended = stack.run("submit", "rl", *options, *(["--shuffle-rewards"] if shuffled else []), "--wait", "--json")
    steps_of: Any = stack.run("steps", ended["run_id"], "--json")
    return [step["metrics"]["reward_mean"] for step in steps_of]


def _told(rewards: list[float], seed: int, shuffled: bool) -> dict[str, Any]:
    first, last = (round(sum(part) / len(part), 3) for part in (rewards[:_MEAN_OF], rewards[-_MEAN_OF:]))
    return {"seed": seed, "shuffled": shuffled, "first": first, "last": last, "rewards": rewards}


def _turns(stack: Stack) -> dict[str, int]:
    """Counts over all episodes."""
    connection = Connection.read(stack.root)
    assert connection is not None
    headers = {"authorization": f"Bearer {connection.api_key}"}
    counts: dict[str, int] = {"num_episodes": 0}
    before = None
    with httpx.Client(base_url=f"{connection.api_url}/api/v1", headers=headers, timeout=60) as client:
        while page := client.get("/episodes", params={"limit": 100} | ({"before": before} if before else {})).json():
            before = page[-1]["episode_id"]
            for one in page:
                counts["num_episodes"] += 1
                for name, value in (one["end"] or {}).items():
                    counts[name] = counts.get(name, 0) + value
    return counts


if __name__ == "__main__":
    main()
