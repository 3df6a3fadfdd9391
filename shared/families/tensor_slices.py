"""Tensor slices: the rows of the engine's parameters that each Hugging Face tensor fills, under tensor parallelism.

The engine's parameters are fused (query, key and value interleaved by key/value head; gate with up) and split over
the tensor-parallel ranks. A tensor slice describes one Hugging Face tensor: the part of it that a rank holds, and the
rows of the rank's parameter that this part fills.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longshore.training import TARGETS
from shared.models.peft import EMBEDDING, module_of


@dataclass(frozen=True)
class TensorSlice:
    """A whole tensor `name` of `shape`, split along dimension `split` (None: every rank holds all of it).

    On each rank it fills rows `start` to `stop` of each of the `groups` equal row groups of `parameter`. `expert`: the
    number of its expert, if any; then it is split over expert-tensor-parallel ranks. `is_stack`: it holds all experts,
    one after another along `split`, divided among expert-parallel ranks. `sections`: sizes of parts along `split` that
    are each split over the ranks; if empty, the whole is. `takes_adapter`: an adapter is possible, if it is a linear's
    weight. `stage` and `ep_rank`: the pipeline stage and the expert-parallel rank that hold it.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    split: int | None
    start: int
    stop: int
    groups: int = 1
    expert: int | None = None
    is_stack: bool = False
    sections: tuple[int, ...] = ()
    takes_adapter: bool = True
    stage: int = 0
    ep_rank: int = 0

    def spans(self, rank: int, size: int) -> list[slice]:
        """Return the ranges of dimension `split` that a rank of `size` ranks holds, one per section; those of the last
        ranks may be short or empty."""
        assert self.split is not None
        spans, start = [], 0
        for length in self.sections or (self.shape[self.split],):
            share, stop = -(-length // size), start + length
            spans.append(slice(min(start + rank * share, stop), min(start + (rank + 1) * share, stop)))
            start = stop
        return spans


@dataclass(frozen=True)
class Linear:
    """A fused linear of the engine and the Hugging Face linears in it, in the order of their rows."""

    name: str
    # Megatron's words: "column" splits output rows over ranks, "row" input columns; "whole": every rank has all of it.
    kind: Literal["column", "row", "whole"]
    slices: tuple[TensorSlice, ...]


def modules_of(slices: Sequence[TensorSlice]) -> dict[str, bool]:
    """Return the names in memory of all modules with a weight, and whether LoRA can adapt them."""
    weights = [s for s in slices if s.name.endswith(".weight") and not s.is_stack]  # a stack is a parameter in memory
    return {module_of(s.name): s.takes_adapter and s.name.split(".")[-2] in TARGETS for s in weights}


def as_linear(embedding: TensorSlice) -> TensorSlice:
    """Return embeddings as a linear of tokens, [hidden, vocabulary], whole on every rank."""
    num_tokens, size = embedding.shape
    return replace(embedding, shape=(size, num_tokens), split=None, start=0, stop=size)


def linears_of(slices: Sequence[TensorSlice]) -> list[Linear]:
    """Return the linears that LoRA can adapt, in model order. Embeddings are one of them."""
    can_adapt = modules_of(slices)
    grouped: dict[str, list[TensorSlice]] = {}
    for s in slices:
        if can_adapt.get(module_of(s.name)) and s.name.endswith(".weight"):
            own = as_linear(s) if s.name.endswith(f".{EMBEDDING}.weight") else s
            grouped.setdefault(s.parameter.removesuffix(".weight"), []).append(own)
    kinds: dict[int | None, Literal["column", "row", "whole"]] = {0: "column", 1: "row", None: "whole"}
    return [Linear(name, kinds[own[0].split], tuple(own)) for name, own in grouped.items()]
