"""Llama, and families that differ from it in a few settings."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from shared.families.architecture import Architecture, Attention, Mlp, NormedBlock, Rope, RopeConfig, TensorNames
from shared.families.config import DenseConfig, LayerRopesConfig, PartRotatedConfig, Tower


class LlamaConfig(DenseConfig):
    """The config of Llama."""

    family = "llama"


class MinistralConfig(DenseConfig):
    """The config of Ministral."""

    family = "ministral"
    has_windows = True

    sliding_window: int | None = Field(default=4096, ge=1)


class MistralConfig(MinistralConfig):
    """The config of Mistral; in files that also read images, of Mistral 3."""

    family = "mistral"
    windows_are_alike = True
    tower = Tower("mistral3", "language_model.model", ("vision_tower.", "multi_modal_projector."), True)


class SmolLM3Config(DenseConfig):
    """The config of SmolLM3, some of whose layers encode no positions."""

    family = "smollm3"

    rope_theta: float | None = 2_000_000.0
    tie_word_embeddings: bool = Field(default=True, strict=True)
    no_rope_layers: tuple[int, ...] | None = None  # 1: the layer rotates, 0: it does not
    no_rope_layer_interval: int = Field(default=4, ge=1)

    @property
    def is_rotated(self) -> tuple[bool, ...]:
        """For each layer, whether it encodes positions."""
        if self.no_rope_layers is not None:
            return tuple(map(bool, self.no_rope_layers[: self.num_hidden_layers]))
        return tuple((layer + 1) % self.no_rope_layer_interval > 0 for layer in range(self.num_hidden_layers))

    def own_problem(self) -> str | None:
        found, num_layers = len(self.is_rotated), self.num_hidden_layers
        return None if found == num_layers else f"no_rope_layers names {found} layers of {num_layers}"

    def rotation_of(self, layer: int) -> Rope | None:
        return super().rotation_of(layer) if self.is_rotated[layer] else None


class GraniteConfig(DenseConfig):
    """The config of Granite. Blocks' outputs are multiplied before they are added, and logits are divided."""

    family = "granite"

    embedding_multiplier: float = 1.0
    attention_multiplier: float = Field(default=1.0, gt=0)
    residual_multiplier: float = 1.0
    logits_scaling: float = Field(default=1.0, gt=0)

    def attention_of(self, layer: int) -> Attention:
        return replace(super().attention_of(layer), scale=self.attention_multiplier)

    def completed(self, whole: Architecture) -> Architecture:
        return replace(
            whole,
            embedding_scale=self.embedding_multiplier,
            residual_scale=self.residual_multiplier,
            logit_divisor=self.logits_scaling,
        )


class Phi3Config(PartRotatedConfig):
    """The config of Phi-3 and Phi-4, whose files have fused linears. Only LongRoPE scaling: transformers reads every
    other kind as that."""

    family = "phi3"
    has_windows = windows_are_alike = True
    rope_types = ("default", "longrope")

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int | None = Field(default=4096, ge=1)
    original_max_position_embeddings: int | None = Field(default=4096, ge=2)

    def attention_of(self, layer: int) -> Attention:
        return replace(super().attention_of(layer), is_fused=True)

    def mlp_of(self, layer: int) -> Mlp:
        return Mlp(self.intermediate_size, linears=("gate_up_proj", "down_proj"))


class Olmo3Config(LayerRopesConfig):
    """The config of Olmo 3, whose norms come after its blocks."""

    family = "olmo3"
    names = TensorNames(mixer_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm")
    always_on = ("use_qk_norm",)
    has_windows = qk_norm = True

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = Field(default=4096, ge=1)
    sliding_window_pattern: Literal[4] = 4
    rope_theta: float | None = 500_000.0

    def rope_of(self, layer: int) -> RopeConfig:
        rope = super().rope_of(layer)  # `rope_theta` is of layers that attend to everything, as transformers reads it
        return rope.model_copy(update={"rope_theta": rope.rope_theta or 500_000.0})

    def attention_of(self, layer: int) -> Attention:
        return replace(super().attention_of(layer), norms_all_heads=True)

    def completed(self, whole: Architecture) -> Architecture:
        return replace(whole, block=NormedBlock(norms_inputs=False))
