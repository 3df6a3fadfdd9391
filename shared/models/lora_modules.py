"""Which modules of a model an adapter is beside, with which rank and scale: as PEFT decides it by their names."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from longshore.module_patterns import Effort, ModulePattern
from longshore.training import TARGETS, Lora
from shared.errors import InvalidInput
from shared.models.peft import EMBEDDING

OUTPUT = "lm_head"
"""The module of the output layer, which is no layer's: PEFT takes it whatever `layers_to_transform` says."""
OUTPUT_WEIGHT = f"{OUTPUT}.weight"


@dataclass(frozen=True)
class LoraSize:
    """The adapter beside one module: y += B A x * scale with A of [rank, inputs]."""

    rank: int
    scale: float


class AdaptedModules:
    """An adapter's settings by names of modules, such as `model.layers.0.self_attn.q_proj`.

    All its questions together may cost so much and no more, as patterns are strangers'.
    """

    def __init__(self, lora: Lora) -> None:
        self.lora = lora
        self._effort = Effort()
        self._whole = None if lora.target_pattern is None else ModulePattern(lora.target_pattern)
        self._ranks = [(ModulePattern(key, is_end=True), rank) for key, rank in lora.rank_pattern]
        self._alphas = [(ModulePattern(key, is_end=True), alpha) for key, alpha in lora.alpha_pattern]
        self.unused = {pattern for pattern, _ in (*self._ranks, *self._alphas)}

    def of(self, module: str) -> LoraSize | None:
        """Return what is beside a module, if anything. Raises InvalidInput where a pattern takes too long."""
        if not self._is_targeted(module):
            return None
        rank = int(self._first(self._ranks, module, self.lora.rank))
        alpha = self._first(self._alphas, module, self.lora.alpha)
        return LoraSize(rank, alpha / (math.sqrt(rank) if self.lora.rank_stabilized else rank))

    def _is_targeted(self, module: str) -> bool:
        if self._whole is not None:
            return self._matches(self._whole, module)
        if module.rpartition(".")[2] not in self.lora.targets:
            return False
        return module == OUTPUT or self.lora.layers is None or layer_of(module) in self.lora.layers

    def _first(self, pairs: Sequence[tuple[ModulePattern, float]], module: str, otherwise: float) -> float:
        found = next((pair for pair in pairs if self._matches(pair[0], module)), None)
        self.unused.discard(found and found[0])
        return otherwise if found is None else found[1]

    def _matches(self, pattern: ModulePattern, module: str) -> bool:
        try:
            return pattern.matches(module, self._effort)
        except ValueError as error:
            raise InvalidInput(str(error), "trainable") from None


def layer_of(module: str) -> int | None:
    """Return the number of the layer that a module is in."""
    return next((int(part) for part in module.split(".")[2:-1] if part.isdecimal()), None)


def with_own_targets(lora: Lora, linears: Container[str]) -> Lora:
    """Return an adapter's settings with the targets that a model has, as PEFT takes them.

    Raises:
        InvalidInput: it has none of them.
    """
    if lora.target_pattern is not None:
        return lora
    targets = tuple(name for name in TARGETS if name in lora.targets and (name in linears or name == OUTPUT))
    if not targets:
        raise InvalidInput(f"this model has no linear {' or '.join(lora.targets)}", "targets")
    return lora.model_copy(update={"targets": targets})


def beside(lora: Lora, modules: Mapping[str, bool]) -> Lora:
    """Check an adapter's settings against a model. Returns them as `with_own_targets`.

    Args:
        modules: names of all of the model's modules that have a weight, and whether an adapter can be beside them.

    Raises:
        InvalidInput: the model has none of them, or not all layers or patterns; or a pattern means what takes none.
    """
    modules = {**modules, OUTPUT: True}  # tied ones, too
    linears = {name.rpartition(".")[2] for name, takes_adapter in modules.items() if takes_adapter}
    if EMBEDDING in lora.targets and EMBEDDING not in linears:
        raise InvalidInput(f"this model's embeddings are not called {EMBEDDING}, and take no adapter", "targets")
    lora = with_own_targets(lora, linears)
    adapted = AdaptedModules(lora)
    above = {".".join(parts[:n]) for parts in (name.split(".") for name in modules) for n in range(1, len(parts))}
    found = [name for name in {*modules, *above} if adapted.of(name) is not None]
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
    return lora
