"""Heads of scalars and of one's own: values, gradients, steps and files as transformers' and torch's; in sessions."""

import functools
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longshore.commands import CommandResult, Datum, Forward, ForwardBackward, OptimStep, SaveState
from longshore.dataset_runs import DPORun, SFTRun
from longshore.events import Failed
from longshore.losses import DPO, PPO, BradleyTerry, CrossEntropy, SquaredError, check_head
from longshore.runs import RLRun
from longshore.training import Adam, EngineName, Full, Layout, Lora, ScalarHead
from megatron_worker.engine import Batch, Outputs, Scores, reported
from megatron_worker.losses import check_columns, loss_function
from megatron_worker.trainer_rank import ForwardInput, TrainerRank, train_head
from megatron_worker.training.batches import Sums, to_batch
from megatron_worker.training.evaluation import _held_out
from shared.errors import InvalidInput
from shared.jobs.commands import Command
from shared.jobs.job import Evaluation
from shared.jobs.packed import Units
from shared.jobs.prefix_tree import TreeUnit, scored_pair
from shared.models.peft import read_config
from tests.depth import drawn
from tests.megatron_worker import differences
from tests.megatron_worker.engines import ENGINES, checkpoint_bytes, start
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.rows import VOCAB_SIZE, distinct_model, random_rows
from tests.megatron_worker.scored_rows import (
    ADAM,
    HEADS,
    LOSSES,
    adamw,
    bins_of_steps,
    lora,
    reference_step,
    reference_values,
    scored_bin,
    scored_rows,
    step,
    transformers_head,
    values,
)
from tests.megatron_worker.scores import transformers_model
from tests.megatron_worker.session_jobs import load, result, session_job, state_of
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.workshop import Workshop, read_log, workshop_of_ids

pytestmark = pytest.mark.usefixtures("one_thread")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: list[tuple[EngineName, str, str]] = [
    *((engine, "qwen3", per) for engine in ENGINES for per in LOSSES),
    ("megatron", "gpt_oss", "token"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def made(family: str) -> Path:
        return distinct_model(tmp_path_factory.mktemp(family), family, tied=False)

    return made


@pytest.mark.parametrize(("engine", "family", "per"), drawn(CASES, 2))
def test_an_adapter_with_a_head_is_trained_as_under_peft(models, tmp_path, engine, family, per) -> None:
    model, steps = models(family), bins_of_steps(per)
    driven = start(engine, model)
    driven.add_adapter("run", lora(per), seed=3)
    driven.save(tmp_path / "fresh")
    reference = transformers_head(model, per, tmp_path / "fresh" / "weights")
    optimizer = adamw(reference, 3e-3)
    rows = scored_rows(per, [17, 30, 5], seed=99)

    def compare() -> None:
        expected_NL = reference_values(reference, per, rows).detach()
        assert expected_NL.abs().max() > 0.1
        torch.testing.assert_close(values(driven, scored_bin(per, rows)), expected_NL, atol=1e-5, rtol=1e-5)

    compare()
    for number, bins in enumerate(steps):
        found = step(driven, per, bins, 3e-3)
        expected = reference_step(reference, optimizer, per, [r for each in bins for r in each])
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), number
    compare()


@pytest.mark.parametrize(("engine", "family", "per"), drawn(CASES, 2))
def test_all_weights_with_a_head_are_trained_as_in_transformers(models, tmp_path, engine, family, per) -> None:
    model, steps, rows = models(family), bins_of_steps(per), scored_rows(per, [17, 30, 5], seed=99)
    driven = start(engine, model)
    driven.train_full(Full(head=HEADS[per]), seed=3)
    driven.save(tmp_path / "fresh")
    reference = transformers_head(tmp_path / "fresh" / "weights", per)
    assert reference.config.id2label == dict(enumerate(HEADS[per].names))
    optimizer = adamw(reference, 3e-4)
    for number, bins in enumerate(steps):
        found = step(driven, per, bins, 3e-4)
        expected = reference_step(reference, optimizer, per, [r for each in bins for r in each])
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), number
    expected_NL, found_NL = reference_values(reference, per, rows).detach(), values(driven, scored_bin(per, rows))
    torch.testing.assert_close(found_NL, expected_NL, atol=1e-5, rtol=1e-5)
    driven.save(tmp_path / "end")
    again, names = transformers_head(tmp_path / "end" / "weights", per), set()
    for name, tensor in load_file(tmp_path / "end" / "weights" / "model.safetensors").items():
        names.add(name)
        torch.testing.assert_close(tensor, reference.state_dict()[name], atol=1e-5, rtol=1e-5)
    assert "lm_head.weight" not in names and "score.weight" in names
    torch.testing.assert_close(reference_values(again, per, rows).detach(), found_NL, atol=1e-5, rtol=1e-5)
    driven.drop_slot(None)
    driven.train_full(Full())  # the base is as it was published, and has its language head again
    assert driven.forward(scored_bin(per, rows), Outputs()).logprob_N is not None


