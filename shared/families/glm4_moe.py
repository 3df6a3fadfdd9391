"""GLM-4.5, 4.6 and 4.5-Air: experts as DeepSeek-V3's after plain attention, which rotates a part of each head."""

from dataclasses import replace

from pydantic import AliasChoices, Field

from shared.families.architecture import Attention
from shared.families.config import PartRotatedConfig
from shared.families.deepseek_v3 import SparseConfig


class Glm4MoeConfig(PartRotatedConfig, SparseConfig):
    """The config of GLM-4's mixtures. Projections to queries, keys and values may have biases, and norms."""

    family = "glm4_moe"
    biases = ("attention_bias",)

    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = Field(default=0.5, gt=0, le=1)
    use_qk_norm: bool = False
    n_shared_experts: int = Field(default=1, ge=1, strict=True)
    n_group: int = Field(default=1, ge=1, strict=True)
    topk_group: int = Field(default=1, ge=1, strict=True)
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int | None = Field(default=1, ge=0)
    num_predicting_layers: int = Field(
        default=1, ge=0, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )

    def attention_of(self, layer: int) -> Attention:
        return replace(super().attention_of(layer), qkv_bias=self.attention_bias, qk_norm=self.use_qk_norm)
