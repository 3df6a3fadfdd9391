"""The parallel layout of one worker: how many ranks, and what each dimension splits."""

from typing import Annotated, Literal, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from longshore.fields import Frozen

Degree = Annotated[int, Field(ge=1, le=4096)]
EngineName = Literal["megatron", "fsdp"]
MAX_WORLD_SIZE = 4096


class Layout(Frozen):
    """Degrees of tensor (tp), pipeline (pp), context (cp), expert (ep) and data (dp) parallelism.

    The world is `tp * pp * cp * dp`, shared out evenly among the hosts of `nodes` machines, which are leased together:
    ranks 0 to n - 1 are on the first. Ranks of a tensor-parallel group are on one machine.
    `sp` (sequence parallelism) lets the tensor-parallel ranks share out the tokens between their linears. Experts are
    laid over the same ranks anew: `ep` ranks share them out, `etp` (expert tensor parallelism) split each, so that
    `ep * etp` divides `tp * cp * dp`. Optimizer state is split over all ranks that hold the same weights.
    """

    tp: Degree = Field(default=1, description="tensor-parallel ranks")
    sp: bool = Field(default=False, description="sequence parallelism: needs tp of at least 2")
    pp: Degree = Field(default=1, description="pipeline stages")
    cp: Degree = Field(default=1, description="context-parallel ranks")
    ep: Degree = Field(default=1, description="expert-parallel ranks")
    etp: Degree = Field(default=1, description="tensor-parallel ranks of each expert")
    dp: Degree = Field(default=1, description="data-parallel ranks")
    nodes: Degree = Field(default=1, description="machines, each with the same number of ranks")

    @model_validator(mode="after")
    def _total_is_bounded(self) -> Self:
        if self.world_size > MAX_WORLD_SIZE:
            raise ValueError(f"tp * pp * cp * dp = {self.world_size:,} ranks; a layout has up to {MAX_WORLD_SIZE:,}")
        if self.world_size % self.nodes:
            raise ValueError(f"nodes={self.nodes} machines cannot share out {self.world_size} ranks evenly")
        if self.ranks_per_node % self.tp:
            raise ValueError(f"tp={self.tp} ranks would lie on several machines: each has {self.ranks_per_node}")
        return self

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def label(self) -> str:
        """A short name, such as `tp2-sp-dp2` or `dp4-nodes2`; `single` for one rank."""
        degrees = self.model_dump()
        parts = [
            "sp" if name == "sp" else f"{name}{degree}"
            for name, degree in degrees.items()
            if degree > 1 or degree is True
        ]
        return "-".join(parts) or "single"


def broken_rule(engine: EngineName, layout: Layout) -> str | None:
    """Return the rule of an engine that a layout breaks, whatever the model; None if it accepts the layout."""
    if engine == "fsdp" and layout != Layout(dp=layout.dp, tp=layout.tp, nodes=layout.nodes):
        return f"the engine fsdp splits data by dp and linears by tp alone: use these, and no {layout.label}"
    return None


class _HasLayout(Protocol):
    @property
    def engine(self) -> EngineName: ...

    @property
    def layout(self) -> Layout: ...


HasLayoutT = TypeVar("HasLayoutT", bound=_HasLayout)


def engine_takes_the_layout(laid: HasLayoutT) -> HasLayoutT:
    """Validate models that have both. Raises ValueError with the rule that the layout breaks."""
    if rule := broken_rule(laid.engine, laid.layout):
        raise ValueError(rule)
    return laid


class _HasBudget(Protocol):
    @property
    def layout(self) -> Layout: ...

    @property
    def memory_budget_bytes(self) -> int | None: ...


HasBudgetT = TypeVar("HasBudgetT", bound=_HasBudget)


def pipelines_have_bins(budgeted: HasBudgetT) -> HasBudgetT:
    """Validate a model with a layout and a memory budget. Raises ValueError if a pipeline has a memory budget."""
    if budgeted.memory_budget_bytes is not None and budgeted.layout.pp > 1:
        raise ValueError("memory_budget_bytes: a pipeline holds all micro-batches of a step at once; use pp 1")
    return budgeted
