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
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.fields import Sha256
from longshore.training import Lora
from megatron_worker.families import read_architecture
from megatron_worker.families.architecture import Architecture, rotary_frequencies
from megatron_worker.families.tensor_slices import TensorSlice, slices_of
from megatron_worker.sampler.drawing import PromptScores
from megatron_worker.sampler.experts import SamplerExperts, fuse_experts
from megatron_worker.sampler.linears import FusedLinear, LoraFactors, Mlp, fuse, fuse_mlp
from megatron_worker.tensors.safetensors_files import check_names, model_files, refuse_unknown, single_file
from megatron_worker.weight_sync.buckets import weights_sha256
from shared.chat.completions import DrawnBy
from shared.errors import InvalidInput
from shared.models import peft as peft_format

BLOCK = 128
_SCORED = 64  # prompt tokens whose logits are held at a time


@dataclass(frozen=True)
class Layer:
    input_norm_H: Tensor
    qkv: FusedLinear
    query_norm_D: Tensor | None
    key_norm_D: Tensor | None
    output: FusedLinear
    mlp_norm_H: Tensor
    mlp: Mlp | SamplerExperts


@dataclass(frozen=True)
class Prefilled:
    """The result of reading a prompt: its last token's final hidden state, keys and values of each layer [G, T, D], and
    the residual stream after the last layer, from which all tokens' final hidden states can be computed."""

    hidden_H: Tensor
    stream_TH: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.stream_TH, *self.keys, *self.values))


