"""Slots with a head of scalars in sessions and jobs: values that are asked for, what is learnt, what is refused."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from longshore.commands import CommandResult, Datum, Forward, ForwardBackward, OptimStep, SaveState
from longshore.dataset_runs import DPORun, SFTRun
from longshore.events import Failed
from longshore.losses import DPO, PPO, CrossEntropy, SquaredError
from longshore.runs import RLRun
from longshore.training import Full, Lora, ScalarHead
from shared.errors import InvalidInput
from shared.jobs.commands import Command
from shared.jobs.job import Evaluation
from shared.models.peft import read_config
from tests.megatron_worker.scored_rows import HEADS
from tests.megatron_worker.session_jobs import load, result, session_job, state_of
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.workshop import Workshop, read_log, workshop_of_ids

HEADED = Lora(rank=4, alpha=8, head=HEADS["sequence"])
DATA = (
    Datum(tokens=(3, 5, 7, 9, 4), value_targets=(0.0, 1.0, -1.0, 0.5), weights=(0.0, 1.0, 0.5, 2.0)),
    Datum(tokens=(8, 6, 4), value_targets=(2.0, -2.0)),
)
LEARN = ForwardBackward(data=DATA, loss=SquaredError(scalar=1))


@pytest.fixture(scope="module")
def workshop(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("heads")
    model = shutil.copytree(tiny_model, root / "model")
    return workshop_of_ids(root, model, 512, 2, held_out=[[0, 1]], prompt_ids=[300, 301])


def done(worker, workshop, folder: Path, commands: Sequence[Command], **changes) -> list[CommandResult]:
    job = session_job(workshop, folder, commands, **({"trainable": HEADED} | changes))
    worker.do_one(job)
    return [result(job, number) for number in range(1, len(commands) + 1)]


def values_of(found: CommandResult) -> torch.Tensor:
    assert found.problem is None and found.data is not None, found.problem
    assert all(not scores.logprobs and scores.values is not None for scores in found.data)
    return torch.tensor([row for scores in found.data for row in scores.values or ()])


def test_a_session_answers_values_and_learns_them(worker, workshop, tmp_path) -> None:
    commands: list[Command] = [Forward(data=DATA), LEARN, OptimStep(learning_rate=0.01), Forward(data=DATA)]
    found = done(worker, workshop, tmp_path / "few", commands)
    before_NL, at_NL, after_NL = (values_of(found[number]) for number in (0, 1, 3))
    assert before_NL.shape == (5, 3) and torch.equal(before_NL, at_NL)
    weight_N, target_N = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0]), torch.tensor([1.0, -1.0, 0.5, 2.0, -2.0])

    def loss(value_NL: torch.Tensor) -> float:
        return float((weight_N * (value_NL[:, 1] - target_N).square()).sum() / weight_N.sum())

    assert found[1].metrics["loss"] == pytest.approx(loss(before_NL), rel=1e-5)
    assert loss(after_NL) < loss(before_NL)


def test_states_are_read_again_to_the_bit(worker, workshop, tmp_path) -> None:
    steps: list[Command] = [LEARN, OptimStep(learning_rate=0.01)]
    whole = session_job(workshop, tmp_path / "whole", [*steps, SaveState(), *steps], trainable=HEADED)
    worker.do_one(whole)
    other = session_job(workshop, tmp_path / "other", [load(whole, 3), *steps], trainable=HEADED, seed=7)
    worker.do_one(other)
    assert state_of(other, 3) == state_of(whole, 5) != state_of(whole, 3)
    weights = tmp_path / "whole" / "checkpoints" / "step-00000005" / "weights"
    assert read_config(weights, HEADED).head == HEADS["sequence"]
    with pytest.raises(InvalidInput, match="its head gives scalars"):  # as a sampler, or an export, reads it
        read_config(weights)
    with pytest.raises(InvalidInput, match="head is 3 scalars a sequence, 1 scalar a token is asked for"):
        read_config(weights, Lora(rank=4, alpha=8, head=HEADS["token"]))


def test_losses_of_the_other_head_are_refused_by_name(worker, workshop, tmp_path) -> None:
    plain, ids = Datum(tokens=(3, 5, 7)), DATA[0].model_copy(update={"value_targets": None})
    asked: list[Command] = [
        ForwardBackward(data=(plain,)),
        ForwardBackward(data=DATA, loss=SquaredError(scalar=3)),
        Forward(data=(ids,), top_k=2),
    ]
    found = done(worker, workshop, tmp_path / "headed", asked)
    for each, words in zip(
        found, ("cross_entropy is of the language head", "3 is behind the last", "values"), strict=True
    ):
        assert each.problem is not None and each.problem.kind == "invalid_input" and words in each.problem.message
    (other,) = done(worker, workshop, tmp_path / "plain", [LEARN], trainable=Lora(rank=4, alpha=8))
    assert other.problem is not None and "squared_error is of a head of scalars" in other.problem.message


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SFTRun, {"dataset": {"uri": "file:///x.jsonl"}, "epochs": 1, "batch_size": 1}),
        (DPORun, {"dataset": {"uri": "file:///x.jsonl"}, "epochs": 1, "batch_size": 1}),
        (RLRun, {}),
    ],
)
def test_runs_of_a_language_loss_take_no_head(kind, fields) -> None:
    kind(model="m", **fields)
    for trainable in (HEADED, Full(head=HEADS["token"])):
        with pytest.raises(ValidationError, match=r"trainable\.head: what this learns from is of the language head"):
            kind(model="m", trainable=trainable, **fields)


def test_plans_have_a_loss_of_their_head(workshop) -> None:
    for loss in (CrossEntropy(), PPO(), DPO()):
        with pytest.raises(ValidationError, match=f"{loss.kind} is of the language head"):
            workshop.plan(trainable=HEADED, loss=loss)
    with pytest.raises(ValidationError, match="name a head"):
        workshop.plan(loss=SquaredError())
    for asked in ({"evaluation": Evaluation(data=workshop.held_out, num_samples=1)}, {"probe": (1, 2)}):
        with pytest.raises(ValidationError, match="and no tokens"):
            workshop.plan(trainable=HEADED, loss=SquaredError(), **asked)


def test_a_job_learns_by_columns_that_are_there(worker, workshop) -> None:
    plan = workshop.plan(trainable=HEADED, loss=SquaredError())
    worker.do_one(job := workshop.job("lacks", plan))
    failed = read_log(job.log_path)[-1]
    assert isinstance(failed, Failed) and "no column advantage; the loss squared_error learns it" in failed.message


def test_heads_are_checked() -> None:
    with pytest.raises(ValidationError, match="replaces lm_head"):
        Lora(targets=("q_proj", "lm_head"), head=ScalarHead())
    with pytest.raises(ValidationError, match="its own name"):
        ScalarHead(names=("a", "a"))
    with pytest.raises(ValidationError, match="value_targets has 1 entries"):
        Datum(tokens=(1, 2, 3), value_targets=(1.0,))
    with pytest.raises(ValidationError, match=r"data\[1\].value_targets: the loss squared_error needs them"):
        ForwardBackward(data=(DATA[0], Datum(tokens=(1, 2))), loss=SquaredError())
