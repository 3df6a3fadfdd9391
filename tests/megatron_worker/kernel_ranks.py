"""Run by the launcher, interpreted: each rank scans a shard of the vocabulary; all agree with the whole in float64."""

import torch
import torch.distributed as dist

from megatron_worker.engine import Outputs
from megatron_worker.head.logprobs import VocabShard, score_targets, set_policy
from megatron_worker.process.ranks import start_group
from tests.megatron_worker.test_head import gradient_of_both, reference

NUM_TARGETS, VOCAB_SIZE, HIDDEN_SIZE = 37, 301, 24


def check(rows_per_rank: int, dtype: torch.dtype, tolerance: float, temperature: float = 1.0) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    # Small whole numbers and a few of them: many logits are equal, within a shard and between shards.
    hidden_NH = torch.randint(-1, 2, (NUM_TARGETS, HIDDEN_SIZE), generator=generator).to(dtype).requires_grad_()
    weight_VH = torch.randint(-1, 2, (VOCAB_SIZE, HIDDEN_SIZE), generator=generator).to(dtype)
    label_N = torch.randint(0, VOCAB_SIZE, (NUM_TARGETS,), generator=generator)
    grad_N = torch.randn(NUM_TARGETS, generator=generator)
    logprob_N, entropy_N, _, _ = reference(hidden_NH.detach().double() / temperature, weight_VH, label_N, grad_N)
    by_hidden, by_weight = gradient_of_both(hidden_NH, weight_VH, label_N, grad_N, temperature)
    padding = torch.full((rows_per_rank * world_size - VOCAB_SIZE, HIDDEN_SIZE), 50.0, dtype=dtype)
    own = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
    shard_VH = torch.cat([weight_VH, padding])[own].clone().requires_grad_()
    shard = VocabShard(first=own.start, size=rows_per_rank, vocab_size=VOCAB_SIZE, group=dist.group.WORLD)
    outputs = Outputs(entropy=True, entropy_gradient=True, temperature=temperature, top_k=7)
    scores = score_targets(hidden_NH, shard_VH, label_N, outputs, shard)
    ((scores.logprob_N + 0.7 * scores.entropy_N) * grad_N).sum().backward()
    whole = torch.cat([by_weight, torch.zeros_like(padding).double()])[own]
    for ours, theirs in (
        (scores.logprob_N, logprob_N),
        (scores.entropy_N, entropy_N),
        (hidden_NH.grad, by_hidden),
        (shard_VH.grad, whole),
    ):
        assert (ours.double() - theirs).norm() <= tolerance * (theirs.norm() + 1e-3), (rank, ours, theirs)
    logit_NV = hidden_NH.detach().double() @ weight_VH.double().t() / temperature
    assert torch.equal(scores.top_id_NK, logit_NV.sort(dim=1, descending=True, stable=True).indices[:, :7])
    best_NK = logit_NV.log_softmax(1).gather(1, scores.top_id_NK)
    torch.testing.assert_close(scores.top_logprob_NK.double(), best_NK, rtol=1e-5, atol=1e-5)


def main() -> None:
    start_group("gloo")
    set_policy("strict")
    check(rows_per_rank=151, dtype=torch.float32, tolerance=1e-5)  # one row of padding
    check(rows_per_rank=VOCAB_SIZE, dtype=torch.float32, tolerance=1e-5)  # the second shard is all padding
    check(rows_per_rank=160, dtype=torch.float32, tolerance=1e-5, temperature=0.5)
    check(rows_per_rank=151, dtype=torch.bfloat16, tolerance=1e-2)
    print(f"rank {dist.get_rank()} agrees", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
