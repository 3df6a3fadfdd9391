"""The settings of families that have more than DenseConfig's. config.py reads them and refuses unsupported ones."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# --- The settings in a `config.json` that every family has, and those of rotary embeddings. See config.py ---

SLIDING = "sliding_attention"
SWITCHED = ("qwen2", "qwen3", "qwen3_moe")  # a window only applies with `use_sliding_window`
WINDOWED = ("gpt_oss", "mistral", "ministral", "gemma3", "gemma4", "olmo3", "phi3", *SWITCHED)

Size = Field(ge=1, strict=True)
SCALINGS = ("default", "llama3", "linear", "yarn", "dynamic", "longrope")


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


class Fp8(BaseModel):
    """E4M3 with a scale for each block, as in DeepSeek-V3's files: the quantization that we read for every family."""

    quant_method: Literal["fp8"]
    weight_block_size: tuple[Literal[128], Literal[128]]
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"


# transformers takes an empty object for none.
_AnyRope = Annotated[RopeConfig | None, BeforeValidator(lambda value: value or None)]


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


class DenseConfig(BaseModel):
    """A decoder's settings.

    Attributes:
        tensor_prefix: the prefix of its tensors' names. It and `carried` are not taken from the file.
        carried: prefixes of tensors of the model that we do not use: they are copied unchanged.
    """

    model_config = ConfigDict(extra="ignore")
    names: ClassVar[TensorNames] = TensorNames()
    rope_types: ClassVar[tuple[str, ...]] = SCALINGS
    norms_all_heads: ClassVar[bool] = False  # norms of queries and of keys are over all heads together
    is_fused: ClassVar[bool] = False  # files hold queries, keys and values in one tensor, and gate and up in another

    model_type: str
    tensor_prefix: str = "model"
    carried: tuple[str, ...] = ()
    vocab_size: int = Size
    hidden_size: int = Size
    intermediate_size: int = Size
    num_hidden_layers: int = Size
    num_attention_heads: int = Size
    num_key_value_heads: int | None = Field(default=None, ge=1, strict=True)
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = Field(default=False, strict=True)
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = Field(default=None, ge=1)
    max_window_layers: int = Field(default=28, ge=0)
    layer_types: tuple[str, ...] | None = None
    max_position_embeddings: int | None = Field(default=None, ge=1)
    original_max_position_embeddings: int | None = Field(default=None, ge=2)
    rope_theta: float | None = None
    rope_scaling: _AnyRope = None
    rope_parameters: _AnyRope = None
    quantization_config: Fp8 | dict[str, Any] | None = Field(default=None, union_mode="left_to_right")

    @property
    def rope(self) -> RopeConfig:
        return self._with_theta(self.rope_scaling or self.rope_parameters or RopeConfig())

    @property
    def max_positions(self) -> int | None:
        """See RopeConfig."""
        return self.rope.max_positions

    @property
    def ropes_disagree(self) -> bool:
        """True if both are given and differ. Some versions of transformers read one of them, some the other."""
        given = [self._with_theta(one) for one in (self.rope_scaling, self.rope_parameters) if one is not None]
        return len(given) == 2 and given[0] != given[1]

    @property
    def window(self) -> int | None:
        """The window of the layers that have one; None if no layer has."""
        is_on = self.use_sliding_window or self.model_type not in SWITCHED
        return self.sliding_window if is_on and self.model_type in WINDOWED else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer how many tokens a token attends to, including itself; None: all before it."""
        kinds = self.layer_types or self.default_kinds()
        return tuple(self.window if kind == SLIDING else None for kind in kinds)

    def default_kinds(self) -> tuple[str, ...]:
        """Return the layers' kinds if the file omits them: the first `max_window_layers` have no window."""
        first = self.max_window_layers if self.model_type in ("qwen2", "qwen3") else 0
        kinds = ("full_attention" if self.window is None or layer < first else SLIDING for layer in self._numbers)
        return tuple(kinds)

    def own_problem(self) -> str | None:
        """Return the unsupported setting among a family's own, or None."""
        return None

    @property
    def _numbers(self) -> range:
        return range(self.num_hidden_layers)

    @property
    def size_of_heads(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """The part of a head that is rotated."""
        return self.size_of_heads

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return the size of a layer's heads, and the number of its key/value heads."""
        return self.size_of_heads, self.num_key_value_heads or self.num_attention_heads

    def ffn_size_of(self, layer: int) -> int:
        """Return the size of a layer's MLP, if it has one."""
        return self.intermediate_size

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        return (False,) * self.num_hidden_layers

    def _with_theta(self, rope: RopeConfig) -> RopeConfig:
        return self._sized(rope).model_copy(update={"rope_theta": rope.rope_theta or self.rope_theta})

    def _sized(self, rope: RopeConfig) -> RopeConfig:
        """Return rotary settings with the model's positions, as transformers completes them."""
        most = self.max_position_embeddings
        original = self.original_max_position_embeddings or rope.original_max_position_embeddings or most
        return rope.model_copy(update={"max_position_embeddings": most, "original_max_position_embeddings": original})


def output_name(tensor_prefix: str) -> str:
    """Return the name of the output layer in files whose tensors' names have this prefix."""
    return "language_model.lm_head.weight" if tensor_prefix == "language_model.model" else "lm_head.weight"


def rope_problem(rope: RopeConfig, known: tuple[str, ...], size: int) -> str | None:
    """Return the unsupported rotary setting, or None. `size`: the number of rotated dimensions."""
    if rope.rope_type not in known:
        return f"rope scaling of type {rope.rope_type!r} is not supported; these are: {', '.join(known)}"
    if rope.rope_type not in ("default", "proportional", "longrope") and rope.factor is None:
        return f"{rope.rope_type} rope scaling needs factor"
    if rope.rope_type in ("llama3", "yarn", "longrope") and rope.original_max_position_embeddings is None:
        return f"{rope.rope_type} rope scaling needs original_max_position_embeddings"
    if rope.rope_type in ("dynamic", "longrope") and rope.max_position_embeddings is None:
        return f"{rope.rope_type} rope scaling needs max_position_embeddings"
    if rope.rope_type == "longrope" and {len(rope.short_factor or ()), len(rope.long_factor or ())} != {size // 2}:
        return f"longrope rope scaling needs short_factor and long_factor, of {size // 2} numbers each"
    return None


class Mxfp4(BaseModel):
    """The only quantization that is supported."""

    model_config = ConfigDict(extra="ignore")

    quant_method: Literal["mxfp4"]


class SmolLM3Config(DenseConfig):
    """The config of SmolLM3, some of whose layers encode no positions."""

    no_rope_layers: tuple[int, ...] | None = None  # 1: the layer rotates, 0: it does not
    no_rope_layer_interval: int = Field(default=4, ge=1)

    @property
    def is_rotated(self) -> tuple[bool, ...]:
        """For each layer, whether it encodes positions."""
        if self.no_rope_layers is not None:
            return tuple(map(bool, self.no_rope_layers[: self.num_hidden_layers]))
        return tuple((layer + 1) % self.no_rope_layer_interval > 0 for layer in range(self.num_hidden_layers))

    def own_problem(self) -> str | None:
        found, num_layers = len(self.is_rotated), self.num_hidden_layers
        return None if found == num_layers else f"no_rope_layers names {found} layers of {num_layers}"


class GraniteConfig(DenseConfig):
    """The config of Granite. Blocks' outputs are multiplied before they are added, and logits are divided."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = Field(default=1.0, gt=0)
    residual_multiplier: float = 1.0
    logits_scaling: float = Field(default=1.0, gt=0)


class PartRotatedConfig(DenseConfig):
    """The config of a family that rotates the first part of each head."""

    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)

    @property
    def rotary_size(self) -> int:
        return int(self.size_of_heads * (self.rope.partial_rotary_factor or self.partial_rotary_factor))

    def own_problem(self) -> str | None:
        if self.rotary_size < 2 or self.rotary_size % 2:
            return f"partial_rotary_factor rotates {self.rotary_size} of {self.size_of_heads} dimensions: not by pairs"
        return super().own_problem()


class Phi3Config(PartRotatedConfig):
    """The config of Phi-3 and Phi-4. Only LongRoPE scaling: transformers reads every other kind as that."""

    is_fused: ClassVar[bool] = True
    rope_types: ClassVar[tuple[str, ...]] = ("default", "longrope")


class LayerRopesConfig(DenseConfig):
    """The config of a family whose layers that attend within a window have rotary settings of their own.

    Attributes:
        rope_parameters: of the layers that attend to everything; `local_rope`: of the others.
        sliding_window_pattern: one of this many layers attends to everything, if the file does not list them.
    """

    original_max_position_embeddings: None = None
    sliding_window_pattern: int = Field(default=6, ge=1)
    local_rope: RopeConfig = RopeConfig()

    @model_validator(mode="before")
    @classmethod
    def _part_ropes(cls, values: dict[str, Any]) -> dict[str, Any]:
        both = values.get("rope_parameters") or {}
        if both and not ("full_attention" in both or SLIDING in both):
            raise ValueError("rope_parameters has neither full_attention nor sliding_attention")
        return values | {"rope_parameters": both.get("full_attention"), "local_rope": both.get(SLIDING) or {}}

    def default_kinds(self) -> tuple[str, ...]:
        kinds = (SLIDING,) * (self.sliding_window_pattern - 1) + ("full_attention",)
        return tuple(kinds[layer % len(kinds)] for layer in self._numbers)

    def rope_of(self, layer: int) -> RopeConfig:
        """Return the rotary settings of a layer."""
        return self.rope if self.windows[layer] is None else self._sized(self.local_rope)

    @property
    def max_positions(self) -> int | None:
        return min((most for layer in self._numbers if (most := self.rope_of(layer).max_positions)), default=None)

    def own_problem(self) -> str | None:
        for layer, window in enumerate(self.windows):
            rope, known = self.rope_of(layer), self.rope_types if window is None else SCALINGS
            if problem := rope_problem(rope, known, self.heads_of(layer)[0]):
                return problem
            if rope.partial_rotary_factor and rope.rope_type not in ("default", "proportional"):
                return f"partial_rotary_factor is not supported with rope scaling of type {rope.rope_type!r}"
            if rope.rope_theta is None:
                return "rope_parameters: each kind of layer needs rope_theta"
            if not rope.truncate:
                return "truncate=false: transformers does not read it where kinds of layers have their own settings"
        return None


class Olmo3Config(LayerRopesConfig):
    """The config of Olmo 3, whose norms come after its blocks."""

    names: ClassVar[TensorNames] = TensorNames(
        mixer_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm"
    )
    norms_all_heads: ClassVar[bool] = True

    sliding_window_pattern: Literal[4] = 4
    rope_theta: float | None = 500_000.0

    def rope_of(self, layer: int) -> RopeConfig:
        rope = super().rope_of(layer)  # `rope_theta` is of layers that attend to everything, as transformers reads it
        return rope.model_copy(update={"rope_theta": rope.rope_theta or 500_000.0})


class MixtureConfig(DenseConfig):
    """The config of a mixture of experts. Transformers 4 writes `num_experts`, 5 writes `num_local_experts`."""

    num_experts: int = Field(ge=1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = Size
    moe_intermediate_size: int = Size
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None

    @property
    def shared_ffn_size(self) -> int:
        """The inner size of an expert that every token goes to; 0 without one."""
        return 0

    @property
    def has_experts(self) -> tuple[bool, ...]:
        return (True,) * self.num_hidden_layers

    def own_problem(self) -> str | None:
        if self.decoder_sparse_step != 1 or self.mlp_only_layers:
            return "layers without experts among others with them are not supported"
        return _choice_problem(self.num_experts_per_tok, self.num_experts)


class GptOssConfig(DenseConfig):
    """The config of gpt-oss. `quantization_config`: only MXFP4 (tensors/safetensors_files.py)."""

    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    num_experts: int = Field(ge=1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = Field(default=4, ge=1)
    swiglu_alpha: float = 1.702
    swiglu_limit: float = Field(default=7.0, gt=0)
    quantization_config: Mxfp4 | None = None  # type: ignore[assignment]

    @property
    def moe_intermediate_size(self) -> int:
        return self.intermediate_size

    @property
    def has_experts(self) -> tuple[bool, ...]:
        return (True,) * self.num_hidden_layers

    @property
    def rope(self) -> RopeConfig:
        if self.rope_scaling is None and self.rope_parameters is None:
            theta = self.rope_theta or 150_000.0
            sizes = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
            return RopeConfig(rope_type="yarn", rope_theta=theta, **sizes)
        return super().rope

    def default_kinds(self) -> tuple[str, ...]:
        return tuple("full_attention" if layer % 2 else SLIDING for layer in self._numbers)

    def own_problem(self) -> str | None:
        return _choice_problem(self.num_experts_per_tok, self.num_experts)


class HybridConfig(PartRotatedConfig):
    """The config of Qwen3.5: layers of gated delta nets among layers of attention with an output gate."""

    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] | None = None
    full_attention_interval: int = Field(default=4, ge=1)
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    linear_conv_kernel_dim: int = Field(default=4, ge=2)
    linear_key_head_dim: int = Field(default=128, ge=1)
    linear_value_head_dim: int = Field(default=128, ge=1)
    linear_num_key_heads: int = Field(default=16, ge=1)
    linear_num_value_heads: int = Field(default=32, ge=1)

    @property
    def is_recurrent(self) -> tuple[bool, ...]:
        """For each layer, whether it is a gated delta net."""
        if self.layer_types is not None:
            return tuple(kind == "linear_attention" for kind in self.layer_types)
        return tuple((layer + 1) % self.full_attention_interval > 0 for layer in range(self.num_hidden_layers))

    def own_problem(self) -> str | None:
        num_layers, found = self.num_hidden_layers, len(self.is_recurrent)
        if found != num_layers:
            return f"layer_types names {found} layers, num_hidden_layers is {num_layers}"
        if self.linear_num_value_heads % self.linear_num_key_heads:
            heads = f"{self.linear_num_key_heads} key heads do not divide {self.linear_num_value_heads} value heads"
            return f"linear attention: {heads}"
        return super().own_problem()


class HybridMixtureConfig(HybridConfig, MixtureConfig):
    """The config of Qwen3.5's mixtures, which have one more expert that every token goes to."""

    intermediate_size: int = 0
    norm_topk_prob: Literal[True] = True
    shared_expert_intermediate_size: int = Size

    @property
    def shared_ffn_size(self) -> int:
        return self.shared_expert_intermediate_size


class LatentConfig(MixtureConfig):
    """The config of DeepSeek-V3, and of GLM-4's models that are built like it: multi-head latent attention, and, except
    in the first layers, experts that are chosen among groups by scores with a correction."""

    names: ClassVar[TensorNames] = TensorNames(shared_expert="shared_experts")

    num_experts: int = Field(ge=1, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Literal[1] = 1
    n_shared_experts: int = Size
    n_group: int = Size
    topk_group: int = Size
    routed_scaling_factor: float
    first_k_dense_replace: int | None = Field(default=None, ge=0)  # of deepseek_v3
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None  # of glm4_moe_lite
    q_lora_rank: int | None = Field(ge=1)
    kv_lora_rank: int = Size
    qk_nope_head_dim: int = Size
    qk_rope_head_dim: int = Size
    v_head_dim: int = Size
    rope_interleave: bool = True
    partial_rotary_factor: float = 1.0
    num_predicting_layers: int = Field(
        default=0, ge=0, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )

    @property
    def size_of_heads(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def shared_ffn_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def has_experts(self) -> tuple[bool, ...]:
        if self.mlp_layer_types is not None:
            return tuple(kind == "sparse" for kind in self.mlp_layer_types)
        first = self.first_k_dense_replace if self.model_type == "deepseek_v3" else 1
        return tuple(layer >= (first or 0) for layer in self._numbers)

    def own_problem(self) -> str | None:
        if problem := super().own_problem():
            return problem
        num_layers, first = self.num_hidden_layers, self.first_k_dense_replace
        if len(self.has_experts) != num_layers:
            return f"mlp_layer_types names {len(self.has_experts)} layers of {num_layers}"
        if first is not None and self.has_experts != tuple(layer >= first for layer in self._numbers):
            return f"first_k_dense_replace is {first}, and another part of the layers is dense by mlp_layer_types"
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            return f"num_key_value_heads is {self.num_key_value_heads}: with latents each head has keys of its own"
        if self.qk_rope_head_dim % 2 or {self.partial_rotary_factor, self.rope.partial_rotary_factor or 1} != {1}:
            return f"qk_rope_head_dim is {self.qk_rope_head_dim}: all of it must be rotated, by pairs"
        return _groups_problem(self)


Block = Literal["mamba", "attention", "mlp", "moe"]
BLOCKS: dict[str, Block] = {
    **{"M": "mamba", "mamba": "mamba", "linear_attention": "mamba"},
    **{"*": "attention", "attention": "attention", "full_attention": "attention"},
    **{"-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe"},
}


class NemotronHConfig(MixtureConfig):
    """The config of Nemotron-H: each layer is one block, a Mamba-2 mixer, attention, an MLP or experts."""

    names: ClassVar[TensorNames] = TensorNames(
        *("embeddings", "norm_f", "norm", "norm", "mixer", "mixer"), shared_expert="shared_experts"
    )

    blocks: tuple[Block, ...]
    rms_norm_eps: float = Field(default=1e-5, validation_alias="layer_norm_epsilon")
    tie_word_embeddings: Literal[False] = False  # transformers would tie nothing
    mlp_hidden_act: Literal["relu2"] = "relu2"
    use_bias: Literal[False] = False
    mamba_hidden_act: Literal["silu"] = "silu"
    mamba_num_heads: int = Field(default=128, ge=1)
    mamba_head_dim: int = Field(default=64, ge=1)
    ssm_state_size: int = Field(default=128, ge=1)
    n_groups: int = Field(default=8, ge=1, validation_alias=AliasChoices("mamba_n_groups", "n_groups"))
    conv_kernel: int = Field(default=4, ge=2, validation_alias=AliasChoices("mamba_d_conv", "conv_kernel"))
    use_conv_bias: bool = Field(default=True, validation_alias=AliasChoices("mamba_conv_bias", "use_conv_bias"))
    time_step_min: float = Field(default=0.001, validation_alias=AliasChoices("mamba_dt_min", "time_step_min"))
    num_experts: int = Field(default=8, ge=2, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: int = Field(default=2, ge=1)
    moe_intermediate_size: int = Field(default=7688, ge=1)
    moe_shared_expert_intermediate_size: int = Field(default=7688, ge=1)
    moe_latent_size: int | None = Field(default=None, ge=1)
    n_group: int = Field(default=1, ge=1)
    topk_group: int = Field(default=1, ge=1)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    @property
    def shared_ffn_size(self) -> int:
        return self.moe_shared_expert_intermediate_size

    @property
    def has_experts(self) -> tuple[bool, ...]:
        return tuple(block == "moe" for block in self.blocks)

    def own_problem(self) -> str | None:
        if self.sliding_window is not None:
            return f"a sliding_window, here of {self.sliding_window} tokens, is not supported"
        if "attention" not in self.blocks:
            return "layers_block_type: at least one layer of attention is needed"
        if self.mamba_num_heads % self.n_groups:
            return f"n_groups: {self.n_groups} groups do not divide {self.mamba_num_heads} heads of Mamba layers"
        return _groups_problem(self)


def _choice_problem(num_chosen: int, num_experts: int) -> str | None:
    return f"a token goes to {num_chosen} experts of {num_experts}" if num_chosen > num_experts else None


def _groups_problem(config: LatentConfig | NemotronHConfig) -> str | None:
    """Return the problem with the groups that experts are chosen among, or None."""
    num_groups, chosen, num_experts = config.n_group, config.topk_group, config.num_experts
    size, rest = divmod(num_experts, num_groups)
    if rest or size < 2:
        groups = f"{num_experts} experts in {num_groups} groups, which have to be equal, of two at least"
        return f"n_group is {num_groups}: {groups}"
    if chosen > num_groups or config.num_experts_per_tok > chosen * size:
        return f"topk_group is {chosen} of {num_groups} groups, for {config.num_experts_per_tok} experts"
    return None
