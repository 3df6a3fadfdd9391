"""Opens a grader of any kind as a function that grades rows. No other module chooses among the kinds of graders."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from activities.grading.outcome import NotGraded, attempt
from activities.grading.python_sandbox import PythonSandbox
from activities.grading.score_model import ScoreModel
from activities.grading.text_similarity import string_check, text_similarity
from longshore.fields import Frozen
from shared.errors import InvalidInput
from shared.grading.expressions import Expression, ExpressionError, parse_expression
from shared.grading.graders import (
    Grader,
    MultiGrader,
    PythonGrader,
    RewardModelGrader,
    SampledItem,
    SampleGrade,
    SampleRewards,
    ScoreModelGrader,
    StringCheckGrader,
    TextSimilarityGrader,
    chosen_scalar,
)
from shared.grading.templates import TemplateError, render
from shared.settings import GradingSettings, Settings


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


@contextmanager
def open_grader(grader: Grader, means: GraderMeans, folder: Path) -> Iterator[GradeAll]:
    """Open a grader as a function that returns for each row, in order, a grade or the reason why there is none.

    Sandboxes run until the block ends, in folders below `folder`.

    Raises:
        InvalidInput: a source that cannot be loaded, a server that may not be asked, a system that cannot isolate.
    """
    with ExitStack() as stack:
        yield _opened(grader, means, folder, stack, "grader")


def _opened(grader: Grader, means: GraderMeans, folder: Path, stack: ExitStack, place: str) -> GradeAll:
    match grader:
        case StringCheckGrader():
            return _each(lambda row: string_check(grader.operation, *_rendered(grader.input, grader.reference, row)))
        case TextSimilarityGrader():
            metric = grader.evaluation_metric
            return _each(lambda row: text_similarity(metric, *_rendered(grader.input, grader.reference, row)))
        case PythonGrader():
            sandbox = _sandbox(grader, means.grading, folder, stack, place)
            return _each(lambda row: sandbox.grade(row.namespaces["sample"], row.item))
        case ScoreModelGrader():
            return ScoreModel(grader, means.grading, means.allow_private_addresses).grade_all
        case RewardModelGrader():
            return _each(lambda row: _reward(grader, row))
        case MultiGrader():
            parts = {
                name: _opened(part, means, folder / str(number), stack, f"{place}.graders.{name}")
                for number, (name, part) in enumerate(sorted(grader.graders.items()))
            }
            return _combined(parts, parse_expression(grader.calculate_output))


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


def _rendered(text: str, reference: str, row: SampledItem) -> tuple[str, str]:
    namespaces = row.namespaces
    try:
        return render(text, namespaces), render(reference, namespaces)
    except TemplateError as error:
        raise NotGraded(str(error)) from error


def _sandbox(
    grader: PythonGrader, settings: GradingSettings, folder: Path, stack: ExitStack, place: str
) -> PythonSandbox:
    folder.mkdir(parents=True, exist_ok=True)
    sandbox = stack.enter_context(PythonSandbox(grader.source, settings, folder))
    try:
        sandbox.check()
    except NotGraded as error:
        raise InvalidInput(str(error), f"{place}.source") from error
    return sandbox


def _combined(parts: dict[str, GradeAll], expression: Expression) -> GradeAll:
    def grade_all(rows: Sequence[SampledItem]) -> list[SampleGrade]:
        by_name = {name: grade(rows) for name, grade in parts.items()}
        return [combined({name: found[row] for name, found in by_name.items()}, expression) for row in range(len(rows))]

    return grade_all


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
