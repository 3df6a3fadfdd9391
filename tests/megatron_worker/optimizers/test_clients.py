"""Optimizers in the hands of clients: a TrainerRank's steps, a session's, and what each of them refuses."""

from pathlib import Path

import pytest
import torch

from longshore.commands import OptimStep
from longshore.training import Adam, Muon
from megatron_worker.trainer_rank import ForwardInput, start
from shared.errors import InvalidInput
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import ENGINES, LORA, furthest
from tests.megatron_worker.engines import start as start_engine
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.session_jobs import do_all, result, sft_commands
from tests.megatron_worker.tiny_jobs import adapter_sha256
from tests.megatron_worker.workshop import make_workshop

pytestmark = pytest.mark.usefixtures("one_thread")

(ROW,) = random_rows([40])


def stepped(rank, name, optimizer):
    """The adapter's weights before a step on a row and after it."""
    rank.create_adapter(name, LORA, seed=3)
    before = rank.snapshot(name).tensors
    output = rank.forward(ForwardInput(ROW.ids, target_logprobs=True))
    rank.backward(-(output.target_logprob_P * torch.tensor(ROW.weights[1:])).sum())
    rank.optim_step(optimizer, 1e-3, sum(ROW.weights))
    return before, rank.snapshot(name).tensors


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainer_rank_s_step_of_muon_is_orthogonal_and_larger_for_b(model, engine):
    rank = start(model, engine=engine)
    before, after = stepped(rank, "plain", Muon(clip_norm=0))
    larger = stepped(rank, "plus", Muon(clip_norm=0, lora_plus_ratio=4.0))[1]
    for name, weight in before.items():
        step = (weight - after[name]) / (1e-3 * 0.2 * max(weight.shape) ** 0.5)
        if ".lora_A." in name:  # B is zero, and A has no gradient
            assert not step.any()
        else:
            values = torch.linalg.svdvals(step)
            assert values.min() > 0.6
            assert values.max() < 1.3
            assert torch.allclose(weight - larger[name], 4 * (weight - after[name]), rtol=1e-4, atol=1e-8)
    driven = start_engine(engine, model, "lora")
    train(driven, [[[ROW]]], Muon(clip_norm=0), 1e-3)
    assert furthest(dict(driven.adapter_weights("run")), after) <= 1e-6


def test_a_trainer_rank_refuses_what_would_do_nothing(model):
    rank = start(model)
    rank.create_adapter("a", LORA, seed=3)
    with pytest.raises(InvalidInput, match="weights of your losses") as refused:
        rank.optim_step(Adam(noise_scale=True), 1e-3)
    assert refused.value.place == "noise_scale"
    rank.drop_adapter("a")
    rank.train_base()
    with pytest.raises(InvalidInput, match="no B matrices"):
        rank.optim_step(Adam(lora_plus_ratio=2.0), 1e-3)


def test_a_session_refuses_what_would_do_nothing_and_keeps_its_gradients(tmp_path: Path) -> None:
    workshop = make_workshop(tmp_path / "workshop")
    commands = sft_commands(workshop)[:2]
    refused = OptimStep(learning_rate=0.1, optimizer=Adam(noise_scale=True))
    job = do_all(workshop, tmp_path / "refused", [commands[0], refused, commands[1]])
    plain = do_all(workshop, tmp_path / "plain", commands)
    problem = result(job, 2).problem
    assert problem is not None
    assert problem.kind == "invalid_input"
    assert "noise_scale: it compares gradients of data-parallel ranks" in problem.message
    assert "dropped" not in problem.message
    assert adapter_sha256(job, 3) == adapter_sha256(plain, 2)
