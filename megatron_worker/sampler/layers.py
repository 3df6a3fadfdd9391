"""The sampler's layers: linears with adapters, token mixers, MLPs and experts, by the trainer's formulas.

A layer computes the tokens of a *pass*: a prompt at once, or one token of every slot. Only the pass knows what comes
before a token: it attends, convolves and updates recurrent states.

Shape suffixes: T tokens of a pass, B slots, H hidden size, O outputs and I inputs of a linear, R ranks of an adapter; Q
query heads, G key/value heads, P query heads for each of those, D size of a head, S positions of a block; J channels
of a convolution, W its width; E experts, K experts of a token, M tokens of one expert.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker import families
from megatron_worker.families import activate, clamped_gate, rotated
from megatron_worker.lora import AppliedLora
from megatron_worker.mixers.linear_attention import (
    convolve,
    delta_step,
    gated_delta_rule,
    gated_group_norm,
    gated_norm,
    heads_of,
    log_decay,
    plan_recurrence,
    scan,
    scan_step,
    steps,
    with_ancestors,
)
from megatron_worker.mixers.tree_attention import attend_forest, plan_forest
from shared.families.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    LatentAttention,
    Mamba2,
    Mixer,
    Mixture,
    Mlp,
    Rope,
    SharedAttention,
    ShortConv,
)
from shared.families.tensor_slices import Linear, TensorSlice, as_linear
from shared.models.peft import EMBEDDING

# --- Linears of the decoder with their adapters ---


Factors = Mapping[str, AppliedLora]
"""An adapter's, by the names of fused linears."""


@dataclass(frozen=True)
class FusedLinear:
    """Hugging Face linears of the same input, stacked by rows."""

    name: str
    parts: tuple[TensorSlice, ...]
    weight_OI: Tensor
    bias_O: Tensor | None

    @property
    def linear(self) -> Linear:
        """As adapters know it."""
        parts, row = list[TensorSlice](), 0
        for part in self.parts:
            parts.append(replace(part, groups=1, start=row, stop=(row := row + part.shape[0])))
        return Linear(self.name, "whole", tuple(parts))

    def named_weights(self) -> dict[str, Tensor]:
        """Return the parts' own rows by their Hugging Face names."""
        sizes = [part.shape[0] for part in self.parts]
        named = dict(zip((part.name for part in self.parts), self.weight_OI.split(sizes), strict=True))
        if self.bias_O is not None:
            biases = [part.name.removesuffix("weight") + "bias" for part in self.parts]
            named |= dict(zip(biases, self.bias_O.split(sizes), strict=True))
        return named

    def __call__(self, x: Tensor, lora_weights: Factors) -> Tensor:
        extra, own = lora_weights.get(self.name), (self.weight_OI, self.bias_O)
        return F.linear(x, *own) if extra is None else extra.linear(x, *own)


def token_table(s: TensorSlice, weight_VH: Tensor) -> list[FusedLinear]:
    """Return the token embeddings in a form that can have an adapter, if their name is the one that adapters know."""
    can_adapt = s.name.endswith(f".{EMBEDDING}.weight")
    return [FusedLinear(EMBEDDING, (as_linear(s),), weight_VH.t(), None)] if can_adapt else []


def with_tokens(x_TH: Tensor, token_T: Tensor, lora_weights: Factors, scale: float | Tensor = 1.0) -> Tensor:
    """Return embeddings of tokens, which are scaled, with what an adapter adds to them."""
    extra = lora_weights.get(EMBEDDING)
    return x_TH if extra is None else x_TH + extra.of_tokens(token_T, scale)


@dataclass(frozen=True)
class Norm:
    """A root mean square norm over the size of its weight."""

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


