"""The modules of a model that an adapter adapts, and the rank and scale of each: decided by names, as in PEFT."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from longshore.module_patterns import ModulePattern
from longshore.training import TARGETS, Lora
from shared.errors import InvalidInput
from shared.models.peft import EMBEDDING, EXPERTS, MLPS, SHARED, UNREAD

OUTPUT = "lm_head"
"""The module of the output layer, which is no layer's: PEFT takes it whatever `layers_to_transform` says."""


@dataclass(frozen=True)
class LoraSize:
    """The adapter of one module: y += B A x * scale with A of [rank, inputs]."""

    rank: int
    scale: float


def check_order(found: Lora, expected: Lora, modules: Iterable[str], place: str) -> None:
    """Raise InvalidInput if the different order of two adapters' patterns makes a difference for some module."""
    one, other = AdaptedModules(found), AdaptedModules(expected)
    if (found.rank_pattern, found.alpha_pattern) != (expected.rank_pattern, expected.alpha_pattern):
        for module in modules:
            if (theirs := one.of(module)) != (ours := other.of(module)) and theirs and ours:
                rule = f"of the adapter's patterns the first that matches {module} says {theirs}, of the run's {ours}"
                raise InvalidInput(f"{rule}: name them in the adapter's order", place)


class AdaptedModules:
    """An adapter's settings by names of modules, such as `model.layers.0.self_attn.q_proj`."""

    def __init__(self, lora: Lora) -> None:
        self.lora = lora
        self._whole = None if lora.target_pattern is None else ModulePattern(lora.target_pattern)
        self._ranks = [(ModulePattern(key, is_end=True), rank) for key, rank in lora.rank_pattern]
        self._alphas = [(ModulePattern(key, is_end=True), alpha) for key, alpha in lora.alpha_pattern]
        self.unused = {pattern for pattern, _ in (*self._ranks, *self._alphas)}

    def of(self, module: str) -> LoraSize | None:
        """Return a module's adapter, if it has one."""
        if not self._is_targeted(module):
            return None
        rank = int(self._first(self._ranks, module, self.lora.rank))
        alpha = self._first(self._alphas, module, self.lora.alpha)
        return size_of(self.lora, rank, alpha)

    def _is_targeted(self, module: str) -> bool:
        if self._whole is not None:
            return self._whole.matches(module)
        if _last(module) not in self.lora.targets or UNREAD in module:
            return False
        return module == OUTPUT or self.lora.layers is None or layer_of(module) in self.lora.layers

    def _first(self, pairs: Sequence[tuple[ModulePattern, float]], module: str, otherwise: float) -> float:
        found = next((pair for pair in pairs if pair[0].matches(module)), None)
        self.unused.discard(found and found[0])
        return otherwise if found is None else found[1]


def size_of(lora: Lora, rank: int, alpha: float) -> LoraSize:
    """Return the size of an adapter with this rank and alpha."""
    return LoraSize(rank, alpha / (math.sqrt(rank) if lora.rank_stabilized else rank))


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def layer_of(module: str) -> int | None:
    """Return the number of the layer that a module is in."""
    return next((int(part) for part in module.split(".")[2:-1] if part.isdecimal()), None)


def with_own_targets(lora: Lora, linears: Container[str]) -> Lora:
    """Return an adapter's settings with only the targets that a model has, as PEFT does.

    Raises InvalidInput: the model has none of the targets.
    """
    if lora.target_pattern is not None:
        return lora
    targets = tuple(name for name in TARGETS if name in lora.targets and (name in linears or name == OUTPUT))
    if not targets:
        raise InvalidInput(f"this model has no linear {' or '.join(lora.targets)}", "targets")
    return lora.model_copy(update={"targets": targets})


