"""What the sampler gives to layers: its linears with adapters and its tensors, a cache, and passes over it.

Shape suffixes: T tokens of a pass, B slots, H hidden size, O outputs and I inputs of a linear, R ranks of an adapter; Q
query heads, G key/value heads, P query heads for each of those, D size of a head, S positions of a block; J channels
of a convolution, W its width; E experts, K experts of a token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker import families
from megatron_worker.layers import Experts, LayerPass, LayerTensors, Norm, Rows, attention_operands, unchanged
from megatron_worker.lora import AppliedLora
from megatron_worker.mixers.linear_attention import (
    convolve,
    delta_step,
    gated_delta_rule,
    plan_recurrence,
    scan,
    scan_step,
)
from shared.families.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    LatentAttention,
    Mamba2,
    Mixer,
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

    def __call__(self, x: Tensor, run: "PromptPass | StepPass", /) -> Tensor:
        return self.with_adapter(x, run.lora_weights)

    def with_adapter(self, x: Tensor, lora_weights: Factors) -> Tensor:
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


class ModelTensors(LayerTensors):
    """Makes a model's tensors, their values undefined, by the names of the trainer's parameters.

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
        super().__init__(slices, constants)
        self.others, self.linears = dict[str, Tensor](), list[FusedLinear]()
        self._dtype, self._device, self._is_zero_centred = dtype, device, is_zero_centred

    def slice_of(self, parameter: str) -> TensorSlice:
        (found,) = self._slices[parameter]
        return found

    def __getitem__(self, parameter: str) -> Tensor:
        return self.others.setdefault(self.slice_of(parameter).name, self._empty(parameter))

    def linear(self, module: str, brings_tokens: bool = True) -> FusedLinear:
        weight_OI, parts = self._empty(f"{module}.weight"), tuple(self._slices[f"{module}.weight"])
        bias_O = self._empty(f"{module}.bias") if f"{module}.bias" in self._slices else None
        self.linears.append(FusedLinear(module, parts, weight_OI, bias_O))
        return self.linears[-1]

    def norm(self, module: str, eps: float) -> Callable[[Tensor], Tensor]:
        weight = self.get(f"{module}.weight")
        return unchanged if weight is None else Norm(weight, eps, self._is_zero_centred)

    def _empty(self, parameter: str) -> Tensor:
        parts = self._slices[parameter]
        dtype = torch.float32 if parameter in self._constants else self._dtype
        num_rows = sum(part.shape[0] for part in parts)
        return torch.empty(num_rows, *parts[0].shape[1:], dtype=dtype, device=self._device)


# --- What is before each token: of a prompt that is read, or of the slots of a cache ---

BLOCK = 128  # positions of keys and values, in a step's attention
PROMPT_BLOCK = 256  # tokens of a prompt that are read at once, and kept together: fewer have slower products

States = tuple[Tensor, ...]
"""Of a layer with attention its keys and values, [G, T, D]; of a recurrent one the last inputs of its convolution, the
oldest first, [W - 1, J], and its state, if it has one. Empty if the layer has none of its own."""


@dataclass(frozen=True)
class Prefilled:
    """The result of reading a prompt: the adapter, the last token's final hidden state, the states of each layer, the
    experts that each layer with experts chose, [T, K], and the residual stream after the last layer of the tokens that
    were computed (it gives their final hidden states).

    `num_tokens`: of the prompt; `num_reused`: its first tokens, which were not computed again.
    """

    lora_weights: Factors
    hidden_H: Tensor
    stream_TH: Tensor
    states: list[list[Tensor]]
    experts: list[Tensor]
    num_tokens: int

    @property
    def num_reused(self) -> int:
        return self.num_tokens - len(self.stream_TH)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.stream_TH, *self.experts, *chain(*self.states)))


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
        self.reserve(prompt.num_tokens)
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


