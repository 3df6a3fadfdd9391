"""The k greatest logits of a row, found in tiles of a shard and shards of a vocabulary, and merged.

A logit and its id are one int64, the key: the greater logit first and, of equals, the lower id. Keys are all different,
so that the greatest do not depend on how a row was cut, and merging is picking the greatest again. Order is that of
float32. -0 counts as 0.

Shape suffixes: C targets of a chunk, V rows of a shard, N targets, K kept, R ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

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
