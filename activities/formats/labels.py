"""Single answers that are good or bad, as KTO learns from them. The weights of a bad answer are -1 in place of 1."""

from dataclasses import replace

from activities.formats.examples import Chat, Example, PreferencePair, PromptCompletion
from activities.formats.messages import has_weighed_parts
from activities.formats.rows import Row, refuse_missing, type_name
from shared.errors import InvalidInput

LABELLED = "answers with a label, true or false"


def with_label(example: Example, row: Row) -> Example:
    """Return a row's example with its `label`: the answer is everything after the last question.

    In a pair, the chosen answer is good and the rejected one bad.

    Raises InvalidInput: there is no label, or no answer after the last question; or the row or a message has a weight.
    """
    match example:
        case PreferencePair():
            return replace(example, rejected=_bad(example.rejected))
        case Chat(messages=messages, weights=weights):
            if messages[-1]["role"] != "assistant":
                rule = f"the last message is the {messages[-1]['role']}'s: a label is of the answer that ends the row"
                raise InvalidInput(rule, row.place)
            first = max((i + 1 for i, m in enumerate(messages) if m["role"] not in ("assistant", "tool")), default=0)
            answer: Chat | PromptCompletion = replace(example, weights=[0.0] * first + weights[first:])
            is_weighed = weights[first:] != [float(m["role"] == "assistant") for m in messages[first:]]
            is_weighed = is_weighed or any(map(has_weighed_parts, messages))
        case PromptCompletion():
            answer, is_weighed = example, example.weight != 1
        case _:
            raise InvalidInput(f"kto learns from {LABELLED}: this row has no answer", row.place)
    refuse_missing(row, "label")
    if isinstance(label := row.fields["label"], str | list | dict) or label not in (0, 1):
        raise InvalidInput(f"label must be true or false, not {type_name(label)}", row.place)
    if is_weighed:
        raise InvalidInput("weight must be 1 or absent: kto weighs all good answers alike, and all bad ones", row.place)
    return answer if label else _bad(answer)


def _bad(answer: Chat | PromptCompletion) -> Chat | PromptCompletion:
    match answer:
        case Chat():
            return replace(answer, weights=[-weight for weight in answer.weights])
        case PromptCompletion():
            return replace(answer, weight=-answer.weight)
