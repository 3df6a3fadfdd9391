"""Linears of the decoder with their adapters, and the MLP made of them.

Shape suffixes: T tokens or slots, O outputs and I inputs of a linear, R ranks of an adapter, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.families.tensor_slices import TensorSlice, as_linear
from shared.models.peft import EMBEDDING


@dataclass(frozen=True)
class LoraFactors:
    """An adapter's matrices for one fused linear; `b_OR` is zero except in each part's block of rows and ranks.

    `scale`: of the ranks, [R] if parts have different ones. `gain_O`: DoRA's factor for each row.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float | Tensor
    gain_O: Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """A root mean square norm over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True)
class FusedLinear:
    """Hugging Face linears of the same input, stacked by rows."""

    name: str
    parts: tuple[TensorSlice, ...]
    weight_OI: Tensor
    bias_O: Tensor | None

    def named_weights(self) -> dict[str, Tensor]:
        """Return the parts' own rows by their Hugging Face names."""
        sizes = [part.shape[0] for part in self.parts]
        named = dict(zip((part.name for part in self.parts), self.weight_OI.split(sizes), strict=True))
        if self.bias_O is not None:
            biases = [part.name.removesuffix("weight") + "bias" for part in self.parts]
            named |= dict(zip(biases, self.bias_O.split(sizes), strict=True))
        return named

    def __call__(self, x: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        extra = lora_weights.get(self.name)
        gain_O = None if extra is None else extra.gain_O
        y = F.linear(x, self.weight_OI, self.bias_O if gain_O is None else None)
        if extra is not None:
            low = F.linear(x, extra.a_RI).mul_(extra.scale)
            y += F.linear(low, extra.b_OR)
        if gain_O is not None:
            y = y * gain_O if self.bias_O is None else torch.addcmul(self.bias_O, y, gain_O)
        return y


def token_table(s: TensorSlice, weight_VH: Tensor) -> FusedLinear:
    """Return the token embeddings in a form that can have an adapter."""
    return FusedLinear(EMBEDDING, (as_linear(s),), weight_VH.t(), None)


def with_tokens(
    x_TH: Tensor, token_T: Tensor, lora_weights: Mapping[str, LoraFactors], scale: float | Tensor = 1.0
) -> Tensor:
    """Return embeddings of tokens, which are scaled, with what an adapter adds to them."""
    if (extra := lora_weights.get(EMBEDDING)) is None:
        return x_TH
    return x_TH + F.embedding(token_T, extra.a_RI.t()) * (extra.scale * scale) @ extra.b_OR.t()


def fuse(
    name: str, modules: Sequence[str], weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]
) -> FusedLinear:
    """Fuse linears, by their Hugging Face names. They are taken out of `weights`, so that none is held twice."""
    own = tuple(slices[f"{module}.weight"] for module in modules)
    weight_OI = torch.cat([weights.pop(f"{module}.weight") for module in modules])
    biases = [weights.pop(f"{module}.bias") for module in modules if f"{module}.bias" in weights]
    return FusedLinear(name, own, weight_OI, torch.cat(biases) if biases else None)


@dataclass(frozen=True)
class Mlp:
    """A SwiGLU MLP: a layer's only one, or one of its experts."""

    gate_up: FusedLinear
    down: FusedLinear

    @property
    def linears(self) -> list[FusedLinear]:
        return [self.gate_up, self.down]

    def __call__(self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        gate, up = self.gate_up(x_TH, lora_weights).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, lora_weights)


def fuse_mlp(module: str, weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]) -> Mlp:
    """Fuse the linears of the MLP with this Hugging Face name, as `fuse` does."""
    is_fused = f"{module}.gate_up_proj.weight" in slices
    names = [f"{module}.{name}" for name in (("gate_up_proj",) if is_fused else ("gate_proj", "up_proj"))]
    gate_up = fuse(f"{module}.gate_up", names, weights, slices)
    return Mlp(gate_up, fuse(f"{module}.down", (f"{module}.down_proj",), weights, slices))
