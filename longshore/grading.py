"""Graders as users write them: their kinds, expressions over scores, templates."""

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, JsonValue, field_validator, model_validator

from longshore.fields import Frozen, Reason

# --- Arithmetic over named numbers, such as `0.8 * exact + 0.2 * max(0, style)` ---
# Parsed once, computed for many samples.
#
# Numbers, names, `+ - * / ^`, parentheses, and min, max, abs, floor, ceil, exp, sqrt, log (natural). `^` binds tighter
# than a sign and groups to the right, so -2^2 is -4 and 2^3^2 is 512. An expression becomes postfix; nothing is ever
# evaluated as code.
#
# Python's `ast` does not fit: it refuses graders named `is` or `lambda`, accepts 1_000 and 0x1F, does not report the
# position of the error in `(1` or `1 +`, and may fail on a sum of 1,900 terms, depending on the caller's stack depth.

MAX_EXPRESSION_CHARS = 4_000
_MAX_DEPTH = 50
_TOKEN = re.compile(
    # Possessive quantifiers: they do not backtrack, so matching takes linear time.
    r"\s*+(?:(?P<number>(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d++)?+)(?![\w.])|(?P<name>[A-Za-z_]\w*+)"
    r"|(?P<sign>[-+*/^(),]))"
)
_BINARY: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": math.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "abs": abs,
    "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
    "min": min,
    "max": max,
}
FUNCTIONS = frozenset(_FUNCTIONS)
_OF_SEVERAL = ("min", "max")


class ExpressionError(ValueError):
    """An expression cannot be parsed, or has no finite value."""


@dataclass(frozen=True)
class _Apply:
    """Pop `arity` values from the stack, and push `function` of them."""

    symbol: str
    function: Callable[..., float]
    arity: int


_Step = float | str | _Apply  # a number, a name, or a function of the values before it
_Token = tuple[str, str, int]  # its kind (number, name, end, or the operator itself), its text, its position

# By binary operator: its precedence, and the least precedence that operators within its right operand must have.
_BINDS: Mapping[str, tuple[int, int]] = {"+": (1, 2), "-": (1, 2), "*": (3, 4), "/": (3, 4), "^": (6, 5)}
_NEGATION_BINDS = 5


