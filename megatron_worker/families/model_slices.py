"""Every tensor of a model, by its Hugging Face name, and its place in the engine's parameters."""

from megatron_worker.families.architecture import Architecture, Attention, DeltaNet, Mixture
from megatron_worker.families.qwen3_5 import delta_net_slices
from megatron_worker.families.tensor_slices import TensorSlice


def slices_of(a: Architecture, tp: int, etp: int = 1) -> list[TensorSlice]:
    """Return every tensor that is computed with, for `tp` and `etp` ranks."""
    vocab = (a.vocab_size, a.hidden_size)
    rows = -(-a.vocab_size // tp)
    embedding = f"{a.tensor_prefix}.embed_tokens.weight", "embedding.word_embeddings.weight"
    slices = [TensorSlice(*embedding, vocab, 0, 0, rows)]
    for layer in range(a.num_layers):
        slices += _layer(a, tp, etp, layer)
    slices.append(_vector(f"{a.tensor_prefix}.norm.weight", "decoder.final_layernorm.weight", a.hidden_size))
    return slices if a.tied else [*slices, output_slice(a, tp)]


def output_slice(a: Architecture, tp: int) -> TensorSlice:
    """Return the output layer, which a model whose embeddings are tied has no tensor of its own for."""
    rows = -(-a.vocab_size // tp)
    return TensorSlice("lm_head.weight", "output_layer.weight", (a.vocab_size, a.hidden_size), 0, 0, rows)


def _layer(a: Architecture, tp: int, etp: int, layer: int) -> list[TensorSlice]:
    theirs, ours = f"{a.tensor_prefix}.layers.{layer}", f"decoder.layers.{layer}"
    mixer = f"{ours}.self_attention"
    slices = [_vector(f"{theirs}.input_layernorm.weight", f"{ours}.input_layernorm.weight", a.hidden_size)]
    match a.mixers[layer]:
        case Attention() as attention:
            slices += _attention(attention, a.hidden_size, tp, f"{theirs}.self_attn", mixer)
        case DeltaNet() as delta_net:
            slices += delta_net_slices(delta_net, a.hidden_size, tp, f"{theirs}.linear_attn", mixer)
    norm = f"{theirs}.post_attention_layernorm.weight"
    slices.append(_vector(norm, f"{ours}.pre_mlp_layernorm.weight", a.hidden_size))
    match a.mlp:
        case Mixture() as mixture:
            return slices + _mixture(mixture, a.hidden_size, tp, etp, f"{theirs}.mlp", f"{ours}.mlp")
        case int(ffn_size):
            return slices + _swiglu(f"{theirs}.mlp", f"{ours}.mlp", a.hidden_size, ffn_size, tp)


def _attention(attention: Attention, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
    slices = _qkv(attention, tp, theirs, f"{ours}.linear_qkv", "weight", (hidden_size,))
    if attention.qkv_bias:
        slices += _qkv(attention, tp, theirs, f"{ours}.linear_qkv", "bias", ())
    if attention.qk_norm:
        slices.append(_vector(f"{theirs}.q_norm.weight", f"{ours}.q_layernorm.weight", attention.head_dim))
        slices.append(_vector(f"{theirs}.k_norm.weight", f"{ours}.k_layernorm.weight", attention.head_dim))
    shape = (hidden_size, attention.num_heads * attention.head_dim)
    slices.append(TensorSlice(f"{theirs}.o_proj.weight", f"{ours}.linear_proj.weight", shape, 1, 0, hidden_size))
    return slices


def _qkv(a: Attention, tp: int, theirs: str, ours: str, suffix: str, rest: tuple[int, ...]) -> list[TensorSlice]:
    """Return query, key and value, which megatron interleaves by key/value head: its queries, its key, its value."""
    slices, start = [], 0
    for name, per_group in (
        ("q_proj", a.heads_per_group * a.rows_per_head),
        ("k_proj", a.head_dim),
        ("v_proj", a.head_dim),
    ):
        stop = start + per_group
        whole = (a.num_kv_heads * per_group, *rest)
        groups = a.num_kv_heads // tp
        slices.append(TensorSlice(f"{theirs}.{name}.{suffix}", f"{ours}.{suffix}", whole, 0, start, stop, groups))
        start = stop
    return slices


def _mixture(m: Mixture, hidden_size: int, tp: int, etp: int, theirs: str, ours: str) -> list[TensorSlice]:
    router = (m.num_experts, hidden_size)
    slices = [TensorSlice(f"{theirs}.gate.weight", f"{ours}.router.weight", router, None, 0, m.num_experts)]
    for number in range(m.num_experts):
        names = f"{theirs}.experts.{number}", f"{ours}.experts.{number}"
        slices += _swiglu(*names, hidden_size, m.ffn_size, etp, number)
    if m.shared_ffn_size:
        gate = f"{theirs}.shared_expert_gate.weight", f"{ours}.shared_gate.weight"
        slices.append(TensorSlice(*gate, (1, hidden_size), None, 0, 1))
        names = f"{theirs}.shared_expert", f"{ours}.shared_expert"
        slices += _swiglu(*names, hidden_size, m.shared_ffn_size, tp)
    return slices


def _swiglu(
    theirs: str, ours: str, hidden_size: int, ffn_size: int, num_ranks: int, expert: int | None = None
) -> list[TensorSlice]:
    up, down, share = (ffn_size, hidden_size), (hidden_size, ffn_size), ffn_size // num_ranks
    fc1, fc2 = f"{ours}.linear_fc1.weight", f"{ours}.linear_fc2.weight"
    return [
        TensorSlice(f"{theirs}.gate_proj.weight", fc1, up, 0, 0, share, expert=expert),
        TensorSlice(f"{theirs}.up_proj.weight", fc1, up, 0, share, 2 * share, expert=expert),
        TensorSlice(f"{theirs}.down_proj.weight", fc2, down, 1, 0, hidden_size, expert=expert),
    ]


def _vector(name: str, parameter: str, size: int) -> TensorSlice:
    return TensorSlice(name, parameter, (size,), None, 0, size)
