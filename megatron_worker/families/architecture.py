"""The architecture of a decoder: for each layer what mixes its tokens, its MLP, and the rotary frequencies."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.jobs.packed import RouteShape


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
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) over the first `size` dimensions of each head, half
    against half."""

    theta: float
    size: int
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None

    def tables(self, position_T: Tensor, frequency_D2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions' angles, [T, 1, size] each, for `rotary_frequencies`."""
        angle_TD2 = position_T.float()[:, None] * frequency_D2
        angle_T1D = torch.cat([angle_TD2, angle_TD2], dim=-1)[:, None]
        magnitude = self.scaling.magnitude if isinstance(self.scaling, YarnScaling) else 1.0
        return (angle_T1D.cos() * magnitude).to(dtype), (angle_T1D.sin() * magnitude).to(dtype)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention, `num_heads` being a multiple of `num_kv_heads`. `rope` None: positions are not encoded.

    `is_gated`: each query head has a gate beside its query, by whose sigmoid its output is multiplied (Qiu et al. 2025,
    arXiv:2505.06708).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    qkv_bias: bool = False
    qk_norm: bool = False
    is_gated: bool = False

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows_per_head(self) -> int:
        """Outputs of the query projection for each head: the query, and its gate."""
        return self.head_dim * (2 if self.is_gated else 1)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464): a recurrent state a value head, [key_size, value_size].

    A key head serves `num_value_heads / num_key_heads` value heads. `conv_width`: tokens that the convolution before
    it sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int

    @property
    def num_keys(self) -> int:
        """Outputs of all key heads; the queries are as many."""
        return self.num_key_heads * self.key_size

    @property
    def num_values(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def mixed_sizes(self) -> tuple[int, int, int]:
        """The channels of the convolution: queries, keys and values."""
        return self.num_keys, self.num_keys, self.num_values

    @property
    def made_sizes(self) -> tuple[int, int, int, int]:
        """What is made of the input: the convolution's channels, gates, and for each value head a step and a decay."""
        return sum(self.mixed_sizes), self.num_values, self.num_value_heads, self.num_value_heads


Mixer = Attention | DeltaNet


@dataclass(frozen=True)
class Mixture:
    """Experts in the place of an MLP.

    `is_normalised`: the chosen experts' weights add up to 1. `shared_ffn_size`: of an expert that all tokens go to,
    with a gate of its own; 0: there is none.
    """

    num_experts: int
    ffn_size: int
    experts_per_token: int
    is_normalised: bool = True
    shared_ffn_size: int = 0


@dataclass(frozen=True)
class Architecture:
    """A whole model, before any tensor parallelism.

    Attributes:
        mixers: what mixes the tokens of each layer.
        mlp: the feed-forward size of each layer's MLP, or its experts.
        zero_centred_norms: the norms' weights are kept as their difference from one.
        tensor_prefix, carried: see shared.models.config.DenseConfig.
    """

    family: str
    mixers: tuple[Mixer, ...]
    mlp: int | Mixture
    hidden_size: int
    vocab_size: int
    norm_eps: float
    tied: bool
    zero_centred_norms: bool = False
    tensor_prefix: str = "model"
    carried: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    @property
    def attention(self) -> Attention:
        """The first layer of attention: all are alike but for their rotary embedding."""
        return next(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    @property
    def delta_net(self) -> DeltaNet | None:
        """The first gated delta net: all are alike. None: there is none."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, DeltaNet)), None)

    def frequencies(self, device: torch.device) -> dict[Rope, Tensor]:
        """Return the frequencies of each rotary embedding that layers have, as `rotary_frequencies` does."""
        ropes = {mixer.rope for mixer in self.mixers if isinstance(mixer, Attention) and mixer.rope}
        return {rope: rotary_frequencies(rope).to(device) for rope in ropes}

    @property
    def num_experts(self) -> int:
        return self.mlp.num_experts if isinstance(self.mlp, Mixture) else 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(range(self.num_layers)) if isinstance(self.mlp, Mixture) else ()

    @property
    def routes(self) -> RouteShape | None:
        """The experts of a token; None: there are none."""
        if not isinstance(self.mlp, Mixture):
            return None
        return RouteShape(
            num_layers=len(self.expert_layers),
            num_experts=self.mlp.num_experts,
            per_token=self.mlp.experts_per_token,
        )


def rotary_frequencies(rope: Rope) -> Tensor:
    """Return the frequencies in radians a position, [size / 2] float32."""
    exponent = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    frequency = 1.0 / (rope.theta**exponent)
    match rope.scaling:
        case None:
            return frequency
        case LinearScaling(factor=factor):
            return frequency / factor
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
