"""What context parallelism costs a recurrent layer: bytes that a rank keeps for the backward, and floating-point work.

    python -m benchmarks.recurrent_context [--tokens 2048] [--branches 16] [--out FILE.json]

The layer is Qwen3.5-35B-A3B's gated delta net between its linears: 16 key heads and 32 value heads of 128, a
convolution over 4 tokens; and a Mamba-2 mixer of as many heads, with a state of 128. A bin is one sequence of
`--tokens`, or a tree: a prompt of half of them with `--branches` branches. Each of `cp` ranks computes its share of the
forward and the backward here, one after the other. A rank's own rows stand in for those that others would give: they
have the same shapes, so that bytes and work are exact. Times are not shown.

Bytes are those of different storages that autograd keeps, the layer's inputs among them; the rank with most counts.
FLOPs are those of matrix products (torch's counter; it leaves out triangular systems, which are 64 tokens wide at most
and grow with a rank's tokens). `over one rank` is the sum over ranks, divided by that of one rank.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import provenance
from megatron_worker.mixers.linear_attention import (
    RecurrentPlan,
    Share,
    convolve,
    gated_delta_rule,
    plan_recurrence,
    scan,
    with_ancestors,
)

_KEY_HEADS, _HEADS, _SIZE, _WIDTH = 16, 32, 128, 4


def _delta_net(mixed_TJ: Tensor, small_TX: Tensor, plan: RecurrentPlan) -> Tensor:
    weight = mixed_TJ.new_ones(mixed_TJ.shape[1], _WIDTH)
    query, key, value = (
        F.silu(convolve(with_ancestors(mixed_TJ, plan), weight)).unflatten(1, (-1, _SIZE)).split([16, 16, 32], dim=1)
    )
    decay, step = small_TX.chunk(2, dim=-1)
    return gated_delta_rule(query, key, value, -decay.exp(), step.sigmoid(), plan)[0]


def _mamba(mixed_TJ: Tensor, small_TX: Tensor, plan: RecurrentPlan) -> Tensor:
    weight = mixed_TJ.new_ones(mixed_TJ.shape[1], _WIDTH)
    query, key, value = (
        F.silu(convolve(with_ancestors(mixed_TJ, plan), weight)).unflatten(1, (-1, _SIZE)).split([16, 16, 32], dim=1)
    )
    decay, step = small_TX.chunk(2, dim=-1)
    return scan(value, key, query, step.sigmoid(), -decay.exp(), plan)[0]


_LAYERS: dict[str, Callable[[Tensor, Tensor, RecurrentPlan], Tensor]] = {
    "gated delta net": _delta_net,
    "Mamba-2": _mamba,
}


def parents(num_tokens: int, num_branches: int) -> Tensor:
    """Return the parents of one sequence, or of a prompt of half the tokens with branches that share the rest out."""
    parent_T = torch.arange(num_tokens) - 1
    half = num_tokens // 2
    for branch in range(num_branches):
        parent_T[half + branch * half // num_branches] = half - 1
    return parent_T


def measure(layer: str, parent_T: Tensor, num_ranks: int) -> list[tuple[int, int]]:
    """Return for each rank the bytes that it keeps, and the FLOPs of its forward and backward."""
    size = len(parent_T) // (2 * num_ranks)
    chunks = [slice(k * size, (k + 1) * size) for k in range(2 * num_ranks)]
    parts = tuple((chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks))
    found = []
    for rank in range(num_ranks):
        share = None
        if num_ranks > 1:
            share = Share(rank, parts, lambda rows: torch.cat([rows] * num_ranks))
        plan = plan_recurrence(parent_T, _WIDTH, share)
        num_tokens = len(plan.place_T)
        mixed_TJ = torch.randn(num_tokens, (2 * _KEY_HEADS + _HEADS) * _SIZE, requires_grad=True)
        small_TX = torch.randn(num_tokens, 2 * _HEADS, requires_grad=True)
        kept: dict[int, int] = {}

        def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with FlopCounterMode(display=False) as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                output = _LAYERS[layer](mixed_TJ, small_TX, plan)
            output.sum().backward()
        found.append((sum(kept.values()), counter.get_total_flops()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for layer in _LAYERS:
        for bin_name, branches in (("one sequence", 0), (f"a prompt with {given.branches} branches", given.branches)):
            whole = None
            for num_ranks in (1, 2, 4):
                found = measure(layer, parents(given.tokens, branches), num_ranks)
                kept, work = max(kept for kept, _ in found), sum(flops for _, flops in found)
                whole = whole or (kept, work)
                row = {
                    "layer": layer,
                    "bin": bin_name,
                    "cp": num_ranks,
                    "MiB a rank keeps": round(kept / 2**20, 1),
                    "of one rank's": round(kept / whole[0], 3),
                    "GFLOP a rank, at most": round(max(flops for _, flops in found) / 1e9, 2),
                    "FLOPs over one rank": round(work / whole[1], 3),
                }
                print(row, flush=True)
                rows.append(row)
    if given.out is not None:
        given.out.write_text(json.dumps({**provenance(), "tokens": given.tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
