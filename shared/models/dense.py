"""The settings in a `config.json` that every family has, and those of rotary embeddings. See config.py."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

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
