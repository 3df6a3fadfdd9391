"""Encodes examples into blocks of tokens, in order: conversations are rendered in a child, texts encoded in batches."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np

from activities.formats.rows import (
    MASKED_LABEL,
    Chat,
    Example,
    PreferencePair,
    PromptCompletion,
    Text,
    TokenIds,
    WeighedText,
    has_weighed_parts,
)
from activities.sandbox.child import sign
from activities.tokenizing.chat_template import Rendered, WeightedSpan
from activities.tokenizing.tokenizer import MAX_CHARACTERS, Encoded, ModelTokenizer, TemplateProcess, check_characters
from activities.tokenizing.units import TokenBlock
from longshore.fields import Frozen
from shared.errors import InvalidInput

# --- Answers whose parts weigh differently: the spans of a rendered row, cut at the ends of these parts ---


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


NUM_PROMPTS = 16
_PROMPT_TOKENS = 32  # shown as the prompt of an example without one
_BATCH_ROWS = 512
_BATCH_CHARACTERS = 2 << 20
_BATCHES_AHEAD = 4
RowT = TypeVar("RowT")
_NONE = np.zeros(0, dtype=np.int64)
NO_ROWS = TokenBlock([], _NONE, _NONE, np.zeros(0, dtype=np.float32), _NONE)


class Prompt(Frozen):
    """A prompt for evaluation: the beginning of an example, and the rest of its text.

    `end_ids`: the tokens that end the trained texts, whatever the model's files name.
    """

    prompt_ids: tuple[int, ...]
    prompt: str
    reference: str
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncodedBatch:
    """A block of tokens, and prompts if they were asked for.

    `control_tokens`: the place of each row with a message that quotes a token that opens or ends turns; and the token.
    `dropped_reasoning`: the place of each row, and how many messages' thoughts the template leaves out. `refused`: the
    places of rows that the template refuses, which are not in the block, with its errors. `unlike_prompts`: the places
    of rows with an answer that is trained after other tokens than its prompt's.
    """

    block: TokenBlock
    prompts: list[Prompt] = field(default_factory=list)
    control_tokens: list[tuple[str, str]] = field(default_factory=list)
    dropped_reasoning: list[tuple[str, int]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unlike_prompts: list[str] = field(default_factory=list)


def encoded(examples: Iterable[Example], tokenizer: ModelTokenizer) -> Generator[EncodedBatch, None, None]:
    """Tokenize a stream of examples of one kind; the first batch has NUM_PROMPTS of them and brings their prompts.

    A prompt and completion are a user's and an assistant's turn. If the model has no chat template, they are one text,
    whose completion and end-of-text token are trained. A text is trained with its end-of-text token.
    A pair is two rows of a block, the chosen answer's and the rejected one's, and has one prompt.

    Raises InvalidInput: an example cannot be rendered or encoded.
    """
    batches = (_rows_of(batch) for batch in batches_of(examples, _checked_size, NUM_PROMPTS))
    first = next(batches, None)
    if first is None:
        return
    everything = chain([first], batches)
    match first[0]:
        case TokenIds():
            yield from (_token_ids(batch, tokenizer, k == 0) for k, batch in enumerate(everything))
        case Chat() if tokenizer.template is None:
            raise InvalidInput("the model has no chat template, and the dataset holds conversations", tokenizer.place)
        case Chat() | PromptCompletion() if tokenizer.template is not None:
            yield from _conversations(everything, tokenizer)
        case _:
            yield from (_plain(batch, tokenizer, k == 0) for k, batch in enumerate(everything))


def batches_of(
    rows: Iterable[RowT], characters_of: Callable[[RowT], int], first_rows: int = _BATCH_ROWS
) -> Iterator[list[RowT]]:
    """Cut a stream of rows into batches of a bounded number of rows and characters.

    `first_rows`: the most rows of the first batch.
    """
    batch, limit, characters = list[RowT](), first_rows, 0
    for row in rows:
        batch.append(row)
        characters += characters_of(row)
        if len(batch) >= limit or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, limit, characters = [], _BATCH_ROWS, 0
    if batch:
        yield batch


def _rows_of(batch: list[Example]) -> list[Example]:
    """List the rows of examples: each alone, and both answers of a pair in order."""
    return [row for one in batch for row in ((one.chosen, one.rejected) if isinstance(one, PreferencePair) else (one,))]


def _is_first_R(places: list[str]) -> list[bool]:
    """Flag the rows that have a prompt to show: all except rejected answers, which follow a row of the same place."""
    return [k == 0 or place != places[k - 1] for k, place in enumerate(places)]


def _checked_size(example: Example) -> int:
    """Characters of an example. Raises InvalidInput for more than a row may have."""
    if (size := _size(example)) > MAX_CHARACTERS:
        rule = f"the row has {size:,} characters; it may have up to {MAX_CHARACTERS:,}"
        raise InvalidInput(rule, example.place)
    return size


def _size(example: Example) -> int:
    match example:
        case PreferencePair():
            return _size(example.chosen) + _size(example.rejected)
        case Chat():
            return sum(len(m["content"]) for m in example.messages if isinstance(m.get("content"), str))
        case PromptCompletion():
            return len(example.prompt) + len(example.completion)
        case Text():
            return len(example.text)
        case TokenIds():
            return 4 * len(example.input_ids)


def _conversations(batches: Iterable[list[Example]], tokenizer: ModelTokenizer) -> Iterator[EncodedBatch]:
    """Encode batches of conversations. A child process renders and a thread encodes, both ahead of the caller."""
    assert tokenizer.template is not None
    with ExitStack() as stack:
        process = stack.enter_context(TemplateProcess(tokenizer.template, tokenizer.place))
        renderer = stack.enter_context(ThreadPoolExecutor(1, "render"))
        encoder = stack.enter_context(ThreadPoolExecutor(1, "encode"))
        stack.callback(process.kill)  # it must end before the threads, which may wait for it; its pipes are closed last
        pending: deque[Future[EncodedBatch]] = deque()
        for k, batch in enumerate(batches):
            chats = [_as_chat(example) for example in batch]
            rendered = renderer.submit(process.spans, chats, prompts=k == 0, tells_refusals=True)
            end_ids = tokenizer.end_ids(process.stops)
            pending.append(encoder.submit(_encode_chats, chats, rendered, tokenizer, end_ids))
            if len(pending) > _BATCHES_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _as_chat(example: Example) -> Chat:
    match example:
        case Chat():
            return example
        case PromptCompletion(place, prompt, completion, weight):
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return Chat(place, turns, None, [0.0, weight])
        case _:
            raise AssertionError(example)


def _encode_chats(
    chats: list[Chat], future: Future[list[Rendered]], tokenizer: ModelTokenizer, end_ids: tuple[int, ...]
) -> EncodedBatch:
    rendered = future.result()
    refused = {
        chat.place: row.refusal for chat, row in zip(chats, rendered, strict=True) if row.refusal is not None
    }  # with both answers of a pair
    kept = [each for each in zip(chats, rendered, strict=True) if each[0].place not in refused]
    if not kept:
        return EncodedBatch(NO_ROWS, refused=refused)
    chats, rendered = [chat for chat, _ in kept], [row for _, row in kept]
    sign_longest([row.text for row in rendered], [chat.place for chat in chats])
    spans = [part_spans(chat, row) for chat, row in zip(chats, rendered, strict=True)]
    codes = tokenizer.encode([row.text for row in rendered], spans)
    places = [chat.place for chat in chats]
    prompts = [
        Prompt(
            prompt_ids=tuple(tokenizer.tokens_of(row.prompt)),
            prompt=_last_text(chat, "user"),
            reference=_last_text(chat, "assistant"),
            end_ids=end_ids,
        )
        for chat, row, is_first in zip(chats, rendered, _is_first_R(places), strict=True)
        if row.prompt is not None and is_first
    ]
    hidden = dict(zip(places, (row.dropped_reasoning for row in rendered), strict=True))  # a pair's answers are one row
    quoting = _with_control_tokens(chats, tokenizer)
    flags = zip(places, rendered, codes.is_joined_R.tolist(), strict=True)
    unlike = list(dict.fromkeys(place for place, row, is_joined in flags if row.unlike_prompts or is_joined))
    return EncodedBatch(_block(places, codes), prompts, quoting, list(hidden.items()), refused, unlike)


def _with_control_tokens(chats: list[Chat], tokenizer: ModelTokenizer) -> list[tuple[str, str]]:
    """Return the place of each row that quotes a control token, and the token. (It is encoded as that token, as in
    transformers.)
    """
    assert tokenizer.template is not None
    quoted = tokenizer.template.control_pattern
    found: dict[str, str] = {}  # both answers of a pair are one row
    for chat in chats:
        contents = (message.get("content") for message in chat.messages)
        if match := next((m for text in contents if isinstance(text, str) and (m := quoted.search(text))), None):
            found[chat.place] = match.group()
    return list(found.items())


def sign_longest(texts: list[str], places: list[str]) -> None:
    """Report the longest of the rows that are encoded now, as the one at fault if encoding them fails (see `sign`).

    Raises InvalidInput: a text, as rendered by the template, is too long.
    """
    for text, place in zip(texts, places, strict=True):
        check_characters(text, place)
    sign(max(zip(texts, places, strict=True), key=lambda each: len(each[0]))[1])


def _last_text(chat: Chat, role: str) -> str:
    """The text of a role's last message."""
    contents = [message.get("content") for message in chat.messages if message["role"] == role]
    return (contents[-1] if contents else None) or ""