class ModelTensors:
    """Makes a model's tensors, their values undefined, by the names of the trainer's parameters.

    `constants`: what is never trained, and float32 in any dtype.

    Attributes:
        others: tensors that are in no linear, by their Hugging Face names.
        linears: those that were asked for so far.
    """

    def __init__(
        self,
        slices: Sequence[TensorSlice],
        constants: Sequence[TensorSlice],
        dtype: torch.dtype,
        device: torch.device,
        is_zero_centred: bool,
    ) -> None:
        self.others, self.linears = dict[str, Tensor](), list[FusedLinear]()
        self._dtype, self._device, self._is_zero_centred = dtype, device, is_zero_centred
        self._constants = {s.parameter for s in constants}
        self._slices = defaultdict[str, list[TensorSlice]](list)
        for s in (*slices, *constants):
            self._slices[s.parameter].append(s)

    def slice_of(self, parameter: str) -> TensorSlice:
        (found,) = self._slices[parameter]
        return found

    def get(self, parameter: str) -> Tensor | None:
        return self[parameter] if parameter in self._slices else None

    def __getitem__(self, parameter: str) -> Tensor:
        return self.others.setdefault(self.slice_of(parameter).name, self._empty(parameter))

    def linear(self, module: str) -> FusedLinear:
        weight_OI, parts = self._empty(f"{module}.weight"), tuple(self._slices[f"{module}.weight"])
        bias_O = self._empty(f"{module}.bias") if f"{module}.bias" in self._slices else None
        self.linears.append(FusedLinear(module, parts, weight_OI, bias_O))
        return self.linears[-1]

    def norm(self, module: str, eps: float) -> Callable[[Tensor], Tensor]:
        """Return a norm, or the identity if the model has none there."""
        weight = self.get(f"{module}.weight")
        return unchanged if weight is None else Norm(weight, eps, self._is_zero_centred)

    def _empty(self, parameter: str) -> Tensor:
        parts = self._slices[parameter]
        dtype = torch.float32 if parameter in self._constants else self._dtype
        num_rows = sum(part.shape[0] for part in parts)
        return torch.empty(num_rows, *parts[0].shape[1:], dtype=dtype, device=self._device)


# --- What is before each token: of a prompt that is read, or of the slots of a cache ---

BLOCK = 128

RotaryTables = dict[Rope, tuple[Tensor, Tensor]]
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What a recurrent rule takes of tokens, in its order."""
States = tuple[Tensor, ...]
"""Of a layer with attention its keys and values, [G, T, D]; of a recurrent one the last inputs of its convolution, the
oldest first, [W - 1, J], and its state, if it has one. Empty if the layer has none of its own."""


@dataclass(frozen=True)
class Prefilled:
    """The result of reading a prompt: the adapter, the last token's final hidden state, the states of each layer, the
    experts that each layer with experts chose, [T, K], and the residual stream after the last layer (it gives the final
    hidden states of all tokens)."""

    lora_weights: Factors
    hidden_H: Tensor
    stream_TH: Tensor
    states: list[States]
    experts: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.stream_TH, *self.experts, *sum(self.states, ())))


class Cache:
    """The states of all slots. Keys and values are [blocks, B, G, S, D]; they grow by blocks of zeros."""

    def __init__(self, a: Architecture, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.promote_types(torch.float32, dtype)
        self._mixers = a.mixers
        self.states: list[list[Tensor]] = []
        for mixer in a.mixers:
            kinds = dtype, dtype if isinstance(mixer, Attention) else wide
            shaped = zip(_shapes(mixer, num_slots), kinds, strict=False)  # a layer may have no states
            self.states.append([torch.zeros(shape, dtype=kind, device=device) for shape, kind in shaped])
        self.slots_B = torch.arange(num_slots, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.states for tensor in tensors)

    def reserve(self, num_tokens: int) -> None:
        for mixer, tensors in zip(self._mixers, self.states, strict=True):
            for number, old in enumerate(tensors if isinstance(mixer, Attention) else ()):
                missing = -(-num_tokens // BLOCK) - len(old)
                if missing > 0:
                    tensors[number] = torch.cat([old, old.new_zeros(missing, *old.shape[1:])])

    def fill(self, slot: int, prompt: Prefilled) -> None:
        self.reserve(len(prompt.stream_TH))
        for mixer, tensors, sources in zip(self._mixers, self.states, prompt.states, strict=True):
            for target, source in zip(tensors, sources, strict=True):
                if not isinstance(mixer, Attention):
                    target[slot] = source
                    continue
                for block, part_GSD in enumerate(source.split(BLOCK, dim=1)):
                    target[block, slot, :, : part_GSD.shape[1]] = part_GSD


def _shapes(mixer: Mixer | None, num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's states in the cache."""
    match mixer:
        case SharedAttention(source=int()) | None:
            return ()
        case Attention() as a:
            value_size = a.value_size if isinstance(a, LatentAttention) else a.head_dim
            return tuple((0, num_slots, a.num_kv_heads, BLOCK, size) for size in (a.head_dim, value_size))
        case DeltaNet() as a:
            state: tuple[int, ...] = num_slots, a.num_value_heads, a.key_size, a.value_size
        case Mamba2() as a:
            state = num_slots, a.num_groups, a.num_heads // a.num_groups, a.head_size, a.state_size
        case ShortConv() as a:
            return ((num_slots, a.conv_width - 1, a.num_channels),)
    return (num_slots, a.conv_width - 1, sum(a.mixed_sizes)), state


