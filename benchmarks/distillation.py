"""Whether a student becomes like its teacher: exact sums of held-out pairs, off-policy and on-policy.

    python -m benchmarks.distillation [--ways off_policy gkd distill] [--steps 60] [--seed 0] [--out FILE.json]

Starts `longshore dev` in a temporary folder and trains the demonstration's model for sums, and an adapter that makes it
round most sums (examples/arithmetic.py). The model without the adapter is the teacher. Each student begins with the
adapter, and learns from the teacher; grades train nothing.

off_policy: the rows of the sums' own dataset, forward KL over whole distributions, in `steps` steps of 32.
gkd: the student's samples, Jensen-Shannon divergence over whole distributions. distill: its samples, with the policy
gradient of the reverse KL at the sampled tokens. Each of `steps` / 5 train steps draws 8 answers to each of 32 prompts.

The evaluation samples greedily on held-out prompts; its grader accepts only exact sums. Prints JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance, tell
from benchmarks.rl_learning import Stack
from examples import arithmetic
from examples.tiny_model import make_tiny_model

WAYS = ("off_policy", "gkd", "distill")
ENOUGH = 0.95  # of the teacher's share of exact answers
_LORA = ["--lora-rank", "16", "--lora-alpha", "32"]
_OFF_POLICY = [
    *(*_LORA, "--batch-size", "32", "--learning-rate", "1e-3", "--warmup", "5", "--max-tokens", "64"),
    *("--bin-tokens", "2048"),
]
_ON_POLICY = [
    *(*_LORA, "--prompts-per-step", "32", "--group-size", "8", "--mini-batches", "8", "--max-completion-tokens", "8"),
    *("--max-tokens", "64", "--bin-tokens", "2048", "--warmup", "8", "--eval-every", "4"),
]
_RATES = {"gkd": "1e-3", "distill": "3e-4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the student, off-policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Stack.started(Path(folder) / "stack") as stack:
        found = _measure(stack, Path(folder), options.ways, options.steps, str(options.seed))
    result = {"what": "share of exact answers to held-out sums", **found, **provenance()}
    tell(result, options.out)


def _measure(stack: Stack, folder: Path, ways: list[str], steps: int, seed: str) -> dict[str, Any]:
    data = folder / "data"
    arithmetic.write_datasets(data)
    model = make_tiny_model(folder / "model", arithmetic.tokenizer_texts(data), **arithmetic.MODEL)
    sft = ["submit", "sft", "--wait", "--json", "--model"]
    sums = stack.run(*sft, model.as_uri(), *arithmetic.dataset_options(data, "sums"), *arithmetic.SUMS_RUN)
    tally = stack.run(*sft, sums["adapter"], *arithmetic.dataset_options(data, "tally"), *arithmetic.TALLY_RUN)
    student = ["--model", sums["adapter"], "--initial-adapter", tally["adapter"], "--seed", seed]
    prompts = arithmetic.rollout_options(data)

    def exact(*of: str) -> list[float]:
        """Return the shares of exact answers before a run on its own rollouts, on its way and after it."""
        run = stack.run("submit", "rl", "--wait", "--json", *of, *prompts)
        kept = stack.root / "store" / "runs" / run["run_id"] / "steps"
        metrics = [json.loads(path.read_text())["metrics"] for path in sorted(kept.iterdir())]
        return [each["eval_reward_mean"] for each in metrics if "eval_reward_mean" in each]

    one = ["--algorithm", "grpo", "--steps", "1", "--prompts-per-step", "1", "--max-completion-tokens", "8"]
    teacher = exact("--model", sums["adapter"], *_LORA, *one)[0]
    found: dict[str, Any] = {}
    for way in ways:
        began = time.monotonic()
        if way == "off_policy":
            rows = arithmetic.dataset_options(data, "sums")
            distill = ["submit", "distill", "--wait", "--json", "--teacher", "base", "--steps", str(steps)]
            run = stack.run(*distill, *student, *_OFF_POLICY, *rows)
            after = exact("--model", sums["adapter"], "--initial-adapter", run["adapter"], *_LORA, *one)[0]
            shares = [exact(*student, *_LORA, *one)[0], after]
        else:
            rate = ["--algorithm", way, "--learning-rate", _RATES[way], "--steps", str(max(1, steps // 5))]
            shares = exact(*student, *_ON_POLICY, *rate)
        reached = {"of_teacher": round(shares[-1] / teacher, 3), "enough": shares[-1] >= ENOUGH * teacher}
        found[way] = {"exact": [round(x, 3) for x in shares], **reached, "seconds": round(time.monotonic() - began, 1)}
    return {"teacher": round(teacher, 3), "students": found}


if __name__ == "__main__":
    main()
