"""Numbers beside answers, as reward models learn them: a pair's margin, an answer's scores, or labels of turns."""

from typing import Any

import numpy as np

from activities.formats.examples import Chat, Example, PreferencePair, PromptCompletion
from activities.formats.messages import has_weighed_parts
from activities.formats.rows import Row, refuse_missing, type_name
from shared.errors import InvalidInput

MARGIN = "margin"
LABELS = "labels"
TEACHER = "teacher"
_LARGEST = 1e30  # of float32, with room
Numbers = dict[str, tuple[float, ...]]
"""What was read of rows, by their places, until their tokens are made into units."""


def read_numbers(example: Example, row: Row, fields: tuple[str, ...], numbers: Numbers) -> Example:
    """Note a row's numbers and return its example. A pair has its `margin` (default 0), other rows `fields`.

    The field `labels` is a list with one number for each of the assistant's turns, except those of a prompt.

    Raises InvalidInput: a field is missing or not a finite number; the row has a weight, or ends without an answer.
    """
    match example:
        case PreferencePair():
            numbers[row.place] = (0.0 if row.fields.get(MARGIN) is None else _number(row, MARGIN),)
            return example
        case Chat(messages=messages, weights=weights):
            if messages[-1]["role"] != "assistant":
                rule = f"the last message is the {messages[-1]['role']}'s: a score is of the answer that ends the row"
                raise InvalidInput(rule, row.place)
            num_turns, is_weighed = sum(weights), weights[-1] != 1 or not {*weights} <= {0.0, 1.0}
            is_weighed = is_weighed or any(map(has_weighed_parts, messages))
        case PromptCompletion():
            num_turns, is_weighed = 1, example.weight != 1
        case _:
            raise InvalidInput("a score belongs to an answer, and this row has no answer", row.place)
    if is_weighed:
        raise InvalidInput("weight must be 1 or absent: a reward model weighs all answers alike", row.place)
    if fields != (LABELS,):
        numbers[row.place] = tuple(_number(row, field) for field in fields)
        return example
    refuse_missing(row, LABELS)
    labels = row.fields[LABELS]
    if not isinstance(labels, list | np.ndarray) or len(labels) != num_turns:
        rule = f"labels must be a list of a number for each of the {num_turns:.0f} turns of the assistant"
        raise InvalidInput(rule, row.place)
    numbers[row.place] = tuple(_number(row, LABELS, i) for i in range(len(labels)))
    return example


def number_of_teacher(row: Row, teachers: tuple[str, ...]) -> float:
    """Return the number, from 1, of the teacher that a row names; 0 if it names none. Raises InvalidInput."""
    named = row.fields.get(TEACHER)
    if named is not None and named not in teachers:
        raise InvalidInput(f"teacher must be one of {', '.join(teachers)}, or absent, not {named!r:.40}", row.place)
    return 0.0 if named is None else 1.0 + teachers.index(named)


def _number(row: Row, field: str, *index: int) -> float:
    """Return the number of a field, or one of its list; true and false are 1 and 0."""
    refuse_missing(row, field)
    value: Any = row.fields[field]
    for place in index:
        value, field = value[place], f"{field}[{place}]"
    if not isinstance(value, int | float | np.integer):
        raise InvalidInput(f"{field} must be a number, not {type_name(value)}", row.place)
    if not abs(float(value)) <= _LARGEST:  # nor is NaN
        raise InvalidInput(f"{field} must be a finite number, not {value!r:.40}", row.place)
    return float(value)
