"""Qwen 2, 2.5 and 3, dense and mixture."""

from pydantic import Field

from shared.families.config import DenseConfig, MixtureConfig


class Qwen2Config(DenseConfig):
    """The config of Qwen 2 and 2.5, whose projections to queries, keys and values have biases."""

    family = "qwen2"
    always_on = ("qkv_bias",)
    qkv_bias = has_windows = switches_windows = True

    sliding_window: int | None = Field(default=4096, ge=1)

    def default_kinds(self) -> tuple[str, ...]:
        first = 0 if self.window is None else self.max_window_layers  # have no window
        return tuple("full_attention" if layer < first else kind for layer, kind in enumerate(super().default_kinds()))


class Qwen3Config(Qwen2Config):
    """The config of Qwen 3, which has norms of queries and keys instead of biases."""

    family = "qwen3"
    always_on = ("use_qk_norm",)
    qkv_bias, qk_norm = False, True

    head_dim: int | None = 128


class Qwen3MoeConfig(MixtureConfig):
    """The config of Qwen 3's mixtures."""

    family = "qwen3_moe"
    always_on = ("use_qk_norm",)
    trains_by_fsdp = qk_norm = has_windows = switches_windows = windows_are_alike = True

    sliding_window: int | None = Field(default=4096, ge=1)
