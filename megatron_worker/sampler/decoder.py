"""A decoder for sampling: it reads one prompt at a time, and steps a fixed number of slots by one token each.

**Why batching cannot change a result.** Products round differently for differently shaped matrices, so shapes here
never depend on what else is going on: a prompt is read alone, whatever waits; a step always computes every slot, empty
or not, with experts too (experts.py); attention goes over blocks of BLOCK positions, and blocks behind a sequence's
end add exactly nothing (a weight of exp(-inf) = 0, a rescaling by exp(0) = 1). What is left is that a product gives
equal rows for equal inputs in every row; `reliable_width` (generation.py) checks that.

Shape suffixes: B slots, T tokens of a prompt, H hidden size, Q query heads, G key/value heads, P query heads for each
of those, S positions of a block, D size of a head, V vocabulary, O outputs and I inputs of a linear, R ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.families import read_architecture
from megatron_worker.families.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    Mixture,
    Rope,
)
from megatron_worker.families.model_slices import output_slice, slices_of
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.mixers.delta_rule import plan_recurrence
from megatron_worker.sampler.drawing import PromptScores
from megatron_worker.sampler.layers.delta_net import RecurrentState, SamplerDeltaNet, fuse_delta_net
from megatron_worker.sampler.layers.experts import SamplerExperts, fuse_experts
from megatron_worker.sampler.layers.linears import FusedLinear, LoraFactors, Mlp, fuse, fuse_mlp
from megatron_worker.tensors.safetensors_files import model_files, refuse_unknown
from shared.errors import InvalidInput

BLOCK = 128
_NO_ADAPTER: Mapping[str, LoraFactors] = {}
_SCORED = 64  # prompt tokens whose logits are held at a time


@dataclass(frozen=True)
class AttentionLinears:
    attention: Attention
    qkv: FusedLinear
    query_norm_D: Tensor | None
    key_norm_D: Tensor | None
    output: FusedLinear

    @property
    def linears(self) -> list[FusedLinear]:
        return [self.qkv, self.output]


@dataclass(frozen=True)
class Layer:
    """A layer, and its place among those that mix tokens in its way."""

    input_norm_H: Tensor
    mixer: AttentionLinears | SamplerDeltaNet
    place: int
    mlp_norm_H: Tensor
    mlp: Mlp | SamplerExperts


@dataclass(frozen=True)
class Prefilled:
    """The result of reading a prompt: the adapter, the last token's final hidden state, keys and values of each layer
    of attention [G, T, D], the state of each recurrent layer, and the residual stream after the last layer, from which
    all tokens' final hidden states can be computed."""

    lora_weights: Mapping[str, LoraFactors]
    hidden_H: Tensor
    stream_TH: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    recurrent: list[RecurrentState]

    @property
    def num_tokens(self) -> int:
        return len(self.stream_TH)

    @property
    def num_bytes(self) -> int:
        attended = sum(tensor.nbytes for tensor in (self.stream_TH, *self.keys, *self.values))
        return attended + sum(state.num_bytes for state in self.recurrent)


