"""Rows of preference pairs: one prompt, its preferred and its rejected answer.

Each answer becomes a separate example, so that it is rendered and encoded as it would be alone.
"""

from dataclasses import replace
from typing import Any

from activities.formats.columns import PROMPT, with_context
from activities.formats.examples import Chat, PreferencePair, PromptCompletion
from activities.formats.messages import messages_of, tools_of, turn_weight
from activities.formats.rows import Row, is_given, list_of_objects, text_of, type_name
from shared.errors import InvalidInput

Messages = list[dict[str, Any]]


def preference(row: Row) -> PreferencePair:
    """Parse `chosen` and `rejected`, with a `prompt` or none, as TRL has them: texts or messages.

    Without `prompt`, the messages that both conversations begin with are the prompt. Some datasets repeat it as a text
    in `prompt`; this text must be one of those messages.

    Raises InvalidInput: an answer is missing, or equals the other one; the prompts differ, or there is none.
    """
    _refuse_weight(row)
    if isinstance(row.fields.get("chosen"), str) and not isinstance(row.fields.get("prompt"), list):
        return _of_texts(row)
    answers = {name: _answer(row, name) for name in ("chosen", "rejected")}
    match row.fields.get("prompt"):
        case list():
            return _pair(row, "prompt", messages_of(row, "prompt"), answers, tools_of(row))
        case str() as text if answers["chosen"][0]["role"] == answers["rejected"][0]["role"] == "assistant":
            return _pair(row, "prompt", [{"role": "user", "content": text}], answers, tools_of(row))
        case str() | None as text:
            return _with_shared_prompt(row, answers, text)
        case other:
            raise InvalidInput(f"prompt must be text or a list, not {type_name(other)}", row.place)


def openai_preference(row: Row) -> PreferencePair:
    """Parse `input.messages`, `preferred_output`, `non_preferred_output`, as OpenAI names them. Raises as above."""
    _refuse_weight(row)
    given = row.fields.get("input")
    if not isinstance(given, dict):
        raise InvalidInput(f"input must be an object, not {type_name(given)}", row.place)
    inner = Row(row.place, {f"input.{name}": value for name, value in given.items()}, row.has_schema)
    answers = {name: _answer(row, name) for name in ("preferred_output", "non_preferred_output")}
    return _pair(row, "input.messages", messages_of(inner, "input.messages"), answers, tools_of(inner, "input.tools"))


def _refuse_weight(row: Row) -> None:
    if row.fields.get("weight") not in (None, 1):
        raise InvalidInput("weight must be 1 or absent: dpo weighs all pairs alike", row.place)


def _of_texts(row: Row) -> PreferencePair:
    if row.fields.get("prompt") is None:
        raise InvalidInput("chosen is text, and there is no prompt: add it, or give messages that share one", row.place)
    prompt, chosen, rejected = (text_of(row, name) for name in ("prompt", "chosen", "rejected"))
    if chosen == rejected:
        raise _same(row, "rejected", "chosen")
    if tools_of(row) or any(is_given(row, column) for column in PROMPT):
        answers = {"chosen": _spoken(chosen), "rejected": _spoken(rejected)}
        return _pair(row, "prompt", [{"role": "user", "content": prompt}], answers, tools_of(row))
    return PreferencePair(
        row.place, PromptCompletion(row.place, prompt, chosen), PromptCompletion(row.place, prompt, rejected)
    )


def _spoken(text: str) -> Messages:
    return [{"role": "assistant", "content": text}]


def _answer(row: Row, field: str) -> Messages:
    """Return the messages of an answer, which may be one message, or a text behind a prompt of messages.

    Weights other than 1 are refused, because the whole answer is trained.
    """
    match row.fields.get(field):
        case str() as text if isinstance(row.fields.get("prompt"), list):
            return _spoken(text)
        case dict() as message:
            row = replace(row, fields=row.fields | {field: [message]})
    for i, turn in enumerate(list_of_objects(row, field)):
        if turn.get("role") == "assistant" and turn_weight(row, f"{field}[{i}]", turn) != 1:
            raise InvalidInput(f"{field}[{i}].weight must be 1 or absent: dpo weighs all answers alike", row.place)
    return messages_of(row, field)


def _with_shared_prompt(row: Row, whole: dict[str, Messages], text: str | None) -> PreferencePair:
    chosen, rejected = whole.values()
    if chosen == rejected:
        raise _same(row, *reversed(whole))
    both = zip(chosen, rejected, strict=False)
    shared = next((i for i, (one, other) in enumerate(both) if one != other), min(len(chosen), len(rejected)))
    prompt = chosen[:shared]
    if not prompt:
        raise InvalidInput("chosen and rejected differ from their first message on: they share no prompt", row.place)
    for field, messages in whole.items():
        for i, turn in enumerate(messages[shared:], shared):
            if turn["role"] not in ("assistant", "tool"):
                rule = "behind what both conversations begin with: the prompts of a pair must be the same"
                raise InvalidInput(f"{field}[{i}] is the {turn['role']}'s, {rule}", row.place)
    if text is not None and not any(message.get("content") == text for message in prompt):
        raise InvalidInput("prompt is not one of the messages with which chosen and rejected begin", row.place)
    return _pair(row, None, prompt, {name: messages[shared:] for name, messages in whole.items()}, tools_of(row))


def _pair(
    row: Row, asked_in: str | None, prompt: Messages, answers: dict[str, Messages], tools: list[dict[str, Any]] | None
) -> PreferencePair:
    """Make a pair of one prompt and two answers to it.

    Args:
        asked_in: the prompt's field; None if the prompt is the common beginning of both conversations.
        answers: by their fields, the preferred one first.
    """
    prompt, _ = with_context(row, prompt, [0.0] * len(prompt))
    if asked_in is not None and prompt[-1]["role"] == "assistant":
        fields = " and ".join(answers)
        raise InvalidInput(f"{asked_in} ends with an assistant's turn: answers go into {fields}", row.place)
    chosen, rejected = answers.values()
    if chosen == rejected:
        raise _same(row, *reversed(answers))
    for field, answer in answers.items():
        _check_answer(row, field, answer)
    return PreferencePair(row.place, _example(row, prompt, chosen, tools), _example(row, prompt, rejected, tools))


def _check_answer(row: Row, field: str, answer: Messages) -> None:
    """Raise InvalidInput unless an answer consists of an assistant's turns, with tools' turns between them."""
    for turn in answer:
        if turn["role"] not in ("assistant", "tool"):
            raise InvalidInput(f"{field} has a turn of the {turn['role']}: answers are an assistant's", row.place)
    if not answer or answer[-1]["role"] != "assistant":
        raise InvalidInput(f"{field} does not end with an assistant's turn, so there is no answer", row.place)


def _example(row: Row, prompt: Messages, answer: Messages, tools: list[dict[str, Any]] | None) -> Chat:
    weights = [0.0] * len(prompt) + [float(turn["role"] == "assistant") for turn in answer]
    return Chat(row.place, [*prompt, *answer], tools, weights)


def _same(row: Row, rejected: str, chosen: str) -> InvalidInput:
    return InvalidInput(f"{rejected} is the same as {chosen}: nothing to prefer", row.place)