class PromptPass(LayerPass):
    """One prompt, a block of tokens at a time, each behind the states that the blocks before it have left.

    A block is computed by itself. So its bits depend on the tokens up to its end, and on no later ones.

    Attributes:
        states: of the tokens so far. Keys and values have room for the whole prompt.
        chosen: the experts that layers with experts chose for the block's tokens, [T, K] each.
        experts: those of each block so far.
        recurrent_at: the recurrent states behind a number of tokens, which is the key.
    """

    def __init__(self, a: Architecture, num_tokens: int, lora_weights: Factors) -> None:
        self.lora_weights, self.is_recurrent = lora_weights, a.conv_width is not None
        self.states = [list[Tensor]() for _ in a.mixers]
        self.experts: list[list[Tensor]] = []
        self.recurrent_at: dict[int, list[States]] = {}
        self._mixers, self._conv_width, self._num_tokens, self._first = a.mixers, a.conv_width, num_tokens, 0

    def blocks(self, token_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tokens and positions of each block behind those that the pass has, to be computed at once."""
        all_T = torch.arange(len(token_T), device=token_T.device)
        for position_T in all_T[len(self.experts) * PROMPT_BLOCK :].split(PROMPT_BLOCK):
            self._first, self._position_T = len(self.experts) * PROMPT_BLOCK, position_T
            self.chosen = list[Tensor]()
            self._masks = dict[int | None, Tensor]()
            if self._conv_width is not None:
                self._recurrence = plan_recurrence(position_T - self._first - 1, self._conv_width)
            yield token_T[position_T], position_T
            self.experts.append(self.chosen)
            if (end := self._first + PROMPT_BLOCK) in self.recurrent_at:
                self.recurrent_at[end] = [() if isinstance(m, Attention) else tuple(x) for m, x in self._by_layer()]

    def block(self, number: int) -> list[States]:
        """Return a copy of the keys and values of one block."""
        here = slice(number * PROMPT_BLOCK, (number + 1) * PROMPT_BLOCK)
        return [
            tuple(x_GTD[:, here].clone() for x_GTD in states if isinstance(mixer, Attention))
            for mixer, states in self._by_layer()
        ]

    def take_block(self, states: Sequence[States], experts: list[Tensor]) -> None:
        """Take the next block's keys, values and experts, as they were computed before."""
        self._first = len(self.experts) * PROMPT_BLOCK
        for layer, made in enumerate(states):
            self._write(layer, made)
        self.experts.append(experts)

    def take_recurrent(self, states: Sequence[States]) -> None:
        """Take the recurrent states behind the blocks that were taken."""
        self.states = [list(own or before) for own, before in zip(states, self.states, strict=True)]

    def _by_layer(self) -> Iterator[tuple[Mixer | None, list[Tensor]]]:
        return zip(self._mixers, self.states, strict=True)

    def _write(self, layer: int, made: States) -> None:
        """Write the block's keys and values behind those of the blocks before it."""
        if not self.states[layer]:
            self.states[layer] = [x.new_empty(len(x), self._num_tokens, x.shape[2]) for x in made]
        for whole_GTD, x_GTD in zip(self.states[layer], made, strict=True):
            whole_GTD[:, self._first : self._first + x_GTD.shape[1]] = x_GTD

    def attend(
        self, layer: int, query_TQD: Tensor, made: tuple[Tensor, Tensor] | None, a: Attention, sink_Q: Tensor | None
    ) -> Tensor:
        if made is not None:
            self._write(layer, tuple(x.transpose(0, 1) for x in made))
        end = self._first + len(query_TQD)
        seen = slice(0 if a.window is None else max(0, self._first - a.window + 1), end)
        key_TGD, value_TGD = (x_GTD[:, seen].transpose(0, 1) for x_GTD in self.states[_source_of(layer, a)])
        query, key, value = attention_operands(query_TQD, key_TGD, value_TGD, a.scale)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        is_causal = self._first == 0 and sink_Q is None and not (a.window is not None and a.window < end)
        mask_TX = None if is_causal else self._mask(seen, a.window, query.dtype)
        if sink_Q is not None and mask_TX is not None:  # the score of one more key, whose value is zero
            key, value = (F.pad(x, (0, 0, 1, 0)) for x in (key, value))
            sink_QT1 = sink_Q[:, None, None].expand(-1, len(query_TQD), 1)
            mask_TX = torch.cat([sink_QT1, mask_TX.expand(len(sink_Q), -1, -1)], dim=2)[None]
        attended_1QTD = F.scaled_dot_product_attention(query, key, value, mask_TX, is_causal=is_causal, enable_gqa=True)
        return attended_1QTD[0].transpose(0, 1)[..., : value_TGD.shape[-1]]

    def _mask(self, seen: slice, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of the block's tokens beside the tokens that are seen: 0 or -inf."""
        if window not in self._masks:
            position_T1 = self._position_T[:, None]
            index_X = torch.arange(seen.start, seen.stop, device=position_T1.device)
            is_hidden_TX = index_X > position_T1
            if window is not None:
                is_hidden_TX |= index_X <= position_T1 - window
            self._masks[window] = torch.zeros_like(is_hidden_TX, dtype=dtype).masked_fill_(is_hidden_TX, -torch.inf)
        return self._masks[window]

    def convolve(self, layer: int, input_TJ: Tensor, weight_JW: Tensor, bias_J: Tensor | None = None) -> Tensor:
        num_before, num_tokens = weight_JW.shape[1] - 1, len(input_TJ)
        held_WJ, *state = self.states[layer] or [input_TJ.new_zeros(num_before, input_TJ.shape[1])]
        whole = torch.cat([held_WJ, input_TJ])
        self.states[layer] = [whole[num_tokens:].clone(), *state]
        shifted = (whole[first : first + num_tokens] for first in range(num_before, -1, -1))
        return convolve(shifted, weight_JW, bias_J)

    def recur(self, layer: int, a: DeltaNet | Mamba2, rows: Rows) -> Tensor:
        held_WJ, *state = self.states[layer]
        entering = state[0][None] if state else None
        output, states = (gated_delta_rule if isinstance(a, DeltaNet) else scan)(*rows, self._recurrence, entering)
        self.states[layer] = [held_WJ, states[0]]
        return output

    def sum_of_experts(self, x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, experts: Experts) -> Tensor:
        """A prompt is read alone: each expert computes only the tokens that chose it."""
        self.chosen.append(expert_TK.short())
        return families.sum_of_experts(x_TH, weight_TK, expert_TK, lambda n, x_MH: experts.output(n, x_MH, self))


class StepPass(LayerPass):
    """One token of every slot, behind those that are in the cache."""

    def __init__(
        self,
        cache: Cache,
        position_B: Tensor,
        masks: Mapping[int | None, list[Tensor]],
        lora_weights: Factors,
        chosen: list[Tensor],
    ) -> None:
        self.lora_weights, self.chosen = lora_weights, chosen
        self._states, self._masks = cache.states, masks
        self._places = position_B // BLOCK, cache.slots_B, slice(None), position_B % BLOCK

    def attend(
        self, layer: int, query_TQD: Tensor, made: tuple[Tensor, Tensor] | None, a: Attention, sink_Q: Tensor | None
    ) -> Tensor:
        keys, values = self._states[_source_of(layer, a)]
        if made is not None:
            keys[self._places], values[self._places] = made
        if a.scale is not None:
            query_TQD = query_TQD * (a.scale * a.head_dim**0.5)
        return attend_blocks(query_TQD, keys, values, self._masks[a.window], sink_Q)

    def convolve(self, layer: int, input_TJ: Tensor, weight_JW: Tensor, bias_J: Tensor | None = None) -> Tensor:
        held_BWJ = self._states[layer][0]
        whole = torch.cat([held_BWJ, input_TJ[:, None]], dim=1)
        held_BWJ.copy_(whole[:, 1:])
        return convolve(reversed(whole.unbind(1)), weight_JW, bias_J)

    def recur(self, layer: int, a: DeltaNet | Mamba2, rows: Rows) -> Tensor:
        return (delta_step if isinstance(a, DeltaNet) else scan_step)(*rows, self._states[layer][1])

    def sum_of_experts(self, x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, experts: Experts) -> Tensor:
        """Add up outputs in the order of the experts' numbers, by products of shapes that depend on no choice.

        Each expert that any slot chose computes all slots, and the outputs for slots that did not choose it are
        dropped. So a slot's products have the same shapes, and the slot the same row in them, whatever other slots
        choose. Each expert's weights are read at most once a step, and not at all if no slot chose it; most of the
        arithmetic is wasted. Two alternatives are worse: products over only the slots that chose an expert change their
        heights, and so their bits, with the choices of other slots; a product for each slot with gathered weights reads
        an expert once for every slot that chose it.
        """
        self.chosen.append(expert_TK)
        total_TH, every_TE1 = torch.zeros_like(x_TH), (len(x_TH), experts.mixture.num_experts, 1)
        weight_TE1 = weight_TK.new_zeros(every_TE1).scatter_(1, expert_TK[..., None], weight_TK[..., None])
        for number in expert_TK.unique().tolist():
            weight_T1 = weight_TE1[:, number]
            added_TH = total_TH + experts.output(number, x_TH, self) * weight_T1
            total_TH = torch.where(weight_T1 != 0, added_TH, total_TH)
        return total_TH


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
