"""The shape of a model: its sizes, the layouts that hold it, and the memory that it needs."""

import math
import re
from collections.abc import Container, Mapping
from typing import Literal

from pydantic import Field

from longshore.fields import Frozen
from longshore.training import LINEARS, EngineName, Layout, Linear, Lora, Target, broken_rule
from shared.errors import InvalidInput
from shared.jobs.packed import RouteShape

# --- The sizes of a model that limit its layouts and adapters, and the layouts and engines that can hold it ---

Of = Literal["", "experts", "shared"]
"""Whose linear it is: a layer's, one of its experts', or its shared expert's."""
Sizes = tuple[int, int]


class LinearShape(Frozen):
    """The sizes of a linear's input and output in the layers that have it, `num` times in each."""

    name: Linear
    of: Of = ""
    inputs: int
    outputs: int
    num: int = 1
    layers: tuple[int, ...]


class ModelShape(Frozen):
    """The sizes of a model that limit its layouts, read from a Hugging Face `config.json`.

    Attributes:
        num_kv_heads: a common divisor of all layers' numbers.
        ffn_size: of MLPs; 0: all layers have experts, or nothing. `shared_ffn_size`: of the expert of all tokens.
        split_too: other sizes that tensor parallelism splits, by name: those of recurrent layers.
        has_stacked_experts: experts are stored together and cannot be adapted.
        needs_one_stage: layers use keys and values of other layers, or have embeddings of their own.
        routes: None without experts.
        max_positions: the longest sequence before rope scaling depends on the length.
        trains_by_fsdp: see DenseConfig; not recorded, as whoever checks layouts has read the model.
        sizes: of all linears of layers that can be adapted. Empty: not one of our families, so unknown.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    num_experts: int = 0
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0
    split_too: dict[str, int] = Field(default_factory=dict)
    has_stacked_experts: bool = False
    needs_one_stage: bool = False
    routes: RouteShape | None = None
    max_positions: int | None = None
    trains_by_fsdp: bool = Field(default=True, exclude_if=lambda _: True)
    sizes: tuple[LinearShape, ...] = ()

    @property
    def is_generic(self) -> bool:
        """True if it is not known which linears the model has."""
        return not self.sizes

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears that any layer has."""
        own = {size.name for size in self.sizes}
        return tuple(name for name in LINEARS if name in own or self.is_generic)

    def num_linears(self, targets: Container[Target]) -> int:
        """Count the linears that an adapter adapts. Those of an MLP count once for each expert."""
        return sum(size.num * len(size.layers) for size in self.sizes if size.name in targets)

    def linear_size(self, linear: Target, of: Of, layer: int) -> Sizes:
        """Return the sizes of a linear's input and output; 0: not known."""
        if linear in ("lm_head", "embed_tokens"):
            sizes = self.hidden_size, self.vocab_size
            return sizes if linear == "lm_head" else sizes[::-1]
        found = (s for s in self.sizes if (s.name, s.of) == (linear, of) and layer in s.layers)
        return next(((size.inputs, size.outputs) for size in found), (0, 0))


def check_layout(layout: Layout, shape: ModelShape, engine: EngineName = "megatron") -> None:
    """Refuse a layout, or an engine, that cannot hold the model.

    Raises InvalidInput: names the dimension and the rule that it breaks.
    """
    if rule := broken_rule(engine, layout):
        raise InvalidInput(rule, "layout")
    if engine == "fsdp" and not shape.trains_by_fsdp:
        raise InvalidInput(f"the engine fsdp does not train {shape.family}: use megatron", "engine")
    for name, size in (
        ("attention heads", shape.num_heads),
        ("key/value heads", shape.num_kv_heads),
        ("feed-forward size", shape.ffn_size),
        ("channels of its shared expert", shape.shared_ffn_size),
        *shape.split_too.items(),
    ):
        if size % layout.tp:
            raise InvalidInput(f"tp={layout.tp} does not divide the model's {size} {name}", "layout.tp")
    if layout.sp and layout.tp == 1:
        raise InvalidInput("sp shares tokens out over tensor-parallel ranks: it needs tp of at least 2", "layout.sp")
    if layout.pp > shape.num_layers:
        message = f"pp={layout.pp} stages need a layer each, the model has {shape.num_layers}"
        raise InvalidInput(message, "layout.pp")
    if layout.pp > 1 and shape.needs_one_stage:
        what = "keys and values that layers share, and embeddings of each layer"
        raise InvalidInput(f"pp={layout.pp}: stages do not pass on {what}", "layout.pp")
    _check_experts(layout, shape, engine)


def check_max_tokens(max_tokens: int | None, shape: ModelShape) -> None:
    """Raise InvalidInput if sequences may be longer than the model supports."""
    if max_tokens is not None and shape.max_positions is not None and max_tokens > shape.max_positions:
        rule = f"by its rope scaling this model is computed for sequences of up to {shape.max_positions}"
        raise InvalidInput(f"max_tokens={max_tokens}: {rule}", "max_tokens")


def _check_experts(layout: Layout, shape: ModelShape, engine: EngineName) -> None:
    if not shape.num_experts:
        for name, degree in (("ep", layout.ep), ("etp", layout.etp)):
            if degree > 1:
                raise InvalidInput(f"{name}={degree}: the model has no experts to split", f"layout.{name}")
        return
    if engine == "fsdp" and layout.tp > 1:
        raise InvalidInput("tp: the engine fsdp splits no experts: use dp, or the engine megatron", "layout.tp")
    if layout.tp > 1 and not layout.sp:
        raise InvalidInput("a model with experts needs sp with tp: each rank routes tokens of its own", "layout.sp")
    if shape.num_experts % layout.ep:
        raise InvalidInput(f"ep={layout.ep} does not divide the model's {shape.num_experts} experts", "layout.ep")
    if layout.etp > 1 and shape.has_stacked_experts:
        raise InvalidInput(f"etp={layout.etp}: this model's experts are stored together and not split", "layout.etp")
    if shape.expert_ffn_size % layout.etp:
        message = f"etp={layout.etp} does not divide the experts' feed-forward size {shape.expert_ffn_size}"
        raise InvalidInput(message, "layout.etp")
    stage = layout.tp * layout.cp * layout.dp
    if stage % (layout.ep * layout.etp):
        message = f"ep * etp = {layout.ep * layout.etp} does not divide tp * cp * dp = {stage}"
        raise InvalidInput(message, "layout.ep")


# --- Estimates the memory of a rank's weights and training state under a layout, from sizes alone ---
#
# Activations and logits are not included: a worker measures those itself (megatron_worker/memory).

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
        is_gate = name.endswith((".gate.weight", "_gate.weight"))
        ways = layout.tp if len(dims) > 1 and not is_gate else 1  # the ranks that it is split over
        size = -(-math.prod(dims) // (layout.ep * layout.etp if ".experts." in name else ways))
        if match := _LAYER.search(name):
            stages[int(match[1]) * layout.pp // shape.num_layers] += size
        elif "embed" in name:  # also embeddings per layer
            stages[0] += size
            stages[-1] += size if is_tied and layout.pp > 1 else 0
        else:
            stages[-1] += size
    return max(stages)


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
