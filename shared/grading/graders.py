"""Graders, which turn a sample into a number. Names and fields are OpenAI's; docs/graders.md describes each."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, JsonValue, TypeAdapter, ValidationError, field_validator, model_validator

from longshore.fields import Frozen
from shared.errors import InvalidInput
from shared.field_rules import Reason, first_error
from shared.grading.expressions import FUNCTIONS, MAX_EXPRESSION_CHARS, parse_expression
from shared.grading.templates import parse_template

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


class PythonGrader(Frozen):
    """Source that defines `grade(sample, item)`, which returns a finite number. Run in a sandbox."""

    type: Literal["python"] = "python"
    name: GraderName
    source: str
    image_tag: None = None

    @field_validator("source")
    @classmethod
    def _of_sane_size(cls, source: str) -> str:
        try:
            num_bytes = len(source.encode())
        except UnicodeEncodeError as error:
            raise ValueError("the source holds half of a surrogate pair, which is no text") from error
        if num_bytes > MAX_SOURCE_BYTES:
            raise ValueError(f"the source has {num_bytes:,} bytes; the limit is {MAX_SOURCE_BYTES:,}")
        if not re.search(r"\bgrade\b", source):
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
        default=None, min_length=1, max_length=200, description="which of its scalars; may be absent if it has one"
    )

    @property
    def scorer(self) -> str:
        """The key of its scores: graders that only differ in the scalar share them."""
        return self.model if self.base is None else f"{self.model} on {self.base}"


_Single = StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader | RewardModelGrader
SingleGrader = Annotated[_Single, Field(discriminator="type")]


class MultiGrader(Frozen):
    """Named graders, and an expression that combines their numbers (shared/grading/expressions.py)."""

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
_ADAPTER: TypeAdapter[Any] = TypeAdapter(Grader)


def parse_grader(fields: JsonValue) -> Grader:
    """Parse a grader that a user sent.

    Raises:
        InvalidInput: names the first wrong field, and the rule that it breaks.
    """
    try:
        grader: Grader = _ADAPTER.validate_python(fields)
    except ValidationError as error:
        field, rule = first_error(error, GRADER_TYPES)
        raise InvalidInput(rule, f"grader.{field}".rstrip(".")) from error
    return grader


def reward_graders(grader: Grader) -> dict[str, RewardModelGrader]:
    """Return the graders that are reward models, by their places."""
    parts = {"grader": grader}
    if isinstance(grader, MultiGrader):
        parts = {f"grader.graders.{name}": part for name, part in grader.graders.items()}
    return {place: part for place, part in parts.items() if isinstance(part, RewardModelGrader)}


def chosen_scalar(grader: RewardModelGrader, names: Sequence[str], place: str = "grader") -> int:
    """Return the number of the scalar that grades. Raises InvalidInput if the reward model lacks it, or has several and
    none is named.
    """
    if grader.scalar is None and len(names) > 1:
        raise InvalidInput(f"the reward model gives {', '.join(names)}: say which as scalar", f"{place}.scalar")
    if grader.scalar is not None and grader.scalar not in names:
        raise InvalidInput(f"the reward model has no {grader.scalar!r}: it gives {', '.join(names)}", f"{place}.scalar")
    return 0 if grader.scalar is None else names.index(grader.scalar)


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
