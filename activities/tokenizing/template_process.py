"""Renders chat templates, which are untrusted code, in a child process under limits of time and memory."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NoReturn, Self

from activities.formats.messages import Chat, Question
from activities.sandbox.calls import CodeProcess, Limits, Server
from activities.tokenizing.chat_template import Rendered, WeightedSpan, one_of
from shared.errors import InvalidInput

_MEMORY_BYTES = 1 << 30
_START_S = 30.0


@dataclass(frozen=True)
class TemplateSource:
    """A chat template and the tokens that it may name. `control_tokens`: those that can end or open a turn.

    `tool_source`: the template for conversations with tools, if the model has a separate one. `end_tokens`: those that
    the model's files name as its end. `file`: the template's file, for errors.
    """

    source: str
    special_tokens: dict[str, str]
    control_tokens: list[str]
    tool_source: str | None = None
    end_tokens: tuple[str, ...] = ()
    file: str = ""

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches any control token."""
        return one_of(self.control_tokens)

    @property
    def text(self) -> str:
        """The source of both templates, to search for keys."""
        return f"{self.source} {self.tool_source}"


class TemplateProcess:
    """Renders conversations in a child process, which ends with the `with` block, or if a batch exceeds its limits."""

    def __init__(
        self, template: TemplateSource, place: str, row_limit_s: float = 10.0, server: Server | None = None
    ) -> None:
        """`place` names the template in errors. `server`: of the sandbox, unless it is this process's."""
        self._place = place
        self._file = f" ({template.file})" if template.file else ""
        described = {name: value for name, value in asdict(template).items() if name != "file"}
        # The child itself stops a slow row and reports it; this limit is for a row that cannot be interrupted.
        limit_s = _START_S + 8 * row_limit_s
        limits = Limits(_MEMORY_BYTES, step_cpu_s=int(limit_s), silence_s=limit_s)
        self._child = CodeProcess("render", json.dumps([described, row_limit_s]).encode(), limits, server)
        answer = self._ask(None)
        if "error" in answer:
            self.close()
            raise InvalidInput(answer["error"] + self._file, place)
        self.stops: tuple[str, ...] = tuple(answer["stops"])

    def spans(self, chats: Sequence[Chat], *, prompts: bool = False, tells_refusals: bool = False) -> list[Rendered]:
        """The text and trained spans of each conversation; with `prompts` also the text that asks for the last answer.

        `tells_refusals`: of a row at which the template raises an error that error is returned, and not raised.

        Raises InvalidInput: the template refuses a conversation, or takes too long, or too much memory.
        """
        rows = [[chat.messages, chat.tools, chat.weights] for chat in chats]
        places = [chat.place for chat in chats]
        return self._rendered([rows, prompts], places, tells_refusals, _with_spans)

    def asked(self, questions: Sequence[Question], *, tells_refusals: bool = False) -> list[Rendered]:
        """Return the text of each prompt: its messages, and the header of the turn that answers.

        `tells_refusals`: as in `spans`.

        Raises:
            InvalidInput: the template refuses a question or leaves a part out, or takes too long, or too much memory.
        """
        rows = [[question.messages, question.tools, None] for question in questions]
        places = [question.place for question in questions]
        return self._rendered([rows, True], places, tells_refusals, _without_spans)

    def _rendered(
        self, batch: list[Any], places: list[str], tells_refusals: bool, read: Callable[[list[Any]], Rendered]
    ) -> list[Rendered]:
        answers: list[Any] = self._ask(batch)["rows"]
        for place, answer in zip(places, answers, strict=False):
            if isinstance(answer, str):
                raise InvalidInput(answer + self._file, place)
            if isinstance(answer, dict) and not tells_refusals:
                raise InvalidInput(answer["refusal"] + self._file, place)
        return [Rendered("", [], **answer) if isinstance(answer, dict) else read(answer) for answer in answers]

    def kill(self) -> None:
        """End the child now; a call in another thread raises."""
        self._child.kill()

    def close(self) -> None:
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Any) -> Any:
        try:
            return json.loads(self._child.answer(json.dumps(question).encode()))
        except (InvalidInput, ValueError) as error:
            self._lost(error.message if isinstance(error, InvalidInput) else "it answers what is no JSON", error)

    def _lost(self, what: str, error: Exception) -> NoReturn:
        self.close()
        raise InvalidInput(f"the chat template ended its process: {what}{self._file}", self._place) from error


def _with_spans(answer: list[Any]) -> Rendered:
    text, spans, *others = answer
    return Rendered(text, [WeightedSpan(*span) for span in spans], *others)


def _without_spans(answer: list[Any]) -> Rendered:
    text, dropped_reasoning = answer
    return Rendered(text, [], dropped_reasoning=dropped_reasoning)