class Cache:
    """Keys and values of all slots, one tensor a layer: [blocks, B, G, S, D]. Grows by blocks of zeros."""

    def __init__(self, a: Architecture, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        empty = (0, num_slots, a.num_kv_heads, BLOCK, a.head_dim)
        self.keys = [torch.zeros(empty, dtype=dtype, device=device) for _ in range(a.num_layers)]
        self.values = [torch.zeros(empty, dtype=dtype, device=device) for _ in range(a.num_layers)]
        self.slots_B = torch.arange(num_slots, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def reserve(self, num_tokens: int) -> None:
        missing = -(-num_tokens // BLOCK) - len(self.keys[0])
        if missing > 0:
            for tensors in (self.keys, self.values):
                for number, old in enumerate(tensors):
                    tensors[number] = torch.cat([old, old.new_zeros(missing, *old.shape[1:])])

    def fill(self, slot: int, prompt: Prefilled) -> None:
        num_tokens = prompt.keys[0].shape[1]
        self.reserve(num_tokens)
        for tensors, sources in ((self.keys, prompt.keys), (self.values, prompt.values)):
            for target, source_GTD in zip(tensors, sources, strict=True):
                for block, start in enumerate(range(0, num_tokens, BLOCK)):
                    part_GTD = source_GTD[:, start : start + BLOCK]
                    target[block, slot, :, : part_GTD.shape[1]] = part_GTD


class Decoder:
    """A decoder of one of our families, whole on one device.

    Raises InvalidInput when the folder cannot be used.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = read_architecture(folder)
        self.dtype, self.device = dtype, device
        weights = _read(folder, self.architecture, dtype, device)
        a = self.architecture
        self._embedding_VH = weights["model.embed_tokens.weight"]
        self._output_VH = self._embedding_VH if a.tied else weights["lm_head.weight"]
        self._final_norm_H = weights["model.norm.weight"]
        self._slices = slices_of(a, 1)
        slices = {s.name: s for s in self._slices}
        self._layers = [_layer(a, weights, slices, number) for number in range(a.num_layers)]
        self._unfused = weights  # what `fuse` has left of them
        self._frequency_D2 = rotary_frequencies(a.rope, a.head_dim).to(device)

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
            refuse_unknown(files, self._slices, folder)
            for s in self._slices:
                targets[s.name].copy_(files.local(s, s.name, 0, 1))

    @property
    def linears(self) -> list[FusedLinear]:
        return [x for layer in self._layers for x in (layer.qkv, layer.output, *layer.mlp.linears)]

    def new_cache(self, num_slots: int) -> Cache:
        return Cache(self.architecture, num_slots, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, token_ids: tuple[int, ...], lora_weights: Mapping[str, LoraFactors]) -> Prefilled:
        """Read one prompt."""
        a = self.architecture
        x_TH = F.embedding(torch.tensor(token_ids, device=self.device), self._embedding_VH)
        cos_T1D, sin_T1D = self._rotary(torch.arange(len(token_ids), device=self.device))
        keys, values = [], []
        for layer in self._layers:
            query_TQD, key_TGD, value_TGD = self._heads(layer, x_TH, lora_weights, cos_T1D, sin_T1D)
            query, key, value = (t.transpose(0, 1).contiguous() for t in (query_TQD, key_TGD, value_TGD))
            key_1QTD, value_1QTD = (t.repeat_interleave(a.heads_per_group, dim=0)[None] for t in (key, value))
            attended_1QTD = F.scaled_dot_product_attention(query[None], key_1QTD, value_1QTD, is_causal=True)
            attended_TX = attended_1QTD[0].transpose(0, 1).flatten(1)
            x_TH = self._rest(layer, x_TH, attended_TX, lora_weights, fixed_shapes=False)
            keys.append(key)
            values.append(value)
        last_1H = x_TH[-1:]
        return Prefilled(self._norm(last_1H, self._final_norm_H)[0], x_TH, keys, values)

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...], prompt: Prefilled, num_top: int = 0) -> PromptScores:
        """Score a prompt's tokens but the first, with `num_top` of the likeliest in the place of each.

        Computed in chunks, never [T, V]; their shapes depend on the prompt alone.
        """
        label_T = torch.tensor(token_ids[1:], dtype=torch.int64, device=self.device)
        scores = PromptScores()
        for label_C, x_CH in zip(label_T.split(_SCORED), prompt.stream_TH[:-1].split(_SCORED), strict=True):
            scores.add(self.logits(self._norm(x_CH, self._final_norm_H)), label_C, num_top)
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
        cos_B1D, sin_B1D = self._rotary(position_B)
        masks = _masks(position_B, num_blocks)
        block_B, offset_B = position_B // BLOCK, position_B % BLOCK
        for number, layer in enumerate(self._layers):
            query_BQD, key_BGD, value_BGD = self._heads(layer, x_BH, lora_weights, cos_B1D, sin_B1D)
            cache.keys[number][block_B, cache.slots_B, :, offset_B] = key_BGD
            cache.values[number][block_B, cache.slots_B, :, offset_B] = value_BGD
            attended_BX = _attend(query_BQD, cache.keys[number], cache.values[number], masks)
            x_BH = self._rest(layer, x_BH, attended_BX, lora_weights, fixed_shapes=True)
        return self._norm(x_BH, self._final_norm_H)

    @torch.inference_mode()
    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Return logits, float32 [B, V]."""
        return F.linear(hidden_BH, self._output_VH).float()

    def _heads(
        self, layer: Layer, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], cos_T1D: Tensor, sin_T1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, rotated: [T, heads, D]."""
        a = self.architecture
        mixed_TO = layer.qkv(self._norm(x_TH, layer.input_norm_H), lora_weights)
        mixed_TXD = mixed_TO.view(len(x_TH), -1, a.head_dim)
        query, key, value = mixed_TXD.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
        if layer.query_norm_D is not None and layer.key_norm_D is not None:
            query, key = self._norm(query, layer.query_norm_D), self._norm(key, layer.key_norm_D)
        return _rotated(query, cos_T1D, sin_T1D), _rotated(key, cos_T1D, sin_T1D), value

    def _rest(
        self,
        layer: Layer,
        x_TH: Tensor,
        attended_TX: Tensor,
        lora_weights: Mapping[str, LoraFactors],
        *,
        fixed_shapes: bool,
    ) -> Tensor:
        """Return the residual stream after a layer's attention and MLP. `fixed_shapes`: see Experts."""
        x_TH = x_TH + layer.output(attended_TX, lora_weights)
        normed_TH = self._norm(x_TH, layer.mlp_norm_H)
        match layer.mlp:
            case Mlp() as mlp:
                return x_TH + mlp(normed_TH, lora_weights)
            case SamplerExperts() as experts:
                return x_TH + experts(normed_TH, lora_weights, fixed_shapes=fixed_shapes)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.architecture.norm_eps)

    def _rotary(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        angle_TD2 = position_T.float()[:, None] * self._frequency_D2
        angle_T1D = torch.cat([angle_TD2, angle_TD2], dim=-1)[:, None]
        return angle_T1D.cos().to(self.dtype), angle_T1D.sin().to(self.dtype)


def _rotated(x_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
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
        refuse_unknown(files, slices, folder)
        return {s.name: files.local(s, s.name, 0, 1).to(device, dtype, copy=True) for s in slices}


def _layer(a: Architecture, weights: dict[str, Tensor], slices: dict[str, TensorSlice], number: int) -> Layer:
    prefix = f"model.layers.{number}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = [f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    return Layer(
        input_norm_H=weights[f"{prefix}.input_layernorm.weight"],
        qkv=fuse(f"{attention}.qkv", qkv, weights, slices),
        query_norm_D=weights.get(f"{attention}.q_norm.weight"),
        key_norm_D=weights.get(f"{attention}.k_norm.weight"),
        output=fuse(f"{attention}.output", [f"{attention}.o_proj"], weights, slices),
        mlp_norm_H=weights[f"{prefix}.post_attention_layernorm.weight"],
        mlp=fuse_experts(mlp, a, weights, slices) if a.num_experts else fuse_mlp(mlp, weights, slices),
    )


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in memory; its folder is not needed any more. Without `lora_weights`: the model alone.

    `drawn_by`: which weights these are. Only the thread that generates changes them, between two tokens (`become`).
    """

    name: str
    folder: str
    lora_weights: Mapping[str, LoraFactors]
    drawn_by: DrawnBy = field(default_factory=DrawnBy)

    def become(self, other: "LoadedAdapter") -> None:
        """Take another one's weights, under the same name."""
        self.folder, self.lora_weights, self.drawn_by = other.folder, other.lora_weights, other.drawn_by

    def weights_sha256(self) -> Sha256:
        """Return the hash of its bits in memory."""
        return weights_sha256(
            (f"{linear}.{matrix}", tensor)
            for linear, lora in self.lora_weights.items()
            for matrix, tensor in (("a", lora.a_RI), ("b", lora.b_OR))
        )


def load_adapter(name: str, folder: Path, decoder: Decoder) -> LoadedAdapter:
    """Load an adapter. Raises InvalidInput when it is missing or damaged, or not of the decoder's shape."""
    lora = peft_format.read_config(folder)
    path = folder / peft_format.WEIGHTS
    shapes = adapter_shapes(decoder, lora)
    with single_file(path) as files:
        check_names(files, set(shapes), path)
        tensors = {
            name: files.local(TensorSlice(name, name, shape, None, 0, shape[0]), name, 0, 1)
            for name, shape in shapes.items()
        }
        return adapter_of(name, str(folder), lora, decoder, tensors)


def adapter_of(name: str, folder: str, lora: Lora, decoder: Decoder, tensors: Mapping[str, Tensor]) -> LoadedAdapter:
    """Make an adapter of whole tensors under PEFT's names, with the shapes of `adapter_shapes`."""
    found = {}
    for linear in decoder.linears:
        if targeted := _targeted(linear, lora):
            found[linear.name] = _lora_weights(linear, targeted, lora, tensors, decoder)
    return LoadedAdapter(name, folder, found)


def adapter_shapes(decoder: Decoder, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by PEFT's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in decoder.linears:
        for part in _targeted(linear, lora):
            shapes[_name(part, "A")] = (lora.rank, part.shape[1])
            shapes[_name(part, "B")] = (part.shape[0], lora.rank)
    return shapes


def _targeted(linear: FusedLinear, lora: Lora) -> list[TensorSlice]:
    return [p for p in linear.parts if p.name.split(".")[-2] in lora.targets]


def _name(part: TensorSlice, matrix: str) -> str:
    return f"{peft_format.PREFIX}{part.name.removesuffix('.weight')}.lora_{matrix}.weight"


def _lora_weights(
    linear: FusedLinear, targeted: list[TensorSlice], lora: Lora, tensors: Mapping[str, Tensor], decoder: Decoder
) -> LoraFactors:
    num_outputs, num_inputs = linear.weight_OI.shape
    a_RI = torch.empty(len(targeted) * lora.rank, num_inputs)
    b_OR = torch.zeros(num_outputs, len(targeted) * lora.rank)
    row = 0
    for part in linear.parts:
        if part in targeted:
            columns = slice((first := targeted.index(part) * lora.rank), first + lora.rank)
            a_RI[columns] = tensors[_name(part, "A")]
            b_OR[row : row + part.shape[0], columns] = tensors[_name(part, "B")]
        row += part.shape[0]
    return LoraFactors(a_RI.to(decoder.device, decoder.dtype), b_OR.to(decoder.device, decoder.dtype), lora.scale)
