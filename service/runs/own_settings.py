"""Longshore's own settings in jobs of other APIs, by their native names (docs/api.md)."""

from typing import Literal

from longshore.fields import Frozen
from longshore.layout import EngineName, Layout
from longshore.training import Decay, Dtype, Lora, OptimizerName, OptimizerStates, Quantization, Recompute, Target

LORA_FIELDS = tuple(name for name in Lora.model_fields if name not in ("kind", "head"))
"""Fields of `trainable` in a run of a language loss."""


class OwnSettings(Frozen):
    """The settings that all such APIs have. Absent ones have their native defaults; values are checked with the job."""

    rank: int | None = None
    alpha: float | None = None
    targets: tuple[Target, ...] | Literal["all-linear"] | None = None
    target_pattern: str | None = None
    layers: tuple[int, ...] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    dropout: float | None = None
    rank_stabilized: bool | None = None
    dora: bool | None = None
    engine: EngineName | None = None
    layout: Layout | None = None
    dtype: Dtype | None = None
    quantize_base: Quantization | None = None
    optimizer_states: OptimizerStates | None = None
    recompute: Recompute | None = None
    max_tokens: int | None = None
    bin_tokens: int | None = None
    optimizer: OptimizerName | None = None
    weight_decay: float | None = None
    decay: Decay | None = None
    clip_norm: float | None = None
    lora_plus_ratio: float | None = None
    noise_scale: bool | None = None
    temperature: float | None = None
    idle_s: float | None = None
    between_steps: Literal["offload", "keep"] | None = None
    equal_rewards: Literal["drop", "keep"] | None = None
