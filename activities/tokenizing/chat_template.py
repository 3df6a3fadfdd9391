"""Renders conversations by a model's chat template as transformers does, and finds the characters that are trained.

One rule holds for every template: of an assistant's message, the model is trained on what it has to write from the
moment it is asked until it stops or hands over to a tool. The moment it is asked is found by rendering the messages
before it with the generation prompt, which the whole conversation's text continues. If that text does not begin with
the prompt, because the template rewrites earlier turns or begins a turn otherwise, the turn begins where they diverge,
and the row is counted as unlike its prompts. The trained text ends with the end-of-turn token after the message's
contents. To find it, the conversation is rendered again with a marker character after the last word of every message.
A row is refused if removing the markers does not give the same text, or if no such token follows.

This module runs in a separate process (`CodeProcess` of activities/sandbox/calls.py), as templates are untrusted
code. `render_asked` answers a batch of rows after another; activities/tokenizing/tokenizer.py asks it.
"""

import importlib
import json
import os.path
import re
import signal
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from types import FrameType
from typing import Any, NoReturn, Self

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from activities.formats import THOUGHTS
from activities.sandbox.child import ask, sign

# --- The environment that chat templates are written for ---
# Jinja2's sandbox, with what transformers adds and no more.


class Unrendered(Exception):
    """A row or a template cannot be rendered with exact spans; the text says why."""


class Raised(Unrendered):
    """The template raises an error at a row: its own refusal, as of roles that do not alternate, or a fault."""


class _GenerationBlocks(Extension):
    """The tag `{% generation %}` around an assistant's words. Renders its body, between marks if those are wanted."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _body(self, _: nodes.EvalContext, caller: Callable[[], str]) -> str:
        body = caller()
        start, end = getattr(self.environment, "generation_marks", ("", ""))
        return f"{start}{body}{end}"


@contextmanager
def tracking_generation(environment: ImmutableSandboxedEnvironment, marks: tuple[str, str]) -> Iterator[None]:
    """Put these marks around `{% generation %}` blocks that are rendered meanwhile."""
    environment.generation_marks = marks  # type: ignore[attr-defined]
    try:
        yield
    finally:
        environment.generation_marks = ("", "")  # type: ignore[attr-defined]


class _SafeNamespace(Namespace):
    """A namespace whose names cannot reach into Python."""

    def __init__(*args: Any, **names: Any) -> None:  # `self` may be a name in it
        self, *rest = args
        for name in dict(*rest, **names):
            _refuse_private(name)
        Namespace.__init__(self, *rest, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template's namespace may not hold {name!r}")


# Filters and globals that models' templates use. The others could reach into objects, or take much memory.
_FILTERS = frozenset(
    "abs batch capitalize count d default dictsort e escape first float indent int items join last length list lower "
    "map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum title tojson "
    "trim unique upper wordcount".split()
)
_GLOBALS = frozenset({"range", "cycler", "joiner"})


def load_everything() -> None:
    """Import the modules that rendering would import later: without namespaces the sandbox cannot open files."""
    for name in ("jinja2.constants", "jinja2.debug", "jinja2.ext", "jinja2.sandbox"):
        importlib.import_module(name)
    time.localtime()
    with suppress(Exception):
        template_environment().from_string("{{ 1 | tojson }}{{ strftime_now('%d %B') }}{{ missing.more }}").render()


def template_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters = {name: environment.filters[name] for name in _FILTERS} | {"tojson": _tojson}
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    environment.globals |= {"raise_exception": _raise_exception, "dict": dict}
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.globals["namespace"] = _SafeNamespace
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


# --- Shown ---
# Checks that a rendered chat template contains every message of the conversation, so that nothing is lost silently.
#
# A template may cut the thoughts of turns before the last question (Qwen3's does): these are counted. If it leaves out
# anything else, the row is refused. Marks that are put into the messages before rendering show where each message's
# content ends.

REASONING = THOUGHTS
"""The names of a message's thoughts."""
_THOUGHT_END = "</think>"
_FIRST, _LAST = 0xF0000, 0x10FFFD
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")


