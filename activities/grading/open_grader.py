"""Opens a grader of any kind as a function that grades rows. No other module chooses among the kinds of graders."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPException, HTTPResponse
from itertools import accumulate
from typing import Any, Literal, Self

from activities.heartbeats import in_parallel, pause
from activities.sandbox.calls import CODE, CodeProcess, Limits
from activities.sandbox.child import ask, is_child, sign
from activities.sources.http import parse_http_uri, requested, shown_uri
from longshore.fields import Frozen
from longshore.grading import (
    EnvironmentGrader,
    Expression,
    ExpressionError,
    Grader,
    Metric,
    MultiGrader,
    PythonGrader,
    RewardModelGrader,
    SampledItem,
    SampleGrade,
    SampleRewards,
    ScoreModelGrader,
    StringCheckGrader,
    TemplateError,
    TextSimilarityGrader,
    parse_expression,
    render,
)
from shared.errors import InvalidInput, StoreUnavailable
from shared.runs.acceptance import chosen_scalar
from shared.settings import DownloadSettings, GradingSettings, Settings

# --- Python graders, which are untrusted code: each sample in a separate process in a sandbox ---

_MAX_SAMPLE_BYTES = 32 << 20
_MAX_GRADE_BYTES = 64 << 10
_OWN_MAKING = "the grader wrote an answer of its own making"


class NotGraded(Exception):
    """A sample gets no grade; the message is the reason."""


def attempt(grade: Callable[[], float]) -> SampleGrade:
    """Call `grade`, and return its grade, or the reason of its NotGraded. The caller fills in the sample's place."""
    sign()
    try:
        return SampleGrade(place="", grade=grade())
    except NotGraded as error:
        return SampleGrade(place="", grade=None, error=str(error))


class PythonSandbox:
    """A grader's source, which grades each sample in a separate sandbox."""

    def __init__(self, source: str, settings: GradingSettings) -> None:
        self._source = source
        time_s = settings.python_time_s
        self._limits = Limits(
            settings.python_memory_bytes, math.ceil(time_s) + 1, time_s, answer_bytes=_MAX_GRADE_BYTES
        )

    def check(self) -> None:
        """Load the source. Raises NotGraded when it cannot be, or defines no `grade`; InvalidInput as `grade`."""
        self._ask(None)

    def grade(self, sample: Any, item: Any) -> float:
        """The grade of one sample, finite. Raises NotGraded with the reason when there is none.

        Raises InvalidInput: this system refuses isolation.
        """
        match self._ask({"sample": sample, "item": item}):
            case {"grade": float() as grade} if math.isfinite(grade):
                return grade
        raise NotGraded(_OWN_MAKING)

    def _ask(self, request: Any) -> Any:
        frame = json.dumps([self._source, request]).encode()
        if len(frame) > _MAX_SAMPLE_BYTES:
            raise NotGraded(f"the sample has {len(frame):,} bytes; a python grader takes up to {_MAX_SAMPLE_BYTES:,}")
        process = CodeProcess("grade", frame, self._limits)
        try:
            answer = process.answer()
        except (InvalidInput, RuntimeError, OSError) as error:
            raise NotGraded(str(error)[:4000]) from error
        finally:
            process.close()
        with suppress(ValueError, RecursionError):
            match json.loads(answer):
                case {"failed": str(reason)}:
                    raise NotGraded(reason[:4000])
                case {"checked": True} | {"grade": _} as parsed:
                    return parsed
        raise NotGraded(_OWN_MAKING)


# --- String checks and text similarity, from 0 to 1 ---
# Pure functions, float64, case-sensitive except for ROUGE and `ilike`.
#
# Words are runs of letters, digits and _; every other character that is not white space is a separate word.
#
# BLEU, GLEU and ROUGE-N are written here: sacrebleu and rouge-score would bring ten packages (lxml and nltk among
# them) for forty lines, and rouge-score's words have ASCII letters only.

_MAX_CHARS = 100_000  # the comparison's time grows with the product of both lengths
_WORD = re.compile(r"\w+|[^\w\s]")
_ROUGE_WORD = re.compile(r"\w+")
_MAX_ORDER = 4  # of BLEU's and GLEU's n-grams


def string_check(operation: Literal["eq", "ne", "like", "ilike"], text: str, reference: str) -> float:
    """1.0 if the operation holds, else 0.0. `ilike` compares case-folded texts."""
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


