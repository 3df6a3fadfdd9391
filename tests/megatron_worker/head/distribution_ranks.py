"""Run by the launcher: each rank holds a shard of the vocabulary; divergences agree with the whole, in float64."""

import dataclasses
from typing import Literal

import torch
import torch.distributed as dist

from megatron_worker.engine import Divergence, Outputs
from megatron_worker.head.distributions import score_beside_teacher
from megatron_worker.head.logprobs import VocabShard, whole_vocabulary
from megatron_worker.process.ranks import start_group
from tests.megatron_worker.head.test_distributions import HIDDEN_SIZE, KINDS, SKEW, VOCAB_SIZE, Given, expected, score

EXACT = {"rtol": 1e-6, "atol": 1e-6}  # top_k's log-probabilities are float32


def check(rows_per_rank: int, tokens: Literal["all", "top_k"]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
    padding = torch.full((rows_per_rank * world_size - VOCAB_SIZE, HIDDEN_SIZE), 50.0, dtype=torch.float64)
    given = Given(torch.float64)
    shard = VocabShard(first=own.start, size=rows_per_rank, vocab_size=VOCAB_SIZE, group=dist.group.WORLD)
    batch = given.batch(tokens, given.logits(*given.leaves())[1].detach(), 4)
    for top_k in (0, 4):
        outputs, teacher_NH = Outputs(logprob=False, top_k=top_k, rest=True), given.teacher_NH
        shard_VH = torch.cat([given.weight_VH, padding])[own]
        told = score_beside_teacher(teacher_NH, shard_VH, batch, outputs, shard, None, chunk=3)
        whole = score_beside_teacher(teacher_NH, given.weight_VH, batch, outputs, whole_vocabulary(VOCAB_SIZE), None)
        assert torch.equal(told.top_id_NK, whole.top_id_NK)
        torch.testing.assert_close(told.top_logprob_NK, whole.top_logprob_NK, rtol=1e-12, atol=1e-12)
    for kind in KINDS:
        hidden_NH, weight_VH = given.leaves()
        shard_VH = torch.cat([weight_VH.detach(), padding])[own].clone().requires_grad_()
        outputs = Outputs(divergence=Divergence(kind, SKEW, tokens))
        found = score(given, (hidden_NH, shard_VH), dataclasses.replace(batch), outputs, 3, shard)
        found.divergence_N.backward(given.grad_N)
        value_N, by_hidden, by_weight = expected(given, kind, tokens, 4, 1.0)
        torch.testing.assert_close(found.divergence_N, value_N, **EXACT)
        torch.testing.assert_close(hidden_NH.grad, by_hidden, **EXACT)
        torch.testing.assert_close(shard_VH.grad, torch.cat([by_weight, torch.zeros_like(padding)])[own], **EXACT)


def main() -> None:
    start_group("gloo")
    for tokens in ("all", "top_k"):
        check(12, tokens)  # one row of padding
        check(VOCAB_SIZE, tokens)  # the second shard is all padding
    print(f"rank {dist.get_rank()} agrees", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
