"""Rows with a number to learn of each token, or of each sequence: bins of them, and the plain loop beside transformers.

Shape suffixes: N targets of a bin, L scalars of a head.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longshore.losses import SquaredError
from longshore.training import Adam, Lora, ScalarHead
from megatron_worker.engine import Batch, Outputs
from megatron_worker.losses import loss_function
from megatron_worker.tensors.slot_engine import Engine
from tests.megatron_worker.rows import Row, bin_of, empty_bin, random_rows

HEADS = {"token": ScalarHead(), "sequence": ScalarHead(names=("helpful", "true", "short"), per="sequence")}
LOSSES = {"token": SquaredError(), "sequence": SquaredError(scalar=1)}
KINDS = {"token": "AutoModelForTokenClassification", "sequence": "AutoModelForSequenceClassification"}
ADAM = Adam(weight_decay=0.01, clip_norm=1.0, eps=1e-5)  # above rounding, whose sign a first step would else take


@dataclass(frozen=True)
class ScoredRow:
    """A row, and what is to be learnt: of each token that has a weight, or of the last one alone."""

    row: Row
    values: list[float]


def scored_rows(per: str, lengths: Sequence[int], seed: int) -> list[ScoredRow]:
    generator = torch.Generator().manual_seed(seed)
    rows = random_rows(lengths, seed=seed)
    return [ScoredRow(row, torch.randn(len(row.ids), generator=generator).tolist()) for row in rows]


def scored_bin(per: str, rows: Sequence[ScoredRow]) -> Batch:
    """A bin whose targets are the states before the weighted tokens, or those of the last ones."""
    if not rows:
        return empty_bin()
    if per == "token":
        values = [v for r in rows for v, weight in zip(r.values, r.row.weights, strict=True) if weight]
        return dataclasses.replace(bin_of([r.row for r in rows]), advantage_N=torch.tensor(values))
    batch = Batch.of_sequences([r.row.ids for r in rows], torch.device("cpu"))
    values_N = torch.tensor([r.values[-1] for r in rows])
    return dataclasses.replace(batch, weight_N=torch.ones(len(rows)), advantage_N=values_N)


def total_weight(per: str, rows: Sequence[ScoredRow]) -> float:
    return float(len(rows)) if per == "sequence" else sum(sum(r.row.weights) for r in rows)


def values(engine: Engine, batch: Batch) -> Tensor:
    with torch.no_grad():
        found = engine.forward(batch, Outputs(logprob=False, values=True))
    assert found.value_NL is not None and found.value_NL.dtype == torch.float32 and found.logprob_N is None
    return found.value_NL


def step(engine: Engine, per: str, bins: Sequence[Sequence[ScoredRow]], learning_rate: float) -> tuple[float, float]:
    """One update by bins that are dealt round the data-parallel ranks. Returns loss and gradient norm."""
    facts, zero = engine.facts, torch.zeros((), dtype=torch.float64)
    turns = -(-len(bins) // facts.dp_size)
    own = list(bins[facts.dp_rank :: facts.dp_size])
    own += [[]] * (turns - len(own))
    sums = {"loss": zero, "weight": zero}
    batches = [scored_bin(per, rows) for rows in own]
    for _, found in engine.forward_backward_all(batches, loss_function(LOSSES[per])):
        sums = {name: sums[name] + found[name].double() for name in sums}
    reduced = engine.reduce(sums)
    norms = engine.optim_step(ADAM, learning_rate, reduced["weight"])
    return reduced["loss"] / reduced["weight"], norms.grad_norm


def bins_of_steps(per: str, num_steps: int = 20) -> list[list[list[ScoredRow]]]:
    """Steps of three bins each: under dp2 one rank has two of them, the other one and an empty one."""
    steps = [scored_rows(per, [20, 31, 12, 25, 9], seed=number) for number in range(num_steps)]
    return [[rows[:2], rows[2:4], rows[4:]] for rows in steps]


# transformers' own.


def transformers_head(model: Path, per: str, adapter: Path | None = None, num_scalars: int | None = None) -> Any:
    """transformers' model of a head, which drops nothing: of a folder with one, or of a language model's.

    `adapter`: PEFT's, with the head's weights. `num_scalars`: make a fresh head.
    """
    import transformers
    from peft import PeftModel

    num = num_scalars or (None if adapter is None else len(HEADS[per].names))
    found = getattr(transformers, KINDS[per]).from_pretrained(model, **({"num_labels": num} if num else {}))
    return (found if adapter is None else PeftModel.from_pretrained(found, adapter, is_trainable=True)).eval()


def reference_values(model: Any, per: str, rows: Sequence[ScoredRow]) -> Tensor:
    """The scalars of a bin's targets, a row at a time, [N, L]."""
    found = []
    for r in rows:
        value_TL = model(torch.tensor([r.row.ids])).logits[0]
        is_scored = torch.tensor(r.row.weights)[1:] > 0
        found.append(value_TL[None] if per == "sequence" else value_TL[:-1][is_scored])
    return torch.cat(found)


def loss_of(model: Any, per: str, rows: Sequence[ScoredRow]) -> Tensor:
    batch = scored_bin(per, rows)
    error_N = reference_values(model, per, rows)[:, LOSSES[per].scalar] - batch.advantage_N
    return (batch.weight_N * error_N.square()).sum() / batch.weight_N.sum()


def reference_step(
    model: Any, optimizer: torch.optim.Optimizer, per: str, rows: Sequence[ScoredRow]
) -> tuple[float, float]:
    loss = loss_of(model, per, rows)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], ADAM.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), float(norm)


def adamw(model: Any, learning_rate: float) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, weight_decay=ADAM.weight_decay, eps=ADAM.eps)


def lora(per: str) -> Lora:
    return Lora(rank=4, alpha=8, head=HEADS[per])