def text_similarity(metric: Metric, text: str, reference: str) -> float:
    """The metric of a text against a reference. Two empty texts are equal; one empty text has similarity 0.

    Raises:
        NotGraded: a text of more than 100,000 characters.
    """
    if (longest := max(len(text), len(reference))) > _MAX_CHARS:
        raise NotGraded(f"text_similarity compares up to {_MAX_CHARS:,} characters; a text here has {longest:,}")
    match metric:
        case "fuzzy_match":
            return share_in_common(text, reference)
        case "bleu":
            return bleu(_WORD.findall(text), _WORD.findall(reference))
        case "gleu":
            return gleu(_WORD.findall(text), _WORD.findall(reference))
        case "rouge_l":
            return share_in_common(_rouge_words(text), _rouge_words(reference))
        case "rouge_1" | "rouge_2" | "rouge_3" | "rouge_4" | "rouge_5":
            return rouge_n(_rouge_words(text), _rouge_words(reference), int(metric[-1]))


def _rouge_words(text: str) -> list[str]:
    return _ROUGE_WORD.findall(text.lower())


def bleu(words: Sequence[str], reference: Sequence[str]) -> float:
    """Sentence BLEU (Papineni et al. 2002, eq. 1-3), n-grams up to 4, or up to the text's length if it is shorter.

    An n-gram order without a match is smoothed by halves: 1/2, 1/4, ... of a match (Chen & Cherry 2014, smoothing 3),
    but a text that shares no word with its reference scores 0.
    """
    if not words or not reference:
        return float(not words and not reference)
    log_precisions = []
    doubling = 1
    for order in range(1, min(_MAX_ORDER, len(words)) + 1):
        matches, total = _matches(words, reference, order), len(words) - order + 1
        if not matches and order == 1:
            return 0.0
        if not matches:
            doubling *= 2
        log_precisions.append(math.log((matches or 1 / doubling) / total))
    brevity = min(0.0, 1 - len(reference) / len(words))
    return math.exp(brevity + sum(log_precisions) / len(log_precisions))


def gleu(words: Sequence[str], reference: Sequence[str]) -> float:
    """GLEU (Wu et al. 2016, arXiv:1609.08144, section 5.2): the lesser of precision and recall, n-grams up to 4."""
    if not words or not reference:
        return float(not words and not reference)
    matches = sum(_matches(words, reference, order) for order in range(1, _MAX_ORDER + 1))
    return matches / max(_num_ngrams(len(words)), _num_ngrams(len(reference)))


def rouge_n(words: Sequence[str], reference: Sequence[str], order: int) -> float:
    """ROUGE-N (Lin 2004, section 2) as the F1 of its precision and recall. Texts too short for an n-gram score 0."""
    if not words and not reference:
        return 1.0
    num_words, num_reference = len(words) - order + 1, len(reference) - order + 1
    if num_words < 1 or num_reference < 1:
        return 0.0
    return 2 * _matches(words, reference, order) / (num_words + num_reference)


def share_in_common(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """2 LCS / (m + n): ROUGE-L of words (Lin 2004, section 3.1, with beta 1), rapidfuzz's `ratio` / 100 of characters.

    To the last bit: rapidfuzz computes its ratio as 1 - distance / (m + n), which may differ in it.
    """
    from rapidfuzz.distance import LCSseq

    if not first and not second:
        return 1.0
    return 2 * LCSseq.similarity(first, second) / (len(first) + len(second))


def _matches(words: Sequence[str], reference: Sequence[str], order: int) -> int:
    """Return the number of n-grams in common, each counted as often as it occurs in both."""
    return (_ngrams(words, order) & _ngrams(reference, order)).total()


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))


def _num_ngrams(num_words: int) -> int:
    return sum(max(0, num_words - order + 1) for order in range(1, _MAX_ORDER + 1))


# --- Grading by a model: for each sample one chat completion of an OpenAI-compatible server ---

_PAUSES_S = (1.0, 4.0)  # before the second and the third try
_LONGEST_PAUSE_S = 20.0
_MAX_ANSWER_BYTES = 4 << 20
_WORTH_RETRYING = (408, 409, 425, 429)
_FENCE = "```"