class PromptPass:
    """All tokens of one prompt.

    Attributes:
        fixed_shapes: the shape of no product may depend on values.
        per_layer_TLX: inputs of each layer besides the residual stream, if the model has them.
        chosen: the experts that layers with experts chose, [T, K] each.
        states: what a cache needs of each layer.
    """

    fixed_shapes = False

    def __init__(self, a: Architecture, token_T: Tensor, dtype: torch.dtype, lora_weights: Factors) -> None:
        self.lora_weights, self.rotary = lora_weights, RotaryTables()
        self.per_layer_TLX: Tensor | None = None
        self.chosen: list[Tensor] = []
        self.states: list[States] = [()] * a.num_layers
        parent_T = torch.arange(len(token_T), device=token_T.device) - 1
        self._recurrence = None if a.conv_width is None else plan_recurrence(parent_T, a.conv_width)
        self._forests = {
            window: plan_forest(parent_T, dtype, window=window)
            for window in a.windows
            if a.has_sinks or (window is not None and len(token_T) > window)
        }

    def attend(
        self, layer: int, query_TQD: Tensor, made: tuple[Tensor, Tensor] | None, a: Attention, sink_Q: Tensor | None
    ) -> Tensor:
        """Attend to `made`, keys and values [T, G, D], and those before; or, if it is None, to those of `a.source`.

        Scores are divided by the root of the size of a key. Returns [T, Q, size of a value].
        """
        if made is not None:
            self.states[layer] = tuple(x.transpose(0, 1).contiguous() for x in made)
        key_GTD, value_GTD = self.states[_source_of(layer, a)]
        if (forest := self._forests.get(a.window)) is not None:
            return attend_forest(query_TQD, key_GTD.transpose(0, 1), value_GTD.transpose(0, 1), forest, sink_Q)
        # The kernels want queries, keys and values of one size, and scale by its root.
        (key_size, value_size), query = (key_GTD.shape[-1], value_GTD.shape[-1]), query_TQD.transpose(0, 1)
        if key_size != value_size:
            size = max(key_size, value_size)
            query = query * (size / key_size) ** 0.5
            query, key_GTD, value_GTD = (F.pad(x, (0, size - x.shape[-1])) for x in (query, key_GTD, value_GTD))
        attended_1QTD = F.scaled_dot_product_attention(
            query[None], key_GTD[None], value_GTD[None], is_causal=True, enable_gqa=True
        )
        return attended_1QTD[0].transpose(0, 1)[..., :value_size]

    def convolve(self, layer: int, input_TJ: Tensor, weight_JW: Tensor, bias_J: Tensor | None = None) -> Tensor:
        assert self._recurrence is not None
        before = weight_JW.shape[1] - 1
        self.states[layer] = (F.pad(input_TJ, (0, 0, before, 0))[len(input_TJ) :].clone(),)
        return convolve(with_ancestors(input_TJ, self._recurrence), weight_JW, bias_J)

    def recur(self, layer: int, a: DeltaNet | Mamba2, rows: Rows) -> Tensor:
        """Update states by the delta rule, or by Mamba-2's scan, and return what tokens read from them."""
        assert self._recurrence is not None
        output, states = (gated_delta_rule if isinstance(a, DeltaNet) else scan)(*rows, self._recurrence)
        self.states[layer] += (states[0],)
        return output


