"""Numbers beside the answers of rows, as reward models learn them: a pair's margin, or an answer's scores."""

import math

from activities.formats.examples import Chat, Example, PreferencePair, PromptCompletion
from activities.formats.rows import Row, refuse_missing, type_name
from shared.errors import InvalidInput

MARGIN = "margin"
_LARGEST = 1e30  # of float32, with room for its square
Numbers = dict[str, tuple[float, ...]]
"""What was read of rows, by their places, until their tokens are made into units."""


def read_numbers(example: Example, row: Row, fields: tuple[str, ...], numbers: Numbers) -> Example:
    """Note a row's numbers, and return its example: of a pair its `margin`, 0 without one; else each of the fields.

    Raises:
        InvalidInput: a field is missing, or no finite number; or the row has a weight, or no answer that ends it.
    """
    match example:
        case PreferencePair():
            numbers[row.place] = (0.0 if row.fields.get(MARGIN) is None else _number(row, MARGIN),)
            return example
        case Chat(messages=messages, weights=weights):
            if messages[-1]["role"] != "assistant":
                rule = f"the last message is the {messages[-1]['role']}'s: a score is of the answer that ends the row"
                raise InvalidInput(rule, row.place)
            is_weighed = weights != [float(message["role"] == "assistant") for message in messages]
        case PromptCompletion():
            is_weighed = example.weight != 1
        case _:
            raise InvalidInput("a score is of an answer, and the row has none of its own", row.place)
    if is_weighed:
        raise InvalidInput("weight must be 1 or absent: a reward model weighs all answers alike", row.place)
    numbers[row.place] = tuple(_number(row, field) for field in fields)
    return example


def _number(row: Row, field: str) -> float:
    refuse_missing(row, field)
    value = row.fields[field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{field} must be a number, not {type_name(value)}", row.place)
    if not math.isfinite(value) or abs(value) > _LARGEST:
        raise InvalidInput(f"{field} must be a finite number, not {value!r:.40}", row.place)
    return float(value)
