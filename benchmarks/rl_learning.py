"""Whether a server-driven RL run learns: exact sums of held-out pairs before and after, for several seeds.

    python -m benchmarks.rl_learning [--seeds 0 1 2] [--full] [--sampler vllm] [--algorithm ppo]

Starts `longshore dev` in a temporary folder and trains the demonstration's model and adapter for sums, once
(examples/arithmetic.py). Then every seed has two RL runs from that adapter: a normal one, and one whose rewards are
shuffled within their groups, which must not learn. With `--full` every weight is trained instead of adapters, in the
first training too, and the samplers get whole weights. `--algorithm ppo` also trains a critic, whose explained variance
is shown by step. `--sampler vllm` needs LONGSHORE_SAMPLING__VLLM_COMMAND. Seconds are
from submission to the run's end. Prints JSON.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from benchmarks.control_plane import LONGSHORE, stack
from benchmarks.machine import provenance
from examples import arithmetic
from examples.tiny_model import make_tiny_model

_OWN: dict[str | None, tuple[str, ...]] = {
    None: (),
    "ppo": (
        *("--algorithm", "ppo", "--learning-rate", "2e-5", "--steps", "16", "--mini-batches", "4", "--epochs", "4"),
        *("--critic-learning-rate", "1e-3", "--critic-gae-lambda", "1", "--critic-clip", "10"),
    ),
}
TALLY_RATE, EXACT_RATE = "1e-4", "4e-5"  # of full training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--full", action="store_true", help="train every weight")
    parser.add_argument("--sampler", choices=["own", "vllm"], default="own", help="the program that samples")
    parser.add_argument("--algorithm", help="instead of the run's own loss and advantages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Stack.started(Path(folder) / "stack") as stack:
        own = ["--sampler", options.sampler, *_OWN.get(options.algorithm, ("--algorithm", options.algorithm))]
        runs = _measure(stack, Path(folder), options.seeds, options.full, own)
    what = "share of exact answers to held-out sums"
    trained = "full" if options.full else "lora"
    of_what = {"trained": trained, "sampler": options.sampler, "algorithm": options.algorithm}
    print(json.dumps({"what": what, **of_what, "runs": runs, **provenance()}, indent=1))


def _measure(stack: "Stack", folder: Path, seeds: list[int], full: bool, own: Sequence[str]) -> list[dict[str, Any]]:
    data = folder / "data"
    arithmetic.write_datasets(data)
    model = make_tiny_model(folder / "model", arithmetic.tokenizer_texts(data), **arithmetic.MODEL)
    sft = ["submit", "sft", "--wait", "--json", "--model"]
    sums = stack.run(*sft, model.as_uri(), *arithmetic.dataset_options(data, "sums"), *arithmetic.SUMS_RUN)
    tally_run, exact_run = arithmetic.TALLY_RUN, arithmetic.EXACT_RUN
    if full:
        tally_run, exact_run = _full(tally_run, TALLY_RATE), _full(exact_run, EXACT_RATE)
    tally = stack.run(*sft, sums["adapter"], *arithmetic.dataset_options(data, "tally"), *tally_run)
    start = ["--model", sums["adapter"], "--initial-adapter", tally["adapter"]]
    if full:
        start = ["--model", tally["adapter"]]
    return [
        stack.learn(*start, *arithmetic.rollout_options(data), *exact_run, *own, seed=seed, shuffled=shuffled)
        for seed in seeds
        for shuffled in (False, True)
    ]


def _full(options: list[str], rate: str) -> list[str]:
    """The same run with every weight trained, at another rate."""
    without = dict(zip(options[::2], options[1::2], strict=True))
    lora = ("--lora-rank", "--lora-alpha")
    kept = [part for name, value in without.items() if name not in lora for part in (name, value)]
    kept[kept.index("--learning-rate") + 1] = rate
    return [*kept, "--full"]


class Stack:
    """A stack of this benchmark's own, reached by the command line."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    @contextmanager
    def started(cls, root: Path) -> Iterator[Self]:
        """Start the stack, and stop it when the block ends."""
        with stack(root):
            yield cls(root)

    def cli(self, *arguments: str) -> str:
        environment = {**os.environ, "LONGSHORE_ROOT": str(self.root)}
        return subprocess.run(
            [LONGSHORE, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def run(self, *arguments: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.cli(*arguments))
        return answer

    def learn(self, *options: str, seed: int, shuffled: bool) -> dict[str, Any]:
        """One RL run, and the share of exact answers wherever it was evaluated."""
        began = time.monotonic()
        control = ["--shuffle-rewards"] if shuffled else []
        run = self.run("submit", "rl", "--wait", "--json", *options, *control, "--seed", str(seed))
        seconds = time.monotonic() - began
        steps = self.root / "store" / "runs" / run["run_id"] / "steps"
        metrics = [json.loads(path.read_text())["metrics"] for path in sorted(steps.iterdir())]
        exact = [round(each["eval_reward_mean"], 3) for each in metrics if "eval_reward_mean" in each]
        proofs = [each["probe_difference_max"] for each in metrics if "probe_difference_max" in each]
        found = {"seed": seed, "shuffled": shuffled, "exact": exact, "probe": max(proofs), "seconds": round(seconds, 1)}
        explained = [round(each["explained_variance"], 3) for each in metrics if "explained_variance" in each]
        return found | ({"explained_variance": explained} if explained else {})


if __name__ == "__main__":
    main()
