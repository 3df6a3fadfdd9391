"""Longshore's own settings in jobs that are sent through other APIs, by their native names (docs/api.md)."""

from typing import Literal

from longshore.fields import Frozen
from longshore.layout import EngineName, Layout
from longshore.training import Dtype, Linear, OptimizerStates, Quantization


class OwnSettings(Frozen):
    """The settings that all such APIs have. Absent ones have their native defaults; values are checked with the job."""

    rank: int | None = None
    alpha: float | None = None
    targets: tuple[Linear, ...] | None = None
    rank_stabilized: bool | None = None
    engine: EngineName | None = None
    layout: Layout | None = None
    dtype: Dtype | None = None
    quantize_base: Quantization | None = None
    optimizer_states: OptimizerStates | None = None
    max_tokens: int | None = None
    bin_tokens: int | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    temperature: float | None = None
    idle_s: float | None = None
    between_steps: Literal["offload", "keep"] | None = None
    equal_rewards: Literal["drop", "keep"] | None = None
