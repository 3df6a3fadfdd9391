"""Rotary position embeddings from a config.json; megatron_worker/families/rope.py computes them."""

import math
from dataclasses import dataclass

from shared.models.dense import RopeConfig

_DEFAULT_THETA = 10_000.0  # transformers' default for all families
_UNSCALED = RopeConfig()
# The settings that each kind of scaling reads. "dynamic" only affects longer sequences, see RopeConfig.max_positions.
_READ = {
    **{"default": set[str](), "linear": {"factor"}, "proportional": {"factor", "partial_rotary_factor"}},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    },
    "longrope": {
        *("factor", "original_max_position_embeddings", "max_position_embeddings"),
        *("short_factor", "attention_factor"),
    },
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) over the first `size` dimensions of each head, half
    against half.

    Attributes:
        scaling: only the settings that its kind of scaling reads.
        magnitude: factor of cosines and sines.
    """

    theta: float
    size: int
    scaling: RopeConfig = _UNSCALED
    magnitude: float = 1.0


def read_rope(parameters: RopeConfig, size: int) -> Rope:
    """Return the embedding for settings that read_model_config has accepted."""
    kind = "default" if parameters.rope_type == "dynamic" else parameters.rope_type
    scaling = RopeConfig(rope_type=kind, **parameters.model_dump(include=_READ[kind]))
    return Rope(parameters.rope_theta or _DEFAULT_THETA, size, scaling, _magnitude(scaling))


def _magnitude(scaling: RopeConfig) -> float:
    """Return the file's magnitude or scales if it has any, else the magnitude of the papers on YaRN and LongRoPE."""
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":  # by how much longer sequences may become
        assert original is not None and scaling.max_position_embeddings is not None  # else the file was refused
        factor = scaling.max_position_embeddings / original if factor is None else factor
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if scaling.rope_type != "yarn" or factor is None:
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_magnitude(factor, scaling.mscale) / yarn_magnitude(factor, scaling.mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
