"""The layers of our families: token mixers, MLPs and experts. Both the Megatron engine and the sampler compute by them.

A layer has its tensors, linears and norms from `LayerTensors`, which knows how ranks hold them. It computes the tokens
of a *pass*: a bin on one rank, a prompt at once, or one token of every slot. Only the pass knows what comes before a
token (it attends, convolves and updates recurrent states), and which other ranks have tokens or experts.

Shape suffixes: T tokens of a pass, H hidden size; Q query heads, G key/value heads (of this rank), D size of a head; J
channels of a convolution; E experts, K experts of a token, M tokens of one expert; L layers, X any size.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker import families
from megatron_worker.families import activate, clamped_gate, rotated
from megatron_worker.mixers.linear_attention import gated_group_norm, gated_norm, heads_of, log_decay, steps
from megatron_worker.quantized import QuantizedTensor, quantized_product
from shared.families.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    LatentAttention,
    Mamba2,
    Mixture,
    Mlp,
    Rope,
    SharedAttention,
    ShortConv,
)
from shared.families.tensor_slices import TensorSlice

RotaryTables = Mapping[Rope, tuple[Tensor, Tensor]]
"""Cosines and sines of the pass's positions, [T, 1, D] each."""
Computed = Callable[[Tensor, Any], Tensor]
"""What is computed of tokens, [T, X], in a pass."""
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What a recurrent rule takes of tokens, in its order."""


class LayerPass(ABC):
    """The tokens that layers compute, alone on one device unless methods say otherwise.

    Attributes:
        rotary: by each rotary embedding of the model.
        per_layer_TLX: inputs of each layer besides the residual stream, if the model has them.
    """

    rotary: RotaryTables
    per_layer_TLX: Tensor | None = None

    @abstractmethod
    def attend(
        self, layer: int, query_TQD: Tensor, made: tuple[Tensor, Tensor] | None, a: Attention, sink_Q: Tensor | None
    ) -> Tensor:
        """Attend to `made`, keys and values [T, G, D], and those before; or, if it is None, to those of `a.source`.

        Returns [T, Q, size of a value].
        """

    @abstractmethod
    def convolve(self, layer: int, input_TJ: Tensor, weight_JW: Tensor, bias_J: Tensor | None = None) -> Tensor:
        """Convolve each token's channels with those of the tokens before it."""

    @abstractmethod
    def recur(self, layer: int, a: DeltaNet | Mamba2, rows: Rows) -> Tensor:
        """Update states by the delta rule, or by Mamba-2's scan, and return what tokens read from them."""

    @abstractmethod
    def sum_of_experts(self, x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, experts: "Experts") -> Tensor:
        """Return each token's weighted sum of its experts' outputs, added up in the order of the experts' numbers."""

    def route(self, layer: int) -> Tensor | None:
        """Return the experts to take, [T, K]; None: those that the router's scores choose."""
        return None

    def rotate(self, heads_TXD: Tensor, rope: Rope | None) -> Tensor:
        """Rotate queries or keys by their tokens' positions."""
        return heads_TXD if rope is None else rotated(heads_TXD, *self.rotary[rope])

    def gathered(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Gather the tokens that tensor-parallel ranks share out."""
        return parts

    def summed(self, x: Tensor) -> Tensor:
        """Sum over tensor-parallel ranks, and return this rank's share of the tokens: undoes `gathered`."""
        return x

    def whole_context(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Gather the tokens that context-parallel ranks share out, in their order."""
        return parts


class LayerTensors(ABC):
    """Gives layers their tensors, by the engine's names (shared/families/architecture.py).

    They are whole unless a method says otherwise.

    Attributes:
        num_ranks: ranks that share out heads.
    """

    num_ranks = 1

    def __init__(self, slices: Sequence[TensorSlice], constants: Sequence[TensorSlice]) -> None:
        """`constants`: what is never trained, and float32 in any dtype."""
        self._constants = {s.parameter: s for s in constants}
        self._slices = defaultdict[str, list[TensorSlice]](list)
        for s in (*slices, *constants):
            self._slices[s.parameter].append(s)

    @abstractmethod
    def __getitem__(self, parameter: str) -> Tensor: ...

    def get(self, parameter: str) -> Tensor | None:
        return self[parameter] if parameter in self._slices else None

    @abstractmethod
    def linear(self, module: str, brings_tokens: bool = True) -> Computed:
        """Return a linear with the adapter beside it. `brings_tokens`: it gathers or sums over ranks itself."""

    @abstractmethod
    def norm(self, module: str, eps: float) -> Callable[[Tensor], Tensor]:
        """Return a norm, or the identity if the model has none there."""

    def stacks(self, module: str) -> "dict[str, Tensor | QuantizedTensor]":
        """Return the tensors of this rank's experts that are stored together, by kind; none of other experts."""
        kinds = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        return {kind: self[f"{module}.{kind}"] for kind in kinds if f"{module}.{kind}" in self._slices}

    def own_experts(self, num_experts: int) -> range:
        """Return the numbers of this rank's experts."""
        return range(num_experts)

    def groups_of(self, a: Attention) -> int:
        """Return the groups of heads that the linear of queries, keys and values makes one after another."""
        return 1


@dataclass(frozen=True)
class Norm:
    """A root mean square norm over the size of its weight (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    weight: Tensor
    eps: float
    is_zero_centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] != len(self.weight):  # over all heads together
            return self(x.flatten(1)).view_as(x)
        if not self.is_zero_centred:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = torch.promote_types(torch.float32, x.dtype)
        return F.rms_norm(x.to(wide), (x.shape[-1],), 1 + self.weight.to(wide), self.eps).to(x.dtype)


def unchanged(x: Tensor) -> Tensor:
    return x


# --- Token mixers ---


class AttentionMixer:
    """Grouped-query attention, in all of the forms of `Attention` and `SharedAttention`."""

    def __init__(self, tensors: LayerTensors, name: str, layer: int, a: Attention, eps: float) -> None:
        self._layer, self._attention, self._eps = layer, a, eps
        self._sink_Q = tensors.get(f"{name}.sinks")
        # Squares of gradients are added up in this order.
        names = ("qkv", "proj") if isinstance(a, SharedAttention) else ("proj", "qkv")
        linears = {linear: tensors.linear(f"{name}.linear_{linear}") for linear in names}
        self._qkv, self._output = linears["qkv"], linears["proj"]
        self._query_norm, self._key_norm = (tensors.norm(f"{name}.{x}_layernorm", eps) for x in "qk")
        self._groups = tensors.groups_of(a)
        per_group = a.num_kv_heads // tensors.num_ranks // self._groups
        num_queries = per_group * a.heads_per_group * a.rows_per_head // a.head_dim
        self._sizes = [num_queries, *[per_group] * (len(a.projections) - 1)]

    def __call__(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        a, gate_TQD, keys_and_values = self._attention, None, None
        heads_TGXD = self._qkv(x_TH, run).unflatten(-1, (self._groups, -1, a.head_dim))
        query, *made = heads_TGXD.split(self._sizes, dim=2)
        if a.is_gated:
            query, gate = query.unflatten(2, (-1, 2)).unbind(3)
            gate_TQD = gate.flatten(1, 2)
        query_TQD = run.rotate(self._query_norm(query.flatten(1, 2)), a.rope)
        if made:
            key_TGD, value_TGD = made[0].flatten(1, 2), made[-1].flatten(1, 2)
            if isinstance(a, SharedAttention):
                value_TGD = F.rms_norm(value_TGD, (a.head_dim,), eps=self._eps)
            key_TGD, value_TGD = run.whole_context(run.rotate(self._key_norm(key_TGD), a.rope), value_TGD)
            keys_and_values = key_TGD, value_TGD
        attended = run.attend(self._layer, query_TQD, keys_and_values, a, self._sink_Q)
        if gate_TQD is not None:
            attended = attended * gate_TQD.sigmoid()
        return self._output(attended.flatten(1), run)


class LatentMixer:
    """Multi-head latent attention. Keys and values are expanded from the latents before attention.

    So the attention of all other models can be used, for sequences, trees, contexts and caches.
    """

    def __init__(self, tensors: LayerTensors, name: str, layer: int, a: LatentAttention) -> None:
        linear = partial(tensors.linear, brings_tokens=False)
        self._layer, self._attention = layer, a
        self._query_down = None if a.query_rank is None else linear(f"{name}.query_down")
        self._query_norm = tensors.norm(f"{name}.query_norm", a.norm_eps)
        self._query_up, self._latent_down = linear(f"{name}.query_up"), linear(f"{name}.latent_down")
        self._latent_norm = tensors.norm(f"{name}.latent_norm", a.norm_eps)
        self._latent_up, self._output = linear(f"{name}.latent_up"), linear(f"{name}.output")

    def __call__(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        a, (own, size) = self._attention, self._attention.key_sizes
        made_of = x_TH if self._query_down is None else self._query_norm(self._query_down(x_TH, run))
        query_TQD = self._query_up(run.gathered(made_of)[0], run).unflatten(-1, (-1, a.head_dim))
        query, turned = query_TQD.split(a.key_sizes, dim=-1)
        query_TQD = torch.cat([query, self._rotated(turned, run)], dim=-1)
        latent_TX, key_TX = self._latent_down(x_TH, run).split([a.latent_size, size], dim=-1)
        latent_TX, key_TX = run.gathered(self._latent_norm(latent_TX), key_TX)
        # Latents are gathered, and not what is made of them.
        latent_TX, key_TX = run.whole_context(latent_TX, self._rotated(key_TX[:, None], run)[:, 0])
        made_TGX = self._latent_up(latent_TX, run).unflatten(-1, (-1, own + a.value_size))
        key_own, value_TGX = made_TGX.split([own, a.value_size], dim=-1)
        key_TGD = torch.cat([key_own, key_TX[:, None].expand(-1, made_TGX.shape[1], -1)], dim=-1)
        attended = run.attend(self._layer, query_TQD, (key_TGD, value_TGX), a, None)
        return run.summed(self._output(attended.flatten(1), run))

    def _rotated(self, heads_TXD: Tensor, run: LayerPass) -> Tensor:
        if self._attention.is_interleaved:
            heads_TXD = heads_TXD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return run.rotate(heads_TXD, self._attention.rope)


def attention_operands(
    query_TQD: Tensor, key_TGD: Tensor, value_TGD: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values for kernels that want them of one size, and scale scores by its root.

    Smaller ones are padded with zeros. `scale`: what scores are to be multiplied by; None: the root of a key's size.
    """
    key_size, value_size = key_TGD.shape[-1], value_TGD.shape[-1]
    size = max(key_size, value_size)
    if key_size == value_size:
        return (query_TQD if scale is None else query_TQD * (scale * size**0.5)), key_TGD, value_TGD
    factor = (size / key_size if scale is None else scale**2 * size) ** 0.5
    query_TQD = query_TQD * factor if factor != 1 else query_TQD
    query, key, value = (F.pad(x, (0, size - x.shape[-1])) for x in (query_TQD, key_TGD, value_TGD))
    return query, key, value


class DeltaNetMixer:
    """A gated delta net, its heads shared out over ranks."""

    def __init__(self, tensors: LayerTensors, name: str, layer: int, a: DeltaNet, eps: float) -> None:
        self._layer, self._delta_net, self._eps, self._num_ranks = layer, a, eps, tensors.num_ranks
        self._conv_weight = tensors[f"{name}.conv_weight"]
        self._rate_log, self._bias = tensors[f"{name}.A_log"], tensors[f"{name}.dt_bias"]
        self._into, self._out = tensors.linear(f"{name}.in_proj"), tensors.linear(f"{name}.out_proj")
        self._norm_weight = tensors[f"{name}.norm.weight"]
        self._sizes = [size // tensors.num_ranks for size in a.made_sizes]

    def __call__(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        a = self._delta_net
        mixed_TJ, gate, step, decay = self._into(x_TH, run).split(self._sizes, dim=-1)
        mixed_TJ = F.silu(run.convolve(self._layer, mixed_TJ, self._conv_weight[:, 0]))
        decay = log_decay(decay, self._rate_log, self._bias)
        read = run.recur(self._layer, a, (*heads_of(mixed_TJ, a, self._num_ranks), decay, step.sigmoid()))
        normed = gated_norm(read, gate.unflatten(-1, (-1, a.value_size)), self._norm_weight, self._eps)
        return self._out(normed.flatten(1), run)


class Mamba2Mixer:
    """A Mamba-2 mixer, its groups of heads shared out over ranks."""

    def __init__(self, tensors: LayerTensors, name: str, layer: int, a: Mamba2, eps: float) -> None:
        self._layer, self._mamba, self._eps = layer, a, eps
        self._conv_weight, self._conv_bias = tensors[f"{name}.conv_weight"], tensors.get(f"{name}.conv_bias")
        self._rate_log, self._skip, self._bias, self._norm_weight = (
            tensors[f"{name}.{tensor}"] for tensor in ("A_log", "D", "dt_bias", "output_scale")
        )
        self._into, self._out = tensors.linear(f"{name}.in_proj"), tensors.linear(f"{name}.out_proj")
        num_values, *self._mixed_sizes, num_heads = (size // tensors.num_ranks for size in a.made_sizes)
        self._sizes = [num_values, sum(self._mixed_sizes), num_heads]
        self._num_groups = a.num_groups // tensors.num_ranks  # each of which is normed by itself

    def __call__(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        a = self._mamba
        gate, mixed_TJ, step = self._into(x_TH, run).split(self._sizes, dim=-1)
        mixed_TJ = F.silu(run.convolve(self._layer, mixed_TJ, self._conv_weight[:, 0], self._conv_bias))
        sizes = a.head_size, a.state_size, a.state_size
        value, key, query = (
            x.unflatten(-1, (-1, size)) for x, size in zip(mixed_TJ.split(self._mixed_sizes, -1), sizes, strict=True)
        )
        step = steps(step, self._bias, a.least_step)
        decay = -step * self._rate_log.to(step.dtype).exp()
        read = run.recur(self._layer, a, (value, key, query, step, decay))
        read = read + value * self._skip[:, None].to(read.dtype)
        normed = gated_group_norm(read.flatten(1), gate, self._norm_weight, self._num_groups, self._eps)
        return self._out(normed.to(x_TH.dtype), run)


class ShortConvMixer:
    """A short gated convolution, its channels shared out over ranks."""

    def __init__(self, tensors: LayerTensors, name: str, layer: int) -> None:
        self._layer, self._conv_weight = layer, tensors[f"{name}.conv_weight"]
        self._into, self._out = tensors.linear(f"{name}.in_proj"), tensors.linear(f"{name}.out_proj")

    def __call__(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        before_TJ, behind_TJ, value_TJ = self._into(x_TH, run).chunk(3, dim=-1)
        mixed_TJ = run.convolve(self._layer, before_TJ * value_TJ, self._conv_weight[:, 0])
        return self._out(behind_TJ * mixed_TJ, run)


# --- MLPs, and mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538) ---


class MlpLayer:
    """A layer's only MLP, an expert, or the expert that all tokens go to, which may have norms of its own."""

    def __init__(self, tensors: LayerTensors, name: str, mlp: Mlp | Mixture, eps: float) -> None:
        self._mlp = mlp
        self._up, self._down = tensors.linear(f"{name}.linear_fc1"), tensors.linear(f"{name}.linear_fc2")
        self._input_norm, self._output_norm = (tensors.norm(f"{name}.{x}_norm", eps) for x in ("input", "output"))

    def __call__(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        made = self._up(self._input_norm(x_TH), run)
        return self._output_norm(self._down(activate(made, self._mlp.activation, self._mlp.is_gated), run))


class Router:
    """Chooses the experts of each token, and their weights. It has no adapter: no trainer of ours trains one.

    A pass may give the experts of its tokens, as a sampler chose them (routing replay: Ma et al. 2025,
    arXiv:2510.11370). Then the scores only give the experts' weights, with gradients for the router.
    """

    def __init__(self, tensors: LayerTensors | Mapping[str, Tensor], name: str, mixture: Mixture, eps: float) -> None:
        self._mixture, self._eps = mixture, eps
        self.weight = tensors[f"{name}.weight"]
        self._bias_E, self.correction, self._scale_H, self._scale_E = (
            tensors.get(f"{name}.{x}") for x in ("bias", "correction", "scale", "expert_scale")
        )

    def __call__(self, x_TH: Tensor, given_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights in the tokens' dtype, and expert numbers: both [T, K].

        `given_TK`: the experts to take in place of those that the scores choose, as any kind of integers.
        """
        if self._scale_H is not None:
            size = x_TH.shape[-1]
            x_TH = F.rms_norm(x_TH, (size,), eps=self._eps) * self._scale_H * size**-0.5
        score_TE = families.scores(x_TH, self.weight, self._mixture, self._bias_E)
        if given_TK is None:
            expert_TK = families.choose(score_TE, self._mixture, self.correction)
        else:
            expert_TK = given_TK.long()
        weight_TK = families.weights(score_TE, expert_TK, self._mixture).to(x_TH.dtype)
        return weight_TK if self._scale_E is None else weight_TK * self._scale_E[expert_TK], expert_TK


class Experts:
    """Takes the place of a layer's MLP. No token is dropped, and no loss for load balance is added.

    `own`: the numbers of this rank's experts.
    """

    def __init__(self, tensors: LayerTensors, name: str, layer: int, mixture: Mixture, eps: float) -> None:
        self.mixture, self._layer = mixture, layer
        self.router = Router(tensors, f"{name}.router", mixture, eps)
        self.own, self._stacks = tensors.own_experts(mixture.num_experts), tensors.stacks(f"{name}.experts")
        numbers = () if self._stacks else self.own
        self._mlps = [MlpLayer(tensors, f"{name}.experts.{number}", mixture, eps) for number in numbers]
        around = [f"{name}.latent_in", f"{name}.latent_out"]
        self._latent = [tensors.linear(module) for module in around if mixture.latent_size]
        self._norms = [tensors.norm(module, eps) for module in around if mixture.is_beside]
        shared = mixture.shared_mlp
        self._shared = MlpLayer(tensors, f"{name}.shared_expert", shared, eps) if mixture.shared_ffn_size else None
        self._shared_gate = tensors.get(f"{name}.shared_gate.weight")

    def __call__(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, with that of the expert of all tokens."""
        whole_TH, x_TH = x_TH, x_TH.view_as(x_TH)  # its gradient is added up before that of the shared expert's input
        chosen = self.router(x_TH, run.route(self._layer))
        if self._latent:
            into, out = self._latent
            output_TH = out(run.sum_of_experts(into(x_TH, run), *chosen, self), run)
        elif self._norms:
            output_TH = self._norms[1](run.sum_of_experts(self._norms[0](x_TH), *chosen, self))
        else:
            output_TH = run.sum_of_experts(x_TH, *chosen, self)
        if self._shared is not None:
            shared_TH = self._shared(whole_TH, run)
            if self._shared_gate is not None:
                shared_TH = F.linear(x_TH, self._shared_gate).sigmoid() * shared_TH
            output_TH = output_TH + shared_TH
        return output_TH

    def output(self, number: int, x_MH: Tensor, run: LayerPass) -> Tensor:
        """Return the output of one of this rank's experts for some tokens, [M, H]."""
        number -= self.own.start
        if self._mlps:
            return self._mlps[number](x_MH, run)
        up, down = (self._stacks[kind][number] for kind in ("gate_up_proj", "down_proj"))
        if self.mixture.stacked is None:
            assert isinstance(up, Tensor) and isinstance(down, Tensor)
            return F.linear(activate(F.linear(x_MH, up), self.mixture.activation, True), down)
        product: Any = torch.addmm if isinstance(up, Tensor) else quantized_product
        up_bias, down_bias = (self._stacks[f"{kind}_bias"][number] for kind in ("gate_up_proj", "down_proj"))
        made = product(up_bias, x_MH, up)  # gates and ups are interleaved
        output_MH: Tensor = product(down_bias, clamped_gate(self.mixture.stacked, made[:, ::2], made[:, 1::2]), down)
        return output_MH


# --- A layer ---


class PerLayerInputs:
    """Makes an input of each layer for each token, from the token's id and its embedding (Gemma 4)."""

    def __init__(self, a: Architecture, tensors: LayerTensors, table: Callable[[Tensor], Tensor]) -> None:
        assert a.block is not None
        self._size, self._table = a.block.per_layer_size, table
        self._projection = tensors["embedding.per_layer.projection.weight"]
        self._norm = tensors.norm("embedding.per_layer.norm", a.norm_eps)
        self._scale = float(torch.tensor(self._size**0.5, dtype=self._projection.dtype))

    def __call__(self, token_T: Tensor, x_TH: Tensor, own: Callable[[Tensor], Tensor] = unchanged) -> Tensor:
        """Return [T, L, X]. `own`: picks this rank's tokens, whose embeddings `x_TH` are."""
        by_id = own(self._table(token_T) * self._scale)
        projected = F.linear(x_TH, self._projection) * x_TH.shape[-1] ** -0.5
        by_id, projected = (x.unflatten(-1, (-1, self._size)) for x in (by_id, projected))
        return (self._norm(projected) + by_id) * 2**-0.5


class Layer:
    """A mixer and an MLP, each with the norms around it that the model has, and what its block has behind them."""

    def __init__(self, a: Architecture, tensors: LayerTensors, layer: int) -> None:
        name, eps = f"decoder.layers.{layer}", a.norm_eps
        self._layer, self._scale = layer, a.residual_scale
        norms = {}
        if a.block is not None:  # in this order squares of gradients are added up
            kinds = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
            norms = {kind: tensors.norm(f"{name}.{kind}", eps) for kind in kinds}
        self._before_mixer = norms.get("input_layernorm") or tensors.norm(f"{name}.input_layernorm", eps)
        self._behind_mixer = norms.get("post_attention_layernorm", unchanged)
        self._mixer = _mixer(a, tensors, layer)
        self._before_mlp = norms.get("pre_mlp_layernorm") or tensors.norm(f"{name}.pre_mlp_layernorm", eps)
        self._behind_mlp = norms.get("post_mlp_layernorm", unchanged)
        self.mlp = _mlp(a, tensors, layer)
        self._gate, self._projection = (tensors.get(f"{name}.per_layer.{x}.weight") for x in ("gate", "projection"))
        self._per_layer_norm = tensors.norm(f"{name}.per_layer.norm", eps)
        self._scalar = tensors.get(f"{name}.scalar")

    def __call__(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        return self.forward(x_TH, run)

    def forward(self, x_TH: Tensor, run: LayerPass) -> Tensor:
        if self._mixer is not None:
            x_TH = self._added(x_TH, self._behind_mixer(self._mixer(self._before_mixer(x_TH), run)))
        if self.mlp is not None:
            x_TH = self._added(x_TH, self._behind_mlp(self.mlp(self._before_mlp(x_TH), run)))
        if self._gate is not None and self._projection is not None and run.per_layer_TLX is not None:
            gated_TX = F.gelu(F.linear(x_TH, self._gate), approximate="tanh") * run.per_layer_TLX[:, self._layer]
            x_TH = x_TH + self._per_layer_norm(F.linear(gated_TX, self._projection))
        return x_TH if self._scalar is None else x_TH * self._scalar.to(x_TH.dtype)

    def _added(self, x_TH: Tensor, made_TH: Tensor) -> Tensor:
        return x_TH + (made_TH if self._scale == 1 else made_TH * self._scale)


def _mixer(a: Architecture, tensors: LayerTensors, layer: int) -> Computed | None:
    name = f"decoder.layers.{layer}.self_attention"
    match a.mixers[layer]:
        case LatentAttention() as latent:
            return LatentMixer(tensors, name, layer, latent)
        case Attention() as attention:
            return AttentionMixer(tensors, name, layer, attention, a.norm_eps)
        case DeltaNet() as delta_net:
            return DeltaNetMixer(tensors, name, layer, delta_net, a.norm_eps)
        case Mamba2() as mamba:
            return Mamba2Mixer(tensors, name, layer, mamba, a.norm_eps)
        case ShortConv():
            return ShortConvMixer(tensors, name, layer)
        case None:
            return None


def _mlp(a: Architecture, tensors: LayerTensors, layer: int) -> MlpLayer | Experts | None:
    name = f"decoder.layers.{layer}.mlp"
    match a.mlps[layer]:
        case Mixture() as mixture:
            return Experts(tensors, name, layer, mixture, a.norm_eps)
        case Mlp() as mlp:
            return MlpLayer(tensors, name, mlp, a.norm_eps)
        case None:
            return None
