"""Layouts (longshore/layout.py) from their labels, and their limits."""

import re
from typing import Protocol, TypeVar

from pydantic import ValidationError

from longshore.layout import Layout
from shared.errors import InvalidInput
from shared.field_rules import first_error


def layout_of(label: str) -> Layout:
    """Parse a layout's label. Raises InvalidInput for any other text."""
    degrees: dict[str, int] = {}
    for part in () if label == "single" else label.split("-"):
        found = re.fullmatch(r"(sp)|(tp|pp|cp|ep|etp|dp|nodes)([1-9][0-9]{0,3})", part)
        name = (found[1] or found[2]) if found else None
        if found is None or name is None or name in degrees:
            raise InvalidInput(f"'{part}' is no degree: a layout is written like tp2-sp-pp2-dp4", "layout")
        degrees[name] = int(found[3] or 1)
    try:
        return Layout.model_validate(degrees)
    except ValidationError as error:
        field, rule = first_error(error)
        raise InvalidInput(rule, f"layout.{field}".rstrip(".")) from None


def check_ranks(layout: Layout, max_ranks: int, below: str = "", why: str = "(setting max_ranks)") -> None:
    """Refuse a layout with more ranks per machine than a host takes, whatever the model.

    `why`: the source of that limit, for the message.

    Raises InvalidInput: names the dimension if one alone exceeds the limit.
    """
    if layout.ranks_per_node > max_ranks:
        split = [name for name in ("tp", "pp", "cp", "dp") if getattr(layout, name) > 1]
        place = f"{below}layout.{split[0]}" if len(split) == 1 else f"{below}layout"
        each = " on each of its machines" if layout.nodes > 1 else ""
        rule = f"{layout.ranks_per_node:,} ranks{each} ({layout.label})"
        raise InvalidInput(f"{rule}; a host of this installation takes up to {max_ranks} {why}", place)


def check_nodes(layout: Layout, max_hosts: int | None, below: str = "") -> None:
    """Refuse a layout of more machines than there can be hosts. None: that is unknown. Raises InvalidInput."""
    if max_hosts is not None and layout.nodes > max_hosts:
        rule = f"{layout.nodes:,} machines ({layout.label}); this installation has up to {max_hosts} GPU host"
        raise InvalidInput(f"{rule}{'s' * (max_hosts > 1)} at a time (setting max_hosts)", f"{below}layout.nodes")


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
