"""The architecture of a decoder: for each layer what mixes its tokens, its MLP, and the rotary frequencies."""

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
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) over the first `size` dimensions of each head, half
    against half."""

    theta: float
    size: int
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention, `num_heads` being whole multiples of `num_kv_heads`.

    `is_gated`: each query head has a gate beside its query, by whose sigmoid its output is multiplied (Qiu et al. 2025,
    arXiv:2505.06708).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
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
        """The first layer of attention: all are alike."""
        return next(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    @property
    def delta_net(self) -> DeltaNet | None:
        """The first gated delta net: all are alike. None: there is none."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, DeltaNet)), None)

    @property
    def num_experts(self) -> int:
        return self.mlp.num_experts if isinstance(self.mlp, Mixture) else 0


def rotary_frequencies(rope: Rope) -> Tensor:
    """Return the frequencies in radians a position, [size / 2] float32."""
    exponent = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    frequency = 1.0 / (rope.theta**exponent)
    if (scaling := rope.scaling) is None:
        return frequency
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency
