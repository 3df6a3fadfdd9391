"""Changes: the elements of a tensor that differ from an earlier version, exactly, in three bytes each.

One step of Adam changes about 2 % of bfloat16 weights. A change is the number of unchanged 2-byte words before it
(uint8) and the exclusive or of the word's old and new bits (uint16). If more than 255 words lie between two changes,
changes by 0 are inserted between them.
"""

import torch
from torch import Tensor

_BYTES = 3  # of a change
_CHUNK = 1 << 16  # words, or changes, at a time: on the way they take some 80 bytes each


def num_bytes(num_changes: int) -> int:
    """Return the bytes that the changes take: gaps first, then values, which begin at an even byte."""
    return num_changes + num_changes % 2 + 2 * num_changes


def find_changes(new: Tensor, old: Tensor, out: Tensor) -> int | None:
    """Write the changes from `old` to `new` into `out`, uint8. None if they take more bytes than `out` has.

    Args:
        new, old: contiguous, of one shape and of a dtype of 2 or 4 bytes.

    Returns:
        The number of changes.
    """
    most = len(out) // _BYTES
    if not most:
        return 0 if torch.equal(_words(new), _words(old)) else None
    gap_M, value_M = _split(out, most)  # values have their place when it is known how many there are
    total, unchanged = 0, 0  # words since the last change, at the end of the last chunk
    for new_W, old_W in zip(_words(new).split(_CHUNK), _words(old).split(_CHUNK), strict=True):
        bits_W = new_W ^ old_W
        place_C = bits_W.nonzero().flatten()
        if total + len(place_C) > most:
            return None
        if not len(place_C):
            unchanged += len(bits_W)
            continue
        gap_C = place_C.diff(prepend=place_C.new_full((1,), -1 - unchanged)) - 1
        last_C = (gap_C // 256 + 1).cumsum(0) - 1
        end = total + int(last_C[-1]) + 1
        if end > most:
            return None
        gap_M[total:end], value_M[total:end] = 255, 0
        gap_M[total:end][last_C] = (gap_C % 256).to(torch.uint8)
        value_M[total:end][last_C] = bits_W[place_C]
        total, unchanged = end, len(bits_W) - 1 - int(place_C[-1])
    _move(value_M[:total], _split(out, total)[1])
    return total


def _move(source: Tensor, target: Tensor) -> None:
    """Copy to a place that does not lie behind the source; both may overlap."""
    for first in range(0, len(source), _CHUNK):
        target[first : first + _CHUNK].copy_(source[first : first + _CHUNK].clone())


def apply(changes: Tensor, num_changes: int, target: Tensor) -> None:
    """Make changes, uint8 as `find_changes` wrote them, to a contiguous tensor in place.

    Raises ValueError: a change lies behind the tensor's end. Nothing has been changed then.
    """
    if not num_changes:
        return
    gap_X, value_X = _split(changes, num_changes)
    words = _words(target)
    place = sum(int(gap_Y.sum()) + len(gap_Y) for gap_Y in gap_X.split(_CHUNK)) - 1
    if place >= len(words):
        raise ValueError(f"a change of word {place} of {len(words)}")
    place = -1
    for gap_Y, value_Y in zip(gap_X.split(_CHUNK), value_X.split(_CHUNK), strict=True):
        place_Y = (gap_Y.long() + 1).cumsum(0).add_(place)
        words[place_Y.to(words.device)] ^= value_Y.to(words.device)
        place = int(place_Y[-1])


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.int16)


def _split(buffer: Tensor, num_changes: int) -> tuple[Tensor, Tensor]:
    start = num_changes + num_changes % 2
    return buffer[:num_changes], buffer[start : start + 2 * num_changes].view(torch.int16)