class Cache:
    """Keys and values of all slots, one tensor a layer of attention: [blocks, B, G, S, D]; grows by blocks of zeros.
    Beside them the states of recurrent layers."""

    def __init__(self, a: Architecture, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        attention = [mixer for mixer in a.mixers if isinstance(mixer, Attention)]
        delta_nets = [mixer for mixer in a.mixers if isinstance(mixer, DeltaNet)]
        empty = [(0, num_slots, mixer.num_kv_heads, BLOCK, mixer.head_dim) for mixer in attention]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in empty]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in empty]
        self.recurrent = [RecurrentState.zeros(mixer, num_slots, dtype, device) for mixer in delta_nets]
        self.slots_B = torch.arange(num_slots, device=device)

    @property
    def num_bytes(self) -> int:
        attended = sum(tensor.nbytes for tensor in (*self.keys, *self.values))
        return attended + sum(state.num_bytes for state in self.recurrent)

    def reserve(self, num_tokens: int) -> None:
        for tensors in (self.keys, self.values):
            for number, old in enumerate(tensors):
                missing = -(-num_tokens // BLOCK) - len(old)
                if missing > 0:
                    tensors[number] = torch.cat([old, old.new_zeros(missing, *old.shape[1:])])

    def fill(self, slot: int, prompt: Prefilled) -> None:
        self.reserve(prompt.num_tokens)
        for tensors, sources in ((self.keys, prompt.keys), (self.values, prompt.values)):
            for target, source_GTD in zip(tensors, sources, strict=True):
                for block, start in enumerate(range(0, prompt.num_tokens, BLOCK)):
                    part_GTD = source_GTD[:, start : start + BLOCK]
                    target[block, slot, :, : part_GTD.shape[1]] = part_GTD
        for state, read in zip(self.recurrent, prompt.recurrent, strict=True):
            state.fill(slot, read)


class Decoder:
    """A decoder of one of our families, whole on one device.

    Raises InvalidInput when the folder cannot be used.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = read_architecture(folder)
        self.folder, self.dtype, self.device = folder, dtype, device
        weights = _read(folder, self.architecture, dtype, device)
        a = self.architecture
        self._embedding_VH = weights[f"{a.tensor_prefix}.embed_tokens.weight"]
        output_VH = self._embedding_VH if a.tied else weights["lm_head.weight"]
        self._output = FusedLinear("lm_head", (output_slice(a, 1),), output_VH, None)
        self._final_norm_H = weights[f"{a.tensor_prefix}.norm.weight"]
        self._slices = slices_of(a, 1)
        slices = {s.name: s for s in self._slices}
        self._layers = [_layer(a, weights, slices, number) for number in range(a.num_layers)]
        self._unfused = weights  # what `fuse` has left of them
        self._frequencies = a.frequencies(device)

    def named_weights(self) -> dict[str, Tensor]:
        """Return every tensor by its Hugging Face name: what is written to one is computed with from then on."""
        named = dict(self._unfused)
        for linear in self.linears:
            named |= linear.named_weights()
        return named

    def read_weights(self, folder: Path) -> None:
        """Replace all weights by those of a Hugging Face folder of the same architecture.

        Raises:
            InvalidInput: the folder cannot be used. The weights may have been replaced in part, if a file is damaged.
        """
        if read_architecture(folder) != self.architecture:
            raise InvalidInput("the weights are of another architecture than the model", str(folder / "config.json"))
        targets = self.named_weights()
        with model_files(folder) as files:
            refuse_unknown(files, self._slices, folder, self.architecture.carried)
            for s in self._slices:
                targets[s.name].copy_(files.local(s, s.name, 0, 1))

    @property
    def linears(self) -> list[FusedLinear]:
        return [x for layer in self._layers for x in (*layer.mixer.linears, *layer.mlp.linears)]

    @property
    def adaptable(self) -> list[FusedLinear]:
        """What adapters can be beside."""
        return [*self.linears, self._output]

    def new_cache(self, num_slots: int) -> Cache:
        return Cache(self.architecture, num_slots, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, token_ids: tuple[int, ...], lora_weights: Mapping[str, LoraFactors]) -> Prefilled:
        """Read one prompt."""
        x_TH = F.embedding(torch.tensor(token_ids, device=self.device), self._embedding_VH)
        index_T = torch.arange(len(token_ids), device=self.device)
        rotary = self._rotary(index_T)
        delta_net = self.architecture.delta_net
        plan = None if delta_net is None else plan_recurrence(index_T - 1, delta_net.conv_width)
        keys, values, recurrent = [], [], []
        for layer in self._layers:
            normed_TH = self._norm(x_TH, layer.input_norm_H)
            if isinstance(layer.mixer, SamplerDeltaNet):
                assert plan is not None
                mixed_TH, state = layer.mixer.read(normed_TH, lora_weights, plan)
                recurrent.append(state)
            else:
                query_TQD, key_TGD, value_TGD, gate_TX = self._heads(layer.mixer, normed_TH, lora_weights, rotary)
                query, key, value = (t.transpose(0, 1).contiguous() for t in (query_TQD, key_TGD, value_TGD))
                key_1QTD, value_1QTD = (
                    t.repeat_interleave(layer.mixer.attention.heads_per_group, dim=0)[None] for t in (key, value)
                )
                attended_1QTD = F.scaled_dot_product_attention(query[None], key_1QTD, value_1QTD, is_causal=True)
                attended_TX = attended_1QTD[0].transpose(0, 1).flatten(1)
                mixed_TH = _output(layer.mixer, attended_TX, gate_TX, lora_weights)
                keys.append(key)
                values.append(value)
            x_TH = self._with_mlp(layer, x_TH + mixed_TH, lora_weights, fixed_shapes=False)
        last_1H = x_TH[-1:]
        return Prefilled(lora_weights, self._norm(last_1H, self._final_norm_H)[0], x_TH, keys, values, recurrent)

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...], prompt: Prefilled, num_top: int = 0) -> PromptScores:
        """Score a prompt's tokens but the first, with `num_top` of the likeliest in the place of each.

        Computed in chunks, never [T, V]; their shapes depend on the prompt alone.
        """
        label_T = torch.tensor(token_ids[1:], dtype=torch.int64, device=self.device)
        scores = PromptScores()
        for label_C, x_CH in zip(label_T.split(_SCORED), prompt.stream_TH[:-1].split(_SCORED), strict=True):
            scores.add(self.logits(self._norm(x_CH, self._final_norm_H), prompt.lora_weights), label_C, num_top)
        return scores

    @torch.inference_mode()
    def step(
        self,
        token_B: Tensor,
        position_B: Tensor,
        num_blocks: int,
        cache: Cache,
        lora_weights: Mapping[str, LoraFactors],
    ) -> Tensor:
        """Compute one token of every slot at its position. Returns final hidden states, [B, H].

        Args:
            num_blocks: blocks that any slot has tokens in; more change nothing.
        """
        x_BH = F.embedding(token_B, self._embedding_VH)
        rotary = self._rotary(position_B)
        masks = _masks(position_B, num_blocks)
        block_B, offset_B = position_B // BLOCK, position_B % BLOCK
        for layer in self._layers:
            normed_BH = self._norm(x_BH, layer.input_norm_H)
            if isinstance(layer.mixer, SamplerDeltaNet):
                mixed_BH = layer.mixer.step(normed_BH, lora_weights, cache.recurrent[layer.place])
            else:
                query_BQD, key_BGD, value_BGD, gate_BX = self._heads(layer.mixer, normed_BH, lora_weights, rotary)
                keys, values = cache.keys[layer.place], cache.values[layer.place]
                keys[block_B, cache.slots_B, :, offset_B] = key_BGD
                values[block_B, cache.slots_B, :, offset_B] = value_BGD
                attended_BX = _attend(query_BQD, keys, values, masks)
                mixed_BH = _output(layer.mixer, attended_BX, gate_BX, lora_weights)
            x_BH = self._with_mlp(layer, x_BH + mixed_BH, lora_weights, fixed_shapes=True)
        return self._norm(x_BH, self._final_norm_H)

    @torch.inference_mode()
    def logits(self, hidden_BH: Tensor, lora_weights: Mapping[str, LoraFactors] = _NO_ADAPTER) -> Tensor:
        """Return logits, float32 [B, V]."""
        return self._output(hidden_BH, lora_weights).float()

    def _heads(
        self,
        linears: AttentionLinears,
        normed_TH: Tensor,
        lora_weights: Mapping[str, LoraFactors],
        rotary: Mapping[Rope, tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values, rotated: [T, heads, D]; and the gates of the outputs, [T, heads * D]."""
        a, gate_TX = linears.attention, None
        mixed_TO = linears.qkv(normed_TH, lora_weights)
        rows = [a.num_heads * a.rows_per_head, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim]
        query, key, value = (part.unflatten(-1, (-1, a.head_dim)) for part in mixed_TO.split(rows, dim=-1))
        if a.is_gated:
            query, gate = query.unflatten(1, (-1, 2)).unbind(2)
            gate_TX = gate.flatten(1)
        if linears.query_norm_D is not None and linears.key_norm_D is not None:
            query, key = self._norm(query, linears.query_norm_D), self._norm(key, linears.key_norm_D)
        if a.rope is not None:
            query, key = (_rotated(x, *rotary[a.rope]) for x in (query, key))
        return query, key, value, gate_TX

    def _with_mlp(
        self, layer: Layer, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], *, fixed_shapes: bool
    ) -> Tensor:
        """Return the residual stream after a layer's MLP. `fixed_shapes`: see SamplerExperts."""
        normed_TH = self._norm(x_TH, layer.mlp_norm_H)
        match layer.mlp:
            case Mlp() as mlp:
                return x_TH + mlp(normed_TH, lora_weights)
            case SamplerExperts() as experts:
                return x_TH + experts(normed_TH, lora_weights, fixed_shapes=fixed_shapes)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        a, size = self.architecture, (x.shape[-1],)
        if a.zero_centred_norms:
            return F.rms_norm(x.float(), size, 1 + weight.float(), a.norm_eps).to(x.dtype)
        return F.rms_norm(x, size, weight, a.norm_eps)

    def _rotary(self, position_T: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        return {rope: rope.tables(position_T, each, self.dtype) for rope, each in self._frequencies.items()}


def _output(
    linears: AttentionLinears, attended_TX: Tensor, gate_TX: Tensor | None, lora_weights: Mapping[str, LoraFactors]
) -> Tensor:
    return linears.output(attended_TX if gate_TX is None else attended_TX * gate_TX.sigmoid(), lora_weights)


def _rotated(x_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate as many of a head's dimensions as the tables have."""
    if (size := cos_T1D.shape[-1]) < x_TXD.shape[-1]:
        return torch.cat([_rotated(x_TXD[..., :size], cos_T1D, sin_T1D), x_TXD[..., size:]], dim=-1)
    first, second = x_TXD.chunk(2, dim=-1)
    return x_TXD * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D


def _masks(position_B: Tensor, num_blocks: int) -> list[Tensor]:
    """Return for each block 0 where a slot may attend and -inf where it may not, [B, 1, 1, S]."""
    offset_S = torch.arange(BLOCK, device=position_B.device)
    zero = torch.zeros((), device=position_B.device)
    return [
        torch.where(block * BLOCK + offset_S > position_B[:, None], -torch.inf, zero)[:, None, None]
        for block in range(num_blocks)
    ]


def _attend(query_BQD: Tensor, keys: Tensor, values: Tensor, masks: list[Tensor]) -> Tensor:
    """Attend over blocks with a running maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3).

    Every slot sees position 0, so that the maximum is finite from the first block on. Returns [B, Q * D].
    """
    _, num_slots, num_groups, _, size = keys.shape
    query = query_BQD.reshape(num_slots * num_groups, -1, size)
    scale = size**-0.5
    highest = total = attended = torch.empty(0)
    for block, mask_B11S in enumerate(masks):
        key_XSD, value_XSD = (t[block].view(-1, BLOCK, size) for t in (keys, values))
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
    return (attended / total).to(query_BQD.dtype).view(num_slots, -1)


def _read(folder: Path, a: Architecture, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Read every tensor, by its Hugging Face name."""
    slices = slices_of(a, 1)
    with model_files(folder) as files:
        refuse_unknown(files, slices, folder, a.carried)
        return {s.name: files.local(s, s.name, 0, 1).to(device, dtype, copy=True) for s in slices}


def _layer(a: Architecture, weights: dict[str, Tensor], slices: dict[str, TensorSlice], number: int) -> Layer:
    prefix, mixer = f"{a.tensor_prefix}.layers.{number}", a.mixers[number]
    mlp = f"{prefix}.mlp"
    return Layer(
        input_norm_H=weights[f"{prefix}.input_layernorm.weight"],
        mixer=(
            fuse_delta_net(f"{prefix}.linear_attn", mixer, a.norm_eps, weights, slices)
            if isinstance(mixer, DeltaNet)
            else _attention_linears(f"{prefix}.self_attn", mixer, weights, slices)
        ),
        place=sum(isinstance(before, type(mixer)) for before in a.mixers[:number]),
        mlp_norm_H=weights[f"{prefix}.post_attention_layernorm.weight"],
        mlp=fuse_experts(mlp, a.mlp, weights, slices) if isinstance(a.mlp, Mixture) else fuse_mlp(mlp, weights, slices),
    )


def _attention_linears(
    module: str, attention: Attention, weights: dict[str, Tensor], slices: dict[str, TensorSlice]
) -> AttentionLinears:
    qkv = [f"{module}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    return AttentionLinears(
        attention=attention,
        qkv=fuse(f"{module}.qkv", qkv, weights, slices),
        query_norm_D=weights.get(f"{module}.q_norm.weight"),
        key_norm_D=weights.get(f"{module}.k_norm.weight"),
        output=fuse(f"{module}.output", [f"{module}.o_proj"], weights, slices),
    )
