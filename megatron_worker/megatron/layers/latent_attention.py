"""Multi-head latent attention, its heads split over tensor-parallel ranks.

Keys and values are expanded from the latents before attention, so that the attention of all other models can be used,
for sequences, trees and contexts. megatron-core's class (transformer/multi_latent_attention.py) makes rotary tables in
every layer from a length, so it cannot take a tree's positions; it packs sequences only with Transformer Engine, and
norms latents with the layers' epsilon, although the published models have another one.

Shape suffixes: s tokens of this rank between layers, t those of its context, T of the whole bin; H heads of this rank;
R size of a latent, D of a key, E of its rotated part, V of a value, P of the largest of D and V.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_worker.megatron.attention import BinPlan, attend, rotate
from megatron_worker.megatron.lora import ExpertLinear
from megatron_worker.megatron.parallel.collectives import gather_rows, sum_rows
from megatron_worker.megatron.parallel.mesh import Group
from shared.families.architecture import LatentAttention


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
