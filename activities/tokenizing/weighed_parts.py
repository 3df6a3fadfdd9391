"""Answers whose parts weigh differently: the spans of a rendered row, cut at the ends of these parts."""

from collections.abc import Iterator

from activities.formats.examples import Chat
from activities.formats.messages import WeighedText, has_weighed_parts
from activities.tokenizing.chat_template import Rendered, WeightedSpan
from shared.errors import InvalidInput


def part_spans(chat: Chat, row: Rendered) -> list[WeightedSpan]:
    """Return a row's trained spans; answers with weighed parts are cut into these parts.

    A part's weight is multiplied by the message's. Text that the template puts around an answer, such as its end
    token, has the message's weight.

    Raises:
        InvalidInput: the template does not write such an answer verbatim.
    """
    trained = [each for each in zip(chat.messages, chat.weights, strict=True) if each[1]]
    if not any(has_weighed_parts(message) for message, _ in trained):
        return row.spans
    if len(trained) != len(row.spans):
        raise _unknown(chat)
    found = list[WeightedSpan]()
    for (message, _), span in zip(trained, row.spans, strict=True):
        content = message.get("content")
        found += _cut(chat, content, span, row.text) if isinstance(content, WeighedText) else [span]
    return found


def _cut(chat: Chat, content: WeighedText, span: WeightedSpan, text: str) -> Iterator[WeightedSpan]:
    core, inside = content.strip(), text[span.start : span.end]  # templates take outer space away
    if not core or inside.count(core) != 1:
        raise _unknown(chat)
    begin = span.start + inside.index(core)
    end, at = begin + len(core), begin - (len(content) - len(content.lstrip()))
    spaced = begin - text[span.start : begin].endswith(" ")  # which a word's first token has
    pieces = [(span.start, spaced, 1.0)]
    for size, weight in content.parts:
        start = max(begin, at)
        pieces.append((spaced if start == begin else start, min(end, at + size), weight))
        at += size
    for start, stop, weight in [*pieces, (end, span.end, 1.0)]:
        if start < stop and weight:
            yield WeightedSpan(start, stop, weight * span.weight)


def _unknown(chat: Chat) -> InvalidInput:
    rule = "the chat template does not write the answer as it stands here, so that its parts cannot be weighed"
    return InvalidInput(rule, chat.place)
