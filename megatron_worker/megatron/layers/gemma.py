"""Gemma's layers: norms around each block, attention to other layers' keys and values, embeddings of each layer.

Shape suffixes: s tokens that a rank has between layers, t tokens of this context-parallel rank, H hidden size, L
layers, P size of a layer's extra embedding of a token; T, G and D as in attention.py.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.utils import skip_init

from megatron_worker.megatron.attention import BinPlan, attend, rotate, whole_context
from megatron_worker.megatron.experts import MegatronExperts
from megatron_worker.megatron.lora import AdaptedColumnLinear, AdaptedRowLinear
from megatron_worker.megatron.parallel.collectives import own_rows
from megatron_worker.megatron.parallel.mesh import Mesh
from shared.families.architecture import Architecture, NormedBlock
from shared.families.gemma import SharedAttention


@dataclass(frozen=True)
class LayerInputs:
    """A bin's inputs of layers besides the residual stream. `kept`: keys and values that later layers share."""

    plan: BinPlan
    per_layer_sLP: Tensor | None
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def _linear(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> torch.nn.Linear:
    """Return a linear that every rank has whole, for the tokens that it has."""
    return skip_init(torch.nn.Linear, num_inputs, num_outputs, bias=False, dtype=dtype)


class PerLayerEmbedding(torch.nn.Module):
    """Per-layer embeddings: an input of each layer for each token, from the token's id and its embedding."""

    def __init__(self, a: Architecture, mesh: Mesh, config: TransformerConfig, norm: type[torch.nn.Module]) -> None:
        super().__init__()
        assert a.block is not None
        size, tp = a.block.per_layer_size, mesh.tp.size
        self._size, self._mesh = size, mesh
        num_rows = -(-a.block.per_layer_vocab_size // tp) * tp
        unused = torch.nn.init.normal_  # no weight is initialised
        self.table = VocabParallelEmbedding(num_rows, a.num_layers * size, init_method=unused, config=config)
        self.projection = _linear(a.hidden_size, a.num_layers * size, config.params_dtype)
        self.norm = norm(config, size, a.norm_eps)
        self._scale = float(torch.tensor(size**0.5, dtype=config.params_dtype))

    def forward(self, token_id_t: Tensor, embedding_s1H: Tensor) -> Tensor:
        """Return the input of each layer: [s, L, P]."""
        by_id_tX = self.table(token_id_t[None])[0] * self._scale
        by_id_sX = own_rows(by_id_tX, self._mesh.tp) if self._mesh.layout.sp else by_id_tX
        projected_sX = self.projection(embedding_s1H[:, 0]) * embedding_s1H.shape[-1] ** -0.5
        normed_sLP: Tensor = self.norm(projected_sX.unflatten(-1, (-1, self._size)))
        return (normed_sLP + by_id_sX.unflatten(-1, (-1, self._size))) * 2**-0.5


class PerLayerBlock(torch.nn.Module):
    """A third residual block, after the MLP, that is gated by the layer's extra embedding of the token."""

    def __init__(self, block: NormedBlock, config: TransformerConfig, norm: type[torch.nn.Module]) -> None:
        super().__init__()
        self.gate = _linear(config.hidden_size, block.per_layer_size, config.params_dtype)
        self.projection = _linear(block.per_layer_size, config.hidden_size, config.params_dtype)
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_s1H: Tensor, taken_sP: Tensor) -> Tensor:
        gated_s1P = F.gelu(self.gate(hidden_s1H), approximate="tanh") * taken_sP[:, None]
        normed: Tensor = self.norm(self.projection(gated_s1P))
        return hidden_s1H + normed


class NormedLayer(torch.nn.Module):
    """Takes the place of megatron's layer, of OLMo too. `number`: its number in the whole model."""

    scalar: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        number: int,
        block: NormedBlock,
        norm: type[torch.nn.Module],
        self_attention: ModuleSpec,
        mlp: ModuleSpec,
        **_: object,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.layer_number, self._number = layer_number, number
        self.register_buffer("scalar", torch.ones(1) if block.has_scalar else None)
        before = partial(norm, config, size, eps) if block.norms_inputs else torch.nn.Identity
        self.input_layernorm, self.post_attention_layernorm = before(), norm(config, size, eps)
        self.pre_mlp_layernorm, self.post_mlp_layernorm = before(), norm(config, size, eps)
        self.self_attention = build_module(self_attention, config=config, layer_number=layer_number)
        self.mlp = build_module(mlp, config=config)
        if isinstance(self.mlp, MegatronExperts):  # which norm what they take themselves
            self.pre_mlp_layernorm = torch.nn.Identity()
        self.per_layer = PerLayerBlock(block, config, norm) if block.per_layer_size else None

    def forward(
        self, hidden_states: Tensor, attention_mask: LayerInputs, padding_mask: Tensor | None = None, **_: object
    ) -> tuple[Tensor, None]:
        hidden_s1H, inputs = hidden_states, attention_mask
        mixed, _bias = self.self_attention(
            self.input_layernorm(hidden_s1H), attention_mask=inputs.plan, number=self._number, kept=inputs.kept
        )
        hidden_s1H = hidden_s1H + self.post_attention_layernorm(mixed)
        put_out, _bias = self.mlp(self.pre_mlp_layernorm(hidden_s1H), padding_mask=padding_mask)
        hidden_s1H = hidden_s1H + self.post_mlp_layernorm(put_out)
        if self.per_layer is not None:
            assert inputs.per_layer_sLP is not None
            hidden_s1H = self.per_layer(hidden_s1H, inputs.per_layer_sLP[:, self._number])
        return (hidden_s1H if self.scalar is None else hidden_s1H * self.scalar.to(hidden_s1H.dtype)), None


class TakenAttention(torch.nn.Module):
    """Attention with normed values. Keys may be made from the same projection, or both taken from another layer."""

    def __init__(
        self, config: TransformerConfig, attention: SharedAttention, norm: type[torch.nn.Module], **_: object
    ) -> None:
        super().__init__()
        a, tp = attention, config.tensor_model_parallel_size
        self._attention, self._groups = a, a.num_kv_heads // tp
        self._sizes = [a.heads_per_group, *([1] * (len(a.projections) - 1))]
        # No weight is initialised: `init_method` is not called.
        linear = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": False}
        made, heads = a.num_kv_heads * sum(self._sizes) * a.head_dim, a.num_heads * a.head_dim
        self.linear_qkv = AdaptedColumnLinear(config.hidden_size, made, gather_output=False, **linear)
        self.linear_proj = AdaptedRowLinear(heads, config.hidden_size, input_is_parallel=True, **linear)
        self.q_layernorm = norm(config, a.head_dim, config.layernorm_epsilon)
        self.k_layernorm = norm(config, a.head_dim, config.layernorm_epsilon) if a.source is None else None
        self._eps = config.layernorm_epsilon

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: BinPlan,
        number: int,
        kept: dict[int, tuple[Tensor, Tensor]],
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        plan, a = attention_mask, self._attention
        assert a.rope is not None
        mixed_T1X, _bias = self.linear_qkv(hidden_states)
        mixed_TGXD = mixed_T1X.view(len(mixed_T1X), self._groups, -1, a.head_dim)
        query, *made = mixed_TGXD.split(self._sizes, dim=2)
        query_THD = rotate(self.q_layernorm(query.flatten(1, 2)), *plan.rotary[a.rope])
        if self.k_layernorm is None:
            assert a.source is not None
            key_TGD, value_TGD = kept[a.source]
        else:
            key_TGD, value_TGD = made[0].flatten(1, 2), made[-1].flatten(1, 2)
            key_TGD = rotate(self.k_layernorm(key_TGD), *plan.rotary[a.rope])
            value_TGD = F.rms_norm(value_TGD, (a.head_dim,), eps=self._eps)
            key_TGD, value_TGD = whole_context(key_TGD, value_TGD, plan.context)
        if a.is_source:
            kept[number] = key_TGD, value_TGD
        if a.scale is not None:
            query_THD = query_THD * (a.scale * a.head_dim**0.5)
        attended_THD = attend(query_THD, key_TGD, value_TGD, plan, a.window)
        output, bias = self.linear_proj(attended_THD.reshape(len(mixed_T1X), 1, -1))
        return output, bias
