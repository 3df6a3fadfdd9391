"""Our attention in transformers' models, by their attention interface: over the forest of a bin, within windows.

The model's mask determines the tokens that a layer attends to. It is read once, when the model is loaded: a mask
function then returns the window in place of a mask, and each attention module remembers it.

Shape suffixes: T tokens of a bin; H query heads, G key/value heads, D size of a head.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from megatron_worker.mixers.tree_attention import Forest, attend_forest
from shared.errors import InvalidInput

ATTENTION = "longshore"
ASKING = "longshore asks for windows"
_WITHOUT_EFFECT = frozenset(
    {"dropout", "is_causal", "output_attentions", "position_ids", "sliding_window", "use_cache"}  # of a whole sequence
)
Forests = Mapping[int | None, Forest]
FORESTS: ContextVar[Forests] = ContextVar("the forest of the bin that is computed, for each window of the layers")


def windows_of(model: nn.Module) -> frozenset[int | None]:
    """Return the windows of a model's layers of attention, once they were asked for."""
    return frozenset(vars(module)["window_asked"] for module in model.modules() if "window_asked" in vars(module))


def _attend(
    module: Any,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from each token to itself and its ancestors: [1, T, H, D], and no weights."""
    factor = 1.0 if scaling is None else scaling * query_1HTD.shape[-1] ** 0.5
    if abs(factor - 1) > 1e-6:
        query_1HTD = query_1HTD * factor
    query_THD, key_TGD, value_TGD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1GTD, value_1GTD))
    return attend_forest(query_THD, key_TGD, value_TGD, FORESTS.get()[module.window_asked])[None], None


def _ask(
    module: Any,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Remember the window, and attend to nothing. Raises InvalidInput if `_attend` would compute something else."""
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise InvalidInput(f"its attention takes {unknown[0]}, which is not computed", "engine")
    if attention_mask is not None and not isinstance(attention_mask, int):
        raise InvalidInput("it makes a mask of its own", "engine")
    if value_1GTD.shape[-1] != query_1HTD.shape[-1]:
        raise InvalidInput("its values are of another size than its keys", "engine")
    module.window_asked = attention_mask
    return query_1HTD.transpose(1, 2), None


def _window_of(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, use_vmap: bool = False, **_: Any
) -> int | None:
    """Return a mask's window; None: all tokens before. Raises InvalidInput if the mask is anything else."""
    size = local_size or 4096
    zero_1, key_K = torch.zeros(1, dtype=torch.int64), torch.arange(3 * size)
    query_Q1 = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size + 1, 3 * size - 2])[:, None]
    is_near = key_K > query_Q1 - (local_size or 3 * size)
    is_seen = None if use_vmap else mask_function(zero_1, zero_1, query_Q1, key_K)
    if is_seen is None or not torch.equal(is_seen, (key_K <= query_Q1) & is_near):
        raise InvalidInput("its layers attend to other tokens than those before, or than a window of them", "engine")
    return local_size


AttentionInterface.register(ATTENTION, _attend)  # without a mask function of the same name transformers makes no mask
AttentionInterface.register(ASKING, _ask)
AttentionMaskInterface.register(ASKING, _window_of)
