"""Grade one sample on its own, or see whether a grader could: for somebody who is writing a grader, and waits."""

import time

from pydantic import Field
from temporalio import activity

from activities.grading.open_grader import open_grader
from activities.heartbeat import beating
from activities.scratch import scratch_folder
from shared.graders import Grader, SampledItem
from shared.models import Frozen
from shared.paths import HostPaths
from shared.settings import Settings


class GradeOneRequest(Frozen):
    """`sample` is None: the grader is only made ready."""

    grader: Grader
    sample: SampledItem | None = None


class OneGrade(Frozen):
    """A grade, or the reason why there is none; the grades of a multi grader's parts; seconds that it took."""

    grade: float | None = None
    error: str | None = None
    parts: dict[str, float | None] = Field(default_factory=dict)
    duration_s: float = 0.0


class GradeOne:
    """Needs settings for scratch space, and for what graders may do."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @activity.defn(name="grade_one")
    def grade_one(self, request: GradeOneRequest) -> OneGrade:
        """Raises InvalidInput for a grader that cannot be loaded, isolated or asked."""
        began = time.monotonic()
        scratch = HostPaths(self._settings.root_path).scratch
        with (
            beating(),
            scratch_folder(scratch, "grade") as folder,
            open_grader(request.grader, self._settings, folder) as grade_all,
        ):
            if request.sample is None:
                return OneGrade(duration_s=time.monotonic() - began)
            outcome = grade_all([request.sample])[0]
        return OneGrade(
            grade=outcome.grade, error=outcome.error, parts=outcome.parts, duration_s=time.monotonic() - began
        )
