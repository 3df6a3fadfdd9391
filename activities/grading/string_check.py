"""String checks: whether a text is, or holds, another."""

from typing import Literal


def string_check(operation: Literal["eq", "ne", "like", "ilike"], text: str, reference: str) -> float:
    """1.0 where the operation holds, else 0.0. `ilike` compares case-folded texts."""
    match operation:
        case "eq":
            holds = text == reference
        case "ne":
            holds = text != reference
        case "like":
            holds = reference in text
        case "ilike":
            holds = reference.casefold() in text.casefold()
    return float(holds)