def _plain(batch: list[Example], tokenizer: ModelTokenizer, with_prompts: bool) -> EncodedBatch:
    """Encode texts, or prompts with completions. Adds the tokenizer's first tokens and the end-of-text token,
    unless a text already has them.
    """
    begin, end = tokenizer.decode(tokenizer.prefix_ids), tokenizer.eos
    texts, spans = list[str](), list[list[WeightedSpan]]()
    for example in batch:
        match example:
            case Text(_, body, weight):
                text, start = body.removeprefix(begin).removesuffix(end) + end, 0
            case PromptCompletion(_, prompt, completion, weight):
                prompt = prompt.removeprefix(begin)
                text, start = prompt + completion.removesuffix(end) + end, len(prompt)
            case Chat():
                raise InvalidInput("the row holds a conversation, and the model has no chat template", example.place)
            case _:
                raise AssertionError(example)
        texts.append(text)
        spans.append([WeightedSpan(start, len(text), weight)])
    places = [example.place for example in batch]
    sign_longest(texts, places)
    block = _block(places, tokenizer.encode(texts, spans), tokenizer.prefix_ids)
    return EncodedBatch(block, _prompts_of(block, tokenizer) if with_prompts else [])


def _token_ids(batch: list[Example], tokenizer: ModelTokenizer, with_prompts: bool) -> EncodedBatch:
    rows = [example for example in batch if isinstance(example, TokenIds)]
    label_T = np.concatenate([row.labels for row in rows])
    num_tokens_R = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    weight_T = np.repeat(np.array([row.weight for row in rows], dtype=np.float32), num_tokens_R)
    block = TokenBlock(
        places=[row.place for row in rows],
        id_T=np.concatenate([row.input_ids for row in rows]),
        label_T=label_T,
        weight_T=np.where(label_T != MASKED_LABEL, weight_T, np.float32(0)),
        num_tokens_R=num_tokens_R,
    )
    block.refuse_unknown_ids(tokenizer.vocab_size)
    return EncodedBatch(block, _prompts_of(block, tokenizer) if with_prompts else [])