@pytest.mark.parametrize("per", LOSSES)
def test_what_peft_saves_is_read_with_equal_values(models, tmp_path, per) -> None:
    """Its head's names are numbers, which those that are asked for replace."""
    from peft import LoraConfig, get_peft_model

    task, num = {"token": ("TOKEN_CLS", 1), "sequence": ("SEQ_CLS", 3)}[per]
    reference = transformers_head(models("qwen3"), per, None, num)
    theirs = get_peft_model(reference, LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules=LINEARS))
    with torch.no_grad():
        for parameter in (p for p in theirs.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    theirs.save_pretrained(tmp_path)
    rows = scored_rows(per, [17, 30, 5], seed=99)
    expected_NL = reference_values(theirs.eval(), per, rows).detach()
    for engine in ENGINES:
        driven = start(engine, models("qwen3"))
        driven.load_adapter("frozen", tmp_path, None, trainable=False)
        torch.testing.assert_close(values(driven, scored_bin(per, rows)), expected_NL, atol=1e-5, rtol=1e-5)
        driven.load_adapter("own", tmp_path, lora(per), trainable=True)
        driven.save(tmp_path / engine)
        assert read_config(tmp_path / engine / "weights", may_have_head=True).head == HEADS[per]
        ours, saved = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / engine / "weights", tmp_path))
        assert ours.keys() == saved.keys() and all(torch.equal(ours[name], saved[name]) for name in ours)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_slot_count_its_head(models, engine, dtype) -> None:
    driven = start(engine, models("qwen3"), dtype=dtype)
    for trainable in (lora("sequence"), Full(head=HEADS["token"])):
        plain, counted = (driven.slot_bytes(t) for t in (trainable.model_copy(update={"head": None}), trainable))
        assert all(counted[part] > plain[part] for part in counted)
        before = driven.memory().parts
        driven.add_adapter("run", trainable, 3) if isinstance(trainable, Lora) else driven.train_full(trainable, 3)
        grown = {p: n.device - (before[p].device if p in before else 0) for p, n in driven.memory().parts.items()}
        assert grown == counted, trainable.kind
        driven.place("host")
        driven.place("device")
        driven.drop_slot(None if trainable.kind == "full" else "run")
        driven.place("device", slots=[None])


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


CPU = torch.device("cpu")
HEAD = ScalarHead(names=("reward",), per="sequence")
Pairs = list[tuple[np.ndarray, np.ndarray, float]]


