"""gpt-oss: attention with sinks, in windows every other layer, and experts whose tensors are stored together.

Projections, router and experts have biases. Published checkpoints hold the experts in MXFP4
(tensors/safetensors_files.py); trained weights are written in the run's dtype.
"""

from dataclasses import replace
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from shared.families.architecture import Attention, ClampedGate, Mixture, RopeConfig
from shared.families.config import SLIDING, DenseConfig, choice_problem


class Mxfp4(BaseModel):
    """The only quantization that is supported."""

    model_config = ConfigDict(extra="ignore")

    quant_method: Literal["mxfp4"]


class GptOssConfig(DenseConfig):
    """The config of gpt-oss. `quantization_config`: only MXFP4 (tensors/safetensors_files.py)."""

    family = "gpt_oss"
    trains_by_fsdp = False
    biases = ("attention_bias", "mlp_bias")
    has_windows = True

    head_dim: int | None = 64
    sliding_window: int | None = Field(default=128, ge=1)
    attention_bias: bool = True
    rms_norm_eps: float = 1e-5
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    num_experts: int = Field(ge=1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = Field(default=4, ge=1)
    swiglu_alpha: float = 1.702
    swiglu_limit: float = Field(default=7.0, gt=0)
    quantization_config: Mxfp4 | None = None  # type: ignore[assignment]

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
        return choice_problem(self.num_experts_per_tok, self.num_experts)

    def attention_of(self, layer: int) -> Attention:
        biased = self.attention_bias
        return replace(super().attention_of(layer), has_sinks=True, qkv_bias=biased, output_bias=biased)

    def mlp_of(self, layer: int) -> Mixture:
        return Mixture(
            num_experts=self.num_experts,
            ffn_size=self.intermediate_size,
            experts_per_token=self.num_experts_per_tok,
            scoring="chosen softmax",
            stacked=ClampedGate(self.swiglu_alpha, self.swiglu_limit),
        )
