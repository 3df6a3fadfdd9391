"""The architecture of a decoder: each layer's token mixer and MLP, and the rotary frequencies."""

import math
from dataclasses import dataclass
from typing import Literal

from shared.models.families import DenseConfig, RopeConfig, TensorNames, output_name

# --- Rotary position embeddings from a config.json; megatron_worker/families.py computes them ---

_DEFAULT_THETA = 10_000.0  # transformers' default for all families
_UNSCALED = RopeConfig()
# The settings that each kind of scaling reads. "dynamic" only affects longer sequences, see RopeConfig.max_positions.
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
        scaling: only the settings that its kind of scaling reads.
        magnitude: factor of cosines and sines.
    """

    theta: float
    size: int
    scaling: RopeConfig = _UNSCALED
    magnitude: float = 1.0


def read_rope(parameters: RopeConfig, size: int) -> Rope:
    """Return the embedding for settings that read_model_config has accepted."""
    kind = "default" if parameters.rope_type == "dynamic" else parameters.rope_type
    scaling = RopeConfig(rope_type=kind, **parameters.model_dump(include=_READ[kind]))
    return Rope(parameters.rope_theta or _DEFAULT_THETA, size, scaling, _magnitude(scaling))


def _magnitude(scaling: RopeConfig) -> float:
    """Return the file's magnitude or scales if it has any, else the magnitude of the papers on YaRN and LongRoPE."""
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


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention, `num_heads` being a multiple of `num_kv_heads`. `rope` None: positions are not encoded.

    Attributes:
        is_gated: each query head also has a gate; its output is multiplied by the gate's sigmoid (Qiu et al. 2025,
            arXiv:2505.06708).
        window: number of tokens that a token attends to, itself and those before it; None: all.
        has_sinks: each head has a number that its softmax treats as one more score, without a value (gpt-oss).
        norms_all_heads: queries and keys are normed over all heads together, not per head.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        is_fused: one linear makes all queries, all keys and all values, in files as here.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    is_gated: bool = False
    window: int | None = None
    has_sinks: bool = False
    scale: float | None = None
    is_fused: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        """The linears that project the input to queries, keys and values, by Hugging Face's names."""
        return "q_proj", "k_proj", "v_proj"

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows_per_head(self) -> int:
        """Outputs of the query projection for each head: the query, and its gate."""
        return self.head_dim * (2 if self.is_gated else 1)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1): keys and values are computed from
    a latent of each token. The last part of a key, of the size of `rope`, is rotated, and the same for all heads.

    Attributes:
        query_rank: size of the latent for queries; None: they are computed from the hidden state.
        latent_size: size of the latent for keys and values together.
        value_size: size of a head's value; `head_dim` is that of its key.
        is_interleaved: rotate pairs of neighbours, not the first half against the second.
        norm_eps: epsilon of the latents' norms.
    """

    query_rank: int | None
    latent_size: int
    value_size: int
    is_interleaved: bool = True
    norm_eps: float = 1e-6

    @property
    def key_sizes(self) -> tuple[int, int]:
        """Sizes of the parts of a key: the head's own part, and the rotated one."""
        rotated = 0 if self.rope is None else self.rope.size
        return self.head_dim - rotated, rotated


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464): each value head has a state, [key_size, value_size].

    A key head serves `num_value_heads / num_key_heads` value heads. `conv_width`: width in tokens of the convolution
    before it.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int

    @property
    def num_keys(self) -> int:
        """Number of outputs of all key heads; queries have the same number."""
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
        """Output sizes of the input projection: the convolution's channels, gates, value heads' steps and decays."""
        return sum(self.mixed_sizes), self.num_values, self.num_value_heads, self.num_value_heads


@dataclass(frozen=True)
class Mamba2:
    """A Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060): each head has a state, [head_size, state_size].

    `num_groups`: the heads of a group use the same keys and queries (the paper's B and C) and norm their outputs
    together. `least_step`: lower bound of the steps.
    """

    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    conv_width: int
    conv_bias: bool
    least_step: float

    @property
    def num_values(self) -> int:
        """Outputs of all heads."""
        return self.num_heads * self.head_size

    @property
    def mixed_sizes(self) -> tuple[int, int, int]:
        """The channels of the convolution: values, keys and queries."""
        return self.num_values, self.num_groups * self.state_size, self.num_groups * self.state_size

    @property
    def made_sizes(self) -> tuple[int, int, int, int, int]:
        """Output sizes of the input projection: gates, the convolution's channels, and one step per head."""
        return self.num_values, *self.mixed_sizes, self.num_heads


Mixer = Attention | DeltaNet | Mamba2
Activation = Literal["silu", "relu2", "gelu_tanh"]


@dataclass(frozen=True)
class Mlp:
    """A gated MLP: the activation of one projection times another, then a third projection; or one without the gate.

    `is_fused`: files hold the first two projections as one tensor.
    """

    ffn_size: int
    activation: Activation = "silu"
    is_gated: bool = True
    is_fused: bool = False