class ScoreModel:
    """Grades samples by asking a model, on an OpenAI-compatible server, for a score of each."""

    def __init__(self, grader: ScoreModelGrader, settings: GradingSettings, allow_private_addresses: bool) -> None:
        """Raises InvalidInput if no server is named, or its URL is not allowed."""
        self._grader = grader
        self._server = ModelServer(grader.base_url, settings, allow_private_addresses, "grader.base_url")

    def grade_all(self, rows: Sequence[SampledItem]) -> list[SampleGrade]:
        """Grade rows, several at a time. Returns for each row, in order, a grade or the reason why there is none.

        Raises:
            InvalidInput: the server refuses the request (4xx), or may not be asked.
            StoreUnavailable: it cannot be reached, or is too busy.
        """
        bodies = [self._body(row) for row in rows]
        answers = iter(self._server.ask("/chat/completions", [body for body in bodies if isinstance(body, dict)]))
        told = [next(answers) if isinstance(body, dict) else body for body in bodies]
        return [attempt(partial(self._score, answer)) for answer in told]

    def _body(self, row: SampledItem) -> dict[str, Any] | NotGraded:
        try:
            messages = [{"role": m.role, "content": render(m.template, row.namespaces)} for m in self._grader.input]
        except TemplateError as error:
            return NotGraded(str(error))
        return request_body(self._grader, messages)

    def _score(self, answer: Any) -> float:
        if isinstance(answer, NotGraded):
            raise answer
        return score_in(answer, self._grader.range)


