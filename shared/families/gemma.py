"""Gemma 3 and 4: some layers attend within a window, norms surround each block, and embeddings are scaled.

Gemma 3's norms are zero-centred. In Gemma 4 heads differ by layer, values are normed, keys may be values, the last
layers may share keys and values of earlier ones, and there may be an embedding per layer. A vision tower is copied
unchanged, and so are a layer's scalar, which is not trained, and keys and values that no layer uses.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from shared.families.architecture import Architecture, Attention, Mixture, Mlp, NormedBlock, Rope
from shared.families.tensor_slices import TensorSlice
from shared.models.gemma import Gemma3Config, Gemma4Config, GemmaConfig

_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")


@dataclass(frozen=True)
class SharedAttention(Attention):
    """Gemma 4's attention. Values are normed, without a weight.

    Attributes:
        source: the layer whose keys and values it uses; None: it computes its own.
        is_source: other layers use its keys and values.
        keys_are_values: values are the output of the key projection, before the keys' norm.
    """

    source: int | None = None
    is_source: bool = False
    keys_are_values: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        if self.source is not None:
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.keys_are_values else ("q_proj", "k_proj", "v_proj")


def architecture(alike: Architecture, config: GemmaConfig, ropes: Sequence[Rope]) -> Architecture:
    """Return the architecture, given one whose layers are all the same, and the rotary embedding of each layer."""
    layers = range(config.num_hidden_layers)
    windows = config.windows
    both = dataclasses.replace(
        alike,
        mlps=tuple(_mlp(config, layer) for layer in layers),
        embedding_scale=config.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping,
    )
    if isinstance(config, Gemma3Config):
        attention = dataclasses.replace(alike.attention, scale=config.query_pre_attn_scalar**-0.5)
        mixers = [dataclasses.replace(attention, window=windows[layer], rope=ropes[layer]) for layer in layers]
        return dataclasses.replace(both, mixers=tuple(mixers), block=NormedBlock(), zero_centred_norms=True)
    assert isinstance(config, Gemma4Config)
    block = NormedBlock(
        per_layer_size=config.hidden_size_per_layer_input,
        per_layer_vocab_size=config.vocab_size_per_layer_input if config.hidden_size_per_layer_input else 0,
        has_scalar=True,
    )
    mixers = [_shared_attention(config, layer, ropes[layer], windows[layer]) for layer in layers]
    kept = [f"{alike.tensor_prefix}.layers.{layer}.layer_scalar" for layer in layers]
    kept += [
        f"{alike.tensor_prefix}.layers.{layer}.self_attn.{name}"
        for layer in layers
        for name in _OF_KEYS
        if config.source_of(layer) != layer
    ]
    return dataclasses.replace(both, mixers=tuple(mixers), block=block, carried=(*alike.carried, *kept))


def _mlp(config: GemmaConfig, layer: int) -> Mlp | Mixture:
    mlp = Mlp(config.ffn_size_of(layer), "gelu_tanh")
    if not (isinstance(config, Gemma4Config) and config.enable_moe_block):
        return mlp
    return Mixture(
        num_experts=config.num_experts,
        ffn_size=config.moe_intermediate_size,
        experts_per_token=config.num_experts_per_tok,
        shared_ffn_size=mlp.ffn_size,
        shared_is_gated=False,
        activation=mlp.activation,
        is_beside=True,
    )


def _shared_attention(config: Gemma4Config, layer: int, rope: Rope, window: int | None) -> SharedAttention:
    size, num_kv_heads = config.heads_of(layer)
    source = config.source_of(layer)
    return SharedAttention(
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=size,
        rope=rope,
        qk_norm=True,
        window=window,
        scale=1.0,
        source=None if source == layer else source,
        is_source=any(config.source_of(after) == layer for after in range(layer + 1, config.num_hidden_layers)),
        keys_are_values=config.missing_in(layer) == ("v_proj",),
    )


def scalars(a: Architecture) -> list[TensorSlice]:
    """Return the numbers that layers' outputs are multiplied by: whole on every rank."""
    if a.block is None or not a.block.has_scalar:
        return []
    theirs = f"{a.tensor_prefix}.layers"
    return [
        TensorSlice(f"{theirs}.{layer}.layer_scalar", f"decoder.layers.{layer}.scalar", (1,), None, 0, 1)
        for layer in range(a.num_layers)
    ]


def norm_slices(a: Architecture, theirs: str, ours: str) -> list[TensorSlice]:
    """Return a layer's tensors outside its mixer and its MLP."""
    assert a.block is not None
    hidden, size = a.hidden_size, a.block.per_layer_size
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
        **({"post_per_layer_input_norm": "per_layer.norm"} if size else {}),
    }
    if a.num_experts:  # the router's input is taken before all norms
        names |= {
            "pre_feedforward_layernorm": "mlp.shared_expert.input_norm",
            "post_feedforward_layernorm_1": "mlp.shared_expert.output_norm",
            "pre_feedforward_layernorm_2": "mlp.latent_in",
            "post_feedforward_layernorm_2": "mlp.latent_out",
        }
    if not a.block.norms_inputs:
        names = {name: own for name, own in names.items() if name.startswith("post")}
    slices = [_whole(f"{theirs}.{name}", f"{ours}.{own}", (hidden,)) for name, own in names.items()]
    if size:
        slices.append(_whole(f"{theirs}.per_layer_input_gate", f"{ours}.per_layer.gate", (size, hidden)))
        slices.append(_whole(f"{theirs}.per_layer_projection", f"{ours}.per_layer.projection", (hidden, size)))
    return slices


def expert_slices(m: Mixture, hidden_size: int, theirs: str, ours: str) -> list[TensorSlice]:
    """Return the tensors, without norms, of experts parallel to an MLP and their router: [experts, outputs, inputs]."""
    experts = m.num_experts
    stacks = {"gate_up_proj": (experts, 2 * m.ffn_size, hidden_size), "down_proj": (experts, hidden_size, m.ffn_size)}
    return [
        _whole(f"{theirs}.router.proj", f"{ours}.router", (experts, hidden_size)),
        TensorSlice(f"{theirs}.router.scale", f"{ours}.router.scale", (hidden_size,), None, 0, hidden_size),
        TensorSlice(f"{theirs}.router.per_expert_scale", f"{ours}.router.expert_scale", (experts,), None, 0, experts),
        *(
            TensorSlice(f"{theirs}.experts.{name}", f"{ours}.experts.{name}", shape, 0, 0, experts, is_stack=True)
            for name, shape in stacks.items()
        ),
    ]


def per_layer_slices(a: Architecture, tp: int) -> list[TensorSlice]:
    """Return the tensors of the per-layer inputs that all layers share, without those of a single layer."""
    if a.block is None or not a.block.per_layer_size:
        return []
    theirs, ours, size = a.tensor_prefix, "embedding.per_layer", a.block.per_layer_size
    table, rows = (a.block.per_layer_vocab_size, a.num_layers * size), -(-a.block.per_layer_vocab_size // tp)
    return [
        TensorSlice(f"{theirs}.embed_tokens_per_layer.weight", f"{ours}.table.weight", table, 0, 0, rows),
        _whole(f"{theirs}.per_layer_model_projection", f"{ours}.projection", (a.num_layers * size, a.hidden_size)),
        _whole(f"{theirs}.per_layer_projection_norm", f"{ours}.norm", (size,)),
    ]


def _whole(name: str, module: str, shape: tuple[int, ...]) -> TensorSlice:
    return TensorSlice(f"{name}.weight", f"{module}.weight", shape, None, 0, shape[0])
