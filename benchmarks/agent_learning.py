"""Whether an agent of several turns learns: what it earns by step, for several seeds, beside shuffled rewards.

    python -m benchmarks.agent_learning [--seeds 0 1] [--steps 12]

Starts `longshore dev` in a temporary folder, trains the demonstration's model and adapter for sums
(examples/arithmetic.py), and then runs examples/agent.py from that adapter. Its agent asks for a sum, says whether it
is right, and asks up to twice more. A question that is answered rightly at once earns 1, later 2/3 and 1/3. Each seed
also runs with rewards that are shuffled within their groups, which must not learn. Counts the turns that kept the ids
of the turns before them. Prints JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Stack.started(Path(folder) / "stack") as stack:
        runs = _measure(stack, Path(folder), options.seeds, options.steps)
        turns = _turns(stack)
    what = f"mean reward of the first and last {_MEAN_OF} of {options.steps} steps"
    tell({"what": what, "runs": runs, **turns, **provenance()}, options.out)


def _measure(stack: Stack, folder: Path, seeds: list[int], steps: int) -> list[dict[str, Any]]:
    data = folder / "data"
    arithmetic.write_datasets(data)
    model = make_tiny_model(folder / "model", arithmetic.tokenizer_texts(data), **arithmetic.MODEL)
    sft = ["submit", "sft", "--wait", "--json", "--model"]
    sums = stack.run(*sft, model.as_uri(), *arithmetic.dataset_options(data, "sums"), *arithmetic.SUMS_RUN)
    tally = stack.run(*sft, sums["adapter"], *arithmetic.dataset_options(data, "tally"), *arithmetic.TALLY_RUN)
    start = ["--model", sums["adapter"], "--initial-adapter", tally["adapter"], "--policy", "tally"]
    start += ["--questions", str(data / "prompts_train.jsonl"), "--steps", str(steps), "--tasks-per-step", "32"]
    start += ["--mini-batches", "8", "--max-tokens", "96", "--max-completion-tokens", "8"]
    return [_learn(stack, *start, seed=seed, shuffled=shuffled) for seed in seeds for shuffled in (False, True)]


def _learn(stack: Stack, *options: str, seed: int, shuffled: bool) -> dict[str, Any]:
    control = ["--shuffle-rewards"] if shuffled else []
    name = f"agent-{seed}{'-shuffled' if shuffled else ''}"
    done = subprocess.run(
        [sys.executable, str(_AGENT), *options, *control, "--seed", str(seed), "--name", name],
        env={**os.environ, "LONGSHORE_ROOT": str(stack.root)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    rewards = [json.loads(line)["reward"] for line in done.stdout.splitlines()]
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
