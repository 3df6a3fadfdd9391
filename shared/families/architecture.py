"""The architecture of a decoder: each layer's token mixer and MLP, the rotary frequencies, and the place of each of its
tensors: its name in Hugging Face's files, and the rows of the engine's parameters that it fills.

In methods `slices`, `theirs` and `ours` are prefixes of a part's names in files and in the engine; `tp` ranks share it.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from shared.families.tensor_slices import TensorSlice

# --- Rotary position embeddings from a config.json; megatron_worker/families.py computes them ---

_DEFAULT_THETA = 10_000.0  # transformers' default for all families


class RopeConfig(BaseModel):
    """Rotary embedding settings: `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4).

    `max_position_embeddings`: the model's, not taken from these settings.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    rope_type: str = Field(default="default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = Field(default=None, ge=2)
    max_position_embeddings: int | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)  # of hybrid models

    @property
    def max_positions(self) -> int | None:
        """The longest sequence whose frequencies do not depend on its length; None: they never do."""
        if self.rope_type == "longrope" and self.short_factor != self.long_factor:
            return self.original_max_position_embeddings
        return self.max_position_embeddings if self.rope_type == "dynamic" else None


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
class TensorNames:
    """Hugging Face's names of the parts of a model and of a layer, if families differ in them."""

    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    mixer_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    mlp: str = "mlp"
    shared_expert: str = "shared_expert"
    recurrent: str = "linear_attn"


def output_name(tensor_prefix: str) -> str:
    """Return the name of the output layer in files whose tensors' names have this prefix."""
    return "language_model.lm_head.weight" if tensor_prefix == "language_model.model" else "lm_head.weight"


def _vector(name: str, parameter: str, size: int) -> TensorSlice:
    return TensorSlice(name, parameter, (size,), None, 0, size)


def _whole(name: str, module: str, *shape: int) -> TensorSlice:
    """Return a module's weight, all of which every rank has."""
    return TensorSlice(f"{name}.weight", f"{module}.weight", shape, None, 0, shape[0])


def _split(
    name: str, parameter: str, shape: tuple[int, ...], tp: int, dim: int = 0, sections: tuple[int, ...] = ()
) -> TensorSlice:
    """Return a tensor that ranks have equal shares of along a dimension, or of each of its sections."""
    return TensorSlice(name, parameter, shape, dim, 0, shape[0] if dim else shape[0] // tp, sections=sections)


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
        names: in files, of the norms of queries and of keys, and of the output's linear.
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
    names: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj")

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

    def slices(self, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
        """Return its tensors."""
        slices = self._qkv(tp, theirs, f"{ours}.linear_qkv", "weight", (hidden_size,))
        (q_norm, k_norm, out) = (f"{theirs}.{name}" for name in self.names)
        if self.qkv_bias:
            slices += self._qkv(tp, theirs, f"{ours}.linear_qkv", "bias", ())
        if self.norms_all_heads:
            for name, own, heads in ((q_norm, "q", self.num_heads), (k_norm, "k", self.num_kv_heads)):
                names = f"{name}.weight", f"{ours}.{own}_layernorm.weight"
                slices.append(_split(*names, (heads * self.head_dim,), tp))
        elif self.qk_norm:
            slices.append(_whole(q_norm, f"{ours}.q_layernorm", self.head_dim))
            if "k_proj" in self.projections:
                slices.append(_whole(k_norm, f"{ours}.k_layernorm", self.head_dim))
        shape = (hidden_size, self.num_heads * self.head_dim)
        slices.append(_split(f"{out}.weight", f"{ours}.linear_proj.weight", shape, tp, 1))
        if self.output_bias:
            slices.append(_vector(f"{out}.bias", f"{ours}.linear_proj.bias", hidden_size))
        if self.has_sinks:
            slices.append(_split(f"{theirs}.sinks", f"{ours}.sinks", (self.num_heads,), tp))
        return slices

    def _qkv(self, tp: int, theirs: str, ours: str, suffix: str, rest: tuple[int, ...]) -> list[TensorSlice]:
        """Return query, key and value. Megatron interleaves them by key/value head: its queries, its key, its value.

        If files hold them as one tensor, they are one after another here, too.
        """
        if self.is_fused:
            sizes = self.num_heads * self.head_dim, *[self.num_kv_heads * self.head_dim] * 2
            names = f"{theirs}.qkv_proj.{suffix}", f"{ours}.{suffix}"
            return [_split(*names, (sum(sizes), *rest), tp, sections=sizes)]
        slices, start = [], 0
        for name in self.projections:
            per_group = self.heads_per_group * self.rows_per_head if name == "q_proj" else self.head_dim
            stop = start + per_group
            whole = (self.num_kv_heads * per_group, *rest)
            groups = self.num_kv_heads // tp
            slices.append(TensorSlice(f"{theirs}.{name}.{suffix}", f"{ours}.{suffix}", whole, 0, start, stop, groups))
            start = stop
        return slices


@dataclass(frozen=True)
class SharedAttention(Attention):
    """Attention with normed values, which have no weight. Keys may be values, or both another layer's (Gemma 4).

    Attributes:
        source: the layer whose keys and values it uses; None: it computes its own.
        is_source: other layers use its keys and values.
        keys_are_values: values are the output of the key projection, before the keys' norm.
    """

    source: int | None = None
    is_source: bool = False
    keys_are_values: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        if self.source is not None:
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.keys_are_values else ("q_proj", "k_proj", "v_proj")


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

    def slices(self, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
        """Return its tensors: projections to latents are whole on every rank, others split by heads."""
        keys, values, (own, rotated) = self.num_heads * self.head_dim, self.num_heads * self.value_size, self.key_sizes
        up = f"{ours}.query_up.weight"
        if self.query_rank is None:
            queries = [_split(f"{theirs}.q_proj.weight", up, (keys, hidden_size), tp)]
        else:
            queries = [
                _whole(f"{theirs}.q_a_proj", f"{ours}.query_down", self.query_rank, hidden_size),
                _whole(f"{theirs}.q_a_layernorm", f"{ours}.query_norm", self.query_rank),
                _split(f"{theirs}.q_b_proj.weight", up, (keys, self.query_rank), tp),
            ]
        of_both = (self.num_heads * own + values, self.latent_size)
        return [
            *queries,
            _whole(f"{theirs}.kv_a_proj_with_mqa", f"{ours}.latent_down", self.latent_size + rotated, hidden_size),
            _whole(f"{theirs}.kv_a_layernorm", f"{ours}.latent_norm", self.latent_size),
            _split(f"{theirs}.kv_b_proj.weight", f"{ours}.latent_up.weight", of_both, tp),
            _split(f"{theirs}.o_proj.weight", f"{ours}.output.weight", (hidden_size, values), tp, 1),
        ]


_DELTA_INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # in the order of `DeltaNet.made_sizes`


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
    def split_too(self) -> tuple[str, int]:
        """What ranks share out besides heads of attention, in words, and the number of it."""
        return "key heads of its delta nets", self.num_key_heads

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

    def slices(self, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
        """Return its tensors: one linear makes all inputs, and each rank has some of the heads."""
        mixed, values, heads = self.mixed_sizes, self.num_values, self.num_value_heads
        slices, start = [], 0
        for name, num_rows in zip(_DELTA_INPUTS, self.made_sizes, strict=True):
            sections = mixed if name == "in_proj_qkv" else ()
            stop, shape = start + num_rows // tp, (num_rows, hidden_size)
            parameter = f"{ours}.in_proj.weight"
            slices.append(TensorSlice(f"{theirs}.{name}.weight", parameter, shape, 0, start, stop, sections=sections))
            start = stop
        kernel, out = (sum(mixed), 1, self.conv_width), (hidden_size, values)
        return [
            *slices,
            _split(f"{theirs}.conv1d.weight", f"{ours}.conv_weight", kernel, tp, sections=mixed),
            _split(f"{theirs}.A_log", f"{ours}.A_log", (heads,), tp),
            _split(f"{theirs}.dt_bias", f"{ours}.dt_bias", (heads,), tp),
            _whole(f"{theirs}.norm", f"{ours}.norm", self.value_size),
            _split(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight", out, tp, 1),
        ]


@dataclass(frozen=True)
class Mamba2:
    """A Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060): each head has a state, [head_size, state_size].

    `num_groups`: the heads of a group use the same keys and queries (the paper's B and C) and norm their outputs
    together. `least_step`: lower bound of the steps. `adapts_output`: `out_proj` takes adapters; PEFT refuses them of
    Nemotron-H, since kernels that transformers uses do not call that module.
    """

    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    conv_width: int
    conv_bias: bool
    least_step: float
    adapts_output: bool = False

    @property
    def split_too(self) -> tuple[str, int]:
        return "groups of its Mamba layers", self.num_groups

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

    def slices(self, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
        """Return its tensors. Each rank has some groups of heads."""
        made, mixed, values, heads = self.made_sizes, self.mixed_sizes, self.num_values, (self.num_heads,)
        kernel = (sum(mixed), 1, self.conv_width)
        out = _split(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight", (hidden_size, values), tp, 1)
        slices = [
            _split(f"{theirs}.in_proj.weight", f"{ours}.in_proj.weight", (sum(made), hidden_size), tp, sections=made),
            _split(f"{theirs}.conv1d.weight", f"{ours}.conv_weight", kernel, tp, sections=mixed),
            *(_split(f"{theirs}.{name}", f"{ours}.{name}", heads, tp) for name in ("A_log", "D", "dt_bias")),
            _split(f"{theirs}.norm.weight", f"{ours}.output_scale", (values,), tp),
            replace(out, takes_adapter=self.adapts_output),
        ]
        bias = f"{theirs}.conv1d.bias", f"{ours}.conv_bias", kernel[:1]
        return [*slices, _split(*bias, tp, sections=mixed)] if self.conv_bias else slices


@dataclass(frozen=True)
class ShortConv:
    """A short gated convolution (LFM2): of each token's three parts the first times the third is convolved over the
    token and those before it, `conv_width` in all, and multiplied by the second."""

    num_channels: int
    conv_width: int

    @property
    def split_too(self) -> tuple[str, int]:
        return "channels of its convolutions", self.num_channels

    def slices(self, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
        """Return its tensors. Each rank has some of the channels."""
        size, sections = self.num_channels, (self.num_channels,) * 3
        into, out, kernel = (3 * size, hidden_size), (hidden_size, size), (size, 1, self.conv_width)
        return [
            _split(f"{theirs}.in_proj.weight", f"{ours}.in_proj.weight", into, tp, sections=sections),
            _split(f"{theirs}.conv.weight", f"{ours}.conv_weight", kernel, tp),
            _split(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight", out, tp, 1),
        ]


Recurrent = DeltaNet | Mamba2 | ShortConv
Mixer = Attention | Recurrent
Activation = Literal["silu", "relu2", "gelu_tanh"]


@dataclass(frozen=True)
class Mlp:
    """A gated MLP: the activation of one projection times another, then a third projection; or one without the gate.

    `linears`: their names in files, the last one's at the end; empty: those of most families. If a gated MLP has two,
    files hold the first two projections as one tensor.
    """

    ffn_size: int
    activation: Activation = "silu"
    is_gated: bool = True
    linears: tuple[str, ...] = ()

    def slices(self, hidden_size: int, tp: int, theirs: str, ours: str, expert: int | None = None) -> list[TensorSlice]:
        """Return its tensors. `expert`: its number, if it is one."""
        up, down, share = (self.ffn_size, hidden_size), (hidden_size, self.ffn_size), self.ffn_size // tp
        fc1, fc2 = f"{ours}.linear_fc1.weight", f"{ours}.linear_fc2.weight"
        *names, last = self.linears or (*(("gate_proj",) if self.is_gated else ()), "up_proj", "down_proj")
        down_slice = TensorSlice(f"{theirs}.{last}.weight", fc2, down, 1, 0, hidden_size, expert=expert)
        if self.is_gated and len(names) == 1:
            both, sizes = (2 * self.ffn_size, hidden_size), (self.ffn_size, self.ffn_size)
            return [_split(f"{theirs}.{names[0]}.weight", fc1, both, tp, sections=sizes), down_slice]
        slices = []
        for place, name in enumerate(names):
            rows = place * share, (place + 1) * share
            slices.append(TensorSlice(f"{theirs}.{name}.weight", fc1, up, 0, *rows, expert=expert))
        return [*slices, down_slice]


@dataclass(frozen=True)
class ClampedGate:
    """An activation of gate and up: (up + 1) * gate * sigmoid(alpha * gate). The gate is clamped to at most `limit`, up
    to [-limit, limit] (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertStacks:
    """Names in a layer of the tensors of experts that files store together, [experts, outputs, inputs], gates above
    ups, and of their router's. The shared expert then has the place of an MLP in the layer."""

    router: str
    gate_up: str
    down: str


@dataclass(frozen=True)
class Mixture:
    """Experts instead of an MLP.

    Attributes:
        is_normalised: the chosen experts' weights add up to 1, before they are multiplied by `scale`.
        shared_ffn_size: size of an expert that all tokens go to; 0: there is none. `shared_is_gated`: it has a gate.
            `shared_linears`: as in an Mlp.
        scoring: softmax over all experts' scores; or the sigmoid of each score, plus a correction that only affects
            the choice; or softmax over the chosen experts' scores.
        num_groups, chosen_groups: experts are chosen from `chosen_groups` of `num_groups` groups.
        activation, is_gated: of the experts, as in an Mlp.
        latent_size: dimensions that the experts work in, between two linears; 0: the model's.
        stacked: activation of experts whose tensors are stored together and have biases, as the router has; None for
            other experts.
        stacks: of experts whose tensors are stored together, without biases; None for other experts.
        is_beside: the shared expert is an MLP in parallel to the others. It, they and the router norm their inputs from
            the residual stream; it and they also norm their outputs. They have `stacks` (Gemma 4).
    """

    num_experts: int
    ffn_size: int
    experts_per_token: int
    is_normalised: bool = True
    shared_ffn_size: int = 0
    shared_is_gated: bool = True
    shared_linears: tuple[str, ...] = ()
    activation: Activation = "silu"
    is_gated: bool = True
    scoring: Literal["softmax", "sigmoid", "chosen softmax"] = "softmax"
    num_groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    latent_size: int = 0
    stacked: ClampedGate | None = None
    stacks: ExpertStacks | None = None
    is_beside: bool = False

    @property
    def shared_mlp(self) -> Mlp:
        """The expert that all tokens go to."""
        return Mlp(self.shared_ffn_size, self.activation, self.is_gated, self.shared_linears)

    @property
    def expert(self) -> Mlp:
        """One of the experts that tokens choose."""
        return Mlp(self.ffn_size, self.activation, self.is_gated)

    def slices(self, hidden_size: int, tp: int, etp: int, theirs: str, ours: str, shared: str) -> list[TensorSlice]:
        """Return its tensors. `etp`: the number of ranks that share an expert; `shared`: the shared one's name."""
        if self.stacked is not None:
            assert etp == 1, etp  # refused by check_layout
            return self._stacked(hidden_size, theirs, ours)
        if self.stacks is not None:
            experts = self._in(self.stacks, hidden_size, theirs.rpartition(".")[0], ours)
            return experts + self.shared_mlp.slices(hidden_size, tp, theirs, f"{ours}.shared_expert")
        slices = [_whole(f"{theirs}.gate", f"{ours}.router", self.num_experts, hidden_size)]
        for number in range(self.num_experts):
            names = f"{theirs}.experts.{number}", f"{ours}.experts.{number}"
            slices += self.expert.slices(self.latent_size or hidden_size, etp, *names, number)
        if self.latent_size:
            slices.append(_whole(f"{theirs}.fc1_latent_proj", f"{ours}.latent_in", self.latent_size, hidden_size))
            slices.append(_whole(f"{theirs}.fc2_latent_proj", f"{ours}.latent_out", hidden_size, self.latent_size))
        if self.shared_ffn_size and self.shared_is_gated:
            slices.append(_whole(f"{theirs}.shared_expert_gate", f"{ours}.shared_gate", 1, hidden_size))
        if self.shared_ffn_size:
            slices += self.shared_mlp.slices(hidden_size, tp, f"{theirs}.{shared}", f"{ours}.shared_expert")
        return slices

    def _stacked(self, hidden_size: int, theirs: str, ours: str) -> list[TensorSlice]:
        """Return the tensors of experts that are stored together: [experts, inputs, outputs]."""
        experts, gate_up = self.num_experts, 2 * self.ffn_size
        stacks = {
            "gate_up_proj": (experts, hidden_size, gate_up),
            "gate_up_proj_bias": (experts, gate_up),
            "down_proj": (experts, self.ffn_size, hidden_size),
            "down_proj_bias": (experts, hidden_size),
        }
        return [
            _whole(f"{theirs}.router", f"{ours}.router", experts, hidden_size),
            _vector(f"{theirs}.router.bias", f"{ours}.router.bias", experts),
            *(_stack(f"{theirs}.experts.{name}", f"{ours}.experts.{name}", shape) for name, shape in stacks.items()),
        ]

    def _in(self, stacks: ExpertStacks, hidden_size: int, theirs: str, ours: str) -> list[TensorSlice]:
        """Return the tensors of experts with stacks, and their router's; no norms. `theirs`: the layer's name."""
        num, size = self.num_experts, self.ffn_size
        slices = [_whole(f"{theirs}.{stacks.router}", f"{ours}.router", num, hidden_size)]
        if self.is_beside:
            router = f"{theirs}.{stacks.router.rpartition('.')[0]}"
            slices.append(_vector(f"{router}.scale", f"{ours}.router.scale", hidden_size))
            slices.append(_vector(f"{router}.per_expert_scale", f"{ours}.router.expert_scale", num))
        gate_up, down = (num, 2 * size, hidden_size), (num, hidden_size, size)
        slices.append(_stack(f"{theirs}.{stacks.gate_up}", f"{ours}.experts.gate_up_proj", gate_up))
        return [*slices, _stack(f"{theirs}.{stacks.down}", f"{ours}.experts.down_proj", down)]


def _stack(name: str, parameter: str, shape: tuple[int, ...]) -> TensorSlice:
    return TensorSlice(name, parameter, shape, 0, 0, shape[0], is_stack=True, takes_adapter=False)


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

    def slices(self, hidden_size: int, has_experts: bool, theirs: str, ours: str) -> list[TensorSlice]:
        """Return a layer's tensors outside its mixer and its MLP."""
        size = self.per_layer_size
        names = {
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
            "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
            **({"post_per_layer_input_norm": "per_layer.norm"} if size else {}),
        }
        if has_experts:  # the router's input is taken before all norms
            names |= {
                "pre_feedforward_layernorm": "mlp.shared_expert.input_norm",
                "post_feedforward_layernorm_1": "mlp.shared_expert.output_norm",
                "pre_feedforward_layernorm_2": "mlp.latent_in",
                "post_feedforward_layernorm_2": "mlp.latent_out",
            }
        if not self.norms_inputs:
            names = {name: own for name, own in names.items() if name.startswith("post")}
        slices = [_whole(f"{theirs}.{name}", f"{ours}.{own}", hidden_size) for name, own in names.items()]
        if size:
            slices.append(_whole(f"{theirs}.per_layer_input_gate", f"{ours}.per_layer.gate", size, hidden_size))
            slices.append(_whole(f"{theirs}.per_layer_projection", f"{ours}.per_layer.projection", hidden_size, size))
        return slices

    def per_layer_slices(self, num_layers: int, hidden_size: int, tp: int, theirs: str) -> list[TensorSlice]:
        """Return the tensors of the per-layer inputs that all layers share, without those of a single layer."""
        if not self.per_layer_size:
            return []
        ours, size = "embedding.per_layer", self.per_layer_size
        table, rows = (self.per_layer_vocab_size, num_layers * size), -(-self.per_layer_vocab_size // tp)
        return [
            TensorSlice(f"{theirs}.embed_tokens_per_layer.weight", f"{ours}.table.weight", table, 0, 0, rows),
            _whole(f"{theirs}.per_layer_model_projection", f"{ours}.projection", num_layers * size, hidden_size),
            _whole(f"{theirs}.per_layer_projection_norm", f"{ours}.norm", size),
        ]


@dataclass(frozen=True)
class Architecture:
    """A whole model, before any tensor parallelism.

    Attributes:
        mixers: each layer's token mixer; None: it has none.
        mlps: each layer's MLP, or its experts; None: it has none.
        zero_centred_norms: the norms' weights are stored as their difference from one.
        tensor_prefix, carried: see shared.families.config.DenseConfig.
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
    names: TensorNames = TensorNames()
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
    def is_generic(self) -> bool:
        """True if the family is none of ours: only transformers' model knows the contents of a layer."""
        return not any(self.mixers) and not any(self.mlps)

    @property
    def output_name(self) -> str:
        """The output layer's name in files, if it is not tied."""
        return output_name(self.tensor_prefix)

    @property
    def attention(self) -> Attention:
        """The first layer of attention."""
        return next(mixer for mixer in self.mixers if isinstance(mixer, Attention))

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
        widths = (mixer.conv_width for mixer in self.mixers if isinstance(mixer, Recurrent))
        return next(widths, None)

    @property
    def num_experts(self) -> int:
        """The number of experts of each layer that has experts; 0 if none has."""
        return next((mlp.num_experts for mlp in self.mlps if isinstance(mlp, Mixture)), 0)

    def slices(self, tp: int, etp: int = 1) -> list[TensorSlice]:
        """Return every tensor that we train, for `tp` and `etp` ranks."""
        theirs, rows = self.tensor_prefix, -(-self.vocab_size // tp)
        embedding = f"{theirs}.{self.names.embedding}.weight", "embedding.word_embeddings.weight"
        slices = [TensorSlice(*embedding, (self.vocab_size, self.hidden_size), 0, 0, rows)]
        if self.block is not None:
            slices += self.block.per_layer_slices(self.num_layers, self.hidden_size, tp, theirs)
        for layer in range(self.num_layers):
            slices += self._layer(layer, tp, etp)
        slices.append(_whole(f"{theirs}.{self.names.final_norm}", "decoder.final_layernorm", self.hidden_size))
        return slices if self.tied else [*slices, self.output_slice(tp)]

    def output_slice(self, tp: int) -> TensorSlice:
        """Return the output layer. A model with tied embeddings has no separate tensor for it."""
        rows = -(-self.vocab_size // tp)
        return TensorSlice(self.output_name, "output_layer.weight", (self.vocab_size, self.hidden_size), 0, 0, rows)

    @property
    def constants(self) -> list[TensorSlice]:
        """Every tensor that we use and never train, whole on every rank: the bias that routers add to experts' scores
        when they choose, in float32, and the numbers that layers' outputs are multiplied by."""
        layers, found = f"{self.tensor_prefix}.layers", []
        for layer, mlp in enumerate(self.mlps):
            if isinstance(mlp, Mixture) and mlp.scoring == "sigmoid":
                name = f"{layers}.{layer}.{self.names.mlp}.gate.e_score_correction_bias"
                found.append(_vector(name, f"decoder.layers.{layer}.mlp.router.correction", mlp.num_experts))
        if self.block is not None and self.block.has_scalar:
            numbers = range(self.num_layers)
            found += [_vector(f"{layers}.{n}.layer_scalar", f"decoder.layers.{n}.scalar", 1) for n in numbers]
        return found

    def _layer(self, layer: int, tp: int, etp: int) -> list[TensorSlice]:
        theirs, ours = f"{self.tensor_prefix}.layers.{layer}", f"decoder.layers.{layer}"
        names, size, mixer, mlp = self.names, self.hidden_size, self.mixers[layer], self.mlps[layer]
        slices: list[TensorSlice] = []
        if self.block is not None:
            slices += self.block.slices(size, bool(self.num_experts), theirs, ours)
        else:
            if mixer is not None:
                slices.append(_whole(f"{theirs}.{names.mixer_norm}", f"{ours}.input_layernorm", size))
            if mlp is not None:
                slices.append(_whole(f"{theirs}.{names.mlp_norm}", f"{ours}.pre_mlp_layernorm", size))
        if mixer is not None:
            name = names.attention if isinstance(mixer, Attention) else names.recurrent
            slices += mixer.slices(size, tp, f"{theirs}.{name}", f"{ours}.self_attention")
        match mlp:
            case Mixture():
                slices += mlp.slices(size, tp, etp, f"{theirs}.{names.mlp}", f"{ours}.mlp", names.shared_expert)
            case Mlp():
                slices += mlp.slices(size, tp, f"{theirs}.{names.mlp}", f"{ours}.mlp")
        return slices
