"""Datasets of runs: where they are and the format of their rows; and teachers."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from longshore.fields import Frozen, Name
from longshore.losses import MOST_TEACHERS, DistillationSettings, several_teachers_fit
from longshore.training import PAIRED

Format = Literal[
    "auto", "chat", "prompt_completion", "alpaca", "sharegpt", "text", "tokenized", "preference", "openai_preference"
]


PAIR_FORMATS = ("preference", "openai_preference")


class DatasetSource(Frozen):
    """A dataset's URI and format. `auto` detects the format from the first rows, and refuses ambiguous ones."""

    uri: str = Field(min_length=1, max_length=2048)
    format: Format = Field(default="auto", description="the format of rows; auto: detected from the first rows")
    prompt_field: str | None = Field(default=None, description="the field that holds the prompt; else rows are chats")
    completion_field: str | None = Field(default=None, description="the field that holds the answer")
    assistant_turns: Literal["all", "last"] = Field(
        default="all",
        description="which answers of a conversation are trained; last: the conversation must end with an answer",
    )
    assistant_pattern: str | None = Field(
        default=None,
        min_length=1,
        max_length=500,
        description="only train those answers that match this regular expression somewhere",
    )


def _both_fields_or_none(source: DatasetSource) -> DatasetSource:
    if (source.prompt_field is None) != (source.completion_field is None):
        raise ValueError("prompt_field and completion_field go together: give both or neither")
    return source


def _prompts_alone(source: DatasetSource) -> DatasetSource:
    if source.format in ("text", "tokenized"):
        raise ValueError(
            f"rows of the format {source.format} ask nothing: prompts are chat rows, or have a prompt field"
        )
    if source.completion_field is not None:
        raise ValueError("completion_field has no meaning here: the model answers; graders see the whole row as item")
    if source.assistant_turns != "all" or source.assistant_pattern is not None:
        raise ValueError("assistant_turns and assistant_pattern have no meaning here: the model answers")
    return source


def _no_pairs(source: DatasetSource) -> DatasetSource:
    if source.format in PAIR_FORMATS:
        raise ValueError(f"rows of the format {source.format} are preference pairs, which dpo learns from")
    return source


def _preferences_alone(source: DatasetSource) -> DatasetSource:
    if source.format in ("text", "tokenized"):
        raise ValueError(f"rows of the format {source.format} have no answers that could be preferred")
    if source.assistant_turns != "all" or source.assistant_pattern is not None:
        raise ValueError("assistant_turns and assistant_pattern have no meaning here: whole answers are learned from")
    return source


def _pairs_alone(source: DatasetSource) -> DatasetSource:
    if source.format not in ("auto", *PAIR_FORMATS):
        raise ValueError(
            f"dpo learns from preference pairs, as reward does: format is auto, {' or '.join(PAIR_FORMATS)}; answers "
            "with a label are what the objective kto learns from, too"
        )
    if source.prompt_field is not None or source.completion_field is not None:
        raise ValueError("prompt_field and completion_field have no meaning here: the fields of pairs have their names")
    return source


RowsSource = Annotated[DatasetSource, AfterValidator(_both_fields_or_none)]


ExamplesSource = Annotated[RowsSource, AfterValidator(_no_pairs)]


PreferencesSource = Annotated[RowsSource, AfterValidator(_preferences_alone)]


PairsSource = Annotated[DatasetSource, AfterValidator(_pairs_alone)]


PromptsSource = Annotated[DatasetSource, AfterValidator(_prompts_alone)]


TeacherUri = Annotated[str, Field(min_length=1, max_length=2048)]


def _is_url(teacher: str) -> bool:
    return teacher.startswith(("http://", "https://"))


class TaughtBy(DistillationSettings):
    """The teacher of a distillation: on the student's base, which is loaded once, or behind a URL."""

    teacher: TeacherUri = Field(
        description="`base`, a published adapter on it (URI or name), or a URL (…/v1) that returns prompt_logprobs",
    )
    teacher_model: str | None = Field(
        default=None, min_length=1, max_length=256, description="the teacher's name at that URL"
    )
    teacher_key: str | None = Field(
        default=None, max_length=64, description="for a teacher behind a URL: the name of its key in this installation"
    )
    teachers: Annotated[tuple[tuple[Name, TeacherUri], ...], PAIRED] = Field(
        default=(),
        max_length=MOST_TEACHERS,
        description="further teachers by name, each as in `teacher`: a row's field `teacher` names one of them; "
        "other rows learn from `teacher`",
    )
    temperature: float = Field(default=1.0, gt=0, le=10, description="divides the logits of both while training")

    @property
    def teacher_url(self) -> str | None:
        return self.teacher if _is_url(self.teacher) else None

    @property
    def named_teachers(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.teachers)

    @model_validator(mode="after")
    def _several_are_on_the_base(self) -> Self:
        several_teachers_fit(self.teachers, self)
        if self.teachers and any(_is_url(uri) for uri in (self.teacher, *dict(self.teachers).values())):
            raise ValueError("several teachers are of the student's base, and none behind a URL")
        if len(set(self.named_teachers)) < len(self.teachers):
            raise ValueError("teachers: two have one name")
        return self

    @model_validator(mode="after")
    def _servers_tell_some_tokens(self) -> Self:
        if (self.teacher_url is None) != (self.teacher_model is None):
            raise ValueError("teacher_model is what a teacher behind a URL is called there: both, or neither")
        if self.teacher_key is not None and self.teacher_url is None:
            raise ValueError("teacher_key is of a teacher behind a URL: drop it")
        if self.teacher_url is not None and (self.tokens == "all" or self.temperature != 1):
            raise ValueError("a server tells log-probabilities of some tokens, at temperature 1: tokens top_k or drawn")
        return self
