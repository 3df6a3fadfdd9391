"""The values of `auto`: hyperparameters from the number of examples (docs/openai_api.md); also counts examples."""

import math
from collections.abc import Iterable

_UNKNOWN_BATCH, _UNKNOWN_EPOCHS, _UNKNOWN_INTERVAL = 8, 3, 10
_LARGEST_BATCH, _MOST_PROMPTS = 64, 32
_FEW, _MANY, _VERY_MANY = 100, 10_000, 50_000
_SEEN, _RL_STEPS, _MOST_EPOCHS = 300, 50, 25
_EVALUATIONS = 10
_LOOKED_AT_BYTES = 32 << 20
# gzip, zstd, zip and Parquet: examples in such files are not counted.
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1")


def batch_size(num_examples: int | None) -> int:
    """Return the power of two nearest to a quarter of the square root of the number, from 1 to 64; 8 if unknown."""
    if num_examples is None:
        return _UNKNOWN_BATCH
    return min(_LARGEST_BATCH, 2 ** max(0, round(math.log2(max(1.0, math.sqrt(num_examples) / 4)))))


def num_epochs(num_examples: int | None) -> int:
    """Return 3; below 100 examples as many as make 300 in all, at most 25; 2 beyond 10,000; 1 beyond 50,000."""
    match num_examples:
        case None:
            return _UNKNOWN_EPOCHS
        case few if few < _FEW:
            return min(_MOST_EPOCHS, math.ceil(_SEEN / max(1, few)))
        case _:
            return 3 if num_examples <= _MANY else 2 if num_examples <= _VERY_MANY else 1


def prompts_per_step(num_prompts: int | None) -> int:
    """Return the largest power of two that is at most the number of prompts, and at most 32; 8 if unknown."""
    if num_prompts is None:
        return _UNKNOWN_BATCH
    return min(_MOST_PROMPTS, 2 ** int(math.log2(max(1, num_prompts))))


def rollout_epochs(num_prompts: int | None, per_step: int) -> int:
    """The number of passes that make 50 steps, at most 25; one for an unknown number of prompts."""
    if num_prompts is None:
        return 1
    return max(1, min(_MOST_EPOCHS, math.ceil(_RL_STEPS * per_step / max(1, num_prompts))))


def evaluation_interval(num_examples: int | None, epochs: float, per_step: int) -> int:
    """Steps between evaluations: a tenth of all; 10 where their number is not known."""
    if num_examples is None:
        return _UNKNOWN_INTERVAL
    return max(1, math.ceil(num_examples * epochs / per_step / _EVALUATIONS))


def count_examples(pieces: Iterable[bytes], num_bytes: int) -> int | None:
    """Count the lines of a JSONL file that are not blank; beyond 32 MiB the number is extrapolated.

    Args:
        pieces: the file from its beginning; only as many as needed are taken.
        num_bytes: the file's size.

    Returns:
        None for a file that does not consist of lines.
    """
    seen, count, rest = 0, 0, b""
    for piece in pieces:
        if not seen and (piece.startswith(_PACKED) or piece.lstrip()[:1] == b"["):
            return None
        seen += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        count += sum(1 for line in lines if line.strip())
        if seen >= _LOOKED_AT_BYTES:
            break
    if seen >= num_bytes:
        return count + bool(rest.strip())
    whole = seen - len(rest)
    return round(count * num_bytes / whole) if whole else None
