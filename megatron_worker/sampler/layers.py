"""The sampler's layers: linears with adapters, attention over a cache, experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker import families
from shared.families.architecture import Attention, Mixture, Rope
from shared.families.tensor_slices import TensorSlice, as_linear
from shared.models.peft import EMBEDDING

# --- Linears of the decoder with their adapters, and the MLP made of them ---
#
# Shape suffixes: T tokens or slots, O outputs and I inputs of a linear, R ranks of an adapter, H hidden size.


@dataclass(frozen=True)
class LoraFactors:
    """An adapter's matrices for one fused linear; `b_OR` is zero except in each part's block of rows and ranks.

    `scale`: of the ranks, [R] if parts have different ones. `gain_O`: DoRA's factor for each row.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float | Tensor
    gain_O: Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """A root mean square norm over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True)
class FusedLinear:
    """Hugging Face linears of the same input, stacked by rows."""

    name: str
    parts: tuple[TensorSlice, ...]
    weight_OI: Tensor
    bias_O: Tensor | None

    def named_weights(self) -> dict[str, Tensor]:
        """Return the parts' own rows by their Hugging Face names."""
        sizes = [part.shape[0] for part in self.parts]
        named = dict(zip((part.name for part in self.parts), self.weight_OI.split(sizes), strict=True))
        if self.bias_O is not None:
            biases = [part.name.removesuffix("weight") + "bias" for part in self.parts]
            named |= dict(zip(biases, self.bias_O.split(sizes), strict=True))
        return named

    def __call__(self, x: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        extra = lora_weights.get(self.name)
        gain_O = None if extra is None else extra.gain_O
        y = F.linear(x, self.weight_OI, self.bias_O if gain_O is None else None)
        if extra is not None:
            low = F.linear(x, extra.a_RI).mul_(extra.scale)
            y += F.linear(low, extra.b_OR)
        if gain_O is not None:
            y = y * gain_O if self.bias_O is None else torch.addcmul(self.bias_O, y, gain_O)
        return y


def token_table(s: TensorSlice, weight_VH: Tensor) -> FusedLinear:
    """Return the token embeddings in a form that can have an adapter."""
    return FusedLinear(EMBEDDING, (as_linear(s),), weight_VH.t(), None)


def with_tokens(
    x_TH: Tensor, token_T: Tensor, lora_weights: Mapping[str, LoraFactors], scale: float | Tensor = 1.0
) -> Tensor:
    """Return embeddings of tokens, which are scaled, with what an adapter adds to them."""
    if (extra := lora_weights.get(EMBEDDING)) is None:
        return x_TH
    return x_TH + F.embedding(token_T, extra.a_RI.t()) * (extra.scale * scale) @ extra.b_OR.t()


def fuse(
    name: str, modules: Sequence[str], weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]
) -> FusedLinear:
    """Fuse linears, by their Hugging Face names. They are taken out of `weights`, so that none is held twice."""
    own = tuple(slices[f"{module}.weight"] for module in modules)
    weight_OI = torch.cat([weights.pop(f"{module}.weight") for module in modules])
    biases = [weights.pop(f"{module}.bias") for module in modules if f"{module}.bias" in weights]
    return FusedLinear(name, own, weight_OI, torch.cat(biases) if biases else None)


@dataclass(frozen=True)
class Mlp:
    """A SwiGLU MLP: a layer's only one, or one of its experts."""

    gate_up: FusedLinear
    down: FusedLinear

    @property
    def linears(self) -> list[FusedLinear]:
        return [self.gate_up, self.down]

    def __call__(self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        gate, up = self.gate_up(x_TH, lora_weights).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, lora_weights)


def fuse_mlp(module: str, weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]) -> Mlp:
    """Fuse the linears of the MLP with this Hugging Face name, as `fuse` does."""
    is_fused = f"{module}.gate_up_proj.weight" in slices
    names = [f"{module}.{name}" for name in (("gate_up_proj",) if is_fused else ("gate_proj", "up_proj"))]
    gate_up = fuse(f"{module}.gate_up", names, weights, slices)
    return Mlp(gate_up, fuse(f"{module}.down", (f"{module}.down_proj",), weights, slices))


# --- Attention in a layer of the decoder: over a prompt at once, and over blocks of positions in a step ---
#
# Shape suffixes: B slots, T tokens of a prompt or slots, H hidden size, Q query heads, G key/value heads, P query
# heads for each of those, S positions of a block, D size of a head.

BLOCK = 128