class StepPass:
    """One token of every slot, behind those that are in the cache."""

    fixed_shapes = True

    def __init__(
        self,
        cache: Cache,
        position_B: Tensor,
        masks: Mapping[int | None, list[Tensor]],
        lora_weights: Factors,
        chosen: list[Tensor],
    ) -> None:
        self.lora_weights, self.rotary, self.chosen = lora_weights, RotaryTables(), chosen
        self.per_layer_TLX: Tensor | None = None
        self._states, self._masks = cache.states, masks
        self._places = position_B // BLOCK, cache.slots_B, slice(None), position_B % BLOCK

    def attend(
        self, layer: int, query_TQD: Tensor, made: tuple[Tensor, Tensor] | None, a: Attention, sink_Q: Tensor | None
    ) -> Tensor:
        keys, values = self._states[_source_of(layer, a)]
        if made is not None:
            keys[self._places], values[self._places] = made
        return attend_blocks(query_TQD, keys, values, self._masks[a.window], sink_Q)

    def convolve(self, layer: int, input_TJ: Tensor, weight_JW: Tensor, bias_J: Tensor | None = None) -> Tensor:
        held_BWJ = self._states[layer][0]
        whole = torch.cat([held_BWJ, input_TJ[:, None]], dim=1)
        held_BWJ.copy_(whole[:, 1:])
        return convolve(reversed(whole.unbind(1)), weight_JW, bias_J)

    def recur(self, layer: int, a: DeltaNet | Mamba2, rows: Rows) -> Tensor:
        return (delta_step if isinstance(a, DeltaNet) else scan_step)(*rows, self._states[layer][1])


def _source_of(layer: int, a: Attention) -> int:
    """Return the layer whose keys and values a layer attends to."""
    return a.source if isinstance(a, SharedAttention) and a.source is not None else layer


def masks_of(position_B: Tensor, num_blocks: int, window: int | None) -> list[Tensor]:
    """Return for each block 0 where a slot may attend and -1e30 where it may not, [B, 1, 1, S]."""
    masks, position_B1 = [], position_B[:, None]
    for block in range(num_blocks):
        index_S = torch.arange(block * BLOCK, (block + 1) * BLOCK, device=position_B.device)
        is_hidden_BS = index_S > position_B1
        if window is not None:
            is_hidden_BS |= index_S <= position_B1 - window
        masks.append((is_hidden_BS * -1e30)[:, None, None])
    return masks


def attend_blocks(
    query_BQD: Tensor, keys: Tensor, values: Tensor, masks: list[Tensor], sink_Q: Tensor | None = None
) -> Tensor:
    """Attend over blocks with a running maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3).

    `keys`, `values`: of all slots, [blocks, B, G, S, D]. A block that is hidden from a slot changes nothing: before the
    first visible one, what it gave is rescaled by exp(-1e30) = 0. Returns [B, Q, size of a value].
    """
    _, num_slots, num_groups, _, size = keys.shape
    query = query_BQD.reshape(num_slots * num_groups, -1, size)
    scale = size**-0.5
    highest = total = attended = torch.empty(0)
    for block, mask_B11S in enumerate(masks):
        key_XSD, value_XSD = (t[block].view(-1, BLOCK, t.shape[-1]) for t in (keys, values))
        score_XPS = torch.bmm(query, key_XSD.transpose(1, 2)).float().mul_(scale)
        score_XPS.view(num_slots, num_groups, -1, BLOCK).add_(mask_B11S)
        block_highest = score_XPS.amax(-1, keepdim=True)
        new_highest = block_highest if block == 0 else torch.maximum(highest, block_highest)
        weight_XPS = score_XPS.sub_(new_highest).exp_()
        block_total = weight_XPS.sum(-1, keepdim=True)
        block_attended = torch.bmm(weight_XPS.to(value_XSD.dtype), value_XSD).float()
        if block == 0:
            total, attended = block_total, block_attended
        else:
            rescaling = (highest - new_highest).exp_()
            total, attended = total * rescaling + block_total, attended * rescaling + block_attended
        highest = new_highest
    attended = (attended / total).view(num_slots, -1, values.shape[-1])
    if sink_Q is not None:
        lse_BQ = (total.log() + highest).view(num_slots, -1)
        attended *= (lse_BQ - sink_Q.to(lse_BQ)).sigmoid()[..., None]
    return attended.to(query_BQD.dtype)