@dataclass(frozen=True)
class Marks:
    """Private-use characters: no template knows them, and no case or whitespace rule touches them.

    Mark i, of message i, is the character `first + i`; two more mark `{% generation %}` blocks.
    """

    first: int
    num_messages: int

    @classmethod
    def beside(cls, text: str, num_messages: int) -> Self:
        """Choose marks that do not occur in a text. Raises Unrendered if there are not enough of them."""
        first = _FIRST
        for used in sorted({ord(character) for character in _PRIVATE.findall(text)}):
            if used >= first + num_messages + 2:
                break
            first = used + 1
        if first + num_messages + 1 > _LAST:
            raise Unrendered("the conversation has too many messages, or characters from U+F0000 to U+10FFFD")
        return cls(first, num_messages)

    @cached_property
    def of_blocks(self) -> tuple[str, str]:
        return chr(self.first + self.num_messages), chr(self.first + self.num_messages + 1)

    @cached_property
    def any(self) -> re.Pattern[str]:
        """Matches any mark, and captures it."""
        return re.compile(f"([{chr(self.first)}-{self.of_blocks[1]}])")

    def index_of(self, mark: str) -> int:
        return ord(mark) - self.first

    def marked(
        self, messages: list[dict[str, Any]], chosen: Container[int], at_the_end: bool = False
    ) -> list[dict[str, Any]]:
        """Return the messages, the chosen ones with a mark after the last character that is not space.

        `at_the_end`: after the trailing space of a content that ends with its thoughts, since templates cut there.
        """
        return [
            {**message, "content": self._with_mark(message["content"], i, at_the_end)}
            if i in chosen and message.get("content")
            else message
            for i, message in enumerate(messages)
        ]

    def _with_mark(self, text: str, i: int, at_the_end: bool) -> str:
        core = text.rstrip()
        if at_the_end and core.endswith("</think>"):
            core = text
        return f"{core}{chr(self.first + i)}{text[len(core) :]}" if core else text


@dataclass(frozen=True)
class CallForm:
    """How a template takes a message that calls tools: the content if it has none, and arguments as JSON text."""

    content: str | None
    are_texts: bool

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        if not message.get("tool_calls"):
            return message
        calls = [_with_text_arguments(call) for call in message["tool_calls"]] if self.are_texts else None
        return message | {"content": message.get("content") or self.content} | ({"tool_calls": calls} if calls else {})


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


@dataclass
class HiddenThoughts:
    """Counts rows whose thoughts of earlier turns a template leaves out."""

    num_rows: int = 0
    first: str = ""

    def add(self, place: str, num_messages: int) -> None:
        if num_messages:
            self.num_rows += 1
            self.first = self.first or place

    def warnings(self) -> Iterator[str]:
        if self.num_rows:
            rows = f"{self.num_rows} row{'s' * (self.num_rows != 1)}"
            yield f"the chat template leaves the thoughts of earlier turns out of {rows}; first: {self.first}"


def dropped_reasoning(text: str, messages: list[dict[str, Any]], tools: list[Any] | None, ends: dict[int, int]) -> int:
    """Count the messages of a rendered text whose thoughts are cut, as those of earlier turns may be.

    `ends`: by message, the position where its content ends, if known (-1: nowhere).

    Raises Unrendered: the text lacks another part of the messages or tools.
    """
    last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    hidden = 0
    for i, message in enumerate(messages):
        shown = text if i not in ends else text[: max(0, ends[i])]
        content, thoughts = _visible(message, shown, is_end=i in ends)
        if content and not _ends(shown, content, i in ends):
            raise Unrendered(
                f"messages[{i}]: the chat template leaves out what this message of the {message['role']} says"
            )
        near = _near(text, messages, ends, i)
        cut = any(not _holds(near, thought) for thought in thoughts)
        if cut and i > last_question:
            raise Unrendered(f"messages[{i}]: the chat template leaves out the thoughts of this message")
        hidden += cut
        for k, call in enumerate(message.get("tool_calls") or ()):
            if (missing := lacking(near, call["function"])) is not None:
                raise Unrendered(f"messages[{i}].tool_calls[{k}]: the chat template leaves out {missing!r:.60}")
    for k, tool in enumerate(tools or ()):
        if not _holds(text, tool["function"]["name"]):
            raise Unrendered(f"tools[{k}]: the chat template leaves out the tool {tool['function']['name']!r:.60}")
    return hidden


