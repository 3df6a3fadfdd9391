"""The part of a Hugging Face `config.json` that the dense families share. What we do not compute is refused."""

from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from megatron_worker.families.architecture import Architecture, Llama3Scaling, Rope
from shared.errors import InvalidInput

Size = Field(ge=1)


class RopeConfig(BaseModel):
    """`rope_parameters` (transformers 5) or `rope_scaling` (before), which names its kind `type` or `rope_type`."""

    model_config = ConfigDict(extra="ignore")

    rope_type: str = Field(default="default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None


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
    rope_scaling: RopeConfig | None = None
    rope_parameters: RopeConfig | None = None

    def architecture(
        self, *, qkv_bias: bool, qk_norm: bool, rope_theta: float, head_dim: int | None = None
    ) -> Architecture:
        """The sizes of this file with the switches of its family.

        Args:
            rope_theta, head_dim: the family's own, for a file that names none. Without either, heads share the hidden
                size.

        Raises:
            InvalidInput: the file asks for what we do not compute.
        """
        self._refuse_unsupported()
        return Architecture(
            family=self.model_type,
            num_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            ffn_size=self.intermediate_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or head_dim or self.hidden_size // self.num_attention_heads,
            vocab_size=self.vocab_size,
            norm_eps=self.rms_norm_eps,
            tied=self.tie_word_embeddings,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            rope=self._rope(rope_theta),
        )

    def _rope(self, default_theta: float) -> Rope:
        parameters = self.rope_parameters or self.rope_scaling or RopeConfig()
        theta = parameters.rope_theta or self.rope_theta or default_theta
        match parameters.rope_type:
            case "default":
                return Rope(theta)
            case "llama3":
                return Rope(theta, _llama3(parameters))
            case other:
                raise InvalidInput(f"rope scaling of type {other!r} is not supported", "config.json")

    def _refuse_unsupported(self) -> None:
        switches = {
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "use_sliding_window": self.use_sliding_window,
        }
        for name, is_on in switches.items():
            if is_on:
                raise InvalidInput(f"{name}=true is not supported for this family", "config.json")


def _llama3(parameters: RopeConfig) -> Llama3Scaling:
    if parameters.factor is None or parameters.original_max_position_embeddings is None:
        raise InvalidInput("llama3 rope scaling needs factor and original_max_position_embeddings", "config.json")
    return Llama3Scaling(
        parameters.factor,
        parameters.low_freq_factor,
        parameters.high_freq_factor,
        parameters.original_max_position_embeddings,
    )
