"""The part of a Hugging Face `config.json` that the dense families share. What we do not compute is refused."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_worker.families.architecture import Llama3Scaling, Rope
from shared.errors import InvalidInput

Size = Field(ge=1)


class RopeConfig(BaseModel):
    """`rope_parameters` (transformers 5) or `rope_scaling` (before), which names its kind `type` or `rope_type`."""

    model_config = ConfigDict(extra="ignore")

    rope_type: str = "default"
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None


class DenseConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

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

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def rope(self, default_theta: float) -> Rope:
        parameters = self.rope_parameters or self.rope_scaling or RopeConfig()
        theta = parameters.rope_theta or self.rope_theta or default_theta
        match parameters.rope_type:
            case "default":
                return Rope(theta)
            case "llama3":
                return Rope(theta, _llama3(parameters))
            case other:
                raise InvalidInput(f"rope scaling of type {other!r} is not supported", "config.json")

    def refuse_unsupported(self) -> None:
        """Raises InvalidInput for switches that would change the computation."""
        for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if getattr(self, name):
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


def with_rope_type(config: dict[str, Any]) -> dict[str, Any]:
    """Older configs name the kind of scaling `type`."""
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "type" in scaling and "rope_type" not in scaling:
        return {**config, "rope_scaling": {**scaling, "rope_type": scaling["type"]}}
    return config
