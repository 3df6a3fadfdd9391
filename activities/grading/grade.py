"""Activities that grade samples by a user's grader, and that check a grader. Grades keep the samples' order."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path

from pydantic import Field, ValidationError

from activities.formats.rows import rows_of
from activities.grading.open_grader import GradeAll, GraderMeans, RewardedItem, answering, open_grader, servers_of
from activities.heartbeats import on_thread
from activities.host_context import OnHost, Parts
from activities.sandbox import calls as confined
from activities.sandbox.child import sign
from longshore.fields import Artifact, Frozen
from longshore.grading import GradeOneRequest, Grader, OneGrade, SampledItem, SampleGrade, SampleRewards, reward_graders
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.storage.artifacts import read_record
from shared.storage.paths import content_key, graded, graded_part

_VERSION = "grade-1"  # raise it when the same samples would get other grades
_ROWS_A_PART = 64  # each part's grades are stored before the next part begins, so that a kill costs one part
_NUM_REASONS, _REASON_CHARS = 5, 300

GRADES, SUMMARY, REWARDS = "grades.jsonl", "summary.json", "rewards.jsonl"


class GradeRequest(Frozen):
    """Samples to grade, and the grader. `samples`: JSONL files of one `SampledItem` a line, read in order of name.

    `rewards`: its reward models' scores of the samples, by the graders' `scorer`: a `SampleRewards` a line.
    """

    samples: Artifact
    grader: Grader
    rewards: dict[str, Artifact] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        """The store key, by content: where the samples' bytes came from does not matter."""
        given = (f"{scorer} {rewards.sha256}" for scorer, rewards in sorted(self.rewards.items()))
        return content_key(_VERSION, self.samples.sha256, self.grader, *given)


class GradeSummary(Frozen):
    """The content of `summary.json`. `mean` and `std` (of the population) are those of the graded samples.

    `reasons`: why the first few samples without a grade have none.
    """

    num_samples: int
    num_graded: int
    num_failed: int
    mean: float | None
    std: float | None
    reasons: tuple[str, ...]


class Graded(Frozen):
    """`grades` holds `grades.jsonl`, a `SampleGrade` a line, and `summary.json`."""

    grades: Artifact
    grades_uri: str
    summary: GradeSummary


class Grade(OnHost):
    """The activities `grade`, `check_grader` and `grade_one`."""

    @on_thread("grade")
    def grade(self, request: GradeRequest) -> Graded:
        """Grade every sample; if that fails, record the reason. The grades are an artifact in the store.

        Raises:
            InvalidInput: a row is not a sample; a grader that cannot be loaded, isolated or asked.
            StoreUnavailable: a scoring server or the store is away; finished grades are kept for the next try.
        """
        parts = Parts(self._host.store, partial(graded_part, request.key))

        def write(folder: Path) -> None:
            settings = self._host.settings
            samples, means = self._host.stage(request.samples), GraderMeans.of(settings)
            rewards = {scorer: self._host.stage(given) / REWARDS for scorer, given in request.rewards.items()}
            asked = samples, request.grader, means.without_key, parts.known(), rewards
            reads, answer = [samples, *rewards.values()], _answering(request.grader, means)
            with closing(
                confined.stream(settings.confined, graded_parts, *asked, kind="grading", answer=answer, reads=reads)
            ) as found:
                summary = _write_grades(found, parts, folder / GRADES)
            (folder / SUMMARY).write_text(summary.model_dump_json(indent=1) + "\n")

        key = graded(request.key)
        grades = self._host.made_once(key, "grade", write)
        summary = read_record(self._host.store, f"{key}/{SUMMARY}", GradeSummary)
        parts.forget(range(0, summary.num_samples, _ROWS_A_PART))
        return Graded(grades=grades, grades_uri=f"{grades.uri}/{GRADES}", summary=summary)

    @on_thread("check_grader")
    def check_grader(self, grader: Grader) -> None:
        """Check that this grader can grade here, before any GPU is asked for. Raises InvalidInput as `grade` would."""
        self._grade_sample(grader, None)

    @on_thread("grade_one")
    def grade_one(self, request: GradeOneRequest) -> OneGrade:
        """Grade one sample. Raises InvalidInput for a grader that cannot be loaded, isolated or asked, and for a
        reward model, which grades only in runs.
        """
        for place in reward_graders(request.grader):
            raise InvalidInput(
                "reward models are scored on a sampler that a run leases: they grade in runs alone", place
            )
        began = time.monotonic()
        found = self._grade_sample(request.grader, request.sample)
        return OneGrade(grade=found.grade, error=found.error, parts=found.parts, duration_s=time.monotonic() - began)

    def _grade_sample(self, grader: Grader, sample: SampledItem | None) -> SampleGrade:
        means = GraderMeans.of(self._host.settings)
        asked = grader, means.without_key, sample
        return self._host.confined(grade_sample, *asked, answer=_answering(grader, means))


