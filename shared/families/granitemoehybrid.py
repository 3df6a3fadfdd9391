"""Granite 4.0: layers of Mamba-2, or of attention with or without positions; experts beside an MLP, or an MLP alone."""

import math
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from shared.families.architecture import Attention, ExpertStacks, Mamba2, Mixture, Mlp, Rope, TensorNames
from shared.families.config import choice_problem
from shared.families.llama import GraniteConfig

_OTHER_WORDS = {"linear_attention": "mamba", "full_attention": "attention"}  # transformers 5's, for published ones
_Kind = Annotated[Literal["mamba", "attention"], BeforeValidator(lambda kind: _OTHER_WORDS.get(str(kind), kind))]
# transformers writes infinity as {"__float__": "Infinity"}, which JSON lacks.
_Limit = Annotated[float, BeforeValidator(lambda value: value["__float__"] if isinstance(value, dict) else value)]
_FUSED = "input_linear", "output_linear"


class GraniteMoeHybridConfig(GraniteConfig):
    """The config of Granite 4.0. `intermediate_size` is that of an expert; the MLP has `shared_intermediate_size`."""

    family = "granitemoehybrid"
    names = TensorNames(mlp="shared_mlp", recurrent="mamba")

    layer_types: tuple[_Kind, ...] | None = Field(
        default=None, validation_alias=AliasChoices("layer_types", "layers_block_type")
    )
    position_embedding_type: Literal["rope", "nope"] | None = None
    shared_intermediate_size: int = Field(default=1024, ge=1)
    num_experts: int | None = Field(default=8, ge=0, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: int = Field(default=2, ge=0)
    mamba_n_heads: int = Field(default=128, ge=1)
    mamba_n_groups: int = Field(default=1, ge=1)
    mamba_d_state: int = Field(default=256, ge=1)
    mamba_d_head: int | Literal["auto"] = "auto"
    mamba_d_conv: int = Field(default=4, ge=2)
    mamba_expand: int = Field(default=2, ge=1)
    mamba_conv_bias: bool = True
    mamba_proj_bias: Literal[False] = False
    time_step_limit: tuple[_Limit, _Limit] = (0.0, math.inf)

    def layers_problem(self) -> str | None:
        kinds = self.layer_types or ()
        if "attention" not in kinds:
            return "layer_types: at least one layer of attention is needed"
        if len(kinds) != self.num_hidden_layers:
            return f"layer_types names {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}"
        return None

    def own_problem(self) -> str | None:
        num_heads, values = self.mamba_n_heads, self.mamba_expand * self.hidden_size
        if values % num_heads or self.mamba_d_head not in ("auto", values // num_heads):
            return (
                f"mamba_d_head: {num_heads} heads of {self.mamba_d_head} are not mamba_expand * hidden_size = {values}"
            )
        if num_heads % self.mamba_n_groups:
            return f"mamba_n_groups: {self.mamba_n_groups} groups do not divide {num_heads} heads of Mamba layers"
        if self.time_step_limit[1] != math.inf:
            return f"time_step_limit: an upper limit of steps, here of {self.time_step_limit[1]}, is not supported"
        if self.num_experts and not self.num_experts_per_tok:
            return "num_experts_per_tok is 0 of a model with experts"
        return choice_problem(self.num_experts_per_tok, self.num_experts) if self.num_experts else None

    def mixer_of(self, layer: int) -> Attention | Mamba2:
        if self.layer_types is not None and self.layer_types[layer] == "attention":
            return self.attention_of(layer)
        return Mamba2(
            num_heads=self.mamba_n_heads,
            head_size=self.mamba_expand * self.hidden_size // self.mamba_n_heads,
            state_size=self.mamba_d_state,
            num_groups=self.mamba_n_groups,
            conv_width=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            least_step=self.time_step_limit[0],
            adapts_output=True,
        )

    def rotation_of(self, layer: int) -> Rope | None:
        return super().rotation_of(layer) if self.position_embedding_type == "rope" else None

    def mlp_of(self, layer: int) -> Mlp | Mixture:
        if not self.num_experts:
            return Mlp(self.shared_intermediate_size, linears=_FUSED)
        where = "block_sparse_moe"
        return Mixture(
            num_experts=self.num_experts,
            ffn_size=self.intermediate_size,
            experts_per_token=self.num_experts_per_tok,
            scoring="chosen softmax",
            shared_ffn_size=self.shared_intermediate_size,
            shared_is_gated=False,
            shared_linears=_FUSED,
            stacks=ExpertStacks(
                f"{where}.router.layer", f"{where}.input_linear.weight", f"{where}.output_linear.weight"
            ),
        )
