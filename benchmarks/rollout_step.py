"""Cost of a warm RL step with rollouts, with weight sync and without, on-policy and sampled one step ahead.

    python -m benchmarks.rollout_step [--steps 7] [--megabytes 16] [--only WORDS] [--out FILE.json]

Starts `longshore dev` in a temporary folder and trains a model of `--megabytes`, every weight or an adapter of rank 16,
once for each case, one after another on one machine. A step has 8 prompts of 4 samples, and 3 passes over them. All
figures are of whole cycles of the trainer, from one job's end to the next one's, without the first two:

    step_s             a cycle
    idle_s             of it, until the next job begins
    job_s              the job: its groups read, passes, updates, the checkpoint written
    sync_blocked_s     of the job, until samplers have read the weights
    passes_s           of the job, passes and updates
    trainer_waits      the share of all cycles that is idle or blocked
    trainer_computes   the share that is passes and updates

and the workflow's own: `sampling_s`, `training_s` and `publishing_s`, until the step is published and its weights are
verified. Seconds are medians. `num_published`, `store_mb`: versions, and the size of all of them in the store.

With `own worker` the critic is updated on a second worker, of a second GPU host on this machine, and `training_s` is
until both have ended. `adapter_sha256`: of the trained weights' file.

Colocated, trainer and sampler take turns on one device: `device_peak_mb` is the peak of both together,
`larger_alone_mb` the larger peak of the two alone.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.control_plane import stack
from benchmarks.machine import provenance, tell
from benchmarks.one_device import Device
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.dataset_runs import PromptsSource
from longshore.events import Event, Started, Step, Succeeded, Synced
from longshore.grading import PythonGrader
from longshore.losses import PPO, Critic, Kl
from longshore.runs import RLRun, Rollouts
from longshore.training import Full, Lora, Trainable, WeightSync
from longshore.views import StepStatus
from service.dev import Connection
from shared.child_environment import STACK_MARK, child_environment
from shared.storage.artifacts import sha256_file

WARMING, HIDDEN = 2, 256
LETTERS = "def grade(sample, item):\n    return sample['output_text'].count('e') / 8\n"
FULL, ADAPTER = Full(), Lora(rank=16)
STORE, SYNC = WeightSync(backend="store"), WeightSync()


@dataclass(frozen=True)
class Case:
    """`ahead`: steps that are sampled ahead. `publish_every`: how many versions lie between two that are published.

    `has_critic`: PPO with a critic, kept near the base: policy, reference and critic on the trainer's device.
    """

    trainable: Trainable
    sync: WeightSync
    ahead: int = 0
    publish_every: int = 1
    is_colocated: bool = False
    has_critic: bool = False
    own_worker: bool = False


CASES = {
    "full, store": Case(FULL, STORE),
    "full, sync": Case(FULL, SYNC),
    "full, sync, published at the end": Case(FULL, SYNC, publish_every=1_000_000),
    "adapter, store": Case(ADAPTER, STORE),
    "adapter, sync": Case(ADAPTER, SYNC),
    "adapter, sync, colocated": Case(ADAPTER, SYNC, is_colocated=True),
    "full, store, one step ahead": Case(FULL, STORE, 1),
    "full, sync, one step ahead": Case(FULL, SYNC, 1),
    "full, sync, one step ahead, samples go on": Case(FULL, WeightSync(in_flight="continue"), 1, 1_000_000),
    "adapter, store, one step ahead": Case(ADAPTER, STORE, 1),
    "adapter, sync, one step ahead": Case(ADAPTER, SYNC, 1),
    "adapter and critic, sync": Case(ADAPTER, SYNC, has_critic=True),
    "adapter and critic, sync, own worker": Case(ADAPTER, SYNC, has_critic=True, own_worker=True),
    "adapter and critic, sync, one step ahead": Case(ADAPTER, SYNC, 1, has_critic=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="of each run")
    parser.add_argument("--megabytes", type=int, default=16, help="of weights")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = provenance()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stack"
        with stack(root, LONGSHORE_CPU_THREADS="1") as connection, _second_host(root, connection):
            figures = _measure(root, Path(folder), options.steps, options.megabytes, options.only)
    sizes = {"steps": options.steps, "megabytes": options.megabytes}
    result = {"benchmark": "rollout_step", **started, **sizes, "figures": figures}
    tell(result, options.out)


@contextmanager
def _second_host(root: Path, connection: Connection) -> Iterator[None]:
    """Have another GPU host of the stack, for the block."""
    own = {"LONGSHORE_TEMPORAL_ADDRESS": connection.temporal_address, STACK_MARK: str(root)}
    own |= {"LONGSHORE_ROOT": str(root), "LONGSHORE_CPU_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "service.host", "--role", "gpu"]
    with (root / "logs" / "second.log").open("ab") as log:
        environment = child_environment("gpu", {**os.environ, **own})
        host = subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=log)
    try:
        yield
    finally:
        host.terminate()
        host.wait()


def _measure(root: Path, folder: Path, num_steps: int, megabytes: int, only: str) -> dict[str, dict[str, float | str]]:
    words = [f"how many crates are on quay {n}? {n * 7 % 50} crates." for n in range(64)]
    layers = max(1, round(megabytes * 1e6 / 4 / (12 * HIDDEN * HIDDEN)))
    model = make_tiny_model(folder / "model", words, hidden_size=HIDDEN, num_layers=layers, head_dim=64)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"how many crates are on quay {n}?"}) + "\n" for n in range(64)))
    connection = Connection.read(root)
    assert connection is not None
    found: dict[str, dict[str, float | str]] = {}
    with Client(connection.api_url, connection.api_key) as client:
        for name, case in ((name, case) for name, case in CASES.items() if name.startswith(only)):
            run_id = client.runs.submit(_run(model, prompts, num_steps, case), name).run_id
            with Device(root) as device:
                events = [item.event for item in client.runs.follow(run_id)]
            steps = list(client.runs.follow_steps(run_id, until_end=False))
            assert [step.state for step in steps] == ["done"] * num_steps, steps
            found[name] = {**_figures(events, steps), **_published(root, run_id)}
            if case.has_critic:
                adapter = str(client.runs.get(run_id).adapter).removeprefix("file://")
                found[name]["adapter_sha256"] = sha256_file(Path(adapter) / "adapter_model.safetensors")
            if case.is_colocated:
                found[name] |= device.figures(events)
            print(name, found[name], file=sys.stderr, flush=True)
            shutil.rmtree(root / "store" / "sampled")  # so that each run draws its own
    return found


def _run(model: Path, prompts: Path, num_steps: int, case: Case) -> RLRun:
    return RLRun(
        model=model.as_uri(),
        trainable=case.trainable,
        loss=PPO(kl=Kl(coefficient=0.01) if case.has_critic else None),
        **({"critic": Critic(own_worker=case.own_worker)} if case.has_critic else {"equal_rewards": "keep"}),
        learning_rate=1e-5 if isinstance(case.trainable, Full) else 1e-3,
        epochs=3,
        max_tokens=128,
        bin_tokens=1024,
        publish_every=case.publish_every,
        rollouts=Rollouts(
            prompts=PromptsSource(uri=prompts.as_uri()),
            grader=PythonGrader(name="letters", source=LETTERS),
            prompts_per_step=8,
            group_size=4,
            max_completion_tokens=64,
            steps=num_steps,
            off_policy_steps=case.ahead,
            weight_sync=case.sync,
            colocate=case.is_colocated,
        ),
    )


@dataclass
class Job:
    """Begin and end of a trainer's job, in seconds since 1970, and its seconds of passes and waiting."""

    began: float
    ended: float = 0.0
    passes_s: float = 0.0
    blocked_s: float = 0.0


