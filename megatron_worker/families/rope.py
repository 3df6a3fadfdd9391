"""Rotary position embeddings: how each kind of scaling changes their frequencies."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import InvalidInput
from shared.models.dense import RopeConfig

_DEFAULT_THETA = 10_000.0  # transformers' default for all families


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rescaling (Grattafiori et al. 2024, arXiv:2407.21783, section 3.4, and its released code).

    Frequencies of long wavelengths are divided by `factor`, short ones kept, those between interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies are divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies that turn less than `beta_slow` times within the original
    positions are divided by `factor`, those that turn more than `beta_fast` times kept, those between interpolated.

    `truncates`: the bounds are widened to whole dimensions. `magnitude`: what cosines and sines are multiplied by.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    truncates: bool
    magnitude: float


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency is divided by its own one of `factors`.

    They are those of short sequences: see RopeConfig.max_positions. `magnitude`: as of YarnScaling.
    """

    factors: tuple[float, ...]
    magnitude: float


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `num_turning` frequencies turn, and they are divided by `factor` (Gemma 4)."""

    num_turning: int
    factor: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) over the first `size` dimensions of each head, half
    against half."""

    theta: float
    size: int
    scaling: Llama3Scaling | LinearScaling | YarnScaling | LongScaling | ProportionalScaling | None = None

    def tables(self, position_T: Tensor, frequency_D2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions' angles, [T, 1, size] each, for `rotary_frequencies`."""
        angle_TD2 = position_T.float()[:, None] * frequency_D2
        angle_T1D = torch.cat([angle_TD2, angle_TD2], dim=-1)[:, None]
        magnitude = self.scaling.magnitude if isinstance(self.scaling, YarnScaling | LongScaling) else 1.0
        return (angle_T1D.cos() * magnitude).to(dtype), (angle_T1D.sin() * magnitude).to(dtype)


def check_lengths(position_T: Tensor, max_positions: int | None) -> None:
    """Raise InvalidInput where a sequence of a bin is longer than what Architecture.max_positions says."""
    if max_positions is not None and len(position_T) and (longest := int(position_T.max()) + 1) > max_positions:
        rule = f"by its rope scaling this model is computed for sequences of up to {max_positions}"
        raise InvalidInput(f"a sequence has {longest} tokens; {rule}", "rope_parameters")


def read_rope(parameters: RopeConfig, size: int) -> Rope:
    """Return the embedding that settings ask for, of those that read_model_config lets pass."""
    theta = parameters.rope_theta or _DEFAULT_THETA
    factor, original = parameters.factor or 1.0, parameters.original_max_position_embeddings or 0
    match parameters.rope_type:
        case "proportional":
            num_turning = int((parameters.partial_rotary_factor or 1.0) * size // 2)
            return Rope(theta, size, ProportionalScaling(num_turning, factor))
        case "linear":
            return Rope(theta, size, LinearScaling(factor))
        case "yarn":
            bounds = parameters.beta_fast or 32.0, parameters.beta_slow or 1.0, parameters.truncate
            return Rope(theta, size, YarnScaling(factor, original, *bounds, _yarn_magnitude(parameters, factor)))
        case "llama3":
            bounds_of_turns = parameters.low_freq_factor, parameters.high_freq_factor
            return Rope(theta, size, Llama3Scaling(factor, *bounds_of_turns, original))
        case "longrope":
            return Rope(theta, size, LongScaling(parameters.short_factor or (), _long_magnitude(parameters)))
        case _:  # dynamic: another base for longer sequences alone
            return Rope(theta, size)


def _long_magnitude(parameters: RopeConfig) -> float:
    """Return the paper's magnitude, by how much longer sequences may become, unless the file has one."""
    original, longest = parameters.original_max_position_embeddings, parameters.max_position_embeddings
    assert original is not None and longest is not None  # else the file was refused
    factor = longest / original if parameters.factor is None else parameters.factor
    if parameters.attention_factor is not None:
        return parameters.attention_factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_magnitude(parameters: RopeConfig, factor: float) -> float:
    """Return the paper's magnitude, 0.1 ln(factor) + 1, unless the file has one, or scales of its own."""
    if parameters.attention_factor is not None:
        return parameters.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.mscale and parameters.mscale_all_dim:
        return magnitude(parameters.mscale) / magnitude(parameters.mscale_all_dim)
    return magnitude(1.0)


def rotary_frequencies(rope: Rope) -> Tensor:
    """Return the frequencies in radians a position, [size / 2] float32."""
    exponent = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    frequency = 1.0 / (rope.theta**exponent)
    match rope.scaling:
        case None:
            return frequency
        case LinearScaling(factor=factor):
            return frequency / factor
        case LongScaling(factors=factors):
            return 1.0 / (torch.tensor(factors) * rope.theta**exponent)
        case ProportionalScaling() as proportional:
            is_still = torch.arange(len(frequency)) >= proportional.num_turning
            return (frequency / proportional.factor).masked_fill(is_still, 0.0)
        case Llama3Scaling() as llama:
            turns = llama.original_max_positions * frequency / (2 * math.pi)
            kept = (turns - llama.low_freq_factor) / (llama.high_freq_factor - llama.low_freq_factor)
            return _interpolated(frequency, llama.factor, kept.clamp(0, 1))
        case YarnScaling() as yarn:
            first, last = (_dimension_of(turns, rope, yarn) for turns in (yarn.beta_fast, yarn.beta_slow))
            if yarn.truncates:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, rope.size - 1)
            last += 0.001 if first == last else 0.0
            index = torch.arange(rope.size // 2, dtype=torch.float32)
            return _interpolated(frequency, yarn.factor, 1 - ((index - first) / (last - first)).clamp(0, 1))


def _interpolated(frequency: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Mix frequencies as they are, by their part `kept`, with the same divided by `factor`."""
    return (1 - kept) * frequency / factor + kept * frequency


def _dimension_of(turns: float, rope: Rope, yarn: YarnScaling) -> float:
    """Return the dimension, not a whole number, whose frequency turns so often within the original positions."""
    return rope.size * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
