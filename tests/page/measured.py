"""What trained runs leave in the store, written there for stand-ins: events, reports, job files, groups."""

import json
import math
import random
from pathlib import Path
from typing import Any

from longshore.events import Evaluated, EvaluationSample, Saved, Started, Step, Succeeded
from longshore.fields import Artifact, Fence
from longshore.losses import CrossEntropy
from longshore.training import Adam, Lora
from longshore.views import CheckpointRef, PhaseSpan, PlanHeader, RunStatus, StepStatus
from shared.chat.trajectories import Trajectory, TrajectoryGroup
from shared.jobs.job import Job, JobPlan, PackedData, Schedule
from shared.storage import artifacts
from shared.storage.paths import RunKeys, grouped
from shared.storage.store import ObjectStore, uri_of

XSS = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
"""Shown as the text that it is, or else noticed by the browser."""
BEGAN = 1_790_000_000.0
NUM_STEPS = 240


def sft_course(store: ObjectStore, run_id: str, num_steps: int = NUM_STEPS) -> None:
    """A run whose first worker was lost two thirds into it; checkpoints, samples, and what its data became."""
    chance = random.Random(7)
    keys, lost = RunKeys(run_id), num_steps * 2 // 3
    first, second = Fence(epoch=1), Fence(epoch=2)
    plan = _plan(store, run_id, num_steps)
    for fence, begin, end in ((first, 0, lost), (second, lost - 20, num_steps)):
        events = [_started(run_id, fence, begin, num_steps, BEGAN + begin)]
        for step in range(begin, end + 1):
            if step > begin:
                metrics = _sft_metrics(step, num_steps, chance)
                events.append(Step(seq=len(events) + 1, time=BEGAN + step, step=step, metrics=metrics))
            if step % (num_steps // 6) == 0:
                seq, loss = len(events) + 1, 0.35 + 2.1 * math.exp(-3.2 * step / num_steps)
                events.append(
                    Evaluated(
                        seq=seq,
                        time=BEGAN + step,
                        step=step,
                        metrics={"loss": loss, "perplexity": math.exp(loss)},
                        samples=_samples(step),
                    )
                )
        if fence == second:
            events.append(Saved(seq=len(events) + 1, time=BEGAN + end, step=end, path="/x", manifest_sha256="0" * 64))
            events.append(Succeeded(seq=len(events) + 1, time=BEGAN + end, step=end, device="released"))
        lines = "".join(f"{event.model_dump_json()}\n" for event in events)
        store.put_bytes(keys.log(plan.job_id, fence), lines.encode())
        job = Job(plan=plan, fence=fence, log_path="/w/log", checkpoint_dir="/w/c", scratch_dir="/w/s")
        store.put_bytes(keys.job(plan.job_id, fence), job.model_dump_json(indent=1).encode())
    store.put_bytes(keys.output(plan.job_id, first), b"SIGKILL: the worker is gone\n")


def finish(store: ObjectStore, run_id: str, folder: Path, num_steps: int = NUM_STEPS) -> None:
    """Let a stand-in that ended have ended as the course says, with checkpoints and a published adapter."""
    keys = RunKeys(run_id)
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 300)
    (folder / "README.md").write_text("a card")
    artifacts.seal(folder)
    places = [(Fence(epoch=1), num_steps // 3), (Fence(epoch=2), num_steps)]
    saved = [artifacts.upload_artifact(store, keys.checkpoint(fence, step), folder) for fence, step in places]
    adapter = artifacts.upload_artifact(store, f"tenants/default/adapters/{run_id}/v000003", folder)
    phases = (("queued", 9, 0), ("checking", 2, 0), ("downloading", 5, 0), ("tokenizing", 14, 0), ("packing", 6, 0))
    later = (("waiting_for_worker", 21, 0), ("training", 160, 1), ("waiting_for_worker", 12, 1), ("training", 110, 2))
    timeline = spans(*phases, *later, ("publishing", 4, 2), at=BEGAN - 60)
    ended_as(
        store,
        run_id,
        step=num_steps,
        num_steps=num_steps,
        metrics={"loss": 0.42, "tokens_per_s": 5120.0},
        epoch=2,
        workers_lost=1,
        checkpoint=CheckpointRef(step=num_steps, fence=Fence(epoch=2), artifact=saved[-1]),
        adapter=adapter.uri,
        adapter_sha256=adapter.sha256,
        version=3,
        dataset_report=uri_of(store, f"{keys.prefix}/dataset/report.json"),
        started_at=BEGAN - 60,
        ended_at=timeline[-1].ended,
        timeline=timeline,
        gpu_seconds=282.0,
    )


def ended_as(store: ObjectStore, run_id: str, **changes: object) -> None:
    """Change how a stand-in ended. The index must be built again to say so too."""
    key = RunKeys(run_id).result
    status = RunStatus.model_validate_json(store.get_bytes(key)).model_copy(update=changes)
    store.put_bytes(key, status.model_dump_json().encode())


def spans(*told: tuple[str, float, int], at: float = BEGAN) -> tuple[PhaseSpan, ...]:
    """Phases of so many seconds, each with its lease, one after another."""
    found = []
    for phase, seconds, lease in told:
        found.append(PhaseSpan(phase=phase, began=at, ended=at + seconds, lease=lease))
        at += seconds
    return tuple(found)


PAUSED = (("waiting_for_worker", 0, 0), ("waiting_for_worker", 9, 1), ("training", 30, 1), ("waiting_for_worker", 0, 1))
PREPARED = tuple((phase, 2, 0) for phase in ("checking", *("downloading", "tokenizing", "packing") * 2))
RESUMED = (
    ("waiting_for_worker", 0, 0),
    ("waiting_for_worker", 4, 2),
    ("training", 20, 2),
    ("waiting_for_worker", 0, 2),
)
"""As the workflow notes them: a user paused the run and resumed it, and no worker was lost."""


def rl_course(
    store: ObjectStore, run_id: str, model: Artifact, prompt: list[int], answer: list[int], num_steps: int = 30
) -> None:
    """Train steps on record, with groups of token ids of a real tokenizer, and optimizer steps of one worker."""
    chance, keys, fence = random.Random(3), RunKeys(run_id), Fence(epoch=1)
    plan = _plan(store, run_id, num_steps).model_copy(update={"model": model})
    job = Job(plan=plan, fence=fence, log_path="/w/log", checkpoint_dir="/w/c", scratch_dir="/w/s")
    store.put_bytes(keys.job(plan.job_id, fence), job.model_dump_json(indent=1).encode())
    events = [_started(run_id, fence, 0, num_steps, BEGAN)]
    for step in range(1, num_steps + 1):
        events.append(
            Step(seq=step + 1, time=BEGAN + step, step=step, metrics=_policy_metrics(step, num_steps, chance))
        )
        reward = 0.9 - 0.8 * math.exp(-step / 11) + chance.gauss(0, 0.03)
        key = grouped(f"{step:032x}")
        store.put_bytes(f"{key}/groups.jsonl", _groups(prompt, answer, chance))
        metrics = {
            "reward_mean": reward,
            "reward_std": 0.3 - 0.006 * step,
            "reward_spread_mean": 0.26 - 0.005 * step,
            "zero_variance_share": min(0.6, 0.015 * step),
            "response_tokens_mean": 40 + 2.0 * step + chance.gauss(0, 3),
            "response_tokens_max": 90.0 + step,
            "truncation_rate": max(0.0, 0.2 - 0.006 * step),
            "sampling_seconds": 3 + chance.random(),
            "grading_seconds": 0.8 + 0.3 * chance.random(),
            "training_seconds": 2 + 0.5 * chance.random(),
            "publishing_seconds": 0.6,
        }
        if step % 5 == 0:
            metrics |= {"eval_reward_mean": reward - 0.05, "evaluating_seconds": 1.5}
        status = StepStatus(
            step=step,
            key=f"step-{step}",
            groups=f"{uri_of(store, key)}/groups.jsonl",
            state="done",
            policy_version=step,
            optimizer_step=step,
            metrics=metrics,
        )
        store.put_bytes(keys.step(step), status.model_dump_json().encode())
    store.put_bytes(keys.log(plan.job_id, fence), "".join(f"{e.model_dump_json()}\n" for e in events).encode())


def _groups(prompt: list[int], answer: list[int], chance: random.Random) -> bytes:
    return b"".join(_group(prompt, answer, chance).model_dump_json().encode() + b"\n" for _ in range(8))


def _group(prompt: list[int], answer: list[int], chance: random.Random) -> TrajectoryGroup:
    """Four answers, of which the browser would run one if it were shown as anything but text. The best is an episode of
    two answers.
    """

    def times(number: int) -> dict[str, Any]:
        sampled = ((False,) * len(prompt) + (True,) * len(answer)) * number
        logprobs = tuple(-0.5 if is_sampled else None for is_sampled in sampled)
        ids = (*prompt, *answer) * number
        return {"token_ids": ids, "sampled": sampled, "logprobs": logprobs, "finish_reason": "stop"}

    best = Trajectory(**times(2), reward=1.0, turn_rewards=(0.25, 0.75), metadata={"end": "turn_limit"})
    others = (Trajectory(**times(1), reward=round(chance.random(), 2)) for _ in range(3))
    return TrajectoryGroup(trajectories=(best, *others), metadata={"place": "prompts.jsonl:17"})


def _plan(store: ObjectStore, run_id: str, num_steps: int) -> JobPlan:
    keys = RunKeys(run_id)
    header = PlanHeader(
        num_steps=num_steps, num_bins=2 * num_steps, bin_tokens=2048, num_tokens=905_000, packing_efficiency=0.921
    )
    store.put_bytes(f"packed/{run_id}/plan.json", header.model_dump_json().encode())
    lengths = [(32, 40), (64, 310), (128, 1270), (256, 2210), (512, 1804), (1024, 620), (2048, 96), (4096, 11)]
    report = {
        "format": "chat",
        "num_rows": 6361,
        "num_kept": 6348,
        "num_tokens": 1_532_004,
        "num_targets": 401_233,
        "trained_fraction": 0.2619,
        "max_tokens": 2048,
        "longest_tokens": 3310,
        "num_truncated": 0,
        "num_too_long": 11,
        "num_fully_masked": 2,
        "lengths": [{"up_to_tokens": tokens, "num_rows": rows} for tokens, rows in lengths],
        "lost": [{"place": "train.jsonl:88", "reason": "3310 tokens are more than max_tokens 2048"}],
    }
    store.put_bytes(f"{keys.prefix}/dataset/report.json", json.dumps(report).encode())
    artifact = Artifact(uri=uri_of(store, f"packed/{run_id}"), sha256="0" * 64)
    return JobPlan(
        run_id=run_id,
        job_id="000001",
        model=artifact,
        trainable=Lora(),
        data=PackedData(units=artifact, plan=artifact),
        num_steps=num_steps,
        loss=CrossEntropy(),
        optimizer=Adam(),
        schedule=Schedule(learning_rate=1e-4),
    )


def _started(run_id: str, fence: Fence, first_step: int, num_steps: int, time: float) -> Started:
    return Started(
        seq=1,
        time=time,
        run_id=run_id,
        job_id="000001",
        fence=fence,
        first_step=first_step,
        num_steps=num_steps,
        device="cpu",
        world_size=1,
    )


def _sft_metrics(step: int, num_steps: int, chance: random.Random) -> dict[str, float]:
    part = step / num_steps
    return {
        "loss": 0.35 + 2.1 * math.exp(-3.4 * part) + chance.gauss(0, 0.07),
        "learning_rate": 1e-4 * min(1.0, 12 * part) * (1 - part),
        "grad_norm": 0.6 + 1.2 * math.exp(-4 * part) + abs(chance.gauss(0, 0.12)),
        "tokens_per_s": 5100 + chance.gauss(0, 160),
        "memory_bytes": 1.42e9 + 2e6 * math.sin(step / 9),
    }


def _policy_metrics(step: int, num_steps: int, chance: random.Random) -> dict[str, float]:
    return _sft_metrics(step, num_steps, chance) | {
        "kl_old_new": -1e-9,
        "kl_reference": 0.002 * step / num_steps + 0.0003 * chance.random(),
        "kl_sampler_trainer": 0.0004 * (1 + chance.random()),
        "entropy": 1.9 - 0.03 * step + chance.gauss(0, 0.03),
        "clip_high_fraction": 0.02 + 0.01 * chance.random(),
        "clip_low_fraction": 0.012 + 0.006 * chance.random(),
    }


def _samples(step: int) -> tuple[EvaluationSample, ...]:
    told = "42 crates." if step >= NUM_STEPS // 2 else "the the crane the"
    return (
        EvaluationSample(
            prompt="How many crates are on quay 6?", completion=f"{told} (step {step})", reference="42 crates."
        ),
        EvaluationSample(prompt=XSS, completion=XSS, reference=None),
    )