# --- Token mixers ---

Pass = PromptPass | StepPass
Computed = Callable[[Tensor, Pass], Tensor]


class SamplerAttention:
    def __init__(self, tensors: ModelTensors, name: str, layer: int, a: Attention, eps: float) -> None:
        self._layer, self._attention, self._eps = layer, a, eps
        self.qkv, self.output = tensors.linear(f"{name}.linear_qkv"), tensors.linear(f"{name}.linear_proj")
        self._query_norm, self._key_norm = (tensors.norm(f"{name}.{x}_layernorm", eps) for x in "qk")
        self._sink_Q = tensors.get(f"{name}.sinks")

    def __call__(self, x_TH: Tensor, run: Pass) -> Tensor:
        a, gate_TQD, keys_and_values = self._attention, None, None
        heads_TXD = self.qkv(x_TH, run.lora_weights).unflatten(-1, (-1, a.head_dim))
        num_queries = a.num_heads * a.rows_per_head // a.head_dim
        query, *made = heads_TXD.split([num_queries, *[a.num_kv_heads] * (len(a.projections) - 1)], dim=1)
        if a.is_gated:
            query, gate_TQD = query.unflatten(1, (-1, 2)).unbind(2)
        query = self._rotated(self._query_norm(query), run)
        if made:
            value = F.rms_norm(made[-1], (a.head_dim,), eps=self._eps) if isinstance(a, SharedAttention) else made[-1]
            keys_and_values = self._rotated(self._key_norm(made[0]), run), value
        if a.scale is not None:
            query = query * (a.scale * a.head_dim**0.5)
        attended = run.attend(self._layer, query, keys_and_values, a, self._sink_Q)
        if gate_TQD is not None:
            attended = attended * gate_TQD.sigmoid()
        return self.output(attended.flatten(1), run.lora_weights)

    def _rotated(self, heads_TXD: Tensor, run: Pass) -> Tensor:
        rope = self._attention.rope
        return heads_TXD if rope is None else rotated(heads_TXD, *run.rotary[rope])


class SamplerLatentAttention:
    """Keys and values are expanded from latents, as the trainer does it, and kept expanded."""

    def __init__(self, tensors: ModelTensors, name: str, layer: int, a: LatentAttention) -> None:
        self._layer, self._attention = layer, a
        self._query_down = None if a.query_rank is None else tensors.linear(f"{name}.query_down")
        self._query_up, self._latent_down, self._latent_up, self._output = (
            tensors.linear(f"{name}.{linear}") for linear in ("query_up", "latent_down", "latent_up", "output")
        )
        self._query_norm, self._latent_norm = (
            tensors.norm(f"{name}.{x}_norm", a.norm_eps) for x in ("query", "latent")
        )

    def __call__(self, x_TH: Tensor, run: Pass) -> Tensor:
        a, lora_weights, (own, size) = self._attention, run.lora_weights, self._attention.key_sizes
        made_of = x_TH if self._query_down is None else self._query_norm(self._query_down(x_TH, lora_weights))
        query_TQD = self._query_up(made_of, lora_weights).unflatten(-1, (-1, a.head_dim))
        query, turned = query_TQD.split(a.key_sizes, dim=-1)
        query_TQD = torch.cat([query, self._rotated(turned, run)], dim=-1)
        if a.scale is not None:
            query_TQD = query_TQD * (a.scale * a.head_dim**0.5)
        latent_TX, key = self._latent_down(x_TH, lora_weights).split([a.latent_size, size], dim=-1)
        made_TQX = self._latent_up(self._latent_norm(latent_TX), lora_weights).unflatten(-1, (a.num_heads, -1))
        key_own, value = made_TQX.split([own, a.value_size], dim=-1)
        shared = self._rotated(key[:, None], run).expand(-1, a.num_heads, -1)
        attended = run.attend(self._layer, query_TQD, (torch.cat([key_own, shared], dim=-1), value), a, None)
        return self._output(attended.flatten(1), lora_weights)

    def _rotated(self, heads_TXD: Tensor, run: Pass) -> Tensor:
        rope = self._attention.rope
        assert rope is not None
        if self._attention.is_interleaved:
            heads_TXD = heads_TXD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotated(heads_TXD, *run.rotary[rope])


