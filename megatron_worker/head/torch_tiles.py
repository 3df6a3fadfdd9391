"""The logprob head in torch: sums over a shard of the vocabulary, and its gradient, a tile of logits at a time.

Sums of exponentials are relative to the greatest logit so far and scaled when a greater one comes (Milakov & Gimelshein
2018, arXiv:1805.02867, algorithm 3), so that no more than a tile of logits is held; on the CPU it fits into a core's
cache, where passing over it again costs little.

Shape suffixes: N targets, H hidden size, V rows of this rank's shard, C targets of a chunk, T rows of a tile, K
greatest logits kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_worker.engine import Outputs

# --- The k greatest logits of a row, found in tiles of a shard and shards of a vocabulary, and merged ---
#
# A logit and its id are one int64, the key: the greater logit first and, of equals, the lower id. Keys are all
# different, so that the greatest do not depend on how a row was cut, and merging is picking the greatest again. Order
# is that of float32. -0 counts as 0.
#
# Shape suffixes: C targets of a chunk, V rows of a shard, N targets, K kept, R ranks.

NONE = torch.iinfo(torch.int64).min  # means no logit; less than every key
_LAST_ID = (1 << 31) - 1


def pack_keys(logit: Tensor, id: Tensor) -> Tensor:
    """Pack logits and ids into keys, int64. A logit of -inf becomes `NONE`.

    Args:
        logit: any floating dtype, rounded to float32.
        id: 0 to 2^31 - 1, an integer, broadcast against `logit`.
    """
    bits = (logit.float() + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ _LAST_ID, bits).long().bitwise_left_shift_(32)
    return (keys | (_LAST_ID - id.long())).masked_fill_(logit == -torch.inf, NONE)


def unpack_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack keys into logits, float32, and ids, int64; `NONE` into -inf and -1."""
    none, ascending = keys == NONE, keys >> 32
    bits = torch.where(ascending < 0, ascending ^ _LAST_ID, ascending).int()
    logit, id = bits.view(torch.float32), _LAST_ID - (keys & 0xFFFFFFFF)
    return torch.where(none, -torch.inf, logit), torch.where(none, -1, id)


def greatest(keys: Tensor, k: int) -> Tensor:
    """Return the k greatest along the last dimension, the greatest first; `NONE` if there are fewer."""
    found = keys.topk(min(k, keys.shape[-1]), dim=-1).values
    return torch.nn.functional.pad(found, (0, k - found.shape[-1]), value=NONE)


def of_logits(logit_CV: Tensor, k: int) -> Tensor:
    """Return keys of each row's k greatest logits, [C, K]; their ids are the columns."""
    return greatest(pack_keys(logit_CV, torch.arange(logit_CV.shape[1], device=logit_CV.device)), k)


def shifted(keys: Tensor, first: int) -> Tensor:
    """Add `first` to the ids of keys."""
    return torch.where(keys == NONE, NONE, keys - first)


