"""Attention as transformers' models call it: within the sequences and trees of a bin, by the plan that all engines use.

A model passes every keyword that it does not know on to its attention: the bin's `Forest` travels so.

Shape suffixes: T tokens of a bin, H query heads, G key/value heads, D size of a head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from megatron_worker.tree_attention import Forest, attend_forest

NAME = "longshore"


def attend(
    module: torch.nn.Module,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    forest: Forest,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each token over itself and those above it: [1, T, H, D], and no weights."""
    assert attention_mask is None and abs(scaling * query_1HTD.shape[-1] ** 0.5 - 1) < 1e-6, (attention_mask, scaling)
    query_THD, key_TGD, value_TGD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1GTD, value_1GTD))
    return attend_forest(query_THD, key_TGD, value_TGD, forest)[None], None


# Without a mask function of the same name transformers makes no mask.
AttentionInterface.register(NAME, attend)
