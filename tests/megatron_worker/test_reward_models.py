"""The loss of reward models beside its formula in float64, and its steps beside transformers' classifier under PEFT."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from longshore.losses import BradleyTerry, SquaredError, check_head
from longshore.training import Lora, ScalarHead
from megatron_worker.engine import Batch, Scores, reported
from megatron_worker.losses import check_columns, loss_function
from megatron_worker.training.batches import Sums, to_batch
from megatron_worker.training.evaluation import _held_out
from shared.errors import InvalidInput
from shared.jobs.packed import Units
from shared.jobs.prefix_tree import TreeUnit, scored_pair
from tests.megatron_worker.engines import ENGINES, start
from tests.megatron_worker.rows import VOCAB_SIZE, distinct_model
from tests.megatron_worker.scored_rows import ADAM, adamw, transformers_head

pytestmark = pytest.mark.usefixtures("one_thread")
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
