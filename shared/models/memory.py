"""Estimates the memory of a rank's weights and training state under a layout, from sizes alone.

Activations and logits are not included: a worker measures those itself (megatron_worker/memory).
"""

import math
import re
from collections.abc import Mapping

from longshore.fields import Frozen
from longshore.layout import EngineName, Layout
from longshore.training import Lora
from shared.errors import InvalidInput
from shared.models.shape import ModelShape, check_layout

Shapes = Mapping[str, tuple[int, ...]]
Laid = tuple[EngineName, Layout]
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
"""Of a number of the weights, by a run's precision."""
_LAYER = re.compile(r"layers\.(\d+)\.")
_SPLIT_INPUTS = ("o_proj", "down_proj", "out_proj")  # tensor parallelism splits these by input, others by output
_MASTER_BYTES, _ADAM_BYTES, _GRADIENT_BYTES = 4, 8, 4


class LayoutBytes(Frozen):
    """A layout, and an estimate of the bytes of the rank that holds the most; or why it cannot hold the model.

    `base_bytes`: the frozen weights; `lora_bytes` and `full_bytes`: the weights with everything that training an
    adapter, or every weight, adds.
    """

    engine: EngineName
    layout: str
    base_bytes: int = 0
    lora_bytes: int = 0
    full_bytes: int = 0
    refused: str | None = None


def layout_bytes(tensors: Shapes, item_bytes: int, shape: ModelShape, lora: Lora, laid: Laid) -> LayoutBytes:
    """Estimate what a rank holds of a model.

    Args:
        tensors: the shapes of its weights, by Hugging Face's names, without those that we do not use.
        item_bytes: bytes per parameter: 2 in bfloat16, 4 in float32.
    """
    engine, layout = laid
    try:
        check_layout(layout, shape, engine)
    except InvalidInput as error:
        return LayoutBytes(engine=engine, layout=layout.label, refused=str(error))
    if engine == "fsdp":  # the base and its state are split over all ranks
        base, adapter = sum(map(math.prod, tensors.values())) // layout.dp, _adapter_size(shape, Layout(), lora)
    else:
        base, adapter = _largest_stage(tensors, shape, layout), _adapter_size(shape, layout, lora)
    state = _ADAM_BYTES + (_MASTER_BYTES if item_bytes < _MASTER_BYTES else 0)
    copies = 1 if engine == "fsdp" else layout.dp * layout.cp  # that AdamW's state is split over
    held = base * item_bytes
    return LayoutBytes(
        engine=engine,
        layout=layout.label,
        base_bytes=held,
        lora_bytes=held + adapter * (item_bytes + _GRADIENT_BYTES) + adapter * state // copies,
        full_bytes=held + base * _GRADIENT_BYTES + base * state // copies,
    )


def _largest_stage(tensors: Shapes, shape: ModelShape, layout: Layout) -> int:
    """Count the parameters of the rank of a pipeline that has the most."""
    stages = [0] * layout.pp
    is_tied = not any(name.endswith("lm_head.weight") for name in tensors)
    for name, dims in tensors.items():
        size = -(-math.prod(dims) // _ways(name, dims, layout))
        if match := _LAYER.search(name):
            stages[int(match[1]) * layout.pp // shape.num_layers] += size
        elif "embed" in name:  # also embeddings per layer
            stages[0] += size
            stages[-1] += size if is_tied and layout.pp > 1 else 0
        else:
            stages[-1] += size
    return max(stages)


def _ways(name: str, dims: tuple[int, ...], layout: Layout) -> int:
    """Return the number of ranks that a tensor is split over."""
    if ".experts." in name:
        return layout.ep * layout.etp
    return layout.tp if len(dims) > 1 and not name.endswith((".gate.weight", "_gate.weight")) else 1


def _adapter_size(shape: ModelShape, layout: Layout, lora: Lora) -> int:
    """Count an adapter's parameters on a rank: for each linear one factor is split like it, the other is whole."""
    total = 0
    for size in shape.sizes:
        if size.name in lora.targets:
            ways, ranks = (layout.etp, layout.ep) if size.of == "experts" else (layout.tp, 1)
            whole, split = size.outputs, size.inputs
            if size.name not in _SPLIT_INPUTS:
                whole, split = split, whole
            total += size.num * len(size.layers) * lora.rank * (whole + split // ways) // ranks
    return total // layout.pp
