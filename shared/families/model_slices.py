"""Every tensor of a model, by its Hugging Face name, and its place in the engine's parameters."""

from shared.families import gemma
from shared.families.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    LatentAttention,
    Mamba2,
    Mixture,
    Mlp,
)
from shared.families.deepseek_v3 import corrections, latent_slices
from shared.families.gpt_oss import stacked_expert_slices
from shared.families.nemotron_h import mamba_slices
from shared.families.qwen3_5 import delta_net_slices
from shared.families.tensor_slices import TensorSlice


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