class SamplerDeltaNet:
    def __init__(self, tensors: ModelTensors, name: str, layer: int, a: DeltaNet, eps: float) -> None:
        self._layer, self._delta_net, self._eps = layer, a, eps
        self._into, self._out = tensors.linear(f"{name}.in_proj"), tensors.linear(f"{name}.out_proj")
        self._conv_weight, self._norm_weight = tensors[f"{name}.conv_weight"], tensors[f"{name}.norm.weight"]
        self._rate_log, self._bias = tensors[f"{name}.A_log"], tensors[f"{name}.dt_bias"]

    def __call__(self, x_TH: Tensor, run: Pass) -> Tensor:
        a = self._delta_net
        mixed_TJ, gate, step, decay = self._into(x_TH, run.lora_weights).split(a.made_sizes, dim=-1)
        heads = heads_of(F.silu(run.convolve(self._layer, mixed_TJ, self._conv_weight[:, 0])), a)
        decay = log_decay(decay, self._rate_log, self._bias)
        read = run.recur(self._layer, a, (*heads, decay, step.sigmoid()))
        normed = gated_norm(read, gate.unflatten(-1, (-1, a.value_size)), self._norm_weight, self._eps)
        return self._out(normed.flatten(1), run.lora_weights)


class SamplerMamba2:
    def __init__(self, tensors: ModelTensors, name: str, layer: int, a: Mamba2, eps: float) -> None:
        self._layer, self._mamba, self._eps = layer, a, eps
        self._into, self._out = tensors.linear(f"{name}.in_proj"), tensors.linear(f"{name}.out_proj")
        self._conv_weight, self._conv_bias = tensors[f"{name}.conv_weight"], tensors.get(f"{name}.conv_bias")
        self._rate_log, self._skip, self._bias, self._norm_weight = (
            tensors[f"{name}.{tensor}"] for tensor in ("A_log", "D", "dt_bias", "output_scale")
        )

    def __call__(self, x_TH: Tensor, run: Pass) -> Tensor:
        a = self._mamba
        made_TX = self._into(x_TH, run.lora_weights)
        gate, mixed_TJ, step = made_TX.split([a.num_values, sum(a.mixed_sizes), a.num_heads], dim=-1)
        mixed_TJ = F.silu(run.convolve(self._layer, mixed_TJ, self._conv_weight[:, 0], self._conv_bias))
        sizes = a.head_size, a.state_size, a.state_size
        value, key, query = (
            x.unflatten(-1, (-1, size)) for x, size in zip(mixed_TJ.split(a.mixed_sizes, -1), sizes, strict=True)
        )
        step = steps(step, self._bias, a.least_step)
        decay = -step * self._rate_log.to(step.dtype).exp()
        read = run.recur(self._layer, a, (value, key, query, step, decay))
        read = read + value * self._skip[:, None].to(read.dtype)
        normed = gated_group_norm(read.flatten(1), gate, self._norm_weight, a.num_groups, self._eps)
        return self._out(normed.to(x_TH.dtype), run.lora_weights)


class SamplerShortConv:
    def __init__(self, tensors: ModelTensors, name: str, layer: int) -> None:
        self._layer, self._conv_weight = layer, tensors[f"{name}.conv_weight"]
        self._into, self._out = tensors.linear(f"{name}.in_proj"), tensors.linear(f"{name}.out_proj")

    def __call__(self, x_TH: Tensor, run: Pass) -> Tensor:
        before, behind, value = self._into(x_TH, run.lora_weights).chunk(3, dim=-1)
        return self._out(behind * run.convolve(self._layer, before * value, self._conv_weight[:, 0]), run.lora_weights)


# --- MLPs, and mixtures of experts ---
#
# **Why batching cannot change a result, and what that costs.** In a step, each expert that any slot chose computes all
# slots, and the outputs for slots that did not choose it are dropped. So a slot's products have the same shapes, and
# the slot the same row in them, whatever other slots choose. Each expert's weights are read at most once a step, and
# not at all if no slot chose it; most of the arithmetic is wasted. Two alternatives are worse: products over only the
# slots that chose an expert change their heights, and so their bits, with the choices of other slots; a product for
# each slot with gathered weights reads an expert once for every slot that chose it. A prompt is read alone, so there
# each expert computes only the tokens that chose it.