def pairs_of(seed: int, num_pairs: int) -> Pairs:
    """Pairs that share a prompt, with margins; of the first, the chosen answer is how the rejected one begins."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(num_pairs):
        prompt, chosen, rejected = (random.integers(3, VOCAB_SIZE, random.integers(3, 12)) for _ in range(3))
        if number == 0:
            rejected = np.concatenate([chosen, rejected])
        margin = float(random.uniform(0, 2)) if number % 2 else 0.0
        found.append((np.concatenate([prompt, chosen]), np.concatenate([prompt, rejected]), margin))
    return found


def units_of(units: list[TreeUnit]) -> Units:
    names = ("token_id", "position", "parent", "hidden_index", "label", "weight", "advantage", "sequence")
    columns = {name: np.concatenate([unit.columns()[name] for unit in units]) for name in names}
    ends = (np.cumsum([0, *sizes]) for sizes in zip(*((u.num_tokens, u.num_targets) for u in units), strict=True))
    return Units.of_arrays(columns, *ends)


def batch_of(pairs: Pairs) -> Batch:
    if not pairs:
        return Batch.empty(CPU)
    units = units_of([scored_pair(*pair) for pair in pairs])
    check_columns(units, BradleyTerry())
    return to_batch(units.read_bin(np.arange(len(pairs))), CPU)


def formula(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, center: float) -> Tensor:
    lead_P = chosen_P - rejected_P
    return (torch.log1p(torch.exp(-(lead_P - margin_P))) + center * (chosen_P + rejected_P) ** 2).mean()


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_the_loss_and_its_gradient_are_the_formulas(center) -> None:
    pairs = pairs_of(1, 7)
    batch, loss = batch_of(pairs), loss_function(BradleyTerry(center=center, scalar=1))
    value_NL = torch.randn(14, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
    sums = loss.sums(Scores(value_NL=value_NL), batch)
    (sums.loss / sums.weight).backward()
    exact_NL = value_NL.detach().double().requires_grad_()
    margin_P = torch.tensor([margin for *_, margin in pairs], dtype=torch.float64)
    expected = formula(exact_NL[::2, 1], exact_NL[1::2, 1], margin_P, center)
    expected.backward()
    assert float(sums.loss / sums.weight) == pytest.approx(float(expected), abs=1e-6)
    torch.testing.assert_close(value_NL.grad.double(), exact_NL.grad, atol=1e-6, rtol=0)
    assert torch.count_nonzero(value_NL.grad[:, [0, 2]]) == 0


def test_metrics_are_exact_however_pairs_are_cut_into_bins() -> None:
    pairs, loss = pairs_of(3, 60), loss_function(BradleyTerry())
    value_NL = torch.randn(120, 1, generator=torch.Generator().manual_seed(4))

    def summed(cuts: list[int]) -> dict[str, float]:
        sums = Sums(loss, CPU)
        for first, end in zip([0, *cuts], [*cuts, 60], strict=True):
            batch = batch_of(pairs[first:end])
            sums.add(loss.sums(Scores(value_NL=value_NL[2 * first : 2 * end]), batch).detached(), batch)
        return {name: float(value) for name, value in sums.totals.items()}

    lead_P = (value_NL[::2, 0] - value_NL[1::2, 0]).double().numpy()
    confidence_P, right_P = 1 / (1 + np.exp(-abs(lead_P))), lead_P > 0
    edges, error = np.linspace(0.5, 1, 11), 0.0
    for low, high in itertools.pairwise(edges):
        inside_P = (confidence_P >= low) & (confidence_P < high)
        if inside_P.any():
            error += inside_P.mean() * abs(confidence_P[inside_P].mean() - right_P[inside_P].mean())
    assert error > 0.05
    for cuts in ([], [1, 1, 30]):
        for found in (reported(summed(cuts)), _held_out(summed(cuts))):
            assert found["calibration_error"] == pytest.approx(error, abs=1e-6)
            assert found["preference_accuracy"] == right_P.mean()
            assert found["reward_margin"] == pytest.approx(lead_P.mean(), abs=1e-6)
            assert not any("part" in name for name in found)


def test_squared_errors_of_several_scalars_are_told_apart_by_labels() -> None:
    value_NL = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    batch = batch_of(pairs_of(6, 2))
    batch.label_N.copy_(torch.tensor([2, 0, 1, 2]))
    sums = loss_function(SquaredError(scalar=None)).sums(Scores(value_NL=value_NL), batch)
    error_N = value_NL[range(4), [2, 0, 1, 2]] - batch.advantage_N
    assert float(sums.loss) == pytest.approx(float(error_N.square().sum()))


def test_what_is_no_pair_and_heads_of_others_are_refused() -> None:
    (first, *others) = [scored_pair(*pair) for pair in pairs_of(7, 3)]
    broken = units_of([*others, first])
    broken.columns["sequence"] = np.array([0, 1, 0, 0, 0, 1])
    with pytest.raises(InvalidInput, match=r"unit 1.*pair 0 is not one chosen and one rejected"):
        check_columns(broken, BradleyTerry())
    broken.columns["sequence"], broken.columns["advantage"] = np.array([0, 1] * 3), np.array([0, 0, 0, 0, np.nan, 0])
    with pytest.raises(InvalidInput, match=r"unit 2.*margin of bradley_terry"):
        check_columns(broken, BradleyTerry())
    for head, words in ((None, "name a head"), (ScalarHead(), "of a scalar a sequence")):
        with pytest.raises(ValueError, match=words):
            check_head(BradleyTerry(), head)
    with pytest.raises(ValueError, match="1 is behind the last of reward"):
        check_head(BradleyTerry(scalar=1), HEAD)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return distinct_model(tmp_path_factory.mktemp("reward"), "qwen3", tied=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_twenty_steps_are_those_of_transformers_under_peft(model, tmp_path, engine) -> None:
    driven, center = start(engine, model), 0.01
    driven.add_adapter("run", Lora(rank=4, alpha=8, head=HEAD), seed=3)
    driven.save(tmp_path / "fresh")
    reference = transformers_head(model, "sequence", tmp_path / "fresh" / "weights", 1)
    optimizer, loss = adamw(reference, 3e-3), loss_function(BradleyTerry(center=center))
    for number in range(20):
        pairs = pairs_of(100 + number, 5)
        sums = {"loss": 0.0, "weight": 0.0}
        for _, found in driven.forward_backward_all([batch_of(pairs[:3]), batch_of(pairs[3:])], loss):
            sums = {name: sums[name] + float(found[name]) for name in sums}
        norm = driven.optim_step(ADAM, 3e-3, sums["weight"]).grad_norm
        chosen_P, rejected_P = (
            torch.cat([reference(torch.tensor(pair[side][None])).logits[0] for pair in pairs]) for side in (0, 1)
        )
        expected = formula(chosen_P, rejected_P, torch.tensor([margin for *_, margin in pairs]), center)
        expected.backward()
        their_norm = torch.nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], ADAM.clip_norm
        )
        optimizer.step()
        optimizer.zero_grad()
        assert sums["loss"] / 5 == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6), number
        assert norm == pytest.approx(float(their_norm), rel=1e-5, abs=1e-6), number


LORA = Lora(rank=4, alpha=8)
OWN_ADAM = Adam(weight_decay=0.01, clip_norm=1.0, eps=1e-5)
STEPS = [[row.ids for row in random_rows([20, 31, 12, 25], seed=seed)] for seed in range(4)]
LAYOUTS = [
    *(("megatron", Layout(**each)) for each in ({"tp": 2, "sp": True}, {"cp": 2}, {"dp": 2})),
    *(("fsdp", Layout(**each)) for each in ({"dp": 2}, {"tp": 2})),
]


class TwoLayers(torch.nn.Module):
    """A head of one's own: two numbers a token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.down, self.out = torch.nn.Linear(hidden_size, 8), torch.nn.Linear(8, 2, bias=False)
        self.num_steps: Tensor
        self.register_buffer("num_steps", torch.tensor(0))

    def scores(self, hidden_NH: Tensor) -> dict[str, Tensor]:
        return dict(zip(("mean", "spread"), self.out(self.down(hidden_NH).tanh()).unbind(-1), strict=True))