def _near(text: str, messages: list[dict[str, Any]], ends: dict[int, int], i: int) -> str:
    """Return the text from the end of the previous message to the end of the next one, as far as these are known.

    A system message may be anywhere.
    """
    known = {k: end for k, end in ends.items() if end >= 0 and messages[k]["role"] != "system"}
    start = next((known[k] for k in range(i - 1, -1, -1) if k in known), 0)
    end = next((known[k] for k in range(i + 1, len(messages)) if k in known), len(text))
    return text[start:end] if start < end else text


def _visible(message: dict[str, Any], shown: str, is_end: bool) -> tuple[str, list[str]]:
    """Separate the contents that must be shown from thoughts, which have separate fields or begin the content."""
    core = (message.get("content") or "").strip()
    thoughts = [message[name].strip() for name in REASONING if isinstance(message.get(name), str)][:1]
    if message["role"] == "assistant" and _THOUGHT_END in core and not _ends(shown, core, is_end):
        thought, _, answer = core.rpartition(_THOUGHT_END)
        return answer.strip(), [*thoughts, thought.removeprefix("<think>").strip()]
    return core, thoughts


def _ends(shown: str, content: str, is_end: bool) -> bool:
    """True if a text ends with a content, verbatim or as JSON; if its end is unknown, it may be anywhere."""
    if not is_end:
        return _holds(shown, content)
    return shown.rstrip().endswith(content) or any(shown.endswith(each) for each in _as_json(content))


def _holds(text: str, part: str) -> bool:
    return part in text or any(each in text for each in _as_json(part))


def _as_json(text: str) -> Iterator[str]:
    """Yield a text as JSON writes it between quotes."""
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def lacking(text: str, function: dict[str, Any]) -> str | None:
    """Return the first part of a call that a text does not hold: its name, or a name or value of its arguments."""
    return next((part for part in (function["name"], *_leaves(function["arguments"])) if not _holds(text, part)), None)