def over_shards(keys_NK: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the k greatest of all ranks of a group, on each of them. Ids must be of the whole vocabulary."""
    if group is None or not keys_NK.numel():
        return keys_NK
    keys_RNK = [torch.empty_like(keys_NK) for _ in range(dist.get_world_size(group))]
    dist.all_gather(keys_RNK, keys_NK.contiguous(), group=group)
    return greatest(torch.cat(keys_RNK, dim=1), keys_NK.shape[1])


class TileSize(NamedTuple):
    """Logits that torch holds at a time, if no kernel is used.

    `joined`: rows of the embedding that are copied at a time, with an adapter's columns appended, kernel or not.
    """

    targets: int
    columns: int
    joined: int = 16_384


CPU_TILE = TileSize(256, 2048)  # 2 MiB of float32, a core's second cache; products are large enough
DEVICE_TILE = TileSize(256, 32_768)  # fewer and larger launches


def tile_size(device: torch.device) -> TileSize:
    return CPU_TILE if device.type == "cpu" else DEVICE_TILE


@dataclass
class LocalSums:
    """Sums over one shard for each target. Exponentials are relative to `max_N`; labels of other shards count 0.

    `weighted_logit_N` are sums of exponential times logit, and `logit_rows_NH` of exponential times logit, relative to
    `max_N`, times row; both only if the entropy is asked for. `weighted_rows_NH`: of exponential times row. `top_NK`
    are keys as above.
    """

    max_N: Tensor
    sum_exp_N: Tensor
    target_N: Tensor
    weighted_logit_N: Tensor
    weighted_rows_NH: Tensor | None
    label_rows_NH: Tensor | None
    logit_rows_NH: Tensor | None
    top_NK: Tensor

    @classmethod
    def none(cls, hidden_NH: Tensor, outputs: Outputs, keep_rows: bool) -> Self:
        """Return the sums over no rows, in the softmax's dtype. `keep_rows`: with rows of the gradient."""
        num_targets, dtype = len(hidden_NH), torch.promote_types(torch.float32, hidden_NH.dtype)
        rows_NH = hidden_NH.new_zeros(hidden_NH.shape, dtype=dtype) if keep_rows else None
        logit_rows_NH = torch.zeros_like(rows_NH) if rows_NH is not None and outputs.entropy_gradient else None
        max_N = hidden_NH.new_full((num_targets,), -torch.inf, dtype=dtype)
        top_NK = hidden_NH.new_full((num_targets, outputs.top_k), NONE, dtype=torch.int64)
        sum_N, target_N, weighted_N = (torch.zeros_like(max_N) for _ in range(3))
        return cls(max_N, sum_N, target_N, weighted_N, rows_NH, None, logit_rows_NH, top_NK)


def merge(local: LocalSums, other: LocalSums) -> None:
    """Add to sums those over other rows, which are changed, too. Rows of labels are those of all already."""
    max_N = torch.maximum(local.max_N, other.max_N)
    for each in (local, other):
        fall_N = each.max_N - max_N
        scale_N = fall_N.exp()
        if each.logit_rows_NH is not None and each.weighted_rows_NH is not None:
            each.logit_rows_NH.addcmul_(each.weighted_rows_NH, finite(fall_N)[:, None]).mul_(scale_N[:, None])
        if each.weighted_rows_NH is not None:
            each.weighted_rows_NH.mul_(scale_N[:, None])
        each.sum_exp_N, each.weighted_logit_N = each.sum_exp_N * scale_N, each.weighted_logit_N * scale_N
    local.max_N = max_N
    for name in ("sum_exp_N", "target_N", "weighted_logit_N", "weighted_rows_NH", "logit_rows_NH"):
        if getattr(local, name) is not None:
            getattr(local, name).add_(getattr(other, name))
    local.top_NK = greatest(torch.cat([local.top_NK, other.top_NK], dim=1), local.top_NK.shape[1])


def scan(
    local: LocalSums,
    hidden_NH: Tensor,
    real_VH: Tensor,
    label_N: Tensor,
    outputs: Outputs,
    first: int,
    tile: TileSize,
    cap: float | None = None,
) -> None:
    for chunk, columns, logit_CT in _tiles_of_logits(hidden_NH, real_VH, outputs.temperature, tile, cap):
        column_C, owned_C = rows_of_labels(label_N[chunk], first + columns.start, logit_CT.shape[1])
        local.target_N[chunk] += torch.where(owned_C, logit_CT.gather(1, column_C[:, None])[:, 0], 0.0)
        if outputs.top_k:
            found_CK = shifted(of_logits(logit_CT, outputs.top_k), first + columns.start)
            both = torch.cat([local.top_NK[chunk], found_CK], dim=1)
            local.top_NK[chunk] = greatest(both, outputs.top_k)
        _add_exponentials(local, chunk, logit_CT, real_VH[columns], outputs, cap)


def _add_exponentials(
    local: LocalSums, chunk: slice, logit_CT: Tensor, weight_TH: Tensor, outputs: Outputs, cap: float | None
) -> None:
    """Scale a chunk's sums to a new maximum and add a tile's. Overwrites the tile's logits."""
    has_slopes = cap is not None and local.weighted_rows_NH is not None
    slope_CT = capped_slope(logit_CT, cap, outputs.temperature) if has_slopes else None
    max_C = torch.maximum(local.max_N[chunk], logit_CT.amax(dim=1))
    fall_C = local.max_N[chunk] - max_C  # -inf at the first tile
    scale_C = fall_C.exp()
    local.max_N[chunk] = max_C
    below_CT = logit_CT.sub_(max_C[:, None])
    exp_CT = below_CT.exp() if outputs.entropy else below_CT.exp_()
    sum_C = exp_CT.sum(dim=1)
    local.sum_exp_N[chunk].mul_(scale_C).add_(sum_C)
    if outputs.entropy:
        below_CT.mul_(exp_CT)
        local.weighted_logit_N[chunk].mul_(scale_C).add_(below_CT.sum(dim=1)).addcmul_(max_C, sum_C)
    if local.weighted_rows_NH is None:
        return
    rows_CH = local.weighted_rows_NH[chunk]
    if slope_CT is not None:
        exp_CT = exp_CT * slope_CT
        below_CT = below_CT.mul_(slope_CT) if local.logit_rows_NH is not None else below_CT
    if local.logit_rows_NH is not None:
        logit_rows_CH = local.logit_rows_NH[chunk].addcmul_(rows_CH, finite(fall_C)[:, None]).mul_(scale_C[:, None])
        _add_product(logit_rows_CH, below_CT, weight_TH)
    _add_product(rows_CH.mul_(scale_C[:, None]), exp_CT, weight_TH)


def _add_product(sum_: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices, computed in the dtype of `right`, in place."""
    if right.dtype == sum_.dtype:
        sum_.addmm_(left, right)
    else:
        sum_ += left.to(right.dtype) @ right


def add_weight_gradient(
    grad_VH: Tensor,
    hidden_NH: Tensor,
    real_VH: Tensor,
    label_N: Tensor,
    lse_N: Tensor,
    grad_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
    first: int,
    tile: TileSize,
    cap: float | None = None,
) -> None:
    """Add d loss / d weight of rows of the shard, whose ids begin at `first`, of as many last columns as `grad_VH` has.

    Other arguments as in logprobs.py.
    """
    seen_NH = hidden_NH[:, -grad_VH.shape[1] :]
    for chunk, columns, logit_CT in _tiles_of_logits(hidden_NH, real_VH, temperature, tile, cap):
        grad_C = grad_N[chunk]
        slope_CT = capped_slope(logit_CT, cap, temperature)
        pull_CT = -grad_C[:, None]
        if entropy is not None:
            mean_logit_N, by_entropy_N = entropy
            pull_CT = pull_CT - by_entropy_N[chunk, None] * (logit_CT - mean_logit_N[chunk, None])
        grad_CT = logit_CT.sub_(lse_N[chunk, None]).exp_().mul_(pull_CT)
        column_C, owned_C = rows_of_labels(label_N[chunk], first + columns.start, len(real_VH[columns]))
        grad_CT.scatter_add_(1, column_C[:, None], torch.where(owned_C, grad_C, 0.0)[:, None])
        if slope_CT is not None:
            grad_CT.mul_(slope_CT)
        _add_product(grad_VH[columns], grad_CT.t(), seen_NH[chunk])


def _tiles_of_logits(
    hidden_NH: Tensor, real_VH: Tensor, temperature: float, tile: TileSize, cap: float | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield each tile's targets, its rows, and its logits [C, T] in the softmax's dtype, capped, by the temperature.

    The buffer is the same for every tile: use it before going on.
    """
    num_targets, num_rows = len(hidden_NH), len(real_VH)
    if not (num_targets and num_rows):
        return
    size = min(tile.targets, num_targets) * min(tile.columns, num_rows)
    product = hidden_NH.new_empty(size)
    dtype = torch.promote_types(torch.float32, hidden_NH.dtype)
    exact = product if product.dtype == dtype else product.new_empty(size, dtype=dtype)
    for chunk in slices(num_targets, tile.targets):
        for columns in slices(num_rows, tile.columns):
            shape = chunk.stop - chunk.start, columns.stop - columns.start
            product_CT, logit_CT = (x[: shape[0] * shape[1]].view(shape) for x in (product, exact))
            torch.mm(hidden_NH[chunk].detach(), real_VH[columns].detach().t(), out=product_CT)
            if exact is not product:
                logit_CT.copy_(product_CT)
            if cap is not None:
                logit_CT.div_(cap).tanh_().mul_(cap)
            if temperature != 1:
                logit_CT.div_(temperature)
            yield chunk, columns, logit_CT


def slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def rows_of_labels(label_N: Tensor, first: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return each label's row among ids from `first` on (0 if it is not among them), and True if it is."""
    row_N = label_N - first
    owned_N = (row_N >= 0) & (row_N < num_rows)
    return torch.where(owned_N, row_N, 0), owned_N


def capped_slope(logit: Tensor, cap: float | None, temperature: float) -> Tensor | None:
    """Return d logit / d product of logits that were capped, and then divided by the temperature; None: one."""
    return None if cap is None else 1 - (logit * (temperature / cap)).square()


def finite(value_N: Tensor) -> Tensor:
    """Replace -inf by 0. It is the maximum of a shard that is all padding, whose sums are 0 anyway."""
    return value_N.masked_fill(value_N == -torch.inf, 0.0)