def _answering(grader: Grader, means: GraderMeans) -> Callable[[bytearray], bytes]:
    return answering(servers_of(grader), means, "grader.base_url")


def graded_parts(
    samples: Path,
    grader: Grader,
    means: GraderMeans,
    done: frozenset[int],
    rewards: dict[str, Path],
) -> Iterator[tuple[int, tuple[SampleGrade, ...] | None]]:
    """Grade part after part, so that memory does not grow with the samples. Raises as `Grade.grade` does.

    Yields the number of each part's first sample, and its grades; None if they are known already.

    Args:
        done: the first samples of the parts that are graded already.
        rewards: files of reward models' scores, by their graders' `scorer`.
    """
    rows, first = _rewarded(sampled_items(samples), rewards) if rewards else sampled_items(samples), 0
    grade_all = open_grader(grader, means)
    while part := list(islice(rows, _ROWS_A_PART)):
        sign(part[0][0])
        yield first, None if first in done else tuple(_graded(part, grade_all))
        first += len(part)


def grade_sample(grader: Grader, means: GraderMeans, sample: SampledItem | None) -> SampleGrade:
    """Grade one sample. Without a sample only check the grader, and return neither grade nor error.

    Raises InvalidInput as `open_grader` does.
    """
    grade_all = open_grader(grader, means)
    if sample is None:
        return SampleGrade(place="", grade=None)
    return _graded([("", sample)], grade_all)[0]


def _write_grades(
    found: Iterable[tuple[int, tuple[SampleGrade, ...] | None]], parts: Parts, path: Path
) -> GradeSummary:
    """Write grades part by part. Each part is stored when it is finished, so that a kill costs at most one part."""
    grades, reasons, num_failed = list[float](), list[str](), 0
    with path.open("wb") as file:
        for first, part in found:
            if part is None:
                data = parts.get(first)
            else:
                data = b"".join(each.model_dump_json().encode() + b"\n" for each in part)
                parts.keep(first, data)
            file.write(data)
            for each in map(SampleGrade.model_validate_json, data.splitlines()):
                if each.grade is not None:
                    grades.append(each.grade)
                    continue
                num_failed += 1
                if len(reasons) < _NUM_REASONS:
                    reasons.append(f"{each.place}: {each.error}"[:_REASON_CHARS])
    if not grades and not num_failed:
        raise InvalidInput("there is nothing to grade: no row in any .jsonl file", "samples")
    mean = math.fsum(grades) / len(grades) if grades else None
    return GradeSummary(
        num_samples=len(grades) + num_failed,
        num_graded=len(grades),
        num_failed=num_failed,
        mean=mean,
        std=None if mean is None else math.sqrt(math.fsum((g - mean) ** 2 for g in grades) / len(grades)),
        reasons=tuple(reasons),
    )


def _rewarded(rows: Iterator[tuple[str, SampledItem]], rewards: dict[str, Path]) -> Iterator[tuple[str, SampledItem]]:
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in rewards.values()]
        for (place, item), *lines in zip(rows, *files, strict=True):
            found = dict(zip(rewards, map(SampleRewards.model_validate_json, lines), strict=True))
            yield place, RewardedItem(**dict(item), rewards=found)


def _graded(part: list[tuple[str, SampledItem]], grade_all: GradeAll) -> list[SampleGrade]:
    outcomes = grade_all([item for _, item in part])
    return [found.model_copy(update={"place": place}) for (place, _), found in zip(part, outcomes, strict=True)]


def sampled_items(folder: Path) -> Iterator[tuple[str, SampledItem]]:
    """The rows of a folder's JSONL files with their places, in the order of the files' names.

    Raises:
        InvalidInput: a row is not a sample.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.jsonl"))
    for name in names:
        for row in rows_of(folder / name, name):
            try:
                item = SampledItem.model_validate(row.fields)
            except ValidationError as error:
                raise InvalidInput(first_rule(error), row.place) from error
            yield row.place, item