def beside(lora: Lora, modules: Mapping[str, bool], is_new: bool = False) -> Lora:
    """Check an adapter's settings against a model. Returns them as `with_own_targets`.

    Args:
        modules: names of all of the model's modules with a weight, and whether each can be adapted.
        is_new: the adapter is trained from scratch, and PEFT must be able to load the result.

    Raises:
        InvalidInput: the model has no such modules, or lacks a layer or a match of a pattern; or a pattern matches a
            module that cannot be adapted; or PEFT would leave something out.
    """
    modules = {**{name: takes and UNREAD not in name for name, takes in modules.items()}, OUTPUT: True}  # also if tied
    linears = {_last(name) for name, takes_adapter in modules.items() if takes_adapter}
    if EMBEDDING in lora.targets and EMBEDDING not in linears:
        raise InvalidInput(f"this model's embeddings are not called {EMBEDDING}, and take no adapter", "targets")
    lora = with_own_targets(lora, linears)
    adapted = AdaptedModules(lora)
    above = {".".join(parts[:n]) for parts in (name.split(".") for name in modules) for n in range(1, len(parts))}
    sizes = {name: adapted.of(name) for name in {*modules, *above}}
    found = [name for name, size in sizes.items() if size is not None]
    if others := sorted(name for name in found if not modules.get(name)):
        raise InvalidInput(f"the pattern means {others[0]}, too, which takes no adapter", "target_pattern")
    if lora.dora and (without := sorted(name for name in found if layer_of(name) is None or ".experts." in name)):
        raise InvalidInput(f"DoRA is of linears of layers, experts' excepted, and not of {without[0]}", "dora")
    if lacking := sorted(set(lora.layers or ()) - {layer_of(name) for name in found}):
        raise InvalidInput(f"this model has nothing to adapt in layer {lacking[0]}", "layers")
    if not found:
        raise InvalidInput("this model has no linear of that name", "trainable")
    if lora.head is not None and OUTPUT in found:
        raise InvalidInput("the pattern means lm_head, and a head of its own stands in its place", "target_pattern")
    if adapted.unused:
        unused = min(pattern.expression for pattern in adapted.unused)
        raise InvalidInput(f"no module with an adapter has a name like that: {unused}", "trainable")
    if is_new and any(EXPERTS in name for name in modules):
        _check_mixture(lora, {name: sizes[name] for name in modules if ".mlp." in name and _last(name) in MLPS})
    return lora


def _check_mixture(lora: Lora, sizes: Mapping[str, LoraSize | None]) -> None:
    """Refuse an adapter of a mixture's MLPs that PEFT would not load unchanged. PEFT stacks a layer's experts.

    `sizes`: the adapter's size for each linear of the MLPs, by name; None: not adapted.
    """
    place = "targets" if lora.target_pattern is None else "target_pattern"
    adapted = {name: size for name, size in sizes.items() if size is not None}
    if other := next((name for name, size in adapted.items() if size != size_of(lora, lora.rank, lora.alpha)), None):
        rule = "PEFT has the adapter's own rank and alpha there: leave MLPs out of rank_pattern and alpha_pattern"
        raise InvalidInput(f"{other} is of a mixture: {rule}", "trainable")
    if lora.dora and (other := next((name for name in adapted if SHARED not in name), None)):
        raise InvalidInput(f"PEFT has no DoRA beside MLPs of such a mixture, as {other} is", "dora")
    kinds = {_last(name) for name in adapted}
    stacks = {(layer_of(name), _last(name) == "down_proj") for name in adapted if EXPERTS in name}
    whole = {name for name in sizes if EXPERTS in name and (layer_of(name), _last(name) == "down_proj") in stacks}
    if len(kinds & {"gate_proj", "up_proj"}) == 1 or whole - {*adapted}:
        rule = "gate_proj and up_proj go together, and a layer's experts"
        raise InvalidInput(f"PEFT stacks MLPs of a mixture: {rule}, or leave them out", place)
    if adapted and not any(EXPERTS in name or SHARED.rstrip(".") in name for name in adapted):
        raise InvalidInput("only dense MLPs of a mixture are meant: add a layer with experts, or leave them out", place)
