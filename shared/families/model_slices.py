"""The shape of a model by its architecture, and what the tensors of a model's folder are."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from longshore.training import LINEARS, Linear
from shared.errors import InvalidInput
from shared.families.architecture import Architecture, Mixture, Mlp, Recurrent, SharedAttention, output_name
from shared.families.config import DenseConfig
from shared.families.tensor_slices import TensorSlice
from shared.jobs.packed import RouteShape
from shared.models.merging import FLOATS, FP8_SCALES, Part, fp8_scale_shape, parts_of
from shared.models.peft import OUTPUT, UNREAD, layer_of
from shared.models.shape import LinearShape, ModelShape, Of, Sizes

# --- The sizes that limit a model's layouts and adapters ---


def shape_of(config: DenseConfig) -> ModelShape:
    """Return the shape of a configuration, by its architecture; a generic one has none, and only sizes."""
    a = config.architecture()
    mlps = [mlp for mlp in a.mlps if isinstance(mlp, Mlp)]
    mixture = next((mlp for mlp in a.mlps if isinstance(mlp, Mixture)), None)
    beside = mixture.shared_ffn_size if mixture and mixture.stacks else 0
    has_stacks = mixture is not None and (mixture.stacked is not None or mixture.stacks is not None)
    return ModelShape(
        family=a.family,
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=math.gcd(*(config.heads_of(layer)[1] for layer in range(a.num_layers))),
        ffn_size=config.intermediate_size if a.is_generic else math.gcd(beside, *(mlp.ffn_size for mlp in mlps)),
        vocab_size=a.vocab_size,
        num_experts=a.num_experts,
        expert_ffn_size=mixture.ffn_size if mixture else 0,
        shared_ffn_size=mixture.shared_ffn_size if mixture and not mixture.stacks else 0,
        split_too=dict(mixer.split_too for mixer in a.mixers if isinstance(mixer, Recurrent)),
        has_stacked_experts=has_stacks,
        needs_one_stage=bool(a.block and a.block.per_layer_size)
        or any(isinstance(mixer, SharedAttention) and mixer.source is not None for mixer in a.mixers),
        routes=mixture and _routes(a, mixture),
        max_positions=a.max_positions,
        sizes=() if a.is_generic else _linear_shapes(a),
        trains_by_fsdp=config.trains_by_fsdp and a.conv_width is None and not has_stacks,
    )


def _routes(a: Architecture, mixture: Mixture) -> RouteShape:
    """Return the shape of a token's expert routes."""
    has_experts = tuple(isinstance(mlp, Mixture) for mlp in a.mlps)
    return RouteShape(
        num_layers=has_experts.count(True),
        num_experts=mixture.num_experts,
        per_token=mixture.experts_per_token,
        has_experts=() if all(has_experts) else has_experts,
    )


def _linear_shapes(a: Architecture) -> tuple[LinearShape, ...]:
    """Return the linears of layers that an adapter can be beside, by the tensors of the architecture."""
    num_in_layer = Counter[tuple[str, Of, Sizes, int]]()
    for s in a.slices(tp=1):
        layer, (name, suffix) = layer_of(s.name), s.name.split(".")[-2:]
        takes_adapter = s.takes_adapter and suffix == "weight" and name in LINEARS and UNREAD not in s.name
        if layer is not None and takes_adapter:
            of: Of = "experts" if s.expert is not None else "shared" if f".{a.names.shared_expert}." in s.name else ""
            num_in_layer[name, of, (s.shape[1], s.shape[0]), layer] += 1
    layers = defaultdict[tuple[str, Of, Sizes, int], list[int]](list)
    for (name, of, sizes, layer), num in num_in_layer.items():
        layers[name, of, sizes, num].append(layer)
    return tuple(
        LinearShape(name=cast(Linear, name), of=of, inputs=sizes[0], outputs=sizes[1], num=num, layers=tuple(own))
        for (name, of, sizes, num), own in layers.items()
    )


# --- Matches each tensor of a model's folder with its architecture: it is used, copied unchanged, or refused ---
#
# The control plane does this before a lease, and a worker when it loads the model. Only names, shapes and types count,
# which are in the files' headers. The table of slices has one tensor per expert; published folders may store a layer's
# experts as one stack of [experts, rows, columns], gates above ups, and a weight in MXFP4 or FP8 as two tensors.

BLOCKS, SCALES, BLOCK_BYTES = "_blocks", "_scales", 16
"""What the names of MXFP4's two tensors end with, and the bytes of a block."""
_IGNORED = "rotary_emb.inv_freq"  # a buffer that old checkpoints carry
_EMBEDDING = "embed_tokens.weight"
_LAYER_BEHIND = re.compile(r".*\.layers\.\d+\.")


