"""Changes: the elements of a tensor that differ from an earlier version, exactly, in three bytes each.

One step of Adam changes about 2 % of bfloat16 weights. A change is the number of unchanged 2-byte words before it
(uint8) and the exclusive or of the word's old and new bits (uint16). Where more than 255 words lie between two changes,
changes by 0 stand between them.
"""

import torch
from torch import Tensor

_BYTES = 3  # of a change
_CHUNK = 1 << 24  # words that are compared at a time


def num_bytes(num_changes: int) -> int:
    """Return the bytes of so many changes: gaps first, then values, which begin at an even byte."""
    return num_changes + num_changes % 2 + 2 * num_changes


def find(new: Tensor, old: Tensor, out: Tensor) -> int | None:
    """Write the changes from `old` to `new` into `out`, uint8. None where they take more bytes than `out` has.

    Args:
        new, old: contiguous, of one shape and of a dtype of 2 or 4 bytes.

    Returns:
        The number of changes.
    """
    most = len(out) // _BYTES
    found: list[tuple[Tensor, Tensor]] = []
    total, unchanged = 0, 0  # words since the last change, at the end of the last chunk
    for new_W, old_W in zip(_words(new).split(_CHUNK), _words(old).split(_CHUNK), strict=True):
        bits_W = new_W ^ old_W
        if total + int(bits_W.count_nonzero()) > most:
            return None
        place_C = bits_W.nonzero().flatten()
        if len(place_C):
            gap_C = place_C.diff(prepend=place_C.new_full((1,), -1 - unchanged)) - 1
            count_C = gap_C // 256 + 1
            last_C = count_C.cumsum(0) - 1
            num = int(last_C[-1]) + 1
            gap_X = torch.full((num,), 255, dtype=torch.uint8, device=gap_C.device)
            value_X = torch.zeros(num, dtype=torch.int16, device=gap_C.device)
            gap_X[last_C] = (gap_C % 256).to(torch.uint8)
            value_X[last_C] = bits_W[place_C]
            found.append((gap_X, value_X))
            total += num
            unchanged = len(bits_W) - 1 - int(place_C[-1])
        else:
            unchanged += len(bits_W)
    if num_bytes(total) > len(out):
        return None
    if total:
        gap, value = _split(out, total)
        gap.copy_(torch.cat([g for g, _ in found]))
        value.copy_(torch.cat([v for _, v in found]))
    return total


def apply(changes: Tensor, num_changes: int, target: Tensor) -> None:
    """Make changes, uint8 as `find` wrote them, to a contiguous tensor in place.

    Raises:
        ValueError: a change lies behind the tensor's end. Nothing has been changed then.
    """
    if not num_changes:
        return
    gap_X, value_X = _split(changes, num_changes)
    place_X = (gap_X.long() + 1).cumsum(0) - 1
    words = _words(target)
    if int(place_X[-1]) >= len(words):
        raise ValueError(f"a change of word {int(place_X[-1])} of {len(words)}")
    words[place_X.to(words.device)] ^= value_X.to(words.device)


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.int16)


def _split(buffer: Tensor, num_changes: int) -> tuple[Tensor, Tensor]:
    start = num_changes + num_changes % 2
    return buffer[:num_changes], buffer[start : start + 2 * num_changes].view(torch.int16)
