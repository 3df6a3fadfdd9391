"""The settings in a `config.json` that several families have, and the architecture that follows from them.

A family's class (in a module beside this one) says in what it differs. `read_model_config` reads a file.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from shared.families.architecture import (
    Architecture,
    Attention,
    Mixer,
    Mixture,
    Mlp,
    Rope,
    RopeConfig,
    TensorNames,
    read_rope,
)

SLIDING = "sliding_attention"
Size = Field(ge=1, strict=True)
SCALINGS = ("default", "llama3", "linear", "yarn", "dynamic", "longrope")


class Fp8(BaseModel):
    """E4M3 with a scale for each block, as in DeepSeek-V3's files: the quantization that we read for every family."""

    quant_method: Literal["fp8"]
    weight_block_size: tuple[Literal[128], Literal[128]]
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"


# transformers takes an empty object for none.
_AnyRope = Annotated[RopeConfig | None, BeforeValidator(lambda value: value or None)]


@dataclass(frozen=True)
class Tower:
    """A family's model that also reads images: its `model_type`, and prefixes of its decoder's and its other tensors.

    `is_tied_by_decoder`: only its decoder's settings say whether embeddings are tied.
    """

    model_type: str
    prefix: str
    carried: tuple[str, ...]
    is_tied_by_decoder: bool = False


class DenseConfig(BaseModel):
    """A decoder's settings. Defaults are transformers'.

    Attributes:
        family: the `model_type` of the family whose class it is; empty: families have classes of their own below it.
        tower: None: the family has no model that reads images.
        prefixes: of its tensors' names: as transformers writes them, and as they may be published.
        always_carried: prefixes of tensors that a model may have beside its decoder.
        trains_by_fsdp: the engine fsdp trains it, too, unless it has recurrent layers or stacks of experts.
        always_on: switches that all models of the family have on, and that nothing reads.
        biases: of the settings `attention_bias` and `mlp_bias`, those that are computed.
        has_windows: layers may attend within a window; `switches_windows`: only with `use_sliding_window`;
            `windows_are_alike`: all layers have it, or none.
        qkv_bias, qk_norm: of all layers of attention.
        rope_types: the kinds of rope scaling that are computed.
        tensor_prefix: the prefix of its tensors' names. It and `carried` are not taken from the file.
        carried: prefixes of tensors of the model that we do not use: they are copied unchanged.
    """

    model_config = ConfigDict(extra="ignore")
    family: ClassVar[str] = ""
    tower: ClassVar[Tower | None] = None
    prefixes: ClassVar[tuple[str, ...]] = ("model",)
    always_carried: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[TensorNames] = TensorNames()
    trains_by_fsdp: ClassVar[bool] = True
    always_on: ClassVar[tuple[str, ...]] = ()
    biases: ClassVar[tuple[str, ...]] = ()
    has_windows: ClassVar[bool] = False
    switches_windows: ClassVar[bool] = False
    windows_are_alike: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    rope_types: ClassVar[tuple[str, ...]] = SCALINGS

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
        is_on = self.use_sliding_window or not self.switches_windows
        return self.sliding_window if is_on and self.has_windows else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer how many tokens a token attends to, including itself; None: all before it."""
        kinds = self.layer_types or self.default_kinds()
        return tuple(self.window if kind == SLIDING else None for kind in kinds)

    def default_kinds(self) -> tuple[str, ...]:
        """Return the layers' kinds if the file omits them."""
        return ("full_attention" if self.window is None else SLIDING,) * self.num_hidden_layers

    def problem(self) -> str | None:
        """Return the unsupported setting, or None."""
        for name in ("attention_bias", "mlp_bias"):
            if getattr(self, name) and name not in self.biases:
                return f"{name}=true is not supported for this family"
        if problem := self.layers_problem() or self.own_problem():
            return problem
        if isinstance(quantized := self.quantization_config, dict):
            method = quantized.get("quant_method", "a method that it does not name")
            rule = "FP8 is in blocks of 128 by 128, of e4m3, with dynamic activations; or take a checkpoint in bfloat16"
            return f"quantization_config: weights that {method} has quantized so are not read: {rule}"
        if self.ropes_disagree:
            rule = "so which of them holds is not known: remove one"
            return f"rope_scaling and rope_parameters say different things, {rule}"
        return self.ropes_problem()

    def layers_problem(self) -> str | None:
        """Return what is wrong with `layer_types`, or None."""
        kinds = self.layer_types or ()
        if others := [kind for kind in kinds if kind not in (SLIDING, "full_attention")]:
            return f"layer_types: {others[0]} is not supported"
        if SLIDING in kinds and not self.has_windows:
            return f"layer_types: {SLIDING} is not of this family"
        if SLIDING in kinds and self.window is None:
            return f"layer_types names layers of {SLIDING}, and there is no sliding_window"
        if kinds and self.windows_are_alike and kinds != self.default_kinds():
            return "layer_types: in this family a window is of all layers, or of none"
        if kinds and len(kinds) != self.num_hidden_layers:
            return f"layer_types names {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}"
        return None

    def own_problem(self) -> str | None:
        """Return the unsupported setting among a family's own, or None."""
        return None

    def ropes_problem(self) -> str | None:
        return rope_problem(self.rope, self.rope_types, self.rotary_size)

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

    @classmethod
    def made_of(cls, values: dict[str, Any], place: str) -> dict[str, Any]:
        """Return fields that a family makes of several settings of a file. Raises InvalidInput, which names them."""
        return {}

    def named_as_in(self, names: Collection[str]) -> Self:
        """Return the config with the prefix of these tensors' names, if the family is published with several."""
        found = [each for each in self.prefixes[1:] if any(name.startswith(f"{each}.") for name in names)]
        return self.model_copy(update={"tensor_prefix": found[0]}) if found else self

    # --- The architecture, a part a method: a family overrides what differs ---

    def architecture(self) -> Architecture:
        """Return the architecture, including the family's settings that are not in the config."""
        whole = Architecture(
            family=self.model_type,
            mixers=tuple(map(self.mixer_of, self._numbers)),
            mlps=tuple(map(self.mlp_of, self._numbers)),
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            norm_eps=self.rms_norm_eps,
            tied=self.tie_word_embeddings,
            tensor_prefix=self.tensor_prefix,
            names=self.names,
            max_positions=self.max_positions,
        )
        whole = self.completed(whole)
        return replace(whole, carried=(*self.carried, *self.unused(), *(s.name for s in whole.constants)))

    def completed(self, whole: Architecture) -> Architecture:
        """Return the architecture with what a family has outside mixers and MLPs."""
        return whole

    def unused(self) -> tuple[str, ...]:
        """Return prefixes of the decoder's tensors that we do not use, beside `carried`."""
        return ()

    def mixer_of(self, layer: int) -> Mixer | None:
        return self.attention_of(layer)

    def attention_of(self, layer: int) -> Attention:
        head_dim, num_kv_heads = self.heads_of(layer)
        return Attention(
            num_heads=self.num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=self.rotation_of(layer),
            window=self.windows[layer],
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
        )

    def rotation_of(self, layer: int) -> Rope | None:
        return read_rope(self.rope, self.rotary_size)

    def mlp_of(self, layer: int) -> Mlp | Mixture | None:
        return Mlp(self.intermediate_size)

    def _with_theta(self, rope: RopeConfig) -> RopeConfig:
        return self._sized(rope).model_copy(update={"rope_theta": rope.rope_theta or self.rope_theta})

    def _sized(self, rope: RopeConfig) -> RopeConfig:
        """Return rotary settings with the model's positions, as transformers completes them."""
        most = self.max_position_embeddings
        original = self.original_max_position_embeddings or rope.original_max_position_embeddings or most
        return rope.model_copy(update={"max_position_embeddings": most, "original_max_position_embeddings": original})


