"""Attention in a layer of the decoder: over a prompt at once, and over blocks of positions in a step.

Shape suffixes: B slots, T tokens of a prompt or slots, H hidden size, Q query heads, G key/value heads, P query heads
for each of those, S positions of a block, D size of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.sampler.layers.linears import FusedLinear, LoraFactors, Norm, fuse
from shared.families.architecture import Attention
from shared.families.rope import Rope
from shared.families.tensor_slices import TensorSlice

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
