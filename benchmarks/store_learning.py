"""Whether a policy learns in an environment of twenty turns with a tool, beside shuffled rewards.

    python -m benchmarks.store_learning [--seeds 0] [--steps 20] [--credit episode]

Starts `longshore dev` in a temporary folder and trains a clerk who keeps a store and mostly answers roughly
(examples/store.py). Then each seed has two RL runs of 64 episodes a step from that clerk: a normal one, and one whose
rewards are shuffled within their groups, which must not learn. By default each answer is credited with what was earned
from it on, with `--credit episode` with the whole episode. Prints JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance, tell
from benchmarks.rl_learning import Stack
from examples import store
from examples.tiny_model import make_tiny_model

_CREDIT = {"episode": [], "turn": ["--algorithm", "reinforce", "--credit", "turn"]}
_SHOWN = ("episode_turns_mean", "episode_kept_share", "sampling_seconds", "training_seconds", "packing_factor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--credit", choices=sorted(_CREDIT), default="turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Stack.started(Path(folder) / "stack") as stack:
        clerk = _clerk(stack, Path(folder))
        runs = [
            _learn(stack, *clerk, *_CREDIT[options.credit], "--steps", str(options.steps), seed=seed, shuffled=shuffled)
            for seed in options.seeds
            for shuffled in (False, True)
        ]
    what = f"mean reward of 64 episodes of up to {2 * store.TASKS} turns, by step"
    tell({"what": what, "credit": options.credit, "runs": runs, **provenance()}, options.out)


def _clerk(stack: Stack, folder: Path) -> list[str]:
    """Train the clerk. Returns the options of a run that begins with it."""
    store.write_datasets(folder / "data")
    model = make_tiny_model(folder / "model", store.tokenizer_texts(folder / "data"), **store.MODEL)
    told = ["--dataset", f"{folder}/data/kept_train.jsonl"]
    kept = stack.run("submit", "sft", "--wait", "--json", "--model", model.as_uri(), *told, *store.KEPT_RUN)
    return ["--model", kept["adapter"], "--prompts", f"{folder}/data/asked.jsonl", *store.STORE_RUN]


def _learn(stack: Stack, *options: str, seed: int, shuffled: bool) -> dict[str, Any]:
    began = time.monotonic()
    control = ["--shuffle-rewards"] if shuffled else []
    run = stack.run("submit", "rl", "--wait", "--json", *options, *control, "--seed", str(seed))
    steps = stack.root / "store" / "runs" / run["run_id"] / "steps"
    metrics = [json.loads(path.read_text())["metrics"] for path in sorted(steps.iterdir())]
    ends = sorted({name for each in metrics for name in each if name.startswith("episode_end_")})
    return {
        "seed": seed,
        "shuffled": shuffled,
        "rewards": [round(each["reward_mean"], 3) for each in metrics if "reward_mean" in each],
        "last": {name: round(metrics[-1][name], 3) for name in (*_SHOWN, *ends) if name in metrics[-1]},
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    main()
