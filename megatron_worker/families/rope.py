"""Rotary position embeddings: how each kind of scaling changes their frequencies."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import InvalidInput
from shared.models.dense import RopeConfig

_DEFAULT_THETA = 10_000.0  # transformers' default for all families
_UNSCALED = RopeConfig()
# What each kind of scaling reads. "dynamic" changes longer sequences alone, see RopeConfig.max_positions.
_READ = {
    **{"default": set[str](), "linear": {"factor"}, "proportional": {"factor", "partial_rotary_factor"}},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    },
    "longrope": {
        *("factor", "original_max_position_embeddings", "max_position_embeddings"),
        *("short_factor", "attention_factor"),
    },
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) over the first `size` dimensions of each head, half
    against half.

    Attributes:
        scaling: the settings that its kind of scaling reads, and nothing else.
        magnitude: what cosines and sines are multiplied by.
    """

    theta: float
    size: int
    scaling: RopeConfig = _UNSCALED
    magnitude: float = 1.0

    def tables(self, position_T: Tensor, frequency_D2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions' angles, [T, 1, size] each, for `rotary_frequencies`."""
        angle_TD2 = position_T.float()[:, None] * frequency_D2
        angle_T1D = torch.cat([angle_TD2, angle_TD2], dim=-1)[:, None]
        return (angle_T1D.cos() * self.magnitude).to(dtype), (angle_T1D.sin() * self.magnitude).to(dtype)


def check_lengths(position_T: Tensor, max_positions: int | None) -> None:
    """Raise InvalidInput where a sequence of a bin is longer than what Architecture.max_positions says."""
    if max_positions is not None and len(position_T) and (longest := int(position_T.max()) + 1) > max_positions:
        rule = f"by its rope scaling this model is computed for sequences of up to {max_positions}"
        raise InvalidInput(f"a sequence has {longest} tokens; {rule}", "rope_parameters")


def read_rope(parameters: RopeConfig, size: int) -> Rope:
    """Return the embedding that settings ask for, of those that read_model_config lets pass."""
    kind = "default" if parameters.rope_type == "dynamic" else parameters.rope_type
    scaling = RopeConfig(rope_type=kind, **parameters.model_dump(include=_READ[kind]))
    return Rope(parameters.rope_theta or _DEFAULT_THETA, size, scaling, _magnitude(scaling))


def _magnitude(scaling: RopeConfig) -> float:
    """Return the magnitude of the papers on YaRN and LongRoPE, unless the file has one, or scales of its own."""
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":  # by how much longer sequences may become
        assert original is not None and scaling.max_position_embeddings is not None  # else the file was refused
        factor = scaling.max_position_embeddings / original if factor is None else factor
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if scaling.rope_type != "yarn" or factor is None:
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_magnitude(factor, scaling.mscale) / yarn_magnitude(factor, scaling.mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


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
