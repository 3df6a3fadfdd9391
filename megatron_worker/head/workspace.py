"""Block sizes of the head's kernels and the memory that they take: numbers, without Triton.

Shape suffixes: N targets, H hidden size, V rows of this rank's shard, C targets of a chunk, K greatest logits kept, L
tiles of a row.
"""

from dataclasses import dataclass

import torch

WORKSPACE_BYTES = 256 << 20
# For each of a tile's greatest logits while the tiles are merged: value, id, and temporary keys.
CANDIDATE_BYTES = 36
_MOST_TARGETS = 4096  # of a chunk without workspace: their hidden states stay in the second-level cache
_ALIGNED = 64  # rows of the workspace begin where tensor cores like them to


@dataclass(frozen=True)
class Blocks:
    """A tile: `targets` by `rows`, the hidden size in steps of `hidden`. Powers of two, 16 or more."""

    targets: int
    rows: int
    hidden: int
    num_warps: int
    num_stages: int


def blocks_for(dtype: torch.dtype) -> Blocks:
    """Return blocks for tensor cores in half precision; float32 is exact, and does without them."""
    if dtype == torch.float32:
        return Blocks(targets=64, rows=64, hidden=32, num_warps=4, num_stages=2)
    return Blocks(targets=128, rows=128, hidden=64, num_warps=8, num_stages=3)


def padded(num_rows: int) -> int:
    return -(-num_rows // _ALIGNED) * _ALIGNED


def chunk_targets(num_targets: int, target_bytes: int, blocks: Blocks, workspace_bytes: int) -> int:
    """Return the targets of a chunk: as many whole tiles as the workspace holds, and one tile at least."""
    most = workspace_bytes // target_bytes // blocks.targets * blocks.targets if target_bytes else _MOST_TARGETS
    return min(max(most, blocks.targets), _MOST_TARGETS, num_targets)


def scan_target_bytes(num_rows: int, element_bytes: int, num_buffers: int, top_k: int, blocks: Blocks) -> int:
    """Return the bytes of the workspace that one target of a scan takes."""
    num_tiles, kept = -(-num_rows // blocks.rows), min(top_k, blocks.rows)
    return num_buffers * padded(num_rows) * element_bytes + num_tiles * kept * CANDIDATE_BYTES