class SamplerMlp:
    """A layer's only MLP, an expert, or the expert that all tokens go to, which may have norms of its own."""

    def __init__(self, tensors: ModelTensors, name: str, mlp: Mlp | Mixture, eps: float) -> None:
        self._mlp = mlp
        self.up, self.down = tensors.linear(f"{name}.linear_fc1"), tensors.linear(f"{name}.linear_fc2")
        self._input_norm, self._output_norm = (tensors.norm(f"{name}.{x}_norm", eps) for x in ("input", "output"))

    def __call__(self, x_TH: Tensor, run: Pass) -> Tensor:
        made = self.up(self._input_norm(x_TH), run.lora_weights)
        active = activate(made, self._mlp.activation, self._mlp.is_gated)
        return self._output_norm(self.down(active, run.lora_weights))


class SamplerExperts:
    """Takes the place of a layer's MLP. The router has no adapter: no trainer of ours trains one."""

    def __init__(self, tensors: ModelTensors, name: str, mixture: Mixture, eps: float) -> None:
        self._mixture, self._eps = mixture, eps
        self._router_EH = tensors[f"{name}.router.weight"]
        self._bias_E, self._correction_E, self._scale_H, self._scale_E = (
            tensors.get(f"{name}.router.{x}") for x in ("bias", "correction", "scale", "expert_scale")
        )
        self._stacks = [tensors.get(f"{name}.experts.{kind}") for kind in ("gate_up_proj", "down_proj")]
        self._biases = [tensors.get(f"{name}.experts.{kind}_bias") for kind in ("gate_up_proj", "down_proj")]
        own = range(0 if mixture.stacked or mixture.stacks else mixture.num_experts)
        self._mlps = [SamplerMlp(tensors, f"{name}.experts.{number}", mixture, eps) for number in own]
        around = [f"{name}.latent_in", f"{name}.latent_out"]
        self._latent = [tensors.linear(module) for module in around if mixture.latent_size]
        self._norms = [tensors.norm(module, eps) for module in around if mixture.is_beside]
        shared = mixture.shared_mlp
        self._shared = SamplerMlp(tensors, f"{name}.shared_expert", shared, eps) if mixture.shared_ffn_size else None
        self._shared_gate = tensors.get(f"{name}.shared_gate.weight")

    def __call__(self, x_TH: Tensor, run: Pass) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, with that of the expert of all tokens."""
        weight_TK, expert_TK = self._route(x_TH)
        run.chosen.append(expert_TK)
        if self._latent:
            into, out = self._latent
            output_TH = out(self._sum(into(x_TH, run.lora_weights), weight_TK, expert_TK, run), run.lora_weights)
        elif self._norms:
            output_TH = self._norms[1](self._sum(self._norms[0](x_TH), weight_TK, expert_TK, run))
        else:
            output_TH = self._sum(x_TH, weight_TK, expert_TK, run)
        if self._shared is not None:
            shared_TH = self._shared(x_TH, run)
            if self._shared_gate is not None:
                shared_TH = F.linear(x_TH, self._shared_gate).sigmoid() * shared_TH
            output_TH = output_TH + shared_TH
        return output_TH

    def _sum(self, x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, run: Pass) -> Tensor:
        """Add up outputs in the order of the experts' numbers."""
        if not run.fixed_shapes:
            return families.sum_of_experts(x_TH, weight_TK, expert_TK, partial(self._expert, run))
        total_TH, every_TE1 = torch.zeros_like(x_TH), (len(x_TH), self._mixture.num_experts, 1)
        weight_TE1 = weight_TK.new_zeros(every_TE1).scatter_(1, expert_TK[..., None], weight_TK[..., None])
        for number in expert_TK.unique().tolist():
            weight_T1 = weight_TE1[:, number]
            added_TH = total_TH + self._expert(run, number, x_TH) * weight_T1
            total_TH = torch.where(weight_T1 != 0, added_TH, total_TH)
        return total_TH

    def _expert(self, run: Pass, number: int, x_MH: Tensor) -> Tensor:
        if self._mlps:
            return self._mlps[number](x_MH, run)
        up, down = (stack[number] for stack in self._stacks if stack is not None)
        if self._mixture.stacked is None:
            return F.linear(activate(F.linear(x_MH, up), self._mixture.activation, True), down)
        up_bias, down_bias = (bias[number] for bias in self._biases if bias is not None)
        made = torch.addmm(up_bias, x_MH, up)
        return torch.addmm(down_bias, clamped_gate(self._mixture.stacked, made[:, ::2], made[:, 1::2]), down)

    def _route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights in the tokens' dtype, and expert numbers: both [T, K]."""
        if self._scale_H is not None:
            size = x_TH.shape[-1]
            x_TH = F.rms_norm(x_TH, (size,), eps=self._eps) * self._scale_H * size**-0.5
        score_TE = families.scores(x_TH, self._router_EH, self._mixture, self._bias_E)
        expert_TK = families.choose(score_TE, self._mixture, self._correction_E)
        weight_TK = families.weights(score_TE, expert_TK, self._mixture).to(x_TH.dtype)
        return weight_TK if self._scale_E is None else weight_TK * self._scale_E[expert_TK], expert_TK