def _block(places: list[str], codes: Encoded, prefix_ids: list[int] | None = None) -> TokenBlock:
    """Make a block of encoded texts. Each row begins with the same untrained tokens."""
    id_T, weight_T, num_tokens_R = codes.id_T.astype(np.int64), codes.weight_T, codes.num_tokens_R
    if prefix_ids:
        at = np.repeat(np.cumsum(num_tokens_R) - num_tokens_R, len(prefix_ids))
        id_T = np.insert(id_T, at, prefix_ids * len(num_tokens_R))
        weight_T = np.insert(weight_T, at, 0)
        num_tokens_R = num_tokens_R + len(prefix_ids)
    return TokenBlock(places, id_T, id_T, weight_T, num_tokens_R)


def _prompts_of(block: TokenBlock, tokenizer: ModelTokenizer) -> list[Prompt]:
    """Make prompts of rows without turns: the tokens before the first trained one, or the first few."""
    prompts: list[Prompt] = []
    rows = zip(block.start_R.tolist(), block.num_tokens_R.tolist(), _is_first_R(block.places), strict=True)
    for start, num_tokens, is_first in rows:
        ids = block.id_T[start : start + num_tokens].tolist()
        untrained = int(np.argmax(block.weight_T[start : start + num_tokens] != 0)) if ids else 0
        cut = untrained if untrained > len(tokenizer.prefix_ids) else min(_PROMPT_TOKENS, num_tokens // 2)
        if cut and is_first:
            prompt, reference = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut:])
            end_ids = tokenizer.end_ids()
            prompts.append(Prompt(prompt_ids=tuple(ids[:cut]), prompt=prompt, reference=reference, end_ids=end_ids))
    return prompts
