"""Run by the launcher: each rank holds a shard of the vocabulary; all must agree with the whole, in float64."""

import torch
import torch.distributed as dist

from megatron_worker.engine import Outputs
from megatron_worker.head.logprobs import VocabShard, score_targets
from megatron_worker.head.torch_tiles import TileSize
from megatron_worker.process.ranks import start_group
from tests.megatron_worker.test_head import HIDDEN_SIZE, VOCAB_SIZE, gradient_of_both, inputs, reference


def check(rows_per_rank: int, tile: TileSize) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hidden_NH, weight_VH, label_N, grad_N = inputs(torch.float64)
    logprob_N, entropy_N, by_hidden, by_weight = reference(hidden_NH, weight_VH, label_N, grad_N)
    padding = torch.full((rows_per_rank * world_size - VOCAB_SIZE, HIDDEN_SIZE), 50.0, dtype=torch.float64)
    padded_VH, own = torch.cat([weight_VH.detach(), padding]), slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
    shard_VH = padded_VH[own].clone().requires_grad_()
    shard = VocabShard(first=own.start, size=rows_per_rank, vocab_size=VOCAB_SIZE, group=dist.group.WORLD)
    scores = score_targets(hidden_NH, shard_VH, label_N, Outputs(entropy=True), shard, tile)
    scores.logprob_N.backward(grad_N)
    torch.testing.assert_close(scores.logprob_N, logprob_N, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores.entropy_N, entropy_N, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden_NH.grad, by_hidden, rtol=1e-12, atol=1e-12)
    whole = torch.cat([by_weight, torch.zeros_like(padding)])[own]
    torch.testing.assert_close(shard_VH.grad, whole, rtol=1e-12, atol=1e-12)


def check_entropy(rows_per_rank: int, tile: TileSize, temperature: float = 1.0) -> None:
    """The gradient of the entropy, each shard with maxima of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hidden_NH, weight_VH, label_N, grad_N = inputs(torch.float64)
    by_hidden, by_weight = gradient_of_both(hidden_NH, weight_VH, label_N, grad_N, temperature)
    padding = torch.full((rows_per_rank * world_size - VOCAB_SIZE, HIDDEN_SIZE), 50.0, dtype=torch.float64)
    own = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
    shard_VH = torch.cat([weight_VH.detach(), padding])[own].clone().requires_grad_()
    shard = VocabShard(first=own.start, size=rows_per_rank, vocab_size=VOCAB_SIZE, group=dist.group.WORLD)
    outputs = Outputs(entropy=True, entropy_gradient=True, temperature=temperature)
    scores = score_targets(hidden_NH, shard_VH, label_N, outputs, shard, tile)
    ((scores.logprob_N + 0.7 * scores.entropy_N) * grad_N).sum().backward()
    torch.testing.assert_close(hidden_NH.grad, by_hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        shard_VH.grad, torch.cat([by_weight, torch.zeros_like(padding)])[own], rtol=1e-12, atol=1e-12
    )


def main() -> None:
    start_group("gloo")
    check(rows_per_rank=51, tile=TileSize(10, 16))  # one row of padding
    check(rows_per_rank=VOCAB_SIZE, tile=TileSize(256, 2048))  # the second shard is all padding
    check_entropy(rows_per_rank=51, tile=TileSize(10, 16))
    check_entropy(rows_per_rank=VOCAB_SIZE, tile=TileSize(256, 2048))
    check_entropy(rows_per_rank=51, tile=TileSize(10, 16), temperature=0.4)
    print(f"rank {dist.get_rank()} agrees", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
