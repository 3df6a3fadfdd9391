"""The tensors of transformers' model by their names in files, as views; and the linears that can have adapters.

When transformers reads a folder it renames tensors, and stacks the matrices of a layer's experts. Its own table of that
(`transformers.conversion_mapping`) says here where each tensor of a file lies in the model.

Shape suffixes: O outputs and I inputs of a linear.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from megatron_worker.sampler.layers.linears import FusedLinear
from shared.errors import InvalidInput
from shared.families.architecture import Architecture
from shared.families.tensor_slices import TensorSlice

_OUTPUT = "lm_head"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Stack = dict[int, dict[int, TensorSlice]]
"""The matrices that each expert's rows of a parameter are, by their places."""


@dataclass(frozen=True)
class CheckpointViews:
    """Every tensor once.

    Attributes:
        linears: by the module that each is.
        experts: for each module that holds a layer's experts the linears of each parameter, in the experts' order.
        others: what is in no linear, by its Hugging Face name.
    """

    linears: dict[str, FusedLinear]
    experts: dict[str, dict[str, list[FusedLinear]]]
    others: dict[str, Tensor]

    @property
    def all_linears(self) -> list[FusedLinear]:
        stacks = [stack for stacks in self.experts.values() for stack in stacks.values()]
        return [*self.linears.values(), *(linear for stack in stacks for linear in stack)]

    def named_weights(self) -> dict[str, Tensor]:
        """Return every tensor by its Hugging Face name: what is written to one is computed with from then on."""
        named = dict(self.others)
        for linear in self.all_linears:
            named |= linear.named_weights()
        return named


def find_views(model: Any, a: Architecture, slices: Sequence[TensorSlice]) -> CheckpointViews:
    """Find every tensor of the files in transformers' model.

    Raises InvalidInput: the model has no such tensor, or one of another shape, or one that no file has; or a file's
    lies there otherwise than whole or as rows of an expert's matrix.
    """
    tensors: dict[str, Tensor] = model.state_dict()
    whole, stacks = _places(model, a, slices, tensors)
    tied = {f"{_OUTPUT}.weight"} if a.tied else set()
    for key in sorted(tensors.keys() - whole.keys() - stacks.keys() - tied):
        _refuse(a, key, "no file has it")
    for key, s in whole.items():
        if tensors[key].shape != s.shape:
            _refuse(a, s.name, f"its shape is {list(tensors[key].shape)}, expected {list(s.shape)}")
    experts = defaultdict[str, dict[str, list[FusedLinear]]](dict)
    for key, stack in stacks.items():
        module_name, _, parameter = key.rpartition(".")
        experts[module_name][parameter] = _linears_of(a, key, stack, tensors[key])
    linears = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != _OUTPUT:
            bias_O = tensors[f"{name}.bias"] if whole.pop(f"{name}.bias", None) else None
            linears[name] = FusedLinear(name, (whole.pop(f"{name}.weight"),), tensors[f"{name}.weight"], bias_O)
    return CheckpointViews(linears, experts, {s.name: tensors[key] for key, s in whole.items()})


def _places(
    model: Any, a: Architecture, slices: Sequence[TensorSlice], tensors: dict[str, Tensor]
) -> tuple[dict[str, TensorSlice], dict[str, Stack]]:
    """Return what is a whole tensor of the model, by that one's name, and what is a part of a stack, by its name."""
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = {p: each for each in transforms if isinstance(each, WeightConverter) for p in each.source_patterns}
    whole: dict[str, TensorSlice] = {}
    stacks = defaultdict[str, Stack](lambda: defaultdict(dict))
    for s in slices:
        # Towers beside the text model change the names of its tensors, and are not here.
        name = re.sub(rf"^{re.escape(a.tensor_prefix)}\.", f"{model.base_model_prefix}.", s.name)
        name = f"{_OUTPUT}.weight" if s.name == a.output_name else name
        key, pattern = rename_source_key(name, renamings, list(converters.values()), model.base_model_prefix, tensors)
        if key not in tensors:
            _refuse(a, s.name, f"there is no {key}")
        if pattern is None:
            whole[key] = s
            continue
        expert = _EXPERT.search(name)
        match converters[pattern].operations:
            case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)] if expert is not None:
                stacks[key][int(expert[1])][converters[pattern].source_patterns.index(pattern)] = s
            case operations:
                _refuse(a, s.name, f"how it lies in {key} is not known here: {operations}")
    return whole, stacks


def _linears_of(a: Architecture, key: str, stack: Stack, weight_EOI: Tensor) -> list[FusedLinear]:
    """Return each expert's rows of a parameter as a linear."""
    linears = []
    for number, weight_OI in enumerate(weight_EOI):
        parts = tuple(part for _, part in sorted(stack[number].items()))
        if (sum(part.shape[0] for part in parts), *{part.shape[1] for part in parts}) != weight_OI.shape:
            shapes = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
            _refuse(a, f"{key}.{number}", f"its shape is {list(weight_OI.shape)}, and its rows are {shapes or 'none'}")
        linears.append(FusedLinear(f"{key}.{number}", parts, weight_OI, None))
    return linears


def _refuse(a: Architecture, name: str, reason: str) -> NoReturn:
    raise InvalidInput(f"transformers' model of {a.family} does not have this tensor as files have it: {reason}", name)