class ModelServer:
    """An OpenAI-compatible server that a user names, or the operator, whose key no other server gets.

    In a sandbox, which has no network, the caller asks it (`answering`).
    """

    def __init__(self, url: str | None, settings: GradingSettings, allow_private_addresses: bool, place: str) -> None:
        """Raises InvalidInput if no server is named (at `place` of the request), or its URL is not allowed."""
        self._named = url
        self._concurrency = settings.score_model_concurrency
        url = url or settings.score_model_url
        if url is None:
            raise InvalidInput("name the server as base_url, or set grading.score_model_url", place)
        is_own = settings.score_model_url is not None and url.rstrip("/") == settings.score_model_url.rstrip("/")
        parse_http_uri(url)
        self._url = url.rstrip("/")
        self._key = settings.score_model_key if is_own else None
        # A server that the operator named may be on a private network.
        self._connect = DownloadSettings(
            allow_private_addresses=is_own or allow_private_addresses, timeout_s=settings.score_model_timeout_s
        )

    def ask(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """Post requests, several at a time. Returns for each the answer's JSON, or why there is none.

        Raises InvalidInput, StoreUnavailable as `ScoreModel.grade_all`.
        """
        sent = [json.dumps(body).encode() for body in bodies]
        if is_child():
            answers = _unpacked(ask(_packed([self._named, path], sent)))[1]
        else:
            answers = self.answers(path, sent)
        return [_parsed(answer) for answer in answers]

    def answers(self, path: str, sent: Sequence[bytes]) -> list[bytes]:
        """Return each request's answer: `.` and the body, or `!` and the reason why there is none."""

        def answered(number: int) -> tuple[int, bytes]:
            sign()
            try:
                return number, b"." + self._ask(path, sent[number])
            except NotGraded as error:
                return number, b"!" + str(error).encode()

        found = dict(in_parallel(answered, range(len(sent)), self._concurrency))
        return [found[number] for number in sorted(found)]

    def _ask(self, path: str, data: bytes) -> bytes:
        """Post a request; retry if the server is busy. Raises as `ask`, and NotGraded."""
        for pause_s in _PAUSES_S:
            try:
                return self._ask_once(path, data)
            except _Busy as busy:
                pause(min(_LONGEST_PAUSE_S, pause_s if busy.wait_s is None else busy.wait_s))
        try:
            return self._ask_once(path, data)
        except _Busy as busy:
            raise StoreUnavailable(f"{shown_uri(self._url)}: {busy}") from busy

    def _ask_once(self, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "longshore"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            with requested("POST", self._url + path, self._connect, headers, body) as response:
                return self._answer(response, _body(response, self._connect.timeout_s))
        except (OSError, HTTPException) as error:
            raise _Busy(f"the connection failed ({error or type(error).__name__})") from error

    def _answer(self, response: HTTPResponse, data: bytes) -> bytes:
        said = f"the server answered {response.status} {response.reason}".rstrip()
        if response.status >= 500 or response.status in _WORTH_RETRYING:
            text = response.getheader("Retry-After", "")
            raise _Busy(said, float(text) if text.isascii() and text.isdigit() else None)
        if response.status != 200:
            text = data[:300].decode(errors="replace")
            text = text.replace(self._key, "…") if self._key else text  # some servers echo the request
            raise InvalidInput(f"{said}: {text}", shown_uri(self._url))
        return data


def _parsed(answer: bytes) -> Any:
    if answer[:1] == b"!":
        return NotGraded(answer[1:].decode())
    try:
        return json.loads(answer[1:])
    except (ValueError, RecursionError):
        return NotGraded("the scoring server's answer is not JSON")


def answering(urls: Collection[str | None], means: "GraderMeans", place: str) -> Callable[[bytearray], bytes]:
    """Return what answers a sandbox that asks servers. It may ask only these, since it reads untrusted data."""

    def answer(question: bytearray) -> bytes:
        head, sent = _unpacked(question)
        match head:
            case [str() | None as url, "/chat/completions" | "/completions" as path] if url in urls:
                server = ModelServer(url, means.grading, means.allow_private_addresses, place)
                return _packed(None, server.answers(path, sent))
        raise InvalidInput("its process asks a server that is not named", place)

    return answer


def _packed(head: Any, parts: Sequence[bytes]) -> bytes:
    """Join texts with their lengths, so that whoever passes them on need not parse them."""
    return json.dumps([head, [len(part) for part in parts]]).encode() + b"\n" + b"".join(parts)


def _unpacked(data: bytearray) -> tuple[Any, list[bytes]]:
    line, _, rest = bytes(data).partition(b"\n")
    head, lengths = json.loads(line)
    ends = list(accumulate(lengths))
    return head, [rest[end - length : end] for end, length in zip(ends, lengths, strict=True)]


class _Busy(Exception):
    """The server is too busy; the request may be repeated, after `wait_s` seconds if the server said so."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        self.wait_s = wait_s
        super().__init__(message)


def _body(response: HTTPResponse, limit_s: float) -> bytes:
    """Read the whole answer, in bounded time and space however slowly it drips."""
    deadline = time.monotonic() + limit_s
    found = bytearray()
    while piece := response.read1(1 << 16):
        found += piece
        if len(found) > _MAX_ANSWER_BYTES:
            raise NotGraded(f"the scoring server answered with more than {_MAX_ANSWER_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer does not end")
    return bytes(found)


def request_body(grader: ScoreModelGrader, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the request of a chat completion: a system message on the form of the answer, then the user's messages."""
    low, high = grader.range
    shape = (
        "You grade. Judge as the messages that follow say, and answer with one JSON object and nothing else: "
        f'{{"reasoning": "<in short>", "result": <a number from {low:g} to {high:g}>}}'
    )
    body: dict[str, Any] = {"model": grader.model, "messages": [{"role": "system", "content": shape}, *messages]}
    if grader.sampling_params:
        body |= grader.sampling_params.model_dump(exclude_none=True)
    if "max_completions_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_completions_tokens")
    return body


def score_in(answer: Any, bounds: tuple[float, float]) -> float:
    """The score in a chat completion: a JSON object's `result`, or a number alone. Raises NotGraded."""
    match answer:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            pass
        case _:
            raise NotGraded("the scoring server's answer has no choices[0].message.content")
    said = text.strip()
    if len(said) >= 2 * len(_FENCE) and said.startswith(_FENCE) and said.endswith(_FENCE):
        said = said[len(_FENCE) : -len(_FENCE)].removeprefix("json").strip()
    try:
        parsed = json.loads(said)
        score = parsed["result"] if isinstance(parsed, dict) else parsed
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError("not a number")
        value = float(score)
    except (ValueError, KeyError, OverflowError, RecursionError) as error:
        raise NotGraded(f"the scoring model gave no score but {said[:200]!r}") from error
    low, high = bounds
    if not (math.isfinite(value) and low <= value <= high):
        raise NotGraded(f"the scoring model gave {value:g}, outside its range {low:g} to {high:g}")
    return value


class RewardedItem(SampledItem):
    """A sample with its rewards by reward models, by their graders' `scorer`. Other graders do not see these."""

    rewards: dict[str, SampleRewards]


GradeAll = Callable[[Sequence[SampledItem]], list[SampleGrade]]


class GraderMeans(Frozen):
    """The installation's settings for graders: limits, and whether their servers may be on private networks."""

    grading: GradingSettings
    allow_private_addresses: bool

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the settings that graders need. Other keys never reach their processes."""
        grading = settings.grading.model_copy(update={"server_keys": {}})
        return cls(grading=grading, allow_private_addresses=settings.download.allow_private_addresses)

    @property
    def without_key(self) -> "GraderMeans":
        """For a sandbox, which asks no server itself."""
        return self.model_copy(update={"grading": self.grading.model_copy(update={"score_model_key": None})})


def servers_of(grader: Grader) -> set[str | None]:
    """Return the servers that a grader asks; None: the operator's."""
    match grader:
        case ScoreModelGrader():
            return {grader.base_url}
        case MultiGrader():
            return {url for part in grader.graders.values() for url in servers_of(part)}
    return set()


def open_grader(grader: Grader, means: GraderMeans, place: str = "grader") -> GradeAll:
    """Open a grader as a function that returns for each row, in order, a grade or the reason why there is none.

    Raises:
        InvalidInput: a source that cannot be loaded, a server that may not be asked, a system that cannot isolate.
    """
    match grader:
        case StringCheckGrader():
            return _each(lambda row: string_check(grader.operation, *_rendered(grader.input, grader.reference, row)))
        case TextSimilarityGrader():
            metric = grader.evaluation_metric
            return _each(lambda row: text_similarity(metric, *_rendered(grader.input, grader.reference, row)))
        case PythonGrader():
            sandbox = PythonSandbox(grader.source, means.grading)
            try:
                sandbox.check()
            except NotGraded as error:
                raise InvalidInput(str(error), f"{place}.source") from error
            return _each(lambda row: sandbox.grade(row.namespaces["sample"], row.item))
        case ScoreModelGrader():
            return ScoreModel(grader, means.grading, means.allow_private_addresses).grade_all
        case RewardModelGrader():
            return _each(lambda row: _reward(grader, row))
        case EnvironmentGrader():
            return _each(_environment_reward)
        case MultiGrader():
            parts = {
                name: open_grader(part, means, f"{place}.graders.{name}")
                for name, part in sorted(grader.graders.items())
            }
            expression = parse_expression(grader.calculate_output)

            def grade_all(rows: Sequence[SampledItem]) -> list[SampleGrade]:
                columns = [grade(rows) for grade in parts.values()]
                return [combined(dict(zip(parts, row, strict=True)), expression) for row in zip(*columns, strict=True)]

            return grade_all


def _each(grade: Callable[[SampledItem], float]) -> GradeAll:
    return lambda rows: [attempt(lambda row=row: grade(row)) for row in rows]  # type: ignore[misc]


def _reward(grader: RewardModelGrader, row: SampledItem) -> float:
    assert isinstance(row, RewardedItem)  # Grade.grade_one refuses samples without scores
    found = row.rewards[grader.scorer]
    if found.error is not None:
        raise NotGraded(found.error)
    names = list(found.values)
    value = found.values[names[chosen_scalar(grader, names)]]
    if value is None:
        raise NotGraded("what the reward model gives is no finite number")
    return value


def _environment_reward(row: SampledItem) -> float:
    match row.sample.get("episode"):
        case {"reward": float() | int() as reward}:
            return float(reward)
        case {"error": str(error)}:
            raise NotGraded(error)
    raise NotGraded("the sample is no episode of an environment")


def _rendered(text: str, reference: str, row: SampledItem) -> tuple[str, str]:
    namespaces = row.namespaces
    try:
        return render(text, namespaces), render(reference, namespaces)
    except TemplateError as error:
        raise NotGraded(str(error)) from error


def combined(parts: dict[str, SampleGrade], expression: Expression) -> SampleGrade:
    """Combine the grades of all parts; a part without a grade leaves the sample without one."""
    grades = {name: part.grade for name, part in parts.items()}
    reasons = [f"{name}: {part.error}" for name, part in parts.items() if part.grade is None]
    if reasons:
        return SampleGrade(place="", grade=None, error="; ".join(reasons), parts=grades)
    known = {name: grade for name, grade in grades.items() if grade is not None}
    return attempt(lambda: _value(expression, known)).model_copy(update={"parts": grades})


def _value(expression: Expression, grades: dict[str, float]) -> float:
    try:
        return expression.value(grades)
    except ExpressionError as error:
        raise NotGraded(f"calculate_output: {error}") from error


if __name__ == "__main__":  # for `longshore doctor`: `bubblewrap`, `namespaces`, or why graders are not isolated
    isolation, refusal = CODE.start()
    print(refusal or isolation)
