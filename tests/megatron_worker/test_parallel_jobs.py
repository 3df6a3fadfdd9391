"""A job file under parallel layouts, through torchrun as by hand: events, evaluation, samples, and moves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_model import make_tiny_model
from shared.events import Evaluated, Saved, Step, Succeeded
from shared.jobs import Artifact, Checkpointing, Evaluation, Job, Lora, PackedData, Schedule
from shared.layout import Layout
from tests.megatron_worker.launch import torchrun
from tests.megatron_worker.workshop import Workshop, read_log, sealed, write_plan, write_units

NUM_STEPS = 3
MANY, OTHER = Layout(pp=2, ep=2, dp=2), Layout(tp=2, sp=True, etp=2)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A model with experts; three bins a step and three held out, so that one of two ranks has none in the last."""
    root = tmp_path_factory.mktemp("jobs")
    make_tiny_model(root / "model", ["w " * 50], family="qwen3_moe", vocab_size=301)
    for name, num_units in (("units", 6 * NUM_STEPS), ("held-out-units", 4)):
        write_units(root / name, num_units, seed=num_units, vocab_size=301)
    prompts = [{"prompt_ids": [270, 271, 272], "prompt": "three tokens", "reference": "four"}]
    (root / "held-out-units" / "prompts.json").write_text(json.dumps(prompts))
    bins = [[[6 * s, 6 * s + 1], [6 * s + 2, 6 * s + 3, 6 * s + 4], [6 * s + 5]] for s in range(NUM_STEPS)]
    write_plan(root / "plan", root / "units", bins)
    write_plan(root / "held-out-plan", root / "held-out-units", [[[0, 1], [2], [3]]])
    data = PackedData(units=sealed(root / "units"), plan=sealed(root / "plan"))
    held_out = PackedData(units=sealed(root / "held-out-units"), plan=sealed(root / "held-out-plan"))
    return Workshop(root, sealed(root / "model"), data, held_out, NUM_STEPS)


def do(workshop: Workshop, name: str, layout: Layout, start: Artifact | None = None) -> Job:
    plan = workshop.plan(
        layout=layout,
        checkpointing=Checkpointing(every_steps=1),
        evaluation=Evaluation(data=workshop.held_out, num_samples=1, sample_tokens=3),
        schedule=Schedule(kind="constant", learning_rate=5e-3),
        trainable=Lora(rank=4, alpha=8),
        probe=(3, 17, 44, 80),
    )
    job = workshop.job(name, plan, start)
    path = workshop.root / f"{name}.json"
    path.write_text(job.model_dump_json())
    torchrun("megatron_worker", "--once", str(path), num_ranks=layout.world_size, timeout_s=240)
    assert isinstance(read_log(job.log_path)[-1], Succeeded), read_log(job.log_path)[-1]
    return job


def metrics(job: Job, kind: type[Step] | type[Evaluated]) -> list[dict[str, float]]:
    unlike = ("step_s", "tokens_per_s", "memory_bytes")
    found = [event.metrics for event in read_log(job.log_path) if isinstance(event, kind)]
    return [{name: value for name, value in own.items() if name not in unlike} for own in found]


def weights(job: Job) -> dict[str, torch.Tensor]:
    folder = Path(job.checkpoint_dir) / f"step-{NUM_STEPS:08d}" / "weights"
    return load_file(folder / "adapter_model.safetensors")


def test_a_job_is_the_same_on_one_rank_on_four_and_on_two_from_where_four_were(workshop: Workshop):
    alone, many = do(workshop, "alone", Layout()), do(workshop, "many", MANY)
    for kind in (Step, Evaluated):
        for ours, theirs in zip(metrics(many, kind), metrics(alone, kind), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    samples = [[e.samples for e in read_log(job.log_path) if isinstance(e, Evaluated)] for job in (alone, many)]
    assert samples[0] == samples[1] != []
    saved = next(e for e in read_log(many.log_path) if isinstance(e, Saved) and e.step == 1)
    start = Artifact(uri=f"file://{saved.path}", sha256=saved.manifest_sha256)
    moved = do(workshop, "moved", OTHER, start)
    losses = [[step["loss"] for step in metrics(job, Step)] for job in (alone, moved)]
    assert losses[1] == pytest.approx(losses[0][1:], rel=1e-5)
    for job in (many, moved):
        assert max(float((weights(job)[n] - w).abs().max()) for n, w in weights(alone).items()) <= 1e-4
