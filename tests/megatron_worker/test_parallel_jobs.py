"""A job file under parallel layouts, by hand: events, evaluation, samples, moves, mixtures. One goes through the
launcher.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from activities.tokenizing.units import PAIR_COLUMNS, pair_unit
from examples.tiny_model import make_tiny_model
from longshore.events import Evaluated, Saved, Step, Succeeded
from longshore.fields import Artifact
from longshore.losses import DPO
from longshore.training import Adam, Full, Layout, Lora, Muon
from shared.jobs.job import Checkpointing, Evaluation, Job, Schedule
from shared.jobs.packed import UnitsWriter, mix_units
from tests.depth import drawn
from tests.megatron_worker.differences import furthest
from tests.megatron_worker.launch import fork_ranks, launch_ranks
from tests.megatron_worker.workshop import Workshop, packed, read_log, workshop_of_ids, write_units

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


def write_pairs(folder: Path, num_units: int, seed: int, vocab_size: int = 301) -> None:
    """Pairs as trees: what both answers begin with stands once."""
    random, writer = np.random.default_rng(seed), UnitsWriter(folder, PAIR_COLUMNS)
    for _ in range(num_units):
        prompt, *answers = (random.integers(0, vocab_size, random.integers(2, 6)) for _ in range(3))
        both = [np.concatenate([prompt, answer]) for answer in answers]
        masks = [np.arange(len(ids)) >= len(prompt) for ids in both]
        unit = pair_unit(both[0], masks[0], both[1], masks[1]).columns()
        writer.append(**{name: unit[name] for name in PAIR_COLUMNS})
    writer.close()


MIXED = [
    ("megatron", Layout(dp=2)),
    ("megatron", Layout(cp=2)),
    ("megatron", Layout(pp=2)),
    ("fsdp", Layout()),
    ("fsdp", Layout(dp=2)),
]


@pytest.mark.parametrize(("engine", "layout"), drawn(MIXED, 2), ids=str)
@pytest.mark.parametrize("kind", ["rows", "pairs"])
def test_each_source_of_a_mixture_has_its_own_loss_and_changes_nothing(
    workshop: Workshop, kind: str, engine: str, layout: Layout
):
    """A source's loss is that of a job on its examples alone, over all ranks and bins."""
    root = workshop.root / f"{kind}-{engine}-{layout.dp}-{layout.cp}-{layout.pp}"
    for name, num_units, seed in (("a", 7, 1), ("b", 5, 2), ("never", 1, 3)):
        if kind == "rows":
            write_units(root / name, num_units, seed, vocab_size=301)
        else:
            write_pairs(root / name, num_units, seed)
    steps = [[[0, 8, 1], [9, 2, 3, 10], [4]], [[7, 5], [6, 11], [1]]]
    for folder in ("mixed", "plain"):
        (root / folder).mkdir()
        mix_units({name: root / name for name in ("a", "b", "never")}, root / folder)
    header = json.loads((root / "plain" / "units.json").read_text())
    assert header.pop("sources")
    (root / "plain" / "units.json").write_text(json.dumps(header))
    one = {
        "trainable": Lora(rank=4, alpha=8),
        "schedule": Schedule(kind="constant", learning_rate=5e-3),
        "loss": {"kind": "cross_entropy"} if kind == "rows" else DPO(beta=2.0),
        "optimizer": Adam(eps=1e-5),
    }

    def trained(name: str, units: str, steps: list[list[list[int]]], layout: Layout, engine: str) -> Job:
        data = packed(root, units, f"{name}-plan", steps)
        plan = {**one, "data": data, "num_steps": len(steps), "layout": layout, "engine": engine}
        job = workshop.job(f"{root.name}-{name}", workshop.plan(checkpointing=Checkpointing(every_steps=1), **plan))
        (root / f"{name}.json").write_text(job.model_dump_json())
        fork_ranks("megatron_worker", "--once", str(root / f"{name}.json"), num_ranks=layout.world_size)
        assert isinstance(read_log(job.log_path)[-1], Succeeded), read_log(job.log_path)[-1]
        return job

    mixed, plain = (trained(name, name, steps, layout, engine) for name in ("mixed", "plain"))
    for part in ("weights/adapter_model.safetensors", "optimizer/optimizer.safetensors"):
        of_both = [(Path(job.checkpoint_dir) / "step-00000002" / part).read_bytes() for job in (mixed, plain)]
        assert of_both[0] == of_both[1], part
    found, without = metrics(mixed, Step), metrics(plain, Step)
    for own, bare in zip(found, without, strict=True):
        more = own.keys() - bare.keys()
        counts = {
            f"{count}_{name}" for count in ("examples", "tokens", "target_tokens") for name in ("a", "b", "never")
        }
        assert more == {"loss_a", "loss_b"} | counts
        assert {name: value for name, value in own.items() if name not in more} == bare
        for whole in ("tokens", "target_tokens"):
            assert own[f"{whole}_a"] + own[f"{whole}_b"] == own[whole] and own[f"{whole}_never"] == 0
    for name, units in (("a", range(7)), ("b", range(7, 12))):
        own_bins = [kept for each in steps[0] if (kept := [unit for unit in each if unit in units])]
        (alone,) = metrics(trained(f"{name}-alone", "plain", [own_bins], Layout(), "megatron"), Step)
        assert found[0][f"loss_{name}"] == pytest.approx(alone["loss"], rel=1e-5)
        assert found[0][f"target_tokens_{name}"] == alone["target_tokens"]
