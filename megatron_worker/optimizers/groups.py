"""Groups of weights, which an optimizer gives other learning rates, decay or updates; the update of flat tensors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longshore.training import Muon, Optimizer
from megatron_worker.optimizers import adamw, muon
from megatron_worker.optimizers.adamw import Rates
from shared.families.tensor_slices import TensorSlice

_OF_LAYER = re.compile(r"\.\d+\.|\.lora_[AB]\.")
_EMBEDDING = re.compile(r"embed(?!_out)|\bwte\b|\bwpe\b")


@dataclass(frozen=True)
class Group:
    """`is_layers`: matrices of layers and of adapters. `is_matrix`: all but vectors, embeddings. `is_b`: LoRA's B."""

    is_layers: bool = False
    is_matrix: bool = False
    is_b: bool = False


def groups_of(slices: Sequence[TensorSlice]) -> dict[str, Group]:
    """Return the groups of parameters."""
    return {s.parameter: _group_of(s) for s in slices}


def _group_of(s: TensorSlice) -> Group:
    num_dimensions = len(s.shape) - s.is_stack
    of_layer = _OF_LAYER.search(s.name) is not None
    is_matrix = num_dimensions > 1 and (of_layer or not _EMBEDDING.search(s.name))
    return Group(num_dimensions == 2 and of_layer, is_matrix, ".lora_B." in s.name)


def rates_of(group: Group, optimizer: Optimizer, learning_rate: float) -> Rates:
    return Rates(
        learning_rate * (optimizer.lora_plus_ratio if group.is_b else 1.0),
        optimizer.weight_decay if optimizer.decay == "all" or group.is_matrix else 0.0,
        group.is_layers and isinstance(optimizer, Muon),
    )


def step_matrix(weight: Tensor, made: Tensor, rates: Rates) -> None:
    """Take a step that `muon.step_of` has made, in place."""
    weight.mul_(1 - rates.learning_rate * rates.weight_decay).add_(made, alpha=-rates.learning_rate)


def update(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, optimizer: Optimizer, rates: Rates, step: int
) -> None:
    """Do step number `step` of flat float32 tensors, in place; of Muon's only what comes before `step_of`."""
    if isinstance(optimizer, Muon) and rates.by_muon:
        muon.direct(grad, mean, square, optimizer)
    else:
        adamw.update(weight, grad, mean, square, optimizer, rates, step)
