"""A job file under parallel layouts, by hand: events, evaluation, samples, and moves. One goes through the launcher."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_model import make_tiny_model
from longshore.events import Evaluated, Saved, Step, Succeeded
from longshore.fields import Artifact
from longshore.training import Adam, Full, Layout, Lora, Muon
from shared.jobs.job import Checkpointing, Evaluation, Job, Schedule
from tests.depth import drawn
from tests.megatron_worker.differences import furthest
from tests.megatron_worker.launch import fork_ranks, launch_ranks
from tests.megatron_worker.workshop import Workshop, read_log, workshop_of_ids

NUM_STEPS = 3
MANY, OTHER = Layout(pp=2, ep=2, dp=2), Layout(tp=2, sp=True, etp=2)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A model with experts; three bins a step and three held out, so that one of two ranks has none in the last."""
    root = tmp_path_factory.mktemp("jobs")
    make_tiny_model(root / "model", ["w " * 50], family="qwen3_moe", vocab_size=301)
    ids = [270, 271, 272]
    return workshop_of_ids(root, root / "model", 301, NUM_STEPS, held_out=[[0, 1], [2], [3]], prompt_ids=ids)


def adapters(workshop: Workshop) -> dict[str, object]:
    """What a job that trains an adapter says of itself."""
    return {
        "evaluation": Evaluation(data=workshop.held_out, num_samples=1, sample_tokens=3),
        "schedule": Schedule(kind="constant", learning_rate=5e-3),
        "trainable": Lora(rank=4, alpha=8),
        "probe": (3, 17, 44, 80),
    }


# Epsilon as in parallel_ranks.py.
FULL = {"schedule": Schedule(kind="constant", learning_rate=3e-4), "trainable": Full(), "optimizer": Adam(eps=1e-5)}


def do(
    workshop: Workshop,
    name: str,
    layout: Layout,
    fields: dict[str, object],
    start: Artifact | None = None,
    start_ranks: Callable[..., str] = fork_ranks,
) -> Job:
    plan = workshop.plan(layout=layout, checkpointing=Checkpointing(every_steps=1), **fields)
    job = workshop.job(name, plan, start)
    path = workshop.root / f"{name}.json"
    path.write_text(job.model_dump_json())
    start_ranks("megatron_worker", "--once", str(path), num_ranks=layout.world_size)
    assert isinstance(read_log(job.log_path)[-1], Succeeded), read_log(job.log_path)[-1]
    return job


def first_checkpoint(job: Job) -> Artifact:
    saved = next(e for e in read_log(job.log_path) if isinstance(e, Saved) and e.step == 1)
    return Artifact(uri=f"file://{saved.path}", sha256=saved.manifest_sha256)


def metrics(job: Job, kind: type[Step] | type[Evaluated]) -> list[dict[str, float]]:
    unlike = ("step_s", "tokens_per_s", "memory_bytes")
    found = [event.metrics for event in read_log(job.log_path) if isinstance(event, kind)]
    return [{name: value for name, value in own.items() if name not in unlike} for own in found]


def last_checkpoint(job: Job) -> Path:
    return Path(job.checkpoint_dir) / f"step-{NUM_STEPS:08d}"


def weights(job: Job) -> dict[str, torch.Tensor]:
    return load_file(last_checkpoint(job) / "weights" / "adapter_model.safetensors")


def test_a_job_is_the_same_on_one_rank_on_four_and_on_two_from_where_four_were(workshop: Workshop):
    fields = adapters(workshop)
    alone, many = do(workshop, "alone", Layout(), fields), do(workshop, "many", MANY, fields)
    for kind in (Step, Evaluated):
        for ours, theirs in zip(metrics(many, kind), metrics(alone, kind), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    samples = [[e.samples for e in read_log(job.log_path) if isinstance(e, Evaluated)] for job in (alone, many)]
    assert samples[0] == samples[1] != []
    moved = do(workshop, "moved", OTHER, fields, first_checkpoint(many), start_ranks=launch_ranks)
    losses = [[step["loss"] for step in metrics(job, Step)] for job in (alone, moved)]
    assert losses[1] == pytest.approx(losses[0][1:], rel=1e-5)
    for job in (many, moved):
        assert max(float((weights(job)[n] - w).abs().max()) for n, w in weights(alone).items()) <= 1e-4


def test_all_weights_their_moments_and_the_cursor_move_from_four_ranks_to_two(workshop: Workshop):
    many = do(workshop, "many-full", MANY, FULL)
    moved = do(workshop, "moved-full", OTHER, FULL, first_checkpoint(many))
    assert len(metrics(moved, Step)) == NUM_STEPS - 1
    for ours, theirs in zip(metrics(moved, Step), metrics(many, Step)[1:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for part in ("weights", "optimizer"):
        assert furthest(last_checkpoint(moved) / part, last_checkpoint(many) / part) <= 1e-5
    states = [(last_checkpoint(job) / "state.json").read_bytes() for job in (many, moved)]
    assert states[0] == states[1]


@pytest.mark.parametrize(("layout", "num_bins"), drawn([(Layout(dp=2), (2, 3)), (OTHER, (1,))], 1), ids=str)
def test_a_step_within_a_memory_budget_is_shared_out_among_ranks(
    workshop: Workshop, layout: Layout, num_bins: tuple[int, ...]
):
    """Where the budget has room for all of a step, each data-parallel rank still has a part, and other ranks have one
    micro-batch. Ranks that measured or cut otherwise than others would wait for these for ever."""
    fields = adapters(workshop)
    name = f"budget-dp{layout.dp}-tp{layout.tp}"
    job = do(workshop, name, layout, fields | {"memory_budget_bytes": 1 << 30})
    plain = do(workshop, f"{name}-plain", layout, fields)
    for ours, theirs in zip(metrics(job, Step), metrics(plain, Step), strict=True):
        assert ours.pop("num_bins") in num_bins and theirs.pop("num_bins") == 3
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert max(float((weights(job)[n] - w).abs().max()) for n, w in weights(plain).items()) <= 1e-4


def test_a_job_by_muon_goes_on_to_the_bit_and_says_how_noisy_gradients_are(workshop: Workshop):
    fields = adapters(workshop) | {"optimizer": Muon(lora_plus_ratio=2.0, noise_scale=True)}
    whole = do(workshop, "muon", Layout(dp=2), fields)
    again = do(workshop, "muon-again", Layout(dp=2), fields, first_checkpoint(whole))
    assert metrics(whole, Step)[1:] == metrics(again, Step)
    for part in ("weights/adapter_model.safetensors", "optimizer/optimizer.safetensors"):
        assert (last_checkpoint(whole) / part).read_bytes() == (last_checkpoint(again) / part).read_bytes()
    for step in metrics(whole, Step):
        assert step["grad_noise_trace"] > 0
        weight = step["grad_noise_trace"] / (step["grad_norm"] ** 2 - step["grad_signal"])
        assert step["target_tokens"] / 2 <= weight <= step["target_tokens"]  # of a half or one each
