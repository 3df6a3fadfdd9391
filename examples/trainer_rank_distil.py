"""Distillation, written out: a student adapter learns a teacher adapter's most probable tokens at every position.

Teacher and student share one base. The loss is the divergence KL(teacher || student) over the teacher's top k
and one bucket for all other tokens.

    python -m examples.trainer_rank_distil MODEL TEACHER_ADAPTER STUDENT_ADAPTER [--steps 30]
    torchrun --nproc_per_node 2 -m examples.trainer_rank_distil ...
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longshore.trainer_rank import ForwardInput, TopK, TrainerRank, start
from longshore.training import Adam, Lora


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("teacher", type=Path, help="folder of a PEFT adapter")
    parser.add_argument("student", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-tokens", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    options = parser.parse_args(arguments)

    rank = start(options.model)
    rank.load_adapter("teacher", options.teacher, trainable=False)
    rank.create_adapter("student", Lora(rank=8, alpha=16), seed=0)
    generator = random.Random(0)
    for step in range(options.steps):
        batch = [
            [generator.randrange(3, rank.facts.vocab_size) for _ in range(options.sequence_tokens)]
            for _ in range(options.batch_size)
        ]
        divergence = train_step(rank, batch, options.top_k, options.learning_rate)
        if rank.facts.rank == 0:
            print(json.dumps({"step": step + 1, "divergence": divergence}), flush=True)
    rank.export("student", options.student)


def train_step(rank: TrainerRank, batch: list[list[int]], k: int, learning_rate: float) -> float:
    """Return the mean divergence per position. Each rank computes the teacher's targets of its own sequences."""
    total = torch.zeros((), dtype=torch.float64)
    own = batch[rank.facts.dp_rank :: rank.facts.dp_size]
    taught = teach(rank, own, k)
    asked = [ForwardInput(ids, labels=top.id_PK) for ids, top in zip(own, taught, strict=True)]
    loss = torch.zeros((), device=rank.facts.device)
    for output, top in zip(rank.forward(asked), taught, strict=True):
        loss = loss + divergence(top.logprob_PK, output.label_logprob_PK)
    rank.backward(loss)
    total += loss.detach().cpu()
    positions = torch.tensor(float(sum(map(len, own))))
    sums = rank.reduce({"divergence": total, "positions": positions})
    rank.optim_step(Adam(), learning_rate, denominator=sums["positions"])
    return sums["divergence"] / sums["positions"]


def teach(rank: TrainerRank, sequences: list[list[int]], k: int) -> list[TopK]:
    with torch.no_grad(), rank.adapter("teacher"):
        outputs = rank.forward([ForwardInput(ids, top_k=k) for ids in sequences])
    return [output.top_k for output in outputs]


def divergence(teacher_PK: Tensor, student_PK: Tensor) -> Tensor:
    """KL(teacher || student) summed over positions, in nats, all tokens that are not named in one bucket."""
    teacher_PB, student_PB = (torch.cat([x, rest(x)], dim=1) for x in (teacher_PK, student_PK))
    return (teacher_PB.exp() * (teacher_PB - student_PB)).sum()


def rest(logprob_PK: Tensor) -> Tensor:
    """The log-probability of everything else, [P, 1]."""
    named_P1 = logprob_PK.exp().sum(dim=1, keepdim=True)
    return torch.log1p(-named_P1.clamp(max=1 - 1e-6))


if __name__ == "__main__":
    main()