def _jobs(events: list[Event]) -> list[Job]:
    """Return a job a step, in their order. Nothing disturbs these runs, so that each is done once."""
    jobs = list[Job]()
    for event in events:
        match event:
            case Started():
                jobs.append(Job(event.time))
            case Step():
                jobs[-1].passes_s += event.metrics["step_s"]
            case Synced():
                jobs[-1].blocked_s = event.outcome.blocked_s
            case Succeeded():
                jobs[-1].ended = event.time
    return jobs


def _figures(events: list[Event], steps: list[StepStatus]) -> dict[str, float]:
    """What a run's steps took, without the first ones."""
    jobs = _jobs(events)
    assert len(jobs) == len(steps)
    cycles = list(pairwise(jobs[WARMING - 1 :]))
    whole = {
        "step_s": [job.ended - before.ended for before, job in cycles],
        "idle_s": [job.began - before.ended for before, job in cycles],
        "job_s": [job.ended - job.began for _, job in cycles],
        "sync_blocked_s": [job.blocked_s for _, job in cycles],
        "passes_s": [job.passes_s for _, job in cycles],
    }
    total = {name: sum(seconds) for name, seconds in whole.items()}
    warm = [step.metrics for step in steps[WARMING:]]
    of_workflow = {
        f"{name}_s": [metrics[f"{name}_seconds"] for metrics in warm] for name in ("sampling", "training", "publishing")
    }
    return {
        **{name: round(statistics.median(seconds), 3) for name, seconds in (whole | of_workflow).items()},
        "trainer_waits": round((total["idle_s"] + total["sync_blocked_s"]) / total["step_s"], 3),
        "trainer_computes": round(total["passes_s"] / total["step_s"], 3),
        "sync_used": statistics.mean(metrics.get("sync_used", 0.0) for metrics in warm),
        "stale_token_share": round(statistics.mean(metrics.get("stale_token_share", 0.0) for metrics in warm), 3),
    }


def _published(root: Path, run_id: str) -> dict[str, float]:
    kinds = ("adapters", "models")
    files = [path for kind in kinds for path in (root / "store").glob(f"**/{kind}/{run_id}/v*/*.safetensors")]
    num_bytes = sum(path.stat().st_size for path in files)
    return {"num_published": len({path.parent for path in files}), "store_mb": round(num_bytes / 1e6)}


if __name__ == "__main__":
    main()
