"""The parallel layout of one worker: how many ranks, and what each dimension splits."""

import re
from typing import Annotated, Literal, Protocol, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from shared.contract import Frozen
from shared.errors import InvalidInput
from shared.field_rules import first_error

Degree = Annotated[int, Field(ge=1, le=4096)]
EngineName = Literal["megatron", "fsdp"]
MAX_WORLD_SIZE = 4096
FAMILIES = ("qwen3", "qwen3_moe", "qwen2", "llama")
"""Model families, by their config.json's `model_type`: each has a module of its name in megatron_worker/families."""
_MEGATRON_ALONE = ("qwen3_moe",)


class Layout(Frozen):
    """Degrees of tensor (tp), pipeline (pp), context (cp), expert (ep) and data (dp) parallelism.

    The world is `tp * pp * cp * dp`.
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

    @model_validator(mode="after")
    def _total_is_bounded(self) -> Self:
        if self.world_size > MAX_WORLD_SIZE:
            raise ValueError(f"tp * pp * cp * dp = {self.world_size:,} ranks; a layout has up to {MAX_WORLD_SIZE:,}")
        return self

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def label(self) -> str:
        """A short name, such as `tp2-sp-dp2`; `single` for one rank."""
        degrees = self.model_dump()
        parts = [
            "sp" if name == "sp" else f"{name}{degree}"
            for name, degree in degrees.items()
            if degree > 1 or degree is True
        ]
        return "-".join(parts) or "single"

    @classmethod
    def from_label(cls, label: str) -> "Layout":
        """The layout of a label. Raises InvalidInput for any other text."""
        degrees: dict[str, int] = {}
        for part in () if label == "single" else label.split("-"):
            found = re.fullmatch(r"(sp)|(tp|pp|cp|ep|etp|dp)([1-9][0-9]{0,3})", part)
            name = (found[1] or found[2]) if found else None
            if found is None or name is None or name in degrees:
                raise InvalidInput(f"'{part}' is no degree: a layout is written like tp2-sp-pp2-dp4", "layout")
            degrees[name] = int(found[3] or 1)
        try:
            return cls.model_validate(degrees)
        except ValidationError as error:
            field, rule = first_error(error)
            raise InvalidInput(rule, f"layout.{field}".rstrip(".")) from None


class ModelShape(Frozen):
    """The sizes of a model that limit its layouts, read from a Hugging Face `config.json`."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    num_experts: int = 0
    expert_ffn_size: int = 0


def check_layout(layout: Layout, shape: ModelShape, engine: EngineName = "megatron") -> None:
    """Refuse a layout, or an engine, that cannot hold the model.

    Raises:
        InvalidInput: names the dimension and the rule that it breaks.
    """
    if rule := broken_rule(engine, layout):
        raise InvalidInput(rule, "layout")
    check_family(engine, shape.family)
    for name, size in (
        ("attention heads", shape.num_heads),
        ("key/value heads", shape.num_kv_heads),
        *([] if shape.num_experts else [("feed-forward size", shape.ffn_size)]),
    ):
        if size % layout.tp:
            raise InvalidInput(f"tp={layout.tp} does not divide the model's {size} {name}", "layout.tp")
    if layout.sp and layout.tp == 1:
        raise InvalidInput("sp shares tokens out over tensor-parallel ranks: it needs tp of at least 2", "layout.sp")
    if layout.pp > shape.num_layers:
        message = f"pp={layout.pp} stages need a layer each, the model has {shape.num_layers}"
        raise InvalidInput(message, "layout.pp")
    _check_experts(layout, shape)


def _check_experts(layout: Layout, shape: ModelShape) -> None:
    if not shape.num_experts:
        for name, degree in (("ep", layout.ep), ("etp", layout.etp)):
            if degree > 1:
                raise InvalidInput(f"{name}={degree}: the model has no experts to split", f"layout.{name}")
        return
    if layout.tp > 1 and not layout.sp:
        raise InvalidInput("a model with experts needs sp with tp: each rank routes tokens of its own", "layout.sp")
    if shape.num_experts % layout.ep:
        raise InvalidInput(f"ep={layout.ep} does not divide the model's {shape.num_experts} experts", "layout.ep")
    if shape.expert_ffn_size % layout.etp:
        message = f"etp={layout.etp} does not divide the experts' feed-forward size {shape.expert_ffn_size}"
        raise InvalidInput(message, "layout.etp")
    stage = layout.tp * layout.cp * layout.dp
    if stage % (layout.ep * layout.etp):
        message = f"ep * etp = {layout.ep * layout.etp} does not divide tp * cp * dp = {stage}"
        raise InvalidInput(message, "layout.ep")


def check_ranks(layout: Layout, max_ranks: int, below: str = "") -> None:
    """Refuse a layout of more ranks than a host has room for, whatever the model.

    Raises:
        InvalidInput: names the dimension, where one alone asks for too much.
    """
    if layout.world_size > max_ranks:
        split = [name for name in ("tp", "pp", "cp", "dp") if getattr(layout, name) > 1]
        place = f"{below}layout.{split[0]}" if len(split) == 1 else f"{below}layout"
        rule = f"{layout.world_size:,} ranks ({layout.label}); a host of this installation takes up to {max_ranks}"
        raise InvalidInput(f"{rule} (setting max_ranks)", place)


def broken_rule(engine: EngineName, layout: Layout) -> str | None:
    """Return the rule by which an engine refuses a layout, whatever the model; None where it takes it."""
    if engine == "fsdp" and layout != Layout(dp=layout.dp):
        return f"the engine fsdp splits data and shards weights by dp alone: use dp, and no {layout.label}"
    return None


def check_family(engine: EngineName, family: str) -> None:
    """Raise InvalidInput where an engine cannot train a model family; Megatron's trains every one of FAMILIES."""
    known = [name for name in FAMILIES if name not in _MEGATRON_ALONE]
    if engine == "fsdp" and family not in known:
        raise InvalidInput(f"the engine fsdp trains {', '.join(known)}, not {family}: use megatron", "engine")


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