# --- A layer ---


class Layer:
    """A mixer and an MLP, each with the norms around it that the model has, and what its block has behind them."""

    def __init__(self, a: Architecture, tensors: ModelTensors, layer: int) -> None:
        name, eps = f"decoder.layers.{layer}", a.norm_eps
        self._layer, self._scale = layer, a.residual_scale
        self._mixer, self._mlp = _mixer(a, tensors, layer), _mlp(a, tensors, layer)
        norms = "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"
        self._norms = [tensors.norm(f"{name}.{norm}", eps) for norm in norms]
        self._gate, self._projection = (tensors.get(f"{name}.per_layer.{x}.weight") for x in ("gate", "projection"))
        self._per_layer_norm = tensors.norm(f"{name}.per_layer.norm", eps)
        self._scalar = tensors.get(f"{name}.scalar")

    def __call__(self, x_TH: Tensor, run: Pass) -> Tensor:
        before_mixer, behind_mixer, before_mlp, behind_mlp = self._norms
        if self._mixer is not None:
            x_TH = self._added(x_TH, behind_mixer(self._mixer(before_mixer(x_TH), run)))
        if self._mlp is not None:
            x_TH = self._added(x_TH, behind_mlp(self._mlp(before_mlp(x_TH), run)))
        if self._gate is not None and self._projection is not None and run.per_layer_TLX is not None:
            gated_TX = F.gelu(F.linear(x_TH, self._gate), approximate="tanh") * run.per_layer_TLX[:, self._layer]
            x_TH = x_TH + self._per_layer_norm(F.linear(gated_TX, self._projection))
        return x_TH if self._scalar is None else x_TH * self._scalar.to(x_TH.dtype)

    def _added(self, x_TH: Tensor, made_TH: Tensor) -> Tensor:
        return x_TH + (made_TH if self._scale == 1 else made_TH * self._scale)


def _mixer(a: Architecture, tensors: ModelTensors, layer: int) -> Computed | None:
    name = f"decoder.layers.{layer}.self_attention"
    match a.mixers[layer]:
        case LatentAttention() as latent:
            return SamplerLatentAttention(tensors, name, layer, latent)
        case Attention() as attention:
            return SamplerAttention(tensors, name, layer, attention, a.norm_eps)
        case DeltaNet() as delta_net:
            return SamplerDeltaNet(tensors, name, layer, delta_net, a.norm_eps)
        case Mamba2() as mamba:
            return SamplerMamba2(tensors, name, layer, mamba, a.norm_eps)
        case ShortConv():
            return SamplerShortConv(tensors, name, layer)
        case None:
            return None


def _mlp(a: Architecture, tensors: ModelTensors, layer: int) -> Computed | None:
    name = f"decoder.layers.{layer}.mlp"
    match a.mlps[layer]:
        case Mixture() as mixture:
            return SamplerExperts(tensors, name, mixture, a.norm_eps)
        case Mlp() as mlp:
            return SamplerMlp(tensors, name, mlp, a.norm_eps)
        case None:
            return None
