"""About how much memory a rank's weights and training state take under a layout, from sizes alone.

What passes hold (activations, logits) is not in it: a worker measures that for itself (megatron_worker/memory).
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from longshore.layout import EngineName, Layout
from longshore.training import Linear, Lora
from shared.models.shape import ModelShape

_LAYER = re.compile(r"layers\.(\d+)\.")
_SPLIT_INPUTS = ("o_proj", "down_proj", "out_proj")  # tensor parallelism splits these by input, others by output
_MASTER_BYTES, _ADAM_BYTES, _GRADIENT_BYTES = 4, 8, 4


class RankBytes(NamedTuple):
    """Bytes on the rank that holds the most: of the frozen base, and of all beside it or in its place for training."""

    base: int
    lora: int
    full: int


def rank_bytes(
    tensors: Mapping[str, tuple[int, ...]],
    shape: ModelShape,
    layout: Layout,
    engine: EngineName,
    item_bytes: int,
    lora: Lora,
) -> RankBytes:
    """Estimate what a rank holds of a model.

    Args:
        tensors: the shapes of its weights, by Hugging Face's names, without those that are not computed.
        item_bytes: of a number of its weights: 2 in bfloat16, 4 in float32.

    Returns:
        The frozen base alone; with an adapter, its gradients and AdamW's state; and the same of full training.
    """
    if engine == "fsdp":
        total = -(-sum(math.prod(dims) for dims in tensors.values()) // layout.dp)
        return _trained(total, _adapter_size(shape, Layout(), lora), 1, item_bytes, 1)
    base = _largest_stage(tensors, shape, layout)
    copies = layout.dp * layout.cp  # over which AdamW's state is split
    return _trained(base, _adapter_size(shape, layout, lora), copies, item_bytes, copies)


def _trained(base: int, adapter: int, adapter_copies: int, item_bytes: int, base_copies: int) -> RankBytes:
    state = _ADAM_BYTES + (_MASTER_BYTES if item_bytes < _MASTER_BYTES else 0)
    held = base * item_bytes
    of_adapter = adapter * (item_bytes + _GRADIENT_BYTES) + adapter * state // adapter_copies
    return RankBytes(held, held + of_adapter, held + base * _GRADIENT_BYTES + base * state // base_copies)


def _largest_stage(tensors: Mapping[str, tuple[int, ...]], shape: ModelShape, layout: Layout) -> int:
    """Count the parameters of the rank of a pipeline that has the most."""
    stages = [0] * layout.pp
    is_tied = "lm_head.weight" not in tensors
    for name, dims in tensors.items():
        size = -(-math.prod(dims) // _ways(name, dims, layout))
        if match := _LAYER.search(name):
            stages[int(match[1]) * layout.pp // shape.num_layers] += size
        elif "embed_tokens" in name:
            stages[0] += size
            stages[-1] += size if is_tied and layout.pp > 1 else 0
        else:
            stages[-1] += size
    return max(stages)


def _ways(name: str, dims: tuple[int, ...], layout: Layout) -> int:
    """Return over how many ranks a tensor is split."""
    if ".experts." in name:
        return layout.ep * layout.etp
    return layout.tp if len(dims) > 1 and not name.endswith((".gate.weight", "_gate.weight")) else 1


def _adapter_size(shape: ModelShape, layout: Layout, lora: Lora) -> int:
    """Count the numbers of an adapter on a rank: of each linear one factor is split as it is, and one is whole."""
    total = 0
    for linear in lora.targets:
        num = shape.num_linears((linear,))
        if shape.num_experts and linear in ("gate_proj", "up_proj", "down_proj"):
            experts = shape.num_experts * shape.num_layers
            total += -(-experts // layout.ep) * _factors(shape, linear, layout.etp, lora.rank, is_shared=False)
            total += (num - experts) * _factors(shape, linear, layout.tp, lora.rank, is_shared=True)
        else:
            total += num * _factors(shape, linear, layout.tp, lora.rank, is_shared=False)
    return -(-total // layout.pp)


def _factors(shape: ModelShape, linear: Linear, ways: int, rank: int, is_shared: bool) -> int:
    in_size, out_size = shape.linear_size(linear, is_shared)
    if linear in _SPLIT_INPUTS:
        return rank * (in_size // ways + out_size)
    return rank * (in_size + out_size // ways)
