"""Where each tensor of a model lies in its Hugging Face folder, and what such a folder's tensors are."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import InvalidInput
from shared.families import gemma
from shared.families.architecture import Architecture, Attention, DeltaNet, LatentAttention, Mamba2, Mixture, Mlp
from shared.families.deepseek_v3 import corrections, latent_slices
from shared.families.gpt_oss import stacked_expert_slices
from shared.families.nemotron_h import mamba_slices
from shared.families.qwen3_5 import delta_net_slices
from shared.families.tensor_slices import TensorSlice
from shared.models.families import output_name
from shared.models.merging import FLOATS, FP8_SCALES, Part, fp8_scale_shape, parts_of
from shared.models.peft import OUTPUT

# --- Every tensor of a model, by its Hugging Face name, and its place in the engine's parameters ---


def slices_of(a: Architecture, tp: int, etp: int = 1) -> list[TensorSlice]:
    """Return every tensor that we use, for `tp` and `etp` ranks."""
    vocab = (a.vocab_size, a.hidden_size)
    rows = -(-a.vocab_size // tp)
    embedding = f"{a.tensor_prefix}.{a.names.embedding}.weight", "embedding.word_embeddings.weight"
    slices = [TensorSlice(*embedding, vocab, 0, 0, rows), *gemma.per_layer_slices(a, tp)]
    for layer in range(a.num_layers):
        slices += _layer(a, tp, etp, layer)
    norm = f"{a.tensor_prefix}.{a.names.final_norm}.weight"
    slices.append(_vector(norm, "decoder.final_layernorm.weight", a.hidden_size))
    return slices if a.tied else [*slices, output_slice(a, tp)]


def output_slice(a: Architecture, tp: int) -> TensorSlice:
    """Return the output layer. A model with tied embeddings has no separate tensor for it."""
    rows = -(-a.vocab_size // tp)
    return TensorSlice(a.output_name, "output_layer.weight", (a.vocab_size, a.hidden_size), 0, 0, rows)


def constants_of(a: Architecture) -> list[TensorSlice]:
    """Return every tensor that we use and never train: whole on every rank."""
    return [*corrections(a), *gemma.scalars(a)]


def _layer(a: Architecture, tp: int, etp: int, layer: int) -> list[TensorSlice]:
    theirs, ours = f"{a.tensor_prefix}.layers.{layer}", f"decoder.layers.{layer}"
    mixer, mlp = f"{ours}.self_attention", f"{theirs}.{a.names.mlp}"
    slices = _norms(a, layer, theirs, ours) if a.block is None else gemma.norm_slices(a, theirs, ours)
    match a.mixers[layer]:
        case LatentAttention() as latent:
            slices += latent_slices(latent, a.hidden_size, tp, f"{theirs}.self_attn", mixer)
        case Attention() as attention:
            slices += _attention(attention, a.hidden_size, tp, f"{theirs}.{a.names.attention}", mixer)
        case DeltaNet() as delta_net:
            slices += delta_net_slices(delta_net, a.hidden_size, tp, f"{theirs}.linear_attn", mixer)
        case Mamba2() as mamba:
            slices += mamba_slices(mamba, a.hidden_size, tp, f"{theirs}.mixer", mixer)
    match a.mlps[layer]:
        case Mixture() as mixture:
            slices += _mixture(mixture, a.hidden_size, tp, etp, mlp, f"{ours}.mlp", a.names.shared_expert)
        case Mlp() as dense:
            slices += _mlp(dense, mlp, f"{ours}.mlp", a.hidden_size, tp)
    return slices


def _norms(a: Architecture, layer: int, theirs: str, ours: str) -> list[TensorSlice]:
    norms = []
    if a.mixers[layer] is not None:
        norms.append(_vector(f"{theirs}.{a.names.mixer_norm}.weight", f"{ours}.input_layernorm.weight", a.hidden_size))
    if a.mlps[layer] is not None:
        norms.append(_vector(f"{theirs}.{a.names.mlp_norm}.weight", f"{ours}.pre_mlp_layernorm.weight", a.hidden_size))
    return norms


def _attention(attention: Attention, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
    slices = _qkv(attention, tp, theirs, f"{ours}.linear_qkv", "weight", (hidden_size,))
    if attention.qkv_bias:
        slices += _qkv(attention, tp, theirs, f"{ours}.linear_qkv", "bias", ())
    if attention.norms_all_heads:
        for name, heads in (("q", attention.num_heads), ("k", attention.num_kv_heads)):
            names = f"{theirs}.{name}_norm.weight", f"{ours}.{name}_layernorm.weight"
            size = heads * attention.head_dim
            slices.append(TensorSlice(*names, (size,), 0, 0, size // tp))
    elif attention.qk_norm:
        slices.append(_vector(f"{theirs}.q_norm.weight", f"{ours}.q_layernorm.weight", attention.head_dim))
        if "k_proj" in attention.projections:
            slices.append(_vector(f"{theirs}.k_norm.weight", f"{ours}.k_layernorm.weight", attention.head_dim))
    shape = (hidden_size, attention.num_heads * attention.head_dim)
    slices.append(TensorSlice(f"{theirs}.o_proj.weight", f"{ours}.linear_proj.weight", shape, 1, 0, hidden_size))
    if attention.output_bias:
        slices.append(_vector(f"{theirs}.o_proj.bias", f"{ours}.linear_proj.bias", hidden_size))
    if attention.has_sinks:
        heads = attention.num_heads
        slices.append(TensorSlice(f"{theirs}.sinks", f"{ours}.sinks", (heads,), 0, 0, heads // tp))
    return slices


def _qkv(a: Attention, tp: int, theirs: str, ours: str, suffix: str, rest: tuple[int, ...]) -> list[TensorSlice]:
    """Return query, key and value. Megatron interleaves them by key/value head: its queries, its key, its value.

    If files hold them as one tensor, they are one after another here, too.
    """
    if a.is_fused:
        sizes = a.num_heads * a.head_dim, *[a.num_kv_heads * a.head_dim] * 2
        name, rows = f"{theirs}.qkv_proj.{suffix}", sum(sizes)
        return [TensorSlice(name, f"{ours}.{suffix}", (rows, *rest), 0, 0, rows // tp, sections=sizes)]
    slices, start = [], 0
    for name in a.projections:
        per_group = a.heads_per_group * a.rows_per_head if name == "q_proj" else a.head_dim
        stop = start + per_group
        whole = (a.num_kv_heads * per_group, *rest)
        groups = a.num_kv_heads // tp
        slices.append(TensorSlice(f"{theirs}.{name}.{suffix}", f"{ours}.{suffix}", whole, 0, start, stop, groups))
        start = stop
    return slices


def _mixture(m: Mixture, hidden_size: int, tp: int, etp: int, theirs: str, ours: str, shared: str) -> list[TensorSlice]:
    router = (m.num_experts, hidden_size)
    if m.stacked is not None:
        return stacked_expert_slices(m, hidden_size, etp, theirs, ours)
    if m.is_beside:
        experts = gemma.expert_slices(m, hidden_size, theirs.rpartition(".")[0], ours)
        return experts + _mlp(m.shared_mlp, theirs, f"{ours}.shared_expert", hidden_size, tp)
    slices = [TensorSlice(f"{theirs}.gate.weight", f"{ours}.router.weight", router, None, 0, m.num_experts)]
    for number in range(m.num_experts):
        names = f"{theirs}.experts.{number}", f"{ours}.experts.{number}"
        slices += _mlp(m, *names, m.latent_size or hidden_size, etp, number)
    if m.latent_size:
        into, out = (m.latent_size, hidden_size), (hidden_size, m.latent_size)
        for name, own, shape in (("fc1_latent_proj", "latent_in", into), ("fc2_latent_proj", "latent_out", out)):
            slices.append(TensorSlice(f"{theirs}.{name}.weight", f"{ours}.{own}.weight", shape, None, 0, shape[0]))
    if m.shared_ffn_size and m.shared_is_gated:
        gate = f"{theirs}.shared_expert_gate.weight", f"{ours}.shared_gate.weight"
        slices.append(TensorSlice(*gate, (1, hidden_size), None, 0, 1))
    if m.shared_ffn_size:
        names = f"{theirs}.{shared}", f"{ours}.shared_expert"
        slices += _mlp(m.shared_mlp, *names, hidden_size, tp)
    return slices


def _mlp(
    mlp: Mlp | Mixture, theirs: str, ours: str, hidden_size: int, num_ranks: int, expert: int | None = None
) -> list[TensorSlice]:
    up, down, share = (mlp.ffn_size, hidden_size), (hidden_size, mlp.ffn_size), mlp.ffn_size // num_ranks
    fc1, fc2 = f"{ours}.linear_fc1.weight", f"{ours}.linear_fc2.weight"
    down_slice = TensorSlice(f"{theirs}.down_proj.weight", fc2, down, 1, 0, hidden_size, expert=expert)
    if isinstance(mlp, Mlp) and mlp.is_fused:
        both = f"{theirs}.gate_up_proj.weight", fc1, (2 * mlp.ffn_size, hidden_size)
        return [TensorSlice(*both, 0, 0, 2 * share, sections=(mlp.ffn_size, mlp.ffn_size)), down_slice]
    slices = []
    for place, name in enumerate(("gate_proj", "up_proj") if mlp.is_gated else ("up_proj",)):
        rows = place * share, (place + 1) * share
        slices.append(TensorSlice(f"{theirs}.{name}.weight", fc1, up, 0, *rows, expert=expert))
    return [*slices, down_slice]


def _vector(name: str, parameter: str, size: int) -> TensorSlice:
    return TensorSlice(name, parameter, (size,), None, 0, size)


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
        slices: all tensors that we use (`slices_of` and `constants_of`), for any number of ranks.
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