class Stored(NamedTuple):
    """A tensor of a file: its type by safetensors' name, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    """How a folder stores the slices.

    Attributes:
        parts: for slices in a stack, their part of it, by name. Other slices are stored under their own names.
        tied: the output layer, and the embedding that it must equal: the model ties them, but has a tensor for both.
    """

    parts: dict[str, Part]
    tied: tuple[str, str] | None


def contents_of(
    slices: Sequence[TensorSlice],
    carried: Sequence[str],
    found: Mapping[str, Stored],
    place: str,
    is_fp8: bool = True,
) -> Contents:
    """Match a folder's tensors with those of an architecture.

    Args:
        slices: all tensors that we use (`slices` and `constants` of its Architecture), for any number of ranks.
        carried: prefixes of the model's tensors that we do not use.
        is_fp8: config.json says that weights may be in FP8.

    Raises:
        InvalidInput: a tensor is missing, unknown, of another shape, or of an unsupported type; names it.
    """
    found = unpacked(found, tuple(carried), place, is_fp8)
    parts, shapes = stacked(slices, found), {s.name: s.shape for s in slices if s.name in found}
    num_experts = 1 + max((s.expert for s in slices if s.expert is not None), default=-1)
    for s in slices:
        if part := parts.get(s.name):
            height = found[part.stack].shape[1] // part.num_rows * s.shape[0]
            shapes[part.stack] = num_experts, height, s.shape[1]
    for name, shape in shapes.items():
        if found[name].dtype not in FLOATS:
            problem = f"tensor {name} is {found[name].dtype}; weights must be one of {', '.join(FLOATS)}"
            raise InvalidInput(problem, place)
        if found[name].shape != shape:
            raise InvalidInput(f"tensor {name} is {found[name].shape}, config.json says {shape}", place)
    needed = [s.name for s in slices if s.name not in parts]
    needed += [  # a layer of multi-token prediction, after the decoder's, must have its `eh_proj`
        f"{start}eh_proj.weight"
        for start in carried
        if _LAYER_BEHIND.fullmatch(start) and any(name.startswith(start) for name in found)
    ]
    embedding = next((s.name for s in slices if s.name.endswith(_EMBEDDING)), "")
    output = output_name(embedding.removesuffix(f".{_EMBEDDING}"))
    if missing := [name for name in needed if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        rule = "; tie_word_embeddings is false in config.json" if missing == [output] else ""
        raise InvalidInput(f"the weights lack the tensor {missing[0]}{more}{rule}", place)
    known = {*shapes, *(name for name in found if name.endswith(_IGNORED) or name.startswith(tuple(carried)))}
    other = next((name for name in (output, f"{OUTPUT}.weight") if name in found.keys() - known), None)
    tied = (other, embedding) if other and embedding else None
    unknown = sorted(found.keys() - known - set(tied or ()))
    if unknown:
        raise InvalidInput(f"{len(unknown)} tensors are not of this family, the first is {unknown[0]!r}", place)
    return Contents(parts, tied)


def stacked(slices: Sequence[TensorSlice], found: Mapping[str, Stored]) -> dict[str, Part]:
    """Return the parts of stacks that hold experts' tensors, by the tensors' names.

    If a folder also has these tensors themselves, the stack counts as unknown, since it would define them twice.
    """
    parts: dict[str, Part] = {}
    if names := {s.name for s in slices if s.expert is not None}:
        for name, stored in found.items():
            own = [part for part in parts_of(name, stored.shape) if part.name in names]
            if not any(part.name in found for part in own):
                parts |= {part.name: part for part in own}
    return parts


def unpacked(found: Mapping[str, Stored], carried: tuple[str, ...], place: str, is_fp8: bool) -> Mapping[str, Stored]:
    """Return tensors in the form that readers get: a quantized weight, stored as two, is one in bfloat16 (of
    [experts, inputs, outputs] for MXFP4).

    Tensors that we do not use do not change.
    """
    read = dict(found)
    for name in [name for name in found if name.endswith(BLOCKS) and not name.startswith(carried)]:
        stem = name.removesuffix(BLOCKS)
        blocks, scales = read.pop(name), read.pop(stem + SCALES, None)
        if scales is None or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, BLOCK_BYTES):
            rule = f"{stem + SCALES} of shape {scales and scales.shape} does not fit its blocks, {blocks.shape}"
            raise InvalidInput(rule, place)
        experts, outputs, num_blocks, num_bytes = blocks.shape
        read[stem] = Stored("BF16", (experts, num_blocks * num_bytes * 2, outputs))
    for name, codes in found.items() if is_fp8 else ():
        if codes.dtype == "F8_E4M3" and len(codes.shape) > 1 and not name.startswith(carried):
            shape, scales = tuple(fp8_scale_shape(codes.shape)), read.pop(name + FP8_SCALES, None)
            if scales is None or scales.shape != shape or scales.dtype not in FLOATS:
                problem = "it is missing" if scales is None else f"it is {scales.dtype} of {scales.shape}"
                rule = f"its scales, {name + FP8_SCALES}, have to be floats of {shape}"
                raise InvalidInput(f"tensor {name} is FP8, and {rule}: {problem}", place)
            read[name] = Stored("BF16", codes.shape)
    return read