RotaryTables = Mapping[Rope, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SamplerAttention:
    """`key_norm` and `query_norm`: of each head."""

    attention: Attention
    qkv: FusedLinear
    query_norm: Norm | None
    key_norm: Norm | None
    output: FusedLinear

    @property
    def linears(self) -> list[FusedLinear]:
        return [self.qkv, self.output]

    def read(
        self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], rotary: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read a prompt. Returns the layer's output, [T, H], and its keys and values, [G, T, D]."""
        query, key, value = (x.transpose(0, 1).contiguous() for x in self._heads(x_TH, lora_weights, rotary))
        key_1QTD, value_1QTD = (x.repeat_interleave(self.attention.heads_per_group, dim=0)[None] for x in (key, value))
        attended_1QTD = F.scaled_dot_product_attention(query[None], key_1QTD, value_1QTD, is_causal=True)
        return self.output(attended_1QTD[0].transpose(0, 1).flatten(1), lora_weights), key, value

    def step(
        self,
        x_BH: Tensor,
        lora_weights: Mapping[str, LoraFactors],
        rotary: RotaryTables,
        keys: Tensor,
        values: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        masks: list[Tensor],
    ) -> Tensor:
        """Compute one token of every slot, and put its key and value into the cache. Returns [B, H].

        Args:
            keys, values: of all slots, [blocks, B, G, S, D].
            places: for each slot its block, itself, and the offset in the block.
            masks: see `masks_of`.
        """
        query_BQD, key_BGD, value_BGD = self._heads(x_BH, lora_weights, rotary)
        block_B, slot_B, offset_B = places
        keys[block_B, slot_B, :, offset_B] = key_BGD
        values[block_B, slot_B, :, offset_B] = value_BGD
        return self.output(_attend(query_BQD, keys, values, masks), lora_weights)

    def _heads(
        self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], rotary: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, rotated: [T, heads, D]."""
        a = self.attention
        heads_TXD = self.qkv(x_TH, lora_weights).unflatten(-1, (-1, a.head_dim))
        query, key, value = heads_TXD.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if a.rope is not None:
            query, key = (_rotated(x, *rotary[a.rope]) for x in (query, key))
        return query, key, value


def fuse_attention(
    module: str, a: Attention, norm_eps: float, weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]
) -> SamplerAttention:
    """Fuse the linears of the attention with this Hugging Face name. Other tensors stay in `weights`."""
    qkv = [f"{module}.{name}" for name in (("qkv_proj",) if a.is_fused else a.projections)]
    return SamplerAttention(
        attention=a,
        qkv=fuse(f"{module}.qkv", qkv, weights, slices),
        query_norm=Norm(weights[f"{module}.q_norm.weight"], norm_eps) if a.qk_norm else None,
        key_norm=Norm(weights[f"{module}.k_norm.weight"], norm_eps) if a.qk_norm else None,
        output=fuse(f"{module}.output", [f"{module}.o_proj"], weights, slices),
    )


def _rotated(x_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate the dimensions that the tables have."""
    turned, rest = x_TXD.split([size := cos_T1D.shape[-1], x_TXD.shape[-1] - size], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def masks_of(position_B: Tensor, num_blocks: int) -> list[Tensor]:
    """Return for each block 0 where a slot may attend and -1e30 where it may not, [B, 1, 1, S]."""
    index_S = torch.arange(BLOCK, device=position_B.device)
    return [((block * BLOCK + index_S > position_B[:, None]) * -1e30)[:, None, None] for block in range(num_blocks)]


def _attend(query_BQD: Tensor, keys: Tensor, values: Tensor, masks: list[Tensor]) -> Tensor:
    """Attend over blocks with a running maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3).

    Returns [B, Q * D].
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


# --- A mixture of experts in a layer of the decoder: a router, and an MLP for each expert ---
#
# **Why batching cannot change a result, and what that costs.** In a step, each expert that any slot chose computes all
# slots, and the outputs for slots that did not choose it are dropped. So a slot's products have the same shapes, and
# the slot the same row in them, whatever other slots choose. Each expert's weights are read at most once a step, and
# not at all if no slot chose it; most of the arithmetic is wasted. Two alternatives are worse: products over only the
# slots that chose an expert change their heights, and so their bits, with the choices of other slots; a product for
# each slot with gathered weights reads an expert once for every slot that chose it. A prompt is read alone, so there
# each expert computes only the tokens that chose it.
#
# The formula is the trainer's: experts are chosen by the same functions (megatron_worker/families.py),
# products are in the weights' dtype, outputs added up in the order of the experts' numbers.
#
# Shape suffixes: T tokens or slots, M those that chose one expert, H hidden size, E experts, K experts of a token.


@dataclass(frozen=True)
class SamplerExperts:
    """Takes the place of a layer's MLP. The router has no adapter: no trainer of ours trains one."""

    router_EH: Tensor
    mlps: tuple[Mlp, ...]
    mixture: Mixture

    @property
    def linears(self) -> list[FusedLinear]:
        return [linear for mlp in self.mlps for linear in mlp.linears]

    def __call__(
        self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], chosen: list[Tensor], *, fixed_shapes: bool
    ) -> Tensor:
        """Return each token's weighted sum of its experts' outputs. Appends the experts, [T, K], to `chosen`.

        `fixed_shapes`: the shape of no product depends on what is chosen, as a step needs it.
        """
        weight_TK, expert_TK = self._route(x_TH)
        chosen.append(expert_TK)
        total_TH = torch.zeros_like(x_TH)
        for number in expert_TK.unique().tolist():
            token_M, choice_M = (expert_TK == number).nonzero(as_tuple=True)
            mlp = self.mlps[number]
            y_MH = mlp(x_TH, lora_weights)[token_M] if fixed_shapes else mlp(x_TH[token_M], lora_weights)
            total_TH.index_add_(0, token_M, y_MH * weight_TK[token_M, choice_M, None])
        return total_TH

    def _route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights in the tokens' dtype, and expert numbers: both [T, K]."""
        score_TE = families.scores(x_TH, self.router_EH, self.mixture)
        expert_TK = families.choose(score_TE, self.mixture)
        return families.weights(score_TE, expert_TK, self.mixture).to(x_TH.dtype), expert_TK


def fuse_experts(
    module: str, mixture: Mixture, weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]
) -> SamplerExperts:
    """Fuse the linears of each expert of the MLP with this Hugging Face name. The router stays in `weights`."""
    mlps = tuple(fuse_mlp(f"{module}.experts.{number}", weights, slices) for number in range(mixture.num_experts))
    return SamplerExperts(weights[f"{module}.gate.weight"], mlps, mixture)
