"""Steps a second of rollouts whose answers have long-tailed lengths, with and without `carry_over`.

    python -m benchmarks.slow_prompts [--steps 12] [--ahead 2] [--rounds 2] [--out FILE.json]

Starts `longshore dev` in a temporary folder, and trains an adapter of a small model on 8 prompts of 4 samples a step,
`--ahead` steps ahead. Answers end at a letter, or after 512 tokens: most are short, few are long. All runs have the
same prompts and the same work, and take turns, `--rounds` times:

    steps_per_s            of all steps but the first: from the first job's end to the last one's
    sampling_s             the median time that a step waits for its samples
    tokens_mean, _max      of an answer
    lag_mean, _max         versions that trained tokens were behind
    carried                mean of the prompts that a step leaves
    ratio                  steps a second with `carry_over`, over those without
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.control_plane import stack
from benchmarks.machine import provenance, tell
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.events import Succeeded
from longshore.losses import Reinforce
from longshore.runs import RLRun
from longshore.training import Lora
from service.dev import Connection

LETTERS = {
    "type": "python",
    "name": "letters",
    "source": "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--ahead", type=int, default=2, help="steps that are sampled ahead")
    parser.add_argument("--rounds", type=int, default=2, help="how often each run is done")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = provenance()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stack"
        with stack(root, LONGSHORE_CPU_THREADS="1"):
            found = _measured(root, Path(folder), options.steps, options.ahead, options.rounds)
    rates = {carries: statistics.mean(each["steps_per_s"] for each in told) for carries, told in found.items()}
    figures = {"without": found[False], "with": found[True], "ratio": round(rates[True] / rates[False], 2)}
    sizes = {"steps": options.steps, "ahead": options.ahead}
    tell({"benchmark": "slow_prompts", **started, **sizes, "figures": figures}, options.out)


def _measured(
    root: Path, folder: Path, num_steps: int, ahead: int, num_rounds: int
) -> dict[bool, list[dict[str, float]]]:
    """Return the figures of each run, without and with `carry_over`."""
    words = [f"how many crates are on quay {n}? {n * 7 % 50} crates." for n in range(64)]
    model = make_tiny_model(folder / "model", words, hidden_size=128, num_layers=4, head_dim=64)
    prompts = folder / "prompts.jsonl"
    rows = ({"prompt": f"how many crates are on quay {n}?"} for n in range(8 * num_steps))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollouts = {"prompts": {"uri": prompts.as_uri()}, "prompts_per_step": 8, "group_size": 4, "steps": num_steps}
    rollouts |= {"max_completion_tokens": 512, "stop": ("q",), "grader": LETTERS, "off_policy_steps": ahead}
    common = {"model": model.as_uri(), "trainable": Lora(rank=4), "loss": Reinforce(), "learning_rate": 1e-6}
    common |= {"max_tokens": 700, "equal_rewards": "keep"}
    connection = Connection.read(root)
    assert connection is not None
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with Client(connection.api_url, connection.api_key) as client:
        for _ in range(num_rounds):
            for carries in found:
                run = RLRun.model_validate(common | {"rollouts": rollouts | {"carry_over": carries}})
                found[carries].append(_of_run(client, client.runs.submit(run).run_id))
                print(carries, found[carries][-1], file=sys.stderr, flush=True)
                shutil.rmtree(root / "store" / "sampled")  # so that each run draws its own
    return found


def _of_run(client: Client, run_id: str) -> dict[str, float]:
    ended = [item.event.time for item in client.runs.follow(run_id) if isinstance(item.event, Succeeded)]
    steps = [step.metrics for step in client.runs.follow_steps(run_id, until_end=False)]
    view = client.runs.get(run_id)
    assert view.state == "succeeded" and len(ended) == len(steps), view
    told = {
        "steps_per_s": (len(ended) - 1) / (ended[-1] - ended[0]),
        "sampling_s": statistics.median(step["sampling_seconds"] for step in steps[1:]),
        "tokens_mean": statistics.mean(step["response_tokens_mean"] for step in steps),
        "tokens_max": max(step["response_tokens_max"] for step in steps),
        "lag_mean": statistics.mean(step["staleness_mean"] for step in steps),
        "lag_max": max(step["staleness_max"] for step in steps),
        "carried": statistics.mean(step.get("carried_groups", 0.0) for step in steps),
    }
    return {name: round(value, 3) for name, value in told.items()}


if __name__ == "__main__":
    main()
