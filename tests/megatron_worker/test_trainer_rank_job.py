"""A job's steps written out on TrainerRank give the bytes that the runner gives."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from longshore.training import Full, Lora
from megatron_worker.engine import Scores
from megatron_worker.losses import supervised
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.planned import learning_rate
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from megatron_worker.training.batches import PackedBatches
from megatron_worker.worker import make_deterministic
from shared.jobs.job import Checkpointing, Schedule
from tests.megatron_worker.engines import checkpoint_bytes
from tests.megatron_worker.test_megatron_job import NUM_STEPS, do, plan, worker, workshop  # noqa: F401 (fixtures)


@pytest.mark.parametrize("trainable", [Lora(rank=4, alpha=8), Full()], ids=["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_job_by_hand_gives_the_runners_bytes(worker, workshop, tmp_path, trainable, dtype):  # noqa: F811 (fixtures)
    what = plan(
        workshop,
        trainable=trainable,
        dtype=dtype,
        schedule=Schedule(kind="cosine", learning_rate=5e-3, warmup_steps=1),
        checkpointing=Checkpointing(every_steps=0),
    )
    job = do(worker, workshop, f"runner-{trainable.kind}-{dtype}", what)
    expected = Path(job.checkpoint_dir) / f"step-{NUM_STEPS:08d}"

    make_deterministic(what)
    rank = TrainerRank(MegatronEngine(folder_of(what.model), what.layout, what.dtype))
    name = None if trainable == Full() else "default"
    if name is None:
        rank.train_base()
    else:
        rank.create_adapter(name, trainable, what.seed)
    with PackedBatches.open(folder_of(what.data.units), folder_of(what.data.plan)) as data:
        for step in range(what.num_steps):
            weight = torch.zeros((), dtype=torch.float64)
            for units in data.bins(step):
                batch = data.batch(units, rank.facts.device)
                outputs = rank.forward(inputs_of(batch))
                scores = Scores(torch.cat([output.target_logprob_P for output in outputs]))
                sums = supervised.cross_entropy_sums(scores, batch)
                rank.backward(sums.loss)
                weight += sums.weight
            rate = learning_rate(what.schedule, step, what.num_steps)
            rank.optim_step(what.optimizer, rate, rank.reduce({"weight": weight})["weight"])
    rank.save(name, tmp_path / "by-hand")
    ours, theirs = checkpoint_bytes(tmp_path / "by-hand"), checkpoint_bytes(expected)
    assert theirs.items() - ours.items() == {
        (path, theirs[path]) for path in ("rng.safetensors", "state.json", "manifest.json")
    }
    again = TrainerRank(MegatronEngine(folder_of(what.model), what.layout, what.dtype))
    if name is None:  # it goes on from a job's checkpoint
        again.train_base()
        again.load(None, expected)
        rank_s = dict(rank.engine.named_weights())
        assert all(torch.equal(weight, rank_s[tensor]) for tensor, weight in again.engine.named_weights())


def folder_of(artifact):
    return Path(artifact.uri.removeprefix("file://"))


def inputs_of(batch):
    """The chains of a bin, each with the positions that the bin scores."""
    starts = [*(batch.parent_T == -1).nonzero()[:, 0].tolist(), len(batch.parent_T)]
    inputs = []
    for start, stop in pairwise(starts):
        inside_N = (batch.hidden_index_N >= start) & (batch.hidden_index_N < stop)
        positions = (batch.hidden_index_N[inside_N] - start).tolist()
        inputs.append(ForwardInput(batch.token_id_T[start:stop], positions=positions, target_logprobs=True))
    return inputs
