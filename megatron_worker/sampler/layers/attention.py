"""Attention in a layer of the decoder: over a prompt at once, and over blocks of positions in a step.

Shape suffixes: B slots, T tokens of a prompt or slots, H hidden size, Q query heads, G key/value heads, P query heads
for each of those, S positions of a block, D size of a head, X all heads' outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.families.architecture import Attention
from megatron_worker.families.rope import Rope
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.mixers.tree_attention import Forest, attend_forest
from megatron_worker.sampler.layers.linears import FusedLinear, LoraFactors, Norm, fuse

BLOCK = 128

RotaryTables = Mapping[Rope, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SamplerAttention:
    """`key_norm` and `query_norm`: of each head, or of all together; `sink_Q`: see Attention."""

    attention: Attention
    qkv: FusedLinear
    query_norm: Norm | None
    key_norm: Norm | None
    output: FusedLinear
    sink_Q: Tensor | None

    @property
    def linears(self) -> list[FusedLinear]:
        return [self.qkv, self.output]

    @property
    def needs_forest(self) -> bool:
        """A prompt is read over a forest's plan, that of its one chain."""
        return self.attention.window is not None or self.sink_Q is not None

    def read(
        self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], rotary: RotaryTables, forest: Forest | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read a prompt. Returns the layer's output, [T, H], and its keys and values, [G, T, D]."""
        query_TQD, key_TGD, value_TGD, gate_TX = self._heads(x_TH, lora_weights, rotary)
        query, key, value = (t.transpose(0, 1).contiguous() for t in (query_TQD, key_TGD, value_TGD))
        if forest is not None:
            attended_TQD = attend_forest(query_TQD, key_TGD, value_TGD, forest, self.sink_Q)
        else:
            per_group = self.attention.heads_per_group
            key_1QTD, value_1QTD = (t.repeat_interleave(per_group, dim=0)[None] for t in (key, value))
            attended_1QTD = F.scaled_dot_product_attention(query[None], key_1QTD, value_1QTD, is_causal=True)
            attended_TQD = attended_1QTD[0].transpose(0, 1)
        return self._output(attended_TQD.flatten(1), gate_TX, lora_weights), key, value

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
        query_BQD, key_BGD, value_BGD, gate_BX = self._heads(x_BH, lora_weights, rotary)
        block_B, slot_B, offset_B = places
        keys[block_B, slot_B, :, offset_B] = key_BGD
        values[block_B, slot_B, :, offset_B] = value_BGD
        return self._output(_attend(query_BQD, keys, values, masks, self.sink_Q), gate_BX, lora_weights)

    def _heads(
        self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], rotary: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values, rotated: [T, heads, D]; and the gates of the outputs, [T, heads * D]."""
        a, gate_TX = self.attention, None
        mixed_TO = self.qkv(x_TH, lora_weights)
        rows = [a.num_heads * a.rows_per_head, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim]
        query, key, value = (part.unflatten(-1, (-1, a.head_dim)) for part in mixed_TO.split(rows, dim=-1))
        if a.is_gated:
            query, gate = query.unflatten(1, (-1, 2)).unbind(2)
            gate_TX = gate.flatten(1)
        if self.query_norm is not None and self.key_norm is not None:
            first = 1 if a.norms_all_heads else 2
            query = self.query_norm(query.flatten(first)).view_as(query)
            key = self.key_norm(key.flatten(first)).view_as(key)
        if a.rope is not None:
            query, key = (_rotated(x, *rotary[a.rope]) for x in (query, key))
        if a.scale is not None:
            query = query * (a.scale * a.head_dim**0.5)
        return query, key, value, gate_TX

    def _output(self, attended_TX: Tensor, gate_TX: Tensor | None, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        return self.output(attended_TX if gate_TX is None else attended_TX * gate_TX.sigmoid(), lora_weights)


def fuse_attention(
    module: str, a: Attention, norm: Norm, weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]
) -> SamplerAttention:
    """Fuse the linears of the attention with this Hugging Face name. What is no linear stays in `weights`.

    Args:
        norm: one of the model's, whose kind those of its heads are of.
    """
    qkv = [f"{module}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    return SamplerAttention(
        attention=a,
        qkv=fuse(f"{module}.qkv", qkv, weights, slices),
        query_norm=norm.by(weights[f"{module}.q_norm.weight"]) if a.qk_norm else None,
        key_norm=norm.by(weights[f"{module}.k_norm.weight"]) if a.qk_norm else None,
        output=fuse(f"{module}.output", [f"{module}.o_proj"], weights, slices),
        sink_Q=weights[f"{module}.sinks"] if a.has_sinks else None,
    )


def _rotated(x_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate as many of a head's dimensions as the tables have."""
    if (size := cos_T1D.shape[-1]) < x_TXD.shape[-1]:
        return torch.cat([_rotated(x_TXD[..., :size], cos_T1D, sin_T1D), x_TXD[..., size:]], dim=-1)
    first, second = x_TXD.chunk(2, dim=-1)
    return x_TXD * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D


def masks_of(position_B: Tensor, num_blocks: int, window: int | None) -> list[Tensor]:
    """Return for each block 0 where a slot may attend and -1e30 where it may not, [B, 1, 1, S]."""
    masks = []
    for block in range(num_blocks):
        distance_BS = position_B[:, None] - block * BLOCK - torch.arange(BLOCK, device=position_B.device)
        excluded_BS = distance_BS < 0 if window is None else (distance_BS < 0) | (distance_BS >= window)
        masks.append((excluded_BS * -1e30)[:, None, None])
    return masks


def _attend(
    query_BQD: Tensor, keys: Tensor, values: Tensor, masks: list[Tensor], sink_Q: Tensor | None = None
) -> Tensor:
    """Attend over blocks with a running maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3).

    What blocks before a slot's window add is finite, and rescaled by 0 later. Returns [B, Q * D].
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
    if sink_Q is not None:
        sink_BGP1 = sink_Q.float().view(1, num_groups, -1, 1).expand(num_slots, -1, -1, -1)
        total = total + (sink_BGP1.reshape(highest.shape) - highest).exp()
    return (attended / total).to(query_BQD.dtype).view(num_slots, -1)
