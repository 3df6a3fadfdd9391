"""The part of a Hugging Face `config.json` that says what a model computes. What we do not compute is refused.

A file that leaves a setting out means what transformers takes for it.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.errors import InvalidInput
from shared.field_rules import first_rule

FAMILIES = ("qwen3", "qwen3_moe", "qwen2", "llama")
"""The `model_type` of each supported model family; megatron_worker/families holds their architectures."""

_HEAD_DIMS = {"qwen3": 128}  # of families whose files may leave it out; others' heads divide the hidden size

Size = Field(ge=1)


class RopeConfig(BaseModel):
    """Rotary embedding settings: `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4)."""

    model_config = ConfigDict(extra="ignore")

    rope_type: str = Field(default="default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None


# transformers takes an empty object for none.
_AnyRope = Annotated[RopeConfig | None, BeforeValidator(lambda value: value or None)]


class DenseConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model_type: str
    vocab_size: int = Size
    hidden_size: int = Size
    intermediate_size: int = Size
    num_hidden_layers: int = Size
    num_attention_heads: int = Size
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    rope_theta: float | None = None
    rope_scaling: _AnyRope = None
    rope_parameters: _AnyRope = None

    @property
    def rope(self) -> RopeConfig:
        return self._with_theta(self.rope_scaling or self.rope_parameters or RopeConfig())

    @property
    def ropes_disagree(self) -> bool:
        """True if both are given and say different things. Versions of transformers take one, or the other."""
        given = [self._with_theta(one) for one in (self.rope_scaling, self.rope_parameters) if one is not None]
        return len(given) == 2 and given[0] != given[1]

    @property
    def size_of_heads(self) -> int:
        of_family = _HEAD_DIMS.get(self.model_type, self.hidden_size // self.num_attention_heads)
        return self.head_dim or of_family

    def _with_theta(self, rope: RopeConfig) -> RopeConfig:
        return rope.model_copy(update={"rope_theta": rope.rope_theta or self.rope_theta})


class MixtureConfig(DenseConfig):
    """The config of a mixture of experts. Transformers 4 writes `num_experts`, 5 writes `num_local_experts`."""

    num_experts: int = Field(ge=1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = Size
    moe_intermediate_size: int = Size
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None


def check_known(values: dict[str, Any], place: str) -> None:
    """Raise InvalidInput where a `config.json` is of no family that we know, before its other fields are read."""
    family = values.get("model_type")
    if family not in FAMILIES:
        raise InvalidInput(f"model_type {family!r} is not a known family: {', '.join(FAMILIES)}", place)


def read_model_config(values: dict[str, Any], place: str) -> DenseConfig:
    """Parse a `config.json`: a MixtureConfig for a model with experts, else a DenseConfig.

    Raises:
        InvalidInput: it is of no family that we know, asks for what we do not compute, or lacks a size.
    """
    check_known(values, place)
    kind = MixtureConfig if values["model_type"] == "qwen3_moe" else DenseConfig
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(first_rule(error), place) from error
    if problem := _not_computed(config):
        raise InvalidInput(problem, place)
    return config


def _not_computed(config: DenseConfig) -> str | None:
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(config, name):
            return f"{name}=true is not supported for this family"
    if config.ropes_disagree:
        return "rope_scaling and rope_parameters say different things, so which of them holds is not known: remove one"
    rope = config.rope
    if rope.rope_type not in ("default", "llama3"):
        return f"rope scaling of type {rope.rope_type!r} is not supported"
    if rope.rope_type == "llama3" and (rope.factor is None or rope.original_max_position_embeddings is None):
        return "llama3 rope scaling needs factor and original_max_position_embeddings"
    if not isinstance(config, MixtureConfig):
        return None
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        return "layers without experts among others with them are not supported"
    if config.num_experts_per_tok > config.num_experts:
        return f"a token goes to {config.num_experts_per_tok} experts of {config.num_experts}"
    return None