@dataclass(frozen=True)
class ClampedGate:
    """An activation of gate and up: (up + 1) * gate * sigmoid(alpha * gate). The gate is clamped to at most `limit`, up
    to [-limit, limit] (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Mixture:
    """Experts instead of an MLP.

    Attributes:
        is_normalised: the chosen experts' weights add up to 1, before they are multiplied by `scale`.
        shared_ffn_size: size of an expert that all tokens go to; 0: there is none. `shared_is_gated`: it has a gate.
        scoring: softmax over all experts' scores; or the sigmoid of each score, plus a correction that only affects
            the choice; or softmax over the chosen experts' scores.
        num_groups, chosen_groups: experts are chosen from `chosen_groups` of `num_groups` groups.
        activation, is_gated: of the experts, as in an Mlp.
        latent_size: dimensions that the experts work in, between two linears; 0: the model's.
        stacked: activation of experts whose tensors are stored together and have biases, as the router has; None for
            other experts.
        is_beside: the shared expert is an MLP in parallel to the others. It, they and the router norm their inputs from
            the residual stream; it and they also norm their outputs. Their tensors are stored together (Gemma 4).
    """

    num_experts: int
    ffn_size: int
    experts_per_token: int
    is_normalised: bool = True
    shared_ffn_size: int = 0
    shared_is_gated: bool = True
    activation: Activation = "silu"
    is_gated: bool = True
    scoring: Literal["softmax", "sigmoid", "chosen softmax"] = "softmax"
    num_groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    latent_size: int = 0
    stacked: ClampedGate | None = None
    is_beside: bool = False

    @property
    def shared_mlp(self) -> Mlp:
        """The expert that all tokens go to."""
        return Mlp(self.shared_ffn_size, self.activation, self.is_gated)


@dataclass(frozen=True)
class NormedBlock:
    """A residual block that norms the outputs of a mixer and an MLP before they are added (Gemma; OLMo).

    Attributes:
        norms_inputs: their inputs are normed, too.
        per_layer_size: size of each layer's extra input for a token: an embedding per layer with `per_layer_vocab_size`
            rows, and a projection of the token's embedding. 0: there is none.
        has_scalar: each layer's output is multiplied by a number that is not trained.
    """

    norms_inputs: bool = True
    per_layer_size: int = 0
    per_layer_vocab_size: int = 0
    has_scalar: bool = False


@dataclass(frozen=True)
class Architecture:
    """A whole model, before any tensor parallelism.

    Attributes:
        mixers: each layer's token mixer; None: it has none.
        mlps: each layer's MLP, or its experts; None: it has none.
        zero_centred_norms: the norms' weights are stored as their difference from one.
        tensor_prefix, carried: see shared.models.config.DenseConfig.
        block: None: the residual block is a norm before each mixer and each MLP.
        embedding_scale: factor of the embeddings, rounded to their dtype.
        residual_scale: factor of the outputs of mixers and MLPs, before they are added.
        logit_cap: logits become cap * tanh(logit / cap).
        logit_divisor: logits are divided by it.
        max_positions: tokens of the longest supported sequence; None: no limit. See RopeConfig.
    """

    family: str
    mixers: tuple[Mixer | None, ...]
    mlps: tuple[Mlp | Mixture | None, ...]
    hidden_size: int
    vocab_size: int
    norm_eps: float
    tied: bool
    zero_centred_norms: bool = False
    tensor_prefix: str = "model"
    carried: tuple[str, ...] = ()
    names: TensorNames = DenseConfig.names
    block: NormedBlock | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_cap: float | None = None
    logit_divisor: float = 1.0
    max_positions: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    @property
    def output_name(self) -> str:
        """The output layer's name in files, if it is not tied."""
        return output_name(self.tensor_prefix)

    @property
    def attention(self) -> Attention:
        """The first layer of attention."""
        return next(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    @property
    def delta_net(self) -> DeltaNet | None:
        """The first gated delta net; all have the same sizes. None: there is none."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, DeltaNet)), None)

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows of the attention layers; None for layers without one."""
        return frozenset(mixer.window for mixer in self.mixers if isinstance(mixer, Attention))

    @property
    def has_sinks(self) -> bool:
        """True if some layers of attention have sinks."""
        return any(isinstance(mixer, Attention) and mixer.has_sinks for mixer in self.mixers)

    @property
    def conv_width(self) -> int | None:
        """The width of the recurrent layers' convolutions, which is the same in all; None without such layers."""
        widths = (mixer.conv_width for mixer in self.mixers if isinstance(mixer, DeltaNet | Mamba2))
        return next(widths, None)

    @property
    def num_experts(self) -> int:
        """The number of experts of each layer that has experts; 0 if none has."""
        return next((mlp.num_experts for mlp in self.mlps if isinstance(mlp, Mixture)), 0)
