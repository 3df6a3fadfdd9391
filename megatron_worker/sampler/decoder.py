"""A decoder for sampling: it reads one prompt at a time, and steps a fixed number of slots by one token each.

**Why batching cannot change a result.** Products round differently for differently shaped matrices, so shapes here
never depend on other requests: a prompt is prefilled alone, whatever waits; a step always computes every slot, empty
or not, with experts too (experts.py); attention runs over blocks of BLOCK positions, and blocks after a sequence's
end add exactly nothing (a weight of exp(-1e30) = 0, a rescaling by exp(0) = 1). This assumes that a product gives
equal rows for equal inputs in every row; `reliable_width` (generation.py) checks that.

Shape suffixes: B slots, T tokens of a prompt, H hidden size, Q query heads, G key/value heads, P query heads for each
of those, S positions of a block, D size of a head, V vocabulary, O outputs and I inputs of a linear, R ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.families import frequencies_of, rope_tables
from megatron_worker.sampler.drawing import PromptScores, score_prompt
from megatron_worker.sampler.layers import (
    BLOCK,
    FusedLinear,
    LoraFactors,
    Mlp,
    Norm,
    SamplerAttention,
    SamplerExperts,
    fuse_attention,
    fuse_experts,
    fuse_mlp,
    masks_of,
    token_table,
    with_tokens,
)
from megatron_worker.tensors.safetensors_files import model_files
from shared.errors import InvalidInput
from shared.families import architecture, read_architecture
from shared.families.architecture import Architecture, Attention, Mixer, Mixture, Rope
from shared.families.model_slices import output_slice, slices_of
from shared.families.tensor_slices import TensorSlice


@dataclass(frozen=True)
class Layer:
    """Attention and an MLP, or experts in its place, each with the norm before it."""

    attention_norm: Norm
    attention: SamplerAttention
    mlp_norm: Norm
    mlp: Mlp | SamplerExperts


@dataclass(frozen=True)
class Prefilled:
    """The result of reading a prompt: the adapter, the last token's final hidden state, keys and values of each layer,
    [G, T, D], the experts that each layer with experts chose, [T, K], and the residual stream after the last layer
    (it gives the final hidden states of all tokens)."""

    lora_weights: Mapping[str, LoraFactors]
    hidden_H: Tensor
    stream_TH: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    experts: list[Tensor]

    @property
    def num_tokens(self) -> int:
        return len(self.stream_TH)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.stream_TH, *self.keys, *self.values, *self.experts))


class Cache:
    """Keys and values of all slots, one tensor a layer: [blocks, B, G, S, D]; grows by blocks of zeros."""

    def __init__(self, a: Architecture, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        empty = 0, num_slots, a.attention.num_kv_heads, BLOCK, a.attention.head_dim
        self.keys = [torch.zeros(empty, dtype=dtype, device=device) for _ in a.mixers]
        self.values = [torch.zeros(empty, dtype=dtype, device=device) for _ in a.mixers]
        self.slots_B = torch.arange(num_slots, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

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


def computes(a: Architecture) -> bool:
    """Return True if `Decoder` computes an architecture: attention to all tokens before, and SwiGLU MLPs."""
    factors = a.logit_cap, a.embedding_scale, a.residual_scale, a.logit_divisor
    is_plain = a.block is None and not a.zero_centred_norms and factors == (None, 1, 1, 1)
    return is_plain and all(map(_attends, a.mixers)) and all(map(_has, a.mlps))


def _attends(mixer: Mixer | None) -> bool:
    if type(mixer) is not Attention or mixer.is_gated or mixer.has_sinks or mixer.norms_all_heads:
        return False
    return mixer.window is None and mixer.scale is None


def _has(mlp: architecture.Mlp | Mixture | None) -> bool:
    if mlp is None or mlp.activation != "silu" or not mlp.is_gated:
        return False
    if isinstance(mlp, architecture.Mlp):
        return True
    return mlp.scoring == "softmax" and mlp.stacked is None and not mlp.latent_size and not mlp.shared_ffn_size


class Decoder:
    """A decoder of one of our families, whole on one device. Raises InvalidInput when the folder cannot be used."""

    computes_slots_alone = False

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = read_architecture(folder)
        if not computes(self.architecture):
            family = self.architecture.family
            raise InvalidInput(f"the small sampler has no decoder of its own for {family}", str(folder))
        self.folder, self.dtype, self.device = folder, dtype, device
        weights = _read(folder, self.architecture, dtype, device)
        a = self.architecture
        self._embedding_VH = weights[f"{a.tensor_prefix}.embed_tokens.weight"]
        output_VH = self._embedding_VH if a.tied else weights[a.output_name]
        self._output = FusedLinear("lm_head", (output_slice(a, 1),), output_VH, None)
        self._final_norm = Norm(weights[f"{a.tensor_prefix}.norm.weight"], a.norm_eps)
        self._slices = slices_of(a, 1)
        slices = {s.name: s for s in self._slices}
        self._table = token_table(slices[f"{a.tensor_prefix}.embed_tokens.weight"], self._embedding_VH)
        self._layers = [_layer(a, weights, slices, number) for number in range(a.num_layers)]
        self._unfused = weights  # what `fuse` has left of them
        self._frequencies = frequencies_of(a, device)

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
        read_into(self.named_weights(), folder, self.architecture, self._slices)

    @property
    def linears(self) -> list[FusedLinear]:
        return [x for layer in self._layers for x in (*layer.attention.linears, *layer.mlp.linears)]

    @property
    def adaptable(self) -> list[FusedLinear]:
        """The linears that an adapter can have factors for."""
        return [*self.linears, self._output, self._table]

    def new_cache(self, num_slots: int) -> Cache:
        return Cache(self.architecture, num_slots, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, token_ids: tuple[int, ...], lora_weights: Mapping[str, LoraFactors]) -> Prefilled:
        """Read one prompt."""
        x_TH = self._embedded(torch.tensor(token_ids, device=self.device), lora_weights)
        rotary = self._rotary(torch.arange(len(token_ids), device=self.device))
        keys, values, experts = [], [], list[Tensor]()
        for layer in self._layers:
            attended_TH, key, value = layer.attention.read(layer.attention_norm(x_TH), lora_weights, rotary)
            keys.append(key)
            values.append(value)
            x_TH = x_TH + attended_TH
            x_TH = x_TH + self._mlp(layer, x_TH, lora_weights, experts, fixed_shapes=False)
        last_1H = x_TH[-1:]
        return Prefilled(lora_weights, self._final_norm(last_1H)[0], x_TH, keys, values, experts)

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...], prompt: Prefilled, num_top: int = 0) -> PromptScores:
        """Score a prompt's tokens but the first, with `num_top` of the likeliest in the place of each."""

        def logits(x_CH: Tensor) -> Tensor:
            return self.logits(self._final_norm(x_CH), prompt.lora_weights)

        return score_prompt(token_ids, prompt.stream_TH, logits, num_top)

    @torch.inference_mode()
    def step(
        self,
        token_B: Tensor,
        position_B: Tensor,
        num_blocks: int,
        cache: Cache,
        lora_weights: Mapping[str, LoraFactors],
        chosen: list[Tensor] | None = None,
    ) -> Tensor:
        """Compute one token of every slot at its position. Returns final hidden states, [B, H].

        Args:
            num_blocks: blocks that any slot has tokens in; more change nothing.
            chosen: the slots' experts in each layer with experts are appended, [B, K].
        """
        x_BH, chosen = self._embedded(token_B, lora_weights), [] if chosen is None else chosen
        rotary, masks = self._rotary(position_B), masks_of(position_B, num_blocks)
        places = position_B // BLOCK, cache.slots_B, position_B % BLOCK
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            x_BH = x_BH + layer.attention.step(
                layer.attention_norm(x_BH), lora_weights, rotary, keys, values, places, masks
            )
            x_BH = x_BH + self._mlp(layer, x_BH, lora_weights, chosen, fixed_shapes=True)
        return self._final_norm(x_BH)

    @torch.inference_mode()
    def logits(self, hidden_BH: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        """Return logits, float32 [B, V]."""
        return self._output(hidden_BH, lora_weights).float()

    def _mlp(
        self,
        layer: Layer,
        x_TH: Tensor,
        lora_weights: Mapping[str, LoraFactors],
        chosen: list[Tensor],
        *,
        fixed_shapes: bool,
    ) -> Tensor:
        """Return the output of a layer's MLP for the residual stream. `chosen`, `fixed_shapes`: see SamplerExperts."""
        normed_TH = layer.mlp_norm(x_TH)
        match layer.mlp:
            case Mlp() as mlp:
                return mlp(normed_TH, lora_weights)
            case SamplerExperts() as experts:
                return experts(normed_TH, lora_weights, chosen, fixed_shapes=fixed_shapes)

    def _embedded(self, token_T: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        return with_tokens(F.embedding(token_T, self._embedding_VH), token_T, lora_weights)

    def _rotary(self, position_T: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        return {rope: rope_tables(rope, position_T, each, self.dtype) for rope, each in self._frequencies.items()}


def _read(folder: Path, a: Architecture, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Read every tensor, by its Hugging Face name."""
    slices = slices_of(a, 1)
    with model_files(folder) as files:
        files.assign(slices, folder, a.carried)
        return {s.name: files.local(s, s.name, 0, 1).to(device, dtype, copy=True) for s in slices}


def read_into(targets: Mapping[str, Tensor], folder: Path, a: Architecture, slices: Sequence[TensorSlice]) -> None:
    """Read every tensor into the one of its Hugging Face name, which may be of another dtype.

    Raises InvalidInput: the folder cannot be used, or is of another architecture.
    """
    if read_architecture(folder) != a:
        raise InvalidInput("the weights are of another architecture than the model", str(folder / "config.json"))
    with model_files(folder) as files:
        files.assign(slices, folder, a.carried)
        for s in slices:
            targets[s.name].copy_(files.local(s, s.name, 0, 1))


def _layer(a: Architecture, weights: dict[str, Tensor], slices: dict[str, TensorSlice], number: int) -> Layer:
    prefix, attention, mlp = f"{a.tensor_prefix}.layers.{number}", a.mixers[number], a.mlps[number]
    assert isinstance(attention, Attention)  # else the family was refused
    return Layer(
        attention_norm=Norm(weights[f"{prefix}.{a.names.mixer_norm}.weight"], a.norm_eps),
        attention=fuse_attention(f"{prefix}.self_attn", attention, a.norm_eps, weights, slices),
        mlp_norm=Norm(weights[f"{prefix}.{a.names.mlp_norm}.weight"], a.norm_eps),
        mlp=(
            fuse_experts(f"{prefix}.mlp", mlp, weights, slices)
            if isinstance(mlp, Mixture)
            else fuse_mlp(f"{prefix}.mlp", weights, slices)
        ),
    )
