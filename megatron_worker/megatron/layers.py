"""Layers that megatron-core lacks: gated delta net, norms around blocks, latent attention, Mamba-2, convolution."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import skip_init

from megatron_worker.megatron.attention import BinPlan, attend, rotate, whole_context
from megatron_worker.megatron.experts import MegatronExperts
from megatron_worker.megatron.linears import AdaptedColumnLinear, AdaptedRowLinear, ExpertLinear
from megatron_worker.megatron.parallel import Group, Mesh, gather_rows, own_rows, sum_rows
from megatron_worker.mixers.linear_attention import (
    convolve,
    gated_delta_rule,
    gated_group_norm,
    gated_norm,
    heads_of,
    log_decay,
    scan,
    steps,
    with_ancestors,
)
from shared.families.architecture import (
    Architecture,
    DeltaNet,
    LatentAttention,
    Mamba2,
    NormedBlock,
    Recurrent,
    SharedAttention,
    ShortConv,
)

# --- A gated delta net in place of attention, its heads split over tensor-parallel ranks ---
#
# megatron-core's class (ssm/gated_delta_net.py) needs flash-linear-attention, which runs only on CUDA, supports
# neither sequences of a bin nor branches, and applies its norm's gate in another dtype than the published models.
#
# Shape suffixes: T tokens of a bin; G value heads of this rank and V the size of each; J channels of its convolution.


class GatedNorm(torch.nn.Module):
    """The norm of each head's output, times the SiLU of its gate; in float32, except the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_norm(x, gate, self.weight, self.eps)