@dataclass(frozen=True)
class Expression:
    """An expression in postfix form."""

    text: str
    steps: tuple[_Step, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(step for step in self.steps if isinstance(step, str))

    def value(self, values: Mapping[str, float]) -> float:
        """Compute the value in float64.

        Raises:
            ExpressionError: a division by zero, a logarithm of zero, a root of a negative number, or an overflow.
        """
        stack: list[float] = []
        for step in self.steps:
            match step:
                case float():
                    stack.append(step)
                case str():
                    stack.append(float(values[step]))
                case _Apply(symbol, function, arity):
                    arguments = stack[-arity:]
                    del stack[-arity:]
                    stack.append(_applied(symbol, function, arguments))
        [result] = stack
        return result


def _applied(symbol: str, function: Callable[..., float], arguments: list[float]) -> float:
    try:
        result = function(*arguments)
    except (ArithmeticError, ValueError) as error:
        raise ExpressionError(f"{symbol} of {_listed(arguments)} has no value") from error
    if not math.isfinite(result):
        raise ExpressionError(f"{symbol} of {_listed(arguments)} is not finite")
    return result


def _listed(arguments: list[float]) -> str:
    return " and ".join(f"{argument:g}" for argument in arguments)


def parse_expression(text: str) -> Expression:
    """Parse an expression. Raises ExpressionError, with the position of the error."""
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ExpressionError(f"an expression has at most {MAX_EXPRESSION_CHARS:,} characters")
    parser = _Parser(_tokens(text))
    parser.operand_and_signs(0, 0)
    parser.expect("end")
    return Expression(text, tuple(parser.steps))


def _tokens(text: str) -> Iterator[_Token]:
    end = 0
    length = len(text.rstrip())
    while end < length:
        match = _TOKEN.match(text, end)
        if match is None:
            place = len(text) - len(text[end:].lstrip())
            raise ExpressionError(f"character {place + 1} ({text[place]!r}) has no meaning here")
        kind = str(match.lastgroup)
        yield match[kind] if kind == "sign" else kind, match[kind], match.start(kind)
        end = match.end()
    yield "end", "the end", len(text)


class _Parser:
    """A parser by precedence climbing (Pratt 1973). `depth` is the depth of nesting, which is bounded."""

    def __init__(self, tokens: Iterator[_Token]) -> None:
        self._tokens = tokens
        self._next = next(tokens)
        self.steps: list[_Step] = []

    def operand_and_signs(self, binding: int, depth: int) -> None:
        """Read an operand and the operators after it of precedence `binding` or higher, with their right operands."""
        self._operand(depth)
        while _BINDS.get(self._next[0], (-1, -1))[0] >= binding:
            sign = self._take()[0]
            self.operand_and_signs(_BINDS[sign][1], depth + (sign == "^"))
            self.steps.append(_Apply(sign, _BINARY[sign], 2))

    def expect(self, kind: str) -> None:
        found, text, place = self._take()
        if found != kind:
            wanted = "the end" if kind == "end" else f"'{kind}'"
            raise ExpressionError(f"character {place + 1}: {wanted} is missing before {text!r}")

    def _operand(self, depth: int) -> None:
        token = kind, text, place = self._take()
        if depth > _MAX_DEPTH:
            raise ExpressionError(f"character {place + 1}: nested deeper than {_MAX_DEPTH} levels")
        match kind:
            case "number":
                self.steps.append(_number(token))
            case "name" if self._next[0] == "(":
                self._call(token, depth)
            case "name":
                self.steps.append(text)
            case "(":
                self.operand_and_signs(0, depth + 1)
                self.expect(")")
            case "+" | "-":
                self.operand_and_signs(_NEGATION_BINDS, depth + 1)
                self.steps += [_Apply("-", operator.neg, 1)] if kind == "-" else []
            case _:
                raise ExpressionError(f"character {place + 1}: a number or a name is missing before {text!r}")

    def _call(self, function: _Token, depth: int) -> None:
        self.expect("(")
        self.operand_and_signs(0, depth + 1)
        arity = 1
        while self._next[0] == ",":
            self._take()
            self.operand_and_signs(0, depth + 1)
            arity += 1
        self.expect(")")
        self.steps.append(_function(function, arity))

    def _take(self) -> _Token:
        token = self._next
        self._next = next(self._tokens, token)
        return token


def _number(token: _Token) -> float:
    _, text, place = token
    value = float(text)
    if not math.isfinite(value):
        raise ExpressionError(f"character {place + 1}: {text} is beyond what a float holds")
    return value


def _function(token: _Token, arity: int) -> _Apply:
    _, name, place = token
    if name not in FUNCTIONS:
        known = ", ".join(sorted(FUNCTIONS))
        raise ExpressionError(f"character {place + 1}: there is no function '{name}'; there are {known}")
    if (arity > 1) != (name in _OF_SEVERAL):
        wanted = "two or more arguments" if name in _OF_SEVERAL else "one argument"
        raise ExpressionError(f"character {place + 1}: {name} takes {wanted}")
    return _Apply(name, _FUNCTIONS[name], arity)


# --- Template strings of graders ---
# `{{ sample.output_text }}` becomes a value of the row. Substitution, never code.
#
# A reference is `sample` or `item`, then fields (`.name`) and list indices (`[0]`). There are no filters, calls or
# loops, and inserted text is not expanded again.

JSON = object  # a result of json.loads: dict, list, str, int, float, bool or None

MAX_TEMPLATE_CHARS = 64 << 10
MAX_RENDERED_CHARS = 16 << 20
_NAMESPACES = ("sample", "item")
_REFERENCE = re.compile(r"\s*(?P<namespace>[A-Za-z_]+)(?P<path>(?:\.[A-Za-z_][\w-]*|\[\d{1,6}\])+)\s*")
_STEP = re.compile(r"\.(?P<field>[A-Za-z_][\w-]*)|\[(?P<place>\d+)\]")


class TemplateError(ValueError):
    """A template cannot be parsed, or names a value that a row does not have."""


@dataclass(frozen=True)
class Reference:
    """`item.answers[0].text` is Reference("item", ("answers", 0, "text"))."""

    namespace: str
    steps: tuple[str | int, ...]

    def __str__(self) -> str:
        return self.namespace + "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in self.steps)


def parse_template(template: str) -> tuple[str | Reference, ...]:
    """Parse a template into literal pieces and references, in order.

    Raises:
        TemplateError: `{{` without `}}`, something other than a reference between them, or too long a template.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"a template has at most {MAX_TEMPLATE_CHARS:,} characters; this one has {len(template):,}")
    pieces: list[str | Reference] = []
    end = 0
    while (start := template.find("{{", end)) >= 0:
        close = template.find("}}", start + 2)
        if close < 0:
            raise TemplateError(f"the {{{{ at character {start + 1} is never closed by }}}}")
        if start > end:
            pieces.append(template[end:start])
        pieces.append(_reference(template[start + 2 : close]))
        end = close + 2
    return (*pieces, template[end:]) if end < len(template) else tuple(pieces)


def _reference(text: str) -> Reference:
    match = _REFERENCE.fullmatch(text)
    if match is None or match["namespace"] not in _NAMESPACES:
        shown = text.strip()[:80]
        raise TemplateError(f"{{{{ {shown} }}}} is no reference: write sample.output_text, item.field or item.list[0]")
    steps = (_step(found) for found in _STEP.finditer(match["path"]))
    return Reference(match["namespace"], tuple(steps))


def _step(found: re.Match[str]) -> str | int:
    return found["field"] if found["field"] is not None else int(found["place"])


def render(template: str, namespaces: Mapping[str, JSON]) -> str:
    """Return the template with every reference replaced: strings unchanged, other values as JSON.

    Raises:
        TemplateError: a field or list place that the row does not have, or too long a result.
    """
    texts: list[str] = []
    num_chars = 0
    for piece in parse_template(template):
        texts.append(piece if isinstance(piece, str) else _text(lookup(piece, namespaces)))
        num_chars += len(texts[-1])
        if num_chars > MAX_RENDERED_CHARS:
            raise TemplateError(f"the rendered template is longer than {MAX_RENDERED_CHARS:,} characters")
    return "".join(texts)


def lookup(reference: Reference, namespaces: Mapping[str, JSON]) -> JSON:
    """Return the value that a reference names. Raises TemplateError if there is none."""
    value = namespaces[reference.namespace]
    for number, step in enumerate(reference.steps):
        match value, step:
            case dict(), str() if step in value:
                value = value[step]
            case list(), int() if step < len(value):
                value = value[step]
            case _:
                known = Reference(reference.namespace, reference.steps[:number])
                raise TemplateError(f"{reference} is not in this row: {known} has no {_shown(step)}")
    return value


def _shown(step: str | int) -> str:
    return f"place {step}" if isinstance(step, int) else f"field '{step}'"


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- Graders, which turn a sample into a number ---
# Names and fields are OpenAI's; docs/graders.md describes each.

MAX_SOURCE_BYTES = 256 << 10
_MAX_MESSAGES = 64
_MAX_GRADERS = 20
_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


def _readable(template: str) -> str:
    parse_template(template)
    return template


Template = Annotated[str, AfterValidator(_readable)]
GraderName = Annotated[str, Field(min_length=1, max_length=200)]


class StringCheckGrader(Frozen):
    """1 if the operation holds, else 0. `like`: the input contains the reference; `ilike`: ignoring case."""

    type: Literal["string_check"] = "string_check"
    name: GraderName
    operation: Literal["eq", "ne", "like", "ilike"]
    input: Template
    reference: Template


UNGRADED = StringCheckGrader(name="ungraded", operation="eq", input="0", reference="1")
"""Grades every sample 0, where nothing reads grades."""

Metric = Literal["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]
_REFUSED_METRICS = {
    "cosine": "cosine compares embeddings of a model, and none is served here: use a score_model grader",
    "meteor": "meteor needs WordNet's synonyms, which are not shipped here: use gleu or rouge_l",
}


class TextSimilarityGrader(Frozen):
    """Grades the similarity of two texts, from 0 to 1."""

    type: Literal["text_similarity"] = "text_similarity"
    name: GraderName
    evaluation_metric: Metric
    input: Template
    reference: Template

    @field_validator("evaluation_metric", mode="before")
    @classmethod
    def _computable(cls, metric: Any) -> Any:
        if isinstance(metric, str) and metric in _REFUSED_METRICS:
            raise ValueError(_REFUSED_METRICS[metric])
        return metric


def sane_source(source: str) -> str:
    """Return a source that can be sent to a sandbox. Raises ValueError: it is too long, or no text."""
    try:
        num_bytes = len(source.encode())
    except UnicodeEncodeError as error:
        raise ValueError("the source holds half of a surrogate pair, which is no text") from error
    if num_bytes > MAX_SOURCE_BYTES:
        raise ValueError(f"the source has {num_bytes:,} bytes; the limit is {MAX_SOURCE_BYTES:,}")
    return source


class PythonGrader(Frozen):
    """Source that defines `grade(sample, item)`, which returns a finite number. Run in a sandbox."""

    type: Literal["python"] = "python"
    name: GraderName
    source: str
    image_tag: None = None

    @field_validator("source")
    @classmethod
    def _defines_a_function(cls, source: str) -> str:
        if not re.search(r"\bgrade\b", sane_source(source)):
            raise ValueError("the source must define grade(sample, item)")
        return source

    @field_validator("image_tag", mode="before")
    @classmethod
    def _no_image(cls, tag: Any) -> Any:
        if tag is not None:
            raise ValueError(
                "image_tag names a container of OpenAI's; here graders run on the host's Python: leave it out"
            )
        return tag


class InputText(Frozen):
    """A text part of a message."""

    type: Literal["input_text", "text"] = "input_text"
    text: Template


class Message(Frozen):
    """A message to the scoring model."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Template | InputText

    @property
    def template(self) -> str:
        return self.content if isinstance(self.content, str) else self.content.text


class ScoreModelSampling(Frozen):
    """Sampling parameters; the scoring server chooses those that are not set. `max_completions_tokens` is OpenAI's."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    max_completions_tokens: int | None = Field(default=None, ge=1)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ScoreModelGrader(Frozen):
    """Asks a model of an OpenAI-compatible server for a grade within `range`.

    `base_url`, a field that OpenAI's graders do not have, is the server's URL, such as `https://host/v1`. Without it
    the installation's server is used (`grading.score_model_url`).
    """

    type: Literal["score_model"] = "score_model"
    name: GraderName
    model: str = Field(min_length=1, max_length=500)
    input: tuple[Message, ...] = Field(min_length=1, max_length=_MAX_MESSAGES)
    range: tuple[float, float] = (0.0, 1.0)
    sampling_params: ScoreModelSampling | None = None
    base_url: str | None = Field(default=None, max_length=2048)

    @field_validator("range")
    @classmethod
    def _rising(cls, found: tuple[float, float]) -> tuple[float, float]:
        low, high = found
        if not (abs(low) < float("inf") and abs(high) < float("inf") and low < high):
            raise ValueError("a range is two finite numbers, the lower one first")
        return found


class RewardModelGrader(Frozen):
    """Longshore's own kind: a reward model scores the prompt and the sample as one conversation.

    The reward model runs on a sampler that the run leases: the policy's if that also serves `base`, else another.
    """

    type: Literal["reward_model"] = "reward_model"
    name: GraderName
    model: str = Field(min_length=1, max_length=2048, description="the reward model's adapter: published name, or URI")
    base: str | None = Field(
        default=None,
        min_length=1,
        max_length=2048,
        description="its base model; if absent, the published adapter's, else the policy's",
    )
    scalar: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="which of the model's scalars is the grade; may be absent if it has one",
    )

    @property
    def scorer(self) -> str:
        """The key of its scores: graders that only differ in the scalar share them."""
        return self.model if self.base is None else f"{self.model} on {self.base}"


class EnvironmentGrader(Frozen):
    """Longshore's own kind: the sum of the rewards that the run's environment gave in the episode."""

    type: Literal["environment"] = "environment"
    name: GraderName = "environment"


_Single = (
    StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader | RewardModelGrader | EnvironmentGrader
)
SingleGrader = Annotated[_Single, Field(discriminator="type")]


class MultiGrader(Frozen):
    """Named graders, and an expression that combines their numbers."""

    type: Literal["multi"] = "multi"
    name: GraderName
    graders: dict[str, SingleGrader] = Field(min_length=1, max_length=_MAX_GRADERS)
    calculate_output: str = Field(max_length=MAX_EXPRESSION_CHARS)

    @model_validator(mode="after")
    def _fits_together(self) -> "MultiGrader":
        names = parse_expression(self.calculate_output).names
        if unnamed := [name for name in self.graders if not _NAME.fullmatch(name) or name in FUNCTIONS]:
            raise ValueError(
                f"'{unnamed[0]}' cannot be a grader's name in calculate_output: letters, digits and _ alone"
            )
        if unknown := sorted(names - set(self.graders)):
            raise ValueError(f"calculate_output names '{unknown[0]}', which is none of the graders")
        if unused := sorted(set(self.graders) - names):
            raise ValueError(f"the grade of '{unused[0]}' would be ignored: calculate_output does not name it")
        return self


Grader = Annotated[_Single | MultiGrader, Field(discriminator="type")]
GRADER_TYPES = tuple(get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(get_args(Grader)[0]))


def parts_of(grader: Grader) -> dict[str, SingleGrader]:
    """Return a grader, or the parts of a multi grader, by their places."""
    if isinstance(grader, MultiGrader):
        return {f"grader.graders.{name}": part for name, part in grader.graders.items()}
    return {"grader": grader}


def reward_graders(grader: Grader) -> dict[str, RewardModelGrader]:
    """Return the graders that are reward models, by their places."""
    return {place: part for place, part in parts_of(grader).items() if isinstance(part, RewardModelGrader)}


class SampleRewards(Frozen):
    """A reward model's scalars for a sample, or why there are none.

    `values`: by the scalars' names; None for one that is no finite number.
    """

    values: dict[str, float | None] = Field(default_factory=dict)
    error: Reason | None = None


class SampledItem(Frozen):
    """A row to grade: the model's output (at least `sample.output_text`) and the dataset's row that it answers."""

    sample: dict[str, JsonValue]
    item: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_text(self) -> "SampledItem":
        if not isinstance(self.sample.get("output_text"), str):
            raise ValueError("sample.output_text must be a text")
        return self

    @property
    def namespaces(self) -> dict[str, dict[str, JsonValue]]:
        """A sample as graders see it. `output_json` is added if the text is JSON and the field was not sent."""
        sample = dict(self.sample)
        if "output_json" not in sample and (parsed := _parsed(str(sample["output_text"]))) is not None:
            sample["output_json"] = parsed
        return {"sample": sample, "item": self.item}


def _parsed(text: str) -> JsonValue:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        parsed: JsonValue = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class SampleGrade(Frozen):
    """One line of the grades, in the order of the samples: a grade, or the reason for its absence."""

    place: str
    grade: float | None
    error: Reason | None = None
    parts: dict[str, float | None] = Field(default_factory=dict)


class GradeOneRequest(Frozen):
    """A request to grade one sample; without a sample, it only checks that the grader can be used."""

    grader: Grader
    sample: SampledItem | None = None


class OneGrade(Frozen):
    """A grade, or the reason for its absence; the grades of a multi grader's parts; the duration in seconds."""

    grade: float | None = None
    error: Reason | None = None
    parts: dict[str, float | None] = Field(default_factory=dict)
    duration_s: float = 0.0