@dataclass(frozen=True)
class Trial:
    model: Path
    engine: EngineName
    single: Path
    layout: Layout = field(default_factory=Layout)

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.layout.label}"


def own_loss(found: dict[str, Tensor]) -> Tensor:
    """Of one sequence: a number for each place, which is of no row's own."""
    target_P = torch.arange(len(found["mean"])).sin()
    return (found["mean"] - target_P).square().sum() + found["spread"].exp().sum()


def train(rank: TrainerRank, head: TwoLayers, first: int, end: int, name: str | None = "critic") -> list[float]:
    """Steps of the rows that are this rank's. Returns the norms."""
    norms = []
    for rows in STEPS[first:end]:
        own = rows[rank.facts.dp_rank :: rank.facts.dp_size]
        found = rank.forward([ForwardInput(ids, hidden=True, adapter=name) for ids in own])
        rank.backward(torch.stack([own_loss(head.scores(each.hidden_PH)) for each in found]).sum())
        norms.append(rank.optim_step(OWN_ADAM, 3e-3, float(len(rows)), [name])[name].grad_norm)
        head.num_steps += 1
    return norms


def measure(trial: Trial, out: Path) -> None:
    rank = TrainerRank(ENGINES[trial.engine](trial.model, trial.layout, "float32"))
    rank.create_adapter("critic", LORA, seed=3)
    head = TwoLayers(rank.facts.hidden_size)
    train_head(rank, "critic", head)
    norms = train(rank, head, 0, 2)
    rank.save("critic", out / "middle")
    norms += train(rank, head, 2, 4)
    rank.save("critic", out / "end")
    for name, begin in (("again", out), ("from-single", trial.single)):
        rank.load("critic", begin / "middle")
        norms += train(rank, head, 2, 4)
        rank.save("critic", out / name)
    (out / f"noted-{rank.facts.rank}.json").write_text(json.dumps(norms))
    if rank.facts.rank == 0:
        save_file({name: p.detach().clone() for name, p in head.named_parameters()}, out / "head.safetensors")


