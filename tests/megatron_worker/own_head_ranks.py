"""What ranks of a TrainerRank do with a head of their own: `… tests.megatron_worker.own_head_ranks OUT TRIALS`"""

import json
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors.torch import save_file
from torch import Tensor

from longshore.layout import EngineName, Layout
from longshore.training import Adam, Lora
from megatron_worker.trainer_rank import ForwardInput, TrainerRank, train_head
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.trials import given_trials

LORA = Lora(rank=4, alpha=8)
ADAM = Adam(weight_decay=0.01, clip_norm=1.0, eps=1e-5)
STEPS = [[row.ids for row in random_rows([20, 31, 12, 25], seed=seed)] for seed in range(4)]


class TwoLayers(torch.nn.Module):
    """A head of one's own: two numbers a token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.down, self.out = torch.nn.Linear(hidden_size, 8), torch.nn.Linear(8, 2, bias=False)

    def scores(self, hidden_NH: Tensor) -> dict[str, Tensor]:
        return dict(zip(("mean", "spread"), self.out(self.down(hidden_NH).tanh()).unbind(-1), strict=True))


class Trial(BaseModel):
    model: Path
    engine: EngineName
    layout: Layout = Layout()
    single: Path

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.layout.label}"


def loss_of(found: dict[str, Tensor]) -> Tensor:
    """Of one sequence: a number for each place, which is of no row's own."""
    target_P = torch.arange(len(found["mean"])).sin()
    return (found["mean"] - target_P).square().sum() + found["spread"].exp().sum()


def train(rank: TrainerRank, head: TwoLayers, first: int, end: int, name: str | None = "critic") -> list[float]:
    """Steps of the rows that are this rank's. Returns the norms."""
    norms = []
    for rows in STEPS[first:end]:
        own = rows[rank.facts.dp_rank :: rank.facts.dp_size]
        found = rank.forward([ForwardInput(ids, hidden=True, adapter=name) for ids in own])
        rank.backward(torch.stack([loss_of(head.scores(each.hidden_PH)) for each in found]).sum())
        norms.append(rank.optim_step(ADAM, 3e-3, float(len(rows)), [name])[name].grad_norm)
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


def main() -> None:
    for trial, out in given_trials(Trial):
        measure(trial, out / trial.name)


if __name__ == "__main__":
    main()