class GenericConfig(DenseConfig):
    """The sizes of a dense decoder of transformers that is none of our families: only the engine fsdp may train it."""

    intermediate_size: int = Field(default=0, ge=0)

    def architecture(self) -> Architecture:
        nothing, sizes = (None,) * self.num_hidden_layers, (self.hidden_size, self.vocab_size)
        return Architecture(self.model_type, nothing, nothing, *sizes, norm_eps=0.0, tied=self.tie_word_embeddings)


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

    def ropes_problem(self) -> str | None:
        return None  # `own_problem` covers each layer's

    def rotation_of(self, layer: int) -> Rope | None:
        return read_rope(self.rope_of(layer), self.heads_of(layer)[0])


class MixtureConfig(DenseConfig):
    """The config of a mixture of experts. Transformers 4 writes `num_experts`, 5 writes `num_local_experts`."""

    trains_by_fsdp: ClassVar[bool] = False

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
        """For each layer, whether it has experts."""
        return (True,) * self.num_hidden_layers

    def own_problem(self) -> str | None:
        if self.decoder_sparse_step != 1 or self.mlp_only_layers:
            return "layers without experts among others with them are not supported"
        return choice_problem(self.num_experts_per_tok, self.num_experts)

    def mlp_of(self, layer: int) -> Mlp | Mixture | None:
        return self.mixture() if self.has_experts[layer] else super().mlp_of(layer)

    def mixture(self) -> Mixture:
        return Mixture(
            num_experts=self.num_experts,
            ffn_size=self.moe_intermediate_size,
            experts_per_token=self.num_experts_per_tok,
            is_normalised=self.norm_topk_prob,
            shared_ffn_size=self.shared_ffn_size,
        )


class GroupedMixtureConfig(MixtureConfig):
    """The config of experts that are chosen among groups, by sigmoids of scores with a correction, which is not
    trained: it is read in float32 in any precision, and copied unchanged. The shared expert has no gate."""

    num_experts: int = Field(ge=1, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    norm_topk_prob: bool = True
    n_shared_experts: int = Size
    n_group: int = Size
    topk_group: int = Size
    routed_scaling_factor: float

    def mixture(self) -> Mixture:
        return replace(
            super().mixture(),
            shared_is_gated=False,
            scoring="sigmoid",
            num_groups=self.n_group,
            chosen_groups=self.topk_group,
            scale=self.routed_scaling_factor,
        )

    def groups_problem(self) -> str | None:
        num_groups, chosen, num_experts = self.n_group, self.topk_group, self.num_experts
        size, rest = divmod(num_experts, num_groups)
        if rest or size < 2:
            groups = f"{num_experts} experts in {num_groups} groups, which have to be equal, of two at least"
            return f"n_group is {num_groups}: {groups}"
        if chosen > num_groups or self.num_experts_per_tok > chosen * size:
            return f"topk_group is {chosen} of {num_groups} groups, for {self.num_experts_per_tok} experts"
        return None


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


def choice_problem(num_chosen: int, num_experts: int) -> str | None:
    return f"a token goes to {num_chosen} experts of {num_experts}" if num_chosen > num_experts else None