@pytest.fixture(scope="module")
def headed(tmp_path_factory) -> Path:
    return distinct_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["critic", None])
def test_it_steps_with_its_slot_as_in_torch(headed, tmp_path, engine, name) -> None:
    from peft import PeftModel

    rank = TrainerRank(ENGINES[engine](headed, Layout(), "float32"))
    rank.create_adapter("critic", LORA, seed=3) if name else rank.train_base()
    rank.export(name, tmp_path)
    head, theirs = TwoLayers(64), TwoLayers(64)
    train_head(rank, name, head)
    reference = PeftModel.from_pretrained(transformers_model(headed), tmp_path, is_trainable=True) if name else None
    reference = reference or transformers_model(tmp_path)
    backbone = reference.base_model.model.model if name else reference.model
    trained = [p for p in (*reference.parameters(), *theirs.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=OWN_ADAM.weight_decay, eps=OWN_ADAM.eps)
    norms = []
    for rows in STEPS:
        for ids in rows:
            hidden_PH = backbone(input_ids=torch.tensor([ids])).last_hidden_state[0]
            (own_loss(theirs.scores(hidden_PH)) / len(rows)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, OWN_ADAM.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
    assert train(rank, head, 0, len(STEPS), name) == pytest.approx(norms, rel=1e-4)
    for ours, other in zip(head.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
    assert not torch.equal(head.out.weight, TwoLayers(64).out.weight)


def test_layouts_and_files(headed, tmp_path) -> None:
    singles = {engine: tmp_path / f"{engine}-{Layout().label}" for engine in ENGINES}
    for engine, single in singles.items():
        single.mkdir()
        measure(Trial(model=headed, engine=engine, single=single), single)
    trials = [Trial(model=headed, engine=engine, layout=each, single=singles[engine]) for engine, each in LAYOUTS]
    for trial in trials:
        (tmp_path / trial.name).mkdir()
    on_ranks(2, in_turn, measure, [(trial, tmp_path / trial.name) for trial in trials], timeout_s=400)
    assert differences.furthest(singles["fsdp"] / "end", singles["megatron"] / "end") < 1e-5
    for trial in [*(Trial(model=headed, engine=e, single=s) for e, s in singles.items()), *trials]:
        out = tmp_path / trial.name
        assert checkpoint_bytes(out / "again") == checkpoint_bytes(out / "end"), trial.name
        noted, (expected,) = (differences.notes(each, "noted") for each in (out, trial.single))
        assert all(rank == pytest.approx(expected, rel=1e-4) for rank in noted), trial.name
        for name in ("end", "from-single"):
            assert differences.furthest(out / name, trial.single / "end") < 1e-5, (trial.name, name)
        saved = load_file(out / "from-single" / "optimizer" / "optimizer.safetensors")
        head = load_file(out / "head.safetensors")
        assert int(saved["buffer.num_steps"]) == 4, trial.name
        assert len(head) == 3 and all(torch.equal(saved[f"master.own.{each}"], head[each]) for each in head)
    config = json.loads((tmp_path / "megatron-dp2" / "end" / "weights" / "adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM", "the adapter's folder is PEFT's, whatever stands on its hidden states"


def test_what_is_not_there_is_refused(headed, tmp_path) -> None:
    rank = TrainerRank(ENGINES["megatron"](headed, Layout(), "float32"))
    with pytest.raises(InvalidInput, match="is not trained"):
        train_head(rank, None, TwoLayers(64))
    with pytest.raises(InvalidInput, match="is not trained"):
        train_head(rank, "critic", TwoLayers(64))
    rank.create_adapter("critic", LORA, seed=3)
    rank.save("critic", tmp_path / "alone")
    train_head(rank, "critic", TwoLayers(64))
    with pytest.raises(InvalidInput, match="tensors are missing"):
        rank.load("critic", tmp_path / "alone")
    rank.save("critic", tmp_path / "both")
    other = TwoLayers(64)
    other.register_buffer("num_steps", torch.zeros(2))
    train_head(rank, "critic", other)
    with pytest.raises(InvalidInput, match=r"'num_steps' has shape \(\), expected \(2,\)"):
        rank.load("critic", tmp_path / "both")
