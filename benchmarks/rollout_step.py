"""What a warm step of a run's own rollouts costs, with weight sync and without, on-policy and sampled one step ahead.

    python -m benchmarks.rollout_step [--steps 8] [--megabytes 40] [--out FILE.json]

Starts `longshore dev` in a temporary folder and trains all weights of a model of so many megabytes, once for each case,
one after another on one machine. `step_s`: from one train step's end to the next one's. `trainer_waits`: the share of
that time in which the trainer is not at a job, or waits in one until samplers have read its weights. `publishing_s`:
from the job's end until the step is published and its weights are proven. `num_published`, `store_mb`: versions, and
what all of them take of the store. Medians over the steps of a run but the first two, which warm trainer and sampler.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks.control_plane import LONGSHORE
from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from service.cli.client import Client
from service.dev.connection import Connection
from shared.grading.graders import PythonGrader
from shared.jobs.events import Event, Started, Step, Succeeded, Synced
from shared.jobs.job import PPO, Full
from shared.jobs.weight_sync import WeightSync
from shared.runs.requests import RLRun
from shared.runs.rollouts import Rollouts
from shared.runs.sources import PromptsSource
from shared.runs.status import StepStatus

WARMING, HIDDEN = 2, 256
LETTERS = "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n"
CASES: dict[str, tuple[int, WeightSync, int]] = {
    "store, on-policy": (0, WeightSync(backend="store"), 1),
    "sync, on-policy": (0, WeightSync(), 1),
    "sync, on-policy, published at the end": (0, WeightSync(), 1_000_000),
    "store, one step ahead": (1, WeightSync(backend="store"), 1),
    "sync, one step ahead": (1, WeightSync(), 1),
    "sync, one step ahead, samples go on": (1, WeightSync(in_flight="continue"), 1_000_000),
}
"""By name: steps sampled ahead, how weights travel, and how many versions lie between two that are published."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--megabytes", type=int, default=40, help="of weights")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stack"
        environment = {**os.environ, "LONGSHORE_ROOT": str(root), "LONGSHORE_CPU_THREADS": "1"}
        subprocess.run([LONGSHORE, "dev", "--detach", "--open", "/", "--root", str(root)], env=environment, check=True)
        try:
            figures = _measure(root, Path(folder), options.steps, options.megabytes)
        finally:
            subprocess.run([LONGSHORE, "dev", "--stop", "--root", str(root)], env=environment, check=True)
    result = {"benchmark": "rollout_step", "steps": options.steps, "figures": figures, **provenance()}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _measure(root: Path, folder: Path, num_steps: int, megabytes: int) -> dict[str, dict[str, float]]:
    words = [f"how many crates are on quay {n}? {n * 7 % 50} crates." for n in range(64)]
    layers = max(1, round(megabytes * 1e6 / 4 / (12 * HIDDEN * HIDDEN)))
    model = make_tiny_model(folder / "model", words, hidden_size=HIDDEN, num_layers=layers, head_dim=64)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"how many crates are on quay {n}?"}) + "\n" for n in range(64)))
    connection = Connection.read(root)
    assert connection is not None
    found = {}
    with Client(connection.api_url, connection.api_key) as client:
        for name, (ahead, sync, publish_every) in CASES.items():
            run = _run(model, prompts, num_steps, ahead, sync, publish_every)
            run_id = client.submit(run, name).run_id
            events = [item.event for item in client.events_to_the_end(run_id, None, follow=True)]
            steps = list(client.steps(run_id))
            assert [step.state for step in steps] == ["done"] * num_steps, steps
            found[name] = _figures(events, steps) | _published(root, run_id)
            shutil.rmtree(root / "store" / "sampled")  # so that each run draws its own
    return found


def _run(model: Path, prompts: Path, num_steps: int, ahead: int, sync: WeightSync, publish_every: int) -> RLRun:
    return RLRun(
        model=model.as_uri(),
        trainable=Full(),
        loss=PPO(),
        equal_rewards="keep",
        learning_rate=1e-5,
        max_tokens=128,
        bin_tokens=1024,
        publish_every=publish_every,
        rollouts=Rollouts(
            prompts=PromptsSource(uri=prompts.as_uri()),
            grader=PythonGrader(name="letters", source=LETTERS),
            prompts_per_step=8,
            group_size=4,
            max_completion_tokens=64,
            steps=num_steps,
            off_policy_steps=ahead,
            weight_sync=sync,
        ),
    )


def _figures(events: list[Event], steps: list[StepStatus]) -> dict[str, float]:
    """What a run's steps took, but for the first ones."""
    ends = [event.time for event in events if isinstance(event, Step)][WARMING - 1 :]
    whole = ends[-1] - ends[0]
    busy = 0.0
    began = blocked = 0.0
    for event in events:
        match event:
            case Started():
                began, blocked = event.time, 0.0
            case Synced():
                blocked = event.outcome.blocked_s
            case Succeeded() if ends[0] <= event.time <= ends[-1] + 60:
                busy += max(0.0, min(event.time, ends[-1]) - max(began, ends[0])) - blocked
    warm = [step.metrics for step in steps[WARMING:]]
    medians = {
        name: round(statistics.median(metrics[f"{name}_seconds"] for metrics in warm), 3)
        for name in ("sampling", "training", "publishing")
    }
    return {
        "step_s": round(statistics.median(b - a for a, b in pairwise(ends)), 3),
        "trainer_waits": round(1 - busy / whole, 3),
        **{f"{name}_s": seconds for name, seconds in medians.items()},
        "sync_used": statistics.mean(metrics.get("sync_used", 0.0) for metrics in warm),
        "stale_token_share": round(statistics.mean(metrics.get("stale_token_share", 0.0) for metrics in warm), 3),
    }


def _published(root: Path, run_id: str) -> dict[str, float]:
    files = list((root / "store").glob(f"**/models/{run_id}/v*/*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    return {"num_published": len({path.parent for path in files}), "store_mb": round(num_bytes / 1e6)}


if __name__ == "__main__":
    main()