def _leaves(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for key, item in value.items():
                yield key
                yield from _leaves(item)
        case list():
            for item in value:
                yield from _leaves(item)
        case str():
            yield value.strip()
        case bool() | None:
            return  # written as templates like: true, True
        case _:
            yield json.dumps(value)


Message = dict[str, Any]

_ASKED = 8
"""How many answers of a row are asked for at its beginning, and at its end. Those between, of a long row, begin as
others behind a message of the same role do, if the text shows it: else a row of n answers would be rendered n times."""
_PROBE = {"name": "winch", "description": "Winds.", "parameters": {"type": "object", "properties": {}}}
_PROBE_TOOL = {"type": "function", "function": _PROBE}
_PROBE_CALL = {
    "type": "function",
    "id": "callprobe",
    "function": {"name": "winch", "arguments": {"cable": "Kittiwake"}},
}


@dataclass(frozen=True, slots=True)
class WeightedSpan:
    """Characters [start, end) of a rendered text, and the loss weight of the tokens in it."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class Rendered:
    """A conversation's text and its trained spans, in order. `prompt`: the text up to where its last answer begins.

    `dropped_reasoning`: messages whose thoughts the template leaves out. `refusal`: the error that the template raises
    instead of a text. `unlike_prompts`: trained answers that follow another text than the prompt that asks for them.
    """

    text: str
    spans: list[WeightedSpan]
    prompt: str | None = None
    dropped_reasoning: int = 0
    refusal: str | None = None
    unlike_prompts: int = 0


@dataclass(frozen=True)
class _Turns:
    """The text that a template puts around an assistant's words, learned from two short conversations.

    `opener`: the first token of the generation prompt, "" without one.
    """

    generation_prompt: str
    opener: str
    terminators: tuple[str, ...]


@dataclass(frozen=True)
class _Marked:
    """A rendered text; by message, the position where its content ends; and the spans of `{% generation %}` blocks."""

    text: str
    ends: dict[int, int]
    blocks: list[tuple[int, int]]
    positions: dict[int, int]  # where each mark is; -1: nowhere
    marks: Marks


class ChatTemplate:
    """A compiled template, and another for conversations with tools if the model has one (`tool_source`).

    `special_tokens`: bos_token and the like; `control_tokens`: added tokens that mark turns; `end_tokens`: those that
    the model's files name as its end; a turn that calls tools may end with one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        control_tokens: list[str],
        tool_source: str | None = None,
        end_tokens: Sequence[str] = (),
        is_of_tools: bool = False,
    ) -> None:
        self._of_tools = (
            ChatTemplate(tool_source, special_tokens, control_tokens, None, end_tokens, True) if tool_source else None
        )
        self._end_tokens = end_tokens
        self._probe_tools = [_PROBE_TOOL] if is_of_tools else None
        self._environment = template_environment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            raise Unrendered(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens
        self._control = one_of(control_tokens)
        self._has_blocks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._turns = self._learn()

    @property
    def stops(self) -> tuple[str, ...]:
        """The token that ends an answer. (Turns before other turns may end with another one.)"""
        return self._turns.terminators[:1]

    def render(self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """The text, as transformers' apply_chat_template gives it; `prompt` adds the generation prompt."""
        if tools and self._of_tools:
            return self._of_tools.render(messages, tools, prompt=prompt)
        if (calling := next((i for i, message in enumerate(messages) if message.get("tool_calls")), None)) is not None:
            if self._call_form is None:
                raise Unrendered(f"messages[{calling}].tool_calls: the chat template shows no tool calls")
            messages = [self._call_form.of(message) for message in messages]
        return self._rendered(messages, tools, prompt)

    def _rendered(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        except MemoryError:
            raise
        except Exception as error:  # untrusted code may do anything
            raise Raised(f"the chat template refuses the conversation: {error}") from error

    def spans(self, messages: list[Message], tools: list[Any] | None, weights: list[float]) -> Rendered:
        """The text and its trained spans; `weights[i]` is message i's.

        Raises:
            Raised: the template refuses the row.
            Unrendered: it leaves a part of the row out, or the spans cannot be known for certain.
        """
        if tools and self._of_tools:
            return self._of_tools.spans(messages, tools, weights)
        self._refuse_control_tokens(messages, tools)
        text = self.render(messages, tools)
        marked = self._mark(text, messages, tools)
        hidden = self._checked(text, messages, tools, marked.positions)
        found, num_unlike, headers = list[WeightedSpan](), 0, dict[str, str]()
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and weights[i]]
        for i in answers:
            role, before = messages[i - 1]["role"], marked.ends.get(i - 1, -1)
            header = headers.get(role) if i in answers[_ASKED:-_ASKED] else None
            if header is not None and before >= 0 and text.startswith(header, before):
                start = before + len(header)
            else:
                start, is_asked = self._start(marked, messages, tools, i)
                num_unlike += not is_asked
                if is_asked and before >= 0:
                    headers[role] = text[before:start]
            end, closing = self._end(marked, messages, tools, i, start)
            text += closing
            turn = WeightedSpan(start, end + len(closing), weights[i])
            found += self._in_blocks(turn, marked) if self._has_blocks else [turn]
        return Rendered(text, found, dropped_reasoning=hidden, unlike_prompts=num_unlike)

    def prompt_of(self, messages: list[Message], tools: list[Any] | None) -> str:
        """Return the text that ends where the last answer begins."""
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return self.render(messages[:last], tools, prompt=True)

    def asked(self, messages: list[Message], tools: list[Any] | None) -> Rendered:
        """Return the text that asks for an answer, without spans. Raises Unrendered as `spans` does."""
        if tools and self._of_tools:
            return self._of_tools.asked(messages, tools)
        text = self.render(messages, tools, prompt=True)
        marks = Marks.beside(text, len(messages))
        marked = self._read_marks(marks, marks.marked(messages, range(len(messages))), tools, prompt=True)
        positions = marked.positions if marked is not None and marked.text == text else {}
        return Rendered(text, [], dropped_reasoning=self._checked(text, messages, tools, positions))

    def _checked(self, text: str, messages: list[Message], tools: list[Any] | None, positions: dict[int, int]) -> int:
        """Count hidden thoughts. Raises Unrendered if the text lacks anything else (see `dropped_reasoning`)."""
        said = json.dumps(messages, ensure_ascii=False)
        # If a message has a tool's name, to find that in the text proves nothing.
        if tools and not self._probe_tools and any(tool["function"]["name"] in said for tool in tools):
            without = [self._render_or("", messages, prompt=prompt) for prompt in (False, True)]
            if text in without:
                raise Unrendered("tools: the chat template leaves them out")
        return dropped_reasoning(text, messages, tools, positions)

    @cached_property
    def _call_form(self) -> CallForm | None:
        """Learn how the template wants tool calls; None if it shows none."""
        for tools in (self._probe_tools, [_PROBE_TOOL]):
            for form in (CallForm(None, False), CallForm("", False), CallForm(None, True), CallForm("", True)):
                asked = {"role": "user", "content": "Quayside?"}
                try:
                    text = self._rendered([asked, form.of({"role": "assistant", "tool_calls": [_PROBE_CALL]})], tools)
                except Unrendered:
                    continue
                is_whole = "winch" in text and "cable" in text and "Kittiwake" in text
                if is_whole and '\\"cable' not in text and "None" not in text:
                    return form
        return None

    # Learning the template's turns.

    def _learn(self) -> _Turns:
        """Learn the template's turns from short conversations.

        Raises Unrendered if assistant turns have no terminator, since a model trained on them would never stop.
        """
        question, answer = "Quayside?", "Zephyrine!"
        user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        tools = self._probe_tools
        asked = self.render([user], tools)
        prompt = self.render([user], tools, prompt=True)
        last = self.render([user, assistant], tools)
        middle = self._render_or(last, [user, assistant, {"role": "user", "content": "Harbour?"}])
        for text in (last, middle):
            if text.count(answer) != 1 or question not in text:
                raise Unrendered(
                    "the chat template does not show a user's question and an assistant's answer once each"
                )
        generation_prompt = prompt[len(asked) :] if prompt.startswith(asked) else ""
        opener = self._control.search(generation_prompt)
        terminators = self._terminators(last, middle, question, answer, generation_prompt)
        return _Turns(generation_prompt, opener.group() if opener else "", terminators)

    def _render_or(self, otherwise: str, messages: list[Message], prompt: bool = False) -> str:
        try:
            return self.render(messages, self._probe_tools, prompt=prompt)
        except Unrendered:  # a template for one question and one answer
            return otherwise

    def _terminators(self, last: str, middle: str, question: str, answer: str, prompt: str) -> tuple[str, ...]:
        """Return the tokens that end an assistant's turn: the last turn, and one that another turn follows."""
        tail = last[last.index(answer) + len(answer) :]
        ends = self._control.findall(tail)[:1]
        behind = re.compile(f"(?:{self._control.pattern})+")  # the end may be a later one of these tokens (Command's)
        runs = [behind.search(text, text.index(answer) + len(answer)) for text in (last, middle)]
        both = [set(self._control.findall(run.group())) if run else set() for run in runs]
        ends = [next((each for each in self._end_tokens if each in both[0] & both[1]), each) for each in ends]
        between = self._control.search(middle, middle.index(answer) + len(answer))
        after_question = self._control.search(last, last.index(question) + len(question))
        if between and between.group() not in ends:
            # If this turn has no terminator, `between` is the next header's first token.
            closes_users = after_question and after_question.group() == between.group()
            if between.group() in tail or (prompt and closes_users and between.group() not in prompt):
                ends.append(between.group())
        if not ends and between and between.group() in self._end_tokens:
            ends.append(between.group())  # the next role's marker, which the model's files name as an end token
        if not ends:
            raise Unrendered(
                "the chat template ends an assistant's turn with no special token, so nothing teaches a stop"
            )
        return tuple(ends)

    # Finding a row's spans.

    def _refuse_control_tokens(self, messages: list[Message], tools: list[Any] | None) -> None:
        """Raise Unrendered if a control token occurs outside of contents: it could be taken for the end of a turn.

        Inside contents it cannot, because markers show where they end.
        """
        others = [{key: value for key, value in message.items() if key != "content"} for message in messages]
        if tools is None and all(len(other) == 1 for other in others):
            return  # nothing but roles
        if found := self._control.search(json.dumps([others, tools], ensure_ascii=False)):
            raise Unrendered(f"a message field other than content, or a tool, holds the control token {found.group()}")

    def _mark(self, text: str, messages: list[Message], tools: list[Any] | None) -> _Marked:
        """Render with markers, and check that nothing but the markers changed."""
        marks = Marks.beside(text, len(messages))
        everyone = range(len(messages))
        assistants = [i for i in everyone if messages[i]["role"] == "assistant"]
        for chosen in (everyone, assistants):
            for at_the_end in (False, True):
                marked = self._read_marks(marks, marks.marked(messages, chosen, at_the_end), tools)
                if marked is not None and marked.text == text:
                    return marked
        raise Unrendered("the chat template changes its output with the contents, so trained spans cannot be known")

    def _read_marks(
        self, marks: Marks, messages: list[Message], tools: list[Any] | None, prompt: bool = False
    ) -> _Marked | None:
        with tracking_generation(self._environment, marks.of_blocks):
            try:
                marked = self.render(messages, tools, prompt=prompt)
            except Unrendered:
                return None
        pieces, length = list[str](), 0
        ends, starts, blocks = dict[int, int](), list[int](), list[tuple[int, int]]()
        for piece in marks.any.split(marked):  # texts and marks by turns
            if not marks.any.fullmatch(piece):
                pieces.append(piece)
                length += len(piece)
            elif piece == marks.of_blocks[0]:
                starts.append(length)
            elif piece == marks.of_blocks[1]:
                blocks.append((starts.pop(), length))
            else:
                index = marks.index_of(piece)
                if index in ends and messages[index]["role"] == "assistant":
                    return None  # shown twice: which one is the turn?
                ends[index] = length
        placed = [i for i, message in enumerate(messages) if marks.any.search(message.get("content") or "")]
        return _Marked("".join(pieces), ends, blocks, {i: ends.get(i, -1) for i in placed}, marks)

    def _start(self, marked: _Marked, messages: list[Message], tools: list[Any] | None, i: int) -> tuple[int, bool]:
        """Find where the model begins to write message i; False if the text before differs from the prompt for it."""
        try:
            asked = self.render(messages[:i], tools, prompt=True)
        except Raised as error:
            raise Raised(f"messages[{i}]: {error}, before this answer") from error
        is_asked = marked.text.startswith(asked)
        start = len(asked) if is_asked else self._parting(marked, messages, tools, i, asked)
        header = self._turns.generation_prompt
        if header and not asked.endswith(header) and marked.text.startswith(header, start):  # after a tool's result
            return start + len(header), False
        return start, is_asked

    def _parting(self, marked: _Marked, messages: list[Message], tools: list[Any] | None, i: int, asked: str) -> int:
        """Find where the text and the prompt for message i diverge, after the last earlier message that both show."""
        before, at = marked.marks.marked(messages[:i], marked.positions), 0
        prompt = self._read_marks(marked.marks, before, tools, prompt=True)
        if prompt is not None and (both := prompt.ends.keys() & marked.ends.keys()):
            asked, at = prompt.text[prompt.ends[max(both)] :], marked.ends[max(both)]
        shared = len(os.path.commonprefix([asked, marked.text[at:]]))  # noqa: RUF071 - texts
        if shared < len(asked):  # a token begins after a control token, or after space
            joints = (joint.end() for joint in re.finditer(rf"{self._control.pattern}|\s", asked))
            shared = max((joint for joint in joints if joint <= shared), default=0)
        if not shared or (self._turns.opener and self._turns.opener in asked[shared:]):
            header, behind = self._turns.generation_prompt, marked.ends.get(i - 1, -1)
            found = marked.text.find(header, behind, marked.ends.get(i, _next_end(marked, i)))
            if header and behind >= 0 and found >= 0:  # the template writes something else after the previous message
                return found + len(header)
            raise Unrendered(f"messages[{i}]: the turn does not begin as its prompt ends, with {asked[-60:]!r}")
        return at + shared

    def _end(
        self, marked: _Marked, messages: list[Message], tools: list[Any] | None, i: int, start: int
    ) -> tuple[int, str]:
        """Find where the model stops writing message i, and the token that the text lacks there, if it lacks one.

        After a content, this is the first token that ends turns. Calls, and several messages in one turn, contain more
        such tokens: there, the last one before the next message's content ends the turn.
        """
        text, calls = marked.text, messages[i].get("tool_calls") or ()
        ends = {*self._turns.terminators, *(self._end_tokens if calls else ())}
        is_last = i + 1 == len(messages)
        limit = len(text) if is_last else _content_start(marked, messages[i + 1], i + 1)
        tokens = self._control.finditer(text, max(start, marked.ends.get(i, start)), limit or _next_end(marked, i))
        found = [token for token in tokens if token.group() in ends]
        if not found and is_last and (marker := self._marker_behind(text, messages, tools, ends)):
            return len(text), marker
        if found:
            token = found[0] if limit is None or (i in marked.ends and not calls) else found[-1]
            is_written = token.group() not in self._turns.terminators[1:]  # else the model writes a stop instead
            end = token.end() if is_written else token.start()
            if all(lacking(text[start:end], call["function"]) is None for call in calls):
                return end, ""
        raise Unrendered(f"messages[{i}]: no end-of-turn token ({', '.join(sorted(ends))}) follows the answer")

    def _marker_behind(self, text: str, messages: list[Message], tools: list[Any] | None, ends: set[str]) -> str:
        """Return the end token that would begin the next message, a tool's or the user's; else ""."""
        calls, words = messages[-1].get("tool_calls"), "Quayside?"
        told = {"role": "tool", "tool_call_id": calls[-1].get("id")} if calls else {"role": "user"}
        longer = self.render([*messages, told | {"content": words}], tools)
        markers = [each for each in self._control.findall(longer[: longer.rfind(words)]) if each in ends]
        return markers[-1] if markers and longer.count(markers[-1]) > text.count(markers[-1]) else ""

    def _in_blocks(self, turn: WeightedSpan, marked: _Marked) -> Iterator[WeightedSpan]:
        """Yield a turn's spans inside the template's `{% generation %}` blocks, with the token that ends the turn."""
        for start, end in marked.blocks:
            start, end = max(start, turn.start), min(end, turn.end)
            after = self._control.match(marked.text, end)
            if start <= end and (start < end or after):
                yield WeightedSpan(start, turn.end if after and after.end() == turn.end else end, turn.weight)


def _next_end(marked: _Marked, i: int) -> int:
    """The end of the next message's content, or of the text."""
    return min((end for j, end in marked.ends.items() if j > i), default=len(marked.text))


def _content_start(marked: _Marked, message: Message, i: int) -> int | None:
    """Find the beginning of message i's content; None if the text does not contain it (apart from outer space)."""
    content = message.get("content")
    if i not in marked.ends or not isinstance(content, str):
        return None
    core = content.strip()
    start = marked.ends[i] - len(core)
    return start if start >= 0 and marked.text.startswith(core, start) else None


def _with_reasoning(message: Message) -> Message:
    """Copy a message's reasoning, which has one of three names, to the names that transformers gives to templates."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def one_of(texts: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of some texts; without texts, one that matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first) or "(?!)")


# --- The process that renders ---


class _TooSlow(BaseException):
    """A row has taken too long. Not an Exception, so that no code called by a template catches it."""


def _alarm(_: int, __: FrameType | None) -> NoReturn:
    raise _TooSlow


def _limited(limit_s: float, work: Callable[[], Any]) -> Any:
    """Call `work` under a time limit. Returns its result, or the reason of its failure as text."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return work()
    except Unrendered as error:
        return str(error)
    except _TooSlow:
        return f"the chat template takes longer than {limit_s:g} s and was stopped"
    except MemoryError:
        return "the chat template takes too much memory"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(template: ChatTemplate, row: list[Any], has_prompt: bool) -> dict[str, Any]:
    """Return the fields of a row's `Rendered`. A row without weights is a question: its text is the prompt."""
    messages, tools, weights = row
    try:
        found = template.asked(messages, tools) if weights is None else template.spans(messages, tools, weights)
    except Raised as error:
        return vars(Rendered("", [], refusal=str(error)))
    prompt = None
    if has_prompt and weights is not None:
        with suppress(Unrendered):  # then the row is only left out of the samples that evaluation shows
            prompt = template.prompt_of(messages, tools)
    return vars(found) | {"prompt": prompt, "spans": [[span.start, span.end, span.weight] for span in found.spans]}


def _answers(template: ChatTemplate, rows: list[Any], prompts: bool, limit_s: float) -> Iterator[Any]:
    """Yield an answer for each row. After a text, the reason of a failure, no more follow: the dataset is refused."""
    for row in rows:
        yield (result := _limited(limit_s, partial(_answer, template, row, prompts)))
        if isinstance(result, str):
            return


def render_asked(described: dict[str, Any], row_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the template's stops, or why it cannot be used; then the answer to each batch of rows that is asked for."""
    signal.signal(signal.SIGALRM, _alarm)
    template = _limited(row_limit_s, lambda: ChatTemplate(**described))
    yield {"error": template} if isinstance(template, str) else {"stops": template.stops}
    while not isinstance(template, str):
        rows, prompts = json.loads(ask())
        sign()
        yield {"rows": list(_answers(template, rows, prompts, row_limit_s))}


load_everything()
