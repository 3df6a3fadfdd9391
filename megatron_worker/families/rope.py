"""Rotary position embeddings: how each kind of scaling changes their frequencies."""

import math

import torch
from torch import Tensor

from shared.errors import InvalidInput
from shared.families.architecture import Architecture, Attention
from shared.families.rope import Rope


def rope_tables(rope: Rope, position_T: Tensor, frequency_D2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the positions' angles, [T, 1, size] each, for `rotary_frequencies`."""
    angle_TD2 = position_T.float()[:, None] * frequency_D2
    angle_T1D = torch.cat([angle_TD2, angle_TD2], dim=-1)[:, None]
    return (angle_T1D.cos() * rope.magnitude).to(dtype), (angle_T1D.sin() * rope.magnitude).to(dtype)


def check_lengths(position_T: Tensor, max_positions: int | None) -> None:
    """Raise InvalidInput if a sequence of a bin is longer than Architecture.max_positions."""
    if max_positions is not None and len(position_T) and (longest := int(position_T.max()) + 1) > max_positions:
        rule = f"by its rope scaling this model is computed for sequences of up to {max_positions}"
        raise InvalidInput(f"a sequence has {longest} tokens; {rule}", "rope_parameters")


def frequencies_of(a: Architecture, device: torch.device) -> dict[Rope, Tensor]:
    """Return the frequencies of each rotary embedding that layers have, as `rotary_frequencies` does."""
    ropes = {mixer.rope for mixer in a.mixers if isinstance(mixer, Attention) and mixer.rope}
    return {rope: rotary_frequencies(rope).to(device) for rope in ropes}


def rotary_frequencies(rope: Rope) -> Tensor:
    """Return the frequencies in radians a position, [size / 2] float32."""
    scaling, factor = rope.scaling, rope.scaling.factor or 1.0
    original = scaling.original_max_position_embeddings or 0
    exponent = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    frequency = 1.0 / (rope.theta**exponent)
    match scaling.rope_type:
        case "linear":  # Chen et al. 2023, arXiv:2306.15595
            return frequency / factor
        case "longrope":  # each by its own number (Ding et al. 2024, arXiv:2402.13753), of short sequences
            return 1.0 / (torch.tensor(scaling.short_factor) * rope.theta**exponent)
        case "proportional":  # only the first ones turn (Gemma 4)
            num_turning = int((scaling.partial_rotary_factor or 1.0) * rope.size // 2)
            return (frequency / factor).masked_fill(torch.arange(len(frequency)) >= num_turning, 0.0)
        case "llama3":  # by their turns within the original positions (Grattafiori et al. 2024, arXiv:2407.21783, 3.4)
            turns = original * frequency / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            return _interpolated(frequency, factor, kept.clamp(0, 1))
        case "yarn":  # Peng et al. 2023, arXiv:2309.00071; with `truncate` the bounds are widened to whole dimensions
            bounds = scaling.beta_fast or 32.0, scaling.beta_slow or 1.0
            first, last = (_dimension_of(turns, original, rope) for turns in bounds)
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, rope.size - 1)
            last += 0.001 if first == last else 0.0
            index = torch.arange(rope.size // 2, dtype=torch.float32)
            return _interpolated(frequency, factor, 1 - ((index - first) / (last - first)).clamp(0, 1))
    return frequency


def _interpolated(frequency: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Mix frequencies as they are, by their part `kept`, with the same divided by `factor`."""
    return (1 - kept) * frequency / factor + kept * frequency


def _dimension_of(turns: float, original: int, rope: Rope) -> float:
    """Return the dimension, not a whole number, whose frequency turns so often within the original positions."""
    return rope.size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
