"""Renders chat templates, which are untrusted code, in a child process under limits of time and memory.

The child is isolated as python graders are (activities/isolation), and can open no files. For each batch the parent
writes one frame of JSON to its stdin, and reads one from its stdout.
"""

import json
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import jinja2
import markupsafe

from activities import isolation
from activities.isolation import (
    FramedProcess,
    confine,
    confine_in_bubblewrap,
    frames_of,
    lift_processor_limit,
    write_frame,
)
from activities.tokenizing.chat_template import (
    ChatTemplate,
    Raised,
    Rendered,
    Unrendered,
    WeightedSpan,
    load_everything,
    one_of,
)
from shared.errors import InvalidInput

if TYPE_CHECKING:  # the child starts sooner without
    from activities.formats.messages import Chat, Question

_MEMORY_BYTES = 1 << 30
_MAX_FRAME_BYTES = 256 << 20
_START_S = 30.0
_PROGRAM = ("-m", "activities.tokenizing.template_process")
_SOURCES = Path(__file__).parents[2]
_ZONES = "/usr/share/zoneinfo"  # templates may tell the date
_READY = b"ready"


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
        self, template: TemplateSource, place: str, row_limit_s: float = 10.0, bwrap: str | None = isolation.INSTALLED
    ) -> None:
        """`place` names the template in errors. `bwrap`: the path of bubblewrap, which is preferred."""
        self._place = place
        self._file = f" ({template.file})" if template.file else ""
        self._row_limit_s = row_limit_s
        self._folder = tempfile.mkdtemp(prefix="longshore-template-")  # where the sandbox mounts its root
        self._child = self._started(bwrap)
        described = {name: value for name, value in asdict(template).items() if name != "file"}
        answer = self._ask([described, row_limit_s], _START_S + row_limit_s)
        if "error" in answer:
            self.close()
            raise InvalidInput(answer["error"] + self._file, place)
        self.stops: tuple[str, ...] = tuple(answer["stops"])

    def _started(self, bwrap: str | None) -> FramedProcess:
        """Start the child in bubblewrap if that works, else alone; it then confines itself (`confine`)."""
        from shared.child_environment import child_environment  # imported here, so that the child need not load it

        environment = child_environment("template")
        for namespaces in isolation.namespace_options() if bwrap is not None else ():
            assert bwrap is not None
            command = isolation.isolated_command(bwrap, _PROGRAM, _start_in_bubblewrap(environment), namespaces)
            child = FramedProcess(command, {}, _SOURCES)
            with suppress(EOFError, TimeoutError):
                child.receive(_START_S, len(_READY))
                return child
            child.end()
        return FramedProcess([sys.executable, *_PROGRAM, self._folder], environment, _SOURCES)

    def spans(self, chats: "Sequence[Chat]", *, prompts: bool = False, tells_refusals: bool = False) -> list[Rendered]:
        """The text and trained spans of each conversation; with `prompts` also the text that asks for the last answer.

        `tells_refusals`: of a row at which the template raises an error that error is returned, and not raised.

        Raises InvalidInput: the template refuses a conversation, or takes too long, or too much memory.
        """
        rows = [[chat.messages, chat.tools, chat.weights] for chat in chats]
        places = [chat.place for chat in chats]
        return self._rendered([rows, prompts], places, tells_refusals, _with_spans)

    def asked(self, questions: "Sequence[Question]", *, tells_refusals: bool = False) -> list[Rendered]:
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
        # The child itself stops a slow row and reports it; this limit is for a row that cannot be interrupted.
        limit_s = _START_S + 2 * self._row_limit_s + len(places) * 0.1
        answers: list[Any] = self._ask(batch, limit_s)["rows"]
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
        self._child.end()
        with suppress(OSError):
            Path(self._folder).rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Any, limit_s: float) -> Any:
        try:
            self._child.send(json.dumps(question).encode())
            return json.loads(self._child.receive(limit_s, _MAX_FRAME_BYTES))
        except EOFError:
            self._ended()
        except TimeoutError:
            self._lost("takes too long and was stopped")
        except OverflowError:
            self._lost("makes longer texts than any may be")

    def _ended(self) -> NoReturn:
        """Raise the reason of the child's end: InvalidInput; or RuntimeError, for a retry, if it was killed."""
        status = self._child.wait(_START_S)
        number = status - 128 if status > 128 else -status  # bubblewrap exits with 128 + the signal
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            self.close()
            raise RuntimeError(f"the process of the chat template was killed by signal {number}")
        self._lost("ended its process")

    def _lost(self, what: str) -> NoReturn:
        self.close()
        raise InvalidInput(f"the chat template {what}{self._file}", self._place)


def _with_spans(answer: list[Any]) -> Rendered:
    text, spans, *others = answer
    return Rendered(text, [WeightedSpan(*span) for span in spans], *others)


def _without_spans(answer: list[Any]) -> Rendered:
    text, hidden_thoughts = answer
    return Rendered(text, [], hidden_thoughts=hidden_thoughts)


def _start_in_bubblewrap(environment: dict[str, str]) -> isolation.BubblewrapStart:
    ours = [_SOURCES / name for name in ("activities", "shared")]
    others = [Path(file).parent for file in (jinja2.__file__, markupsafe.__file__)]
    return isolation.BubblewrapStart(
        [*ours, *others], environment, ["CAP_SYS_CHROOT"], ("--ro-bind-try", _ZONES, _ZONES)
    )


# The child.


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


def _prompt_or_none(template: ChatTemplate, messages: Any, tools: Any) -> str | None:
    try:
        return template.prompt_of(messages, tools)
    except Unrendered:  # the row is only left out of the samples that evaluation shows
        return None


def _answers(template: ChatTemplate, rows: list[Any], prompts: bool, limit_s: float) -> Iterator[Any]:
    """Yield an answer for each row. After a text, the reason of a failure, no more follow: the dataset is refused.

    A row without weights is a question: its answer is the prompt. If the template raises an error, the answer is that
    error.
    """
    for messages, tools, weights in rows:

        def answer(messages: Any = messages, tools: Any = tools, weights: Any = weights) -> list[Any] | dict[str, str]:
            try:
                rendered = (
                    template.asked(messages, tools) if weights is None else template.spans(messages, tools, weights)
                )
            except Raised as error:
                return {"refusal": str(error)}
            if weights is None:
                return [rendered.text, rendered.hidden_thoughts]
            prompt = _prompt_or_none(template, messages, tools) if prompts else None
            spans = [[s.start, s.end, s.weight] for s in rendered.spans]
            return [rendered.text, spans, prompt, rendered.hidden_thoughts, None, rendered.unlike_prompts]

        yield (result := _limited(limit_s, answer))
        if isinstance(result, str):
            return


def _serve() -> None:
    lift_processor_limit()
    load_everything()
    if sys.argv[1:]:
        confine(sys.argv[1], _MEMORY_BYTES)
    else:
        isolation.forget_start()
        confine_in_bubblewrap(_MEMORY_BYTES)
        write_frame(1, _READY)
    signal.signal(signal.SIGALRM, _alarm)
    frames = frames_of(0)
    described, limit_s = json.loads(next(frames))
    template = _limited(limit_s, lambda: ChatTemplate(**described))
    _answer({"error": template} if isinstance(template, str) else {"stops": template.stops})
    for frame in frames:
        rows, prompts = json.loads(frame)
        _answer({"rows": list(_answers(template, rows, prompts, limit_s))})


def _answer(value: Any) -> None:
    write_frame(1, json.dumps(value).encode())


if __name__ == "__main__":
    _serve()