class GatedDeltaNet(torch.nn.Module):
    """Takes the place of self-attention in megatron's spec."""

    def __init__(self, config: TransformerConfig, mixer: DeltaNet, **_: object) -> None:
        super().__init__()
        tp, dtype = config.tensor_model_parallel_size, config.params_dtype
        self._delta_net, self._num_ranks = mixer, tp
        self._sizes = [size // tp for size in mixer.made_sizes]
        num_channels, _, num_heads, _ = self._sizes
        # No weight is initialised: `init_method` is not called.
        linear = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": False}
        made, values = sum(mixer.made_sizes), mixer.num_values
        self.in_proj = AdaptedColumnLinear(config.hidden_size, made, gather_output=False, **linear)
        self.out_proj = AdaptedRowLinear(values, config.hidden_size, input_is_parallel=True, **linear)
        self.conv_weight = Parameter(torch.empty(num_channels, 1, mixer.conv_width, dtype=dtype))
        self.A_log = Parameter(torch.empty(num_heads, dtype=dtype))
        self.dt_bias = Parameter(torch.empty(num_heads, dtype=dtype))
        self.norm = GatedNorm(mixer.value_size, config.layernorm_epsilon, dtype)

    def forward(self, hidden_states: Tensor, attention_mask: BinPlan, **_: object) -> tuple[Tensor, Tensor | None]:
        plan, a = attention_mask.recurrence, self._delta_net
        assert plan is not None
        made_T1X, _bias = self.in_proj(hidden_states)
        mixed_TJ, gate_TX, step_TG, decay_TG = made_T1X[:, 0].split(self._sizes, dim=-1)
        mixed_TJ = F.silu(convolve(with_ancestors(mixed_TJ, plan), self.conv_weight[:, 0]))
        output_TGV, _states = gated_delta_rule(
            *heads_of(mixed_TJ, a, self._num_ranks),
            log_decay(decay_TG, self.A_log, self.dt_bias),
            step_TG.sigmoid(),
            plan,
        )
        normed_TGV = self.norm(output_TGV, gate_TX.unflatten(-1, (-1, a.value_size)))
        output, bias = self.out_proj(normed_TGV.flatten(1)[:, None])
        return output, bias


# --- Norms around each block, attention to other layers' keys and values, embeddings of each layer ---
#
# Shape suffixes: s tokens that a rank has between layers, t tokens of this context-parallel rank, H hidden size, L
# layers, P size of a layer's extra embedding of a token; T, G and D as in attention.py.


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


class SandwichNormLayer(torch.nn.Module):
    """Takes the place of megatron's layer. `number`: its number in the whole model."""

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


class SharedKVAttention(torch.nn.Module):
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


# --- Multi-head latent attention, its heads split over tensor-parallel ranks ---
#
# Keys and values are expanded from the latents before attention, so that the attention of all other models can be
# used, for sequences, trees and contexts. megatron-core's class (transformer/multi_latent_attention.py) makes rotary
# tables in every layer from a length, so it cannot take a tree's positions; it packs sequences only with Transformer
# Engine, and norms latents with the layers' epsilon, although the published models have another one.
#
# Shape suffixes: s tokens of this rank between layers, t those of its context, T of the whole bin; H heads of this
# rank; R size of a latent, D of a key, E of its rotated part, V of a value, P of the largest of D and V.


class LatentSelfAttention(torch.nn.Module):
    """Takes the place of self-attention in megatron's spec.

    Args:
        tp: the ranks that share the heads out, and (sp) the tokens between layers.
        norm: makes a norm of some size, by its epsilon.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attention: LatentAttention,
        tp: Group,
        norm: Callable[..., torch.nn.Module],
        **_: object,
    ) -> None:
        super().__init__()
        a, dtype = attention, config.params_dtype
        heads, (own, rotated) = a.num_heads // tp.size, a.key_sizes
        queries_from = config.hidden_size
        if a.query_rank is not None:
            queries_from = a.query_rank
            self.query_down = ExpertLinear(config.hidden_size, a.query_rank, dtype)
            self.query_norm = norm(config, a.query_rank, a.norm_eps)
        self.query_up = ExpertLinear(queries_from, heads * a.head_dim, dtype)
        self.latent_down = ExpertLinear(config.hidden_size, a.latent_size + rotated, dtype)
        self.latent_norm = norm(config, a.latent_size, a.norm_eps)
        self.latent_up = ExpertLinear(a.latent_size, heads * (own + a.value_size), dtype)
        self.output = ExpertLinear(heads * a.value_size, config.hidden_size, dtype)
        self._attention, self._tp = attention, tp

    def forward(self, hidden_states: Tensor, attention_mask: BinPlan, **_: object) -> tuple[Tensor, None]:
        plan, a, hidden_sX = attention_mask, self._attention, hidden_states[:, 0]
        query_tHD, (key_THD, value_THV) = self._queries(hidden_sX, plan), self._keys_and_values(hidden_sX, plan)
        # The kernels want queries, keys and values of one size, and scale by its root.
        size = max(a.head_dim, a.value_size)
        factor = (size / a.head_dim if a.scale is None else a.scale**2 * size) ** 0.5
        if factor != 1:
            query_tHD = query_tHD * factor
        query_tHP, key_THP, value_THP = (F.pad(x, (0, size - x.shape[-1])) for x in (query_tHD, key_THD, value_THV))
        attended_tHV = attend(query_tHP, key_THP, value_THP, plan)[..., : a.value_size]
        return sum_rows(self.output(attended_tHV.flatten(1)), self._tp)[:, None], None

    def _queries(self, hidden_sX: Tensor, plan: BinPlan) -> Tensor:
        """Return queries of this rank's heads, the last part rotated: [t, H, D]."""
        a, made_of_sX = self._attention, hidden_sX
        if a.query_rank is not None:
            made_of_sX = self.query_norm(self.query_down(hidden_sX))
        query_tHD = self.query_up(gather_rows(made_of_sX, self._tp)).unflatten(-1, (-1, a.head_dim))
        own_tHD, rotated_tHE = query_tHD.split(a.key_sizes, dim=-1)
        return torch.cat([own_tHD, self._rotated(rotated_tHE, plan)], dim=-1)

    def _keys_and_values(self, hidden_sX: Tensor, plan: BinPlan) -> tuple[Tensor, Tensor]:
        """Return the bin's keys, [T, H, D], and values, [T, H, V]. Latents are gathered, not these."""
        a, (own, rotated) = self._attention, self._attention.key_sizes
        latent_sR, key_sE = self.latent_down(hidden_sX).split([a.latent_size, rotated], dim=-1)
        both_tX = gather_rows(torch.cat([self.latent_norm(latent_sR), key_sE], dim=-1), self._tp)
        latent_tR, key_tE = both_tX.split([a.latent_size, rotated], dim=-1)
        key_tE = self._rotated(key_tE[:, None], plan)[:, 0]
        if plan.context is not None:
            both_tX = gather_rows(torch.cat([latent_tR, key_tE], dim=-1), plan.context.group)
            latent_tR, key_tE = both_tX.index_select(0, plan.context.order_T).split([a.latent_size, rotated], dim=-1)
        made_THX = self.latent_up(latent_tR).unflatten(-1, (-1, own + a.value_size))
        key_THD, value_THV = made_THX.split([own, a.value_size], dim=-1)
        shared_THE = key_tE[:, None].expand(-1, made_THX.shape[1], -1)
        return torch.cat([key_THD, shared_THE], dim=-1), value_THV

    def _rotated(self, heads_tXE: Tensor, plan: BinPlan) -> Tensor:
        rope = self._attention.rope
        assert rope is not None
        if self._attention.is_interleaved:
            heads_tXE = heads_tXE.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(heads_tXE, *plan.rotary[rope])


# --- A Mamba-2 mixer in place of attention, its groups of heads split over tensor-parallel ranks ---
#
# megatron-core's class (ssm/mamba_mixer.py) makes its weights on CUDA, requires the kernels of mamba-ssm and
# causal-conv1d, supports no branches, and has no setting for the published models' least step.
#
# Shape suffixes: T tokens of a bin; of this rank H heads, P the size of each, I their values; J channels of its
# convolution.


class Mamba2Mixer(torch.nn.Module):
    """Takes the place of self-attention in megatron's spec."""

    def __init__(self, config: TransformerConfig, mixer: Mamba2, **_: object) -> None:
        super().__init__()
        tp, dtype = config.tensor_model_parallel_size, config.params_dtype
        self._mamba, self._num_groups, self._eps = mixer, mixer.num_groups // tp, config.layernorm_epsilon
        num_values, *mixed, num_heads = (size // tp for size in mixer.made_sizes)
        self._mixed, self._made = mixed, [num_values, sum(mixed), num_heads]
        # No weight is initialised: `init_method` is not called.
        linear = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": False}
        self.in_proj = AdaptedColumnLinear(config.hidden_size, sum(mixer.made_sizes), gather_output=False, **linear)
        self.out_proj = AdaptedRowLinear(mixer.num_values, config.hidden_size, input_is_parallel=True, **linear)
        self.conv_weight = Parameter(torch.empty(sum(mixed), 1, mixer.conv_width, dtype=dtype))
        self.conv_bias = Parameter(torch.empty(sum(mixed), dtype=dtype)) if mixer.conv_bias else None
        self.A_log, self.D, self.dt_bias = (Parameter(torch.empty(num_heads, dtype=dtype)) for _ in range(3))
        self.output_scale = Parameter(torch.empty(num_values, dtype=dtype))  # of the norm of this rank's own groups

    def forward(self, hidden_states: Tensor, attention_mask: BinPlan, **_: object) -> tuple[Tensor, Tensor | None]:
        plan, a = attention_mask.recurrence, self._mamba
        assert plan is not None
        made_T1X, _bias = self.in_proj(hidden_states)
        gate_TI, mixed_TJ, step_TH = made_T1X[:, 0].split(self._made, dim=-1)
        mixed_TJ = F.silu(convolve(with_ancestors(mixed_TJ, plan), self.conv_weight[:, 0], self.conv_bias))
        value_TI, key, query = mixed_TJ.split(self._mixed, dim=-1)
        value_THP = value_TI.unflatten(-1, (-1, a.head_size))
        key_TGN, query_TGN = (x.unflatten(-1, (-1, a.state_size)) for x in (key, query))
        step_TH = steps(step_TH, self.dt_bias, a.least_step)
        log_decay_TH = -step_TH * self.A_log.to(step_TH.dtype).exp()
        output_THP, _states = scan(value_THP, key_TGN, query_TGN, step_TH, log_decay_TH, plan)
        output_THP = output_THP + value_THP * self.D[:, None].to(output_THP.dtype)
        normed_TI = gated_group_norm(output_THP.flatten(1), gate_TI, self.output_scale, self._num_groups, self._eps)
        output, bias = self.out_proj(normed_TI[:, None].to(hidden_states.dtype))
        return output, bias


# --- A short gated convolution in place of attention, its channels (J of this rank) split over tensor ranks ---


class ShortConvolution(torch.nn.Module):
    """Takes the place of self-attention in megatron's spec."""

    def __init__(self, config: TransformerConfig, mixer: ShortConv, **_: object) -> None:
        super().__init__()
        size, num_channels = mixer.num_channels, mixer.num_channels // config.tensor_model_parallel_size
        # No weight is initialised: `init_method` is not called.
        linear = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": False}
        self.in_proj = AdaptedColumnLinear(config.hidden_size, 3 * size, gather_output=False, **linear)
        self.out_proj = AdaptedRowLinear(size, config.hidden_size, input_is_parallel=True, **linear)
        self.conv_weight = Parameter(torch.empty(num_channels, 1, mixer.conv_width, dtype=config.params_dtype))

    def forward(self, hidden_states: Tensor, attention_mask: BinPlan, **_: object) -> tuple[Tensor, Tensor | None]:
        plan = attention_mask.recurrence
        assert plan is not None
        made_T1X, _bias = self.in_proj(hidden_states)
        before_TJ, behind_TJ, value_TJ = made_T1X[:, 0].chunk(3, dim=-1)
        mixed_TJ = convolve(with_ancestors(before_TJ * value_TJ, plan), self.conv_weight[:, 0])
        output, bias = self.out_proj((behind_TJ * mixed_TJ)[:, None])
        return output, bias


RECURRENT: dict[type[Recurrent], type[torch.nn.Module]] = {
    DeltaNet: GatedDeltaNet,
    Mamba2: Mamba2Mixer,
    ShortConv: ShortConvolution,
}
"""The module that computes each kind of mixer without attention."""
