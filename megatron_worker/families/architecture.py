"""The architecture of a decoder: its sizes and switches, and its rotary frequencies."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) over whole heads, half against half."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class Architecture:
    """The sizes of a whole model, before any tensor parallelism. With experts, `ffn_size` has no meaning."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: Rope
    num_experts: int = 0
    expert_ffn_size: int = 0
    experts_per_token: int = 0
    normalised_experts: bool = True  # the chosen experts' weights add up to 1

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def rotary_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the frequencies in radians a position, [head_dim / 2] float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if (scaling := rope.scaling) is None:
        return frequency
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency
