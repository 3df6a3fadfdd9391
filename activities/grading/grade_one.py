"""Grade one sample on its own, or see whether a grader could: for somebody who is writing a grader, and waits."""

import time

from temporalio import activity

from activities.confined import calls as confined
from activities.grading.grade import OneGradeWork, grade_one_of
from activities.grading.open_grader import GraderMeans
from activities.heartbeat import beating
from activities.scratch import scratch_folder
from shared.grading.graders import GradeOneRequest, OneGrade
from shared.settings import Settings
from shared.storage.paths import HostPaths


class GradeOne:
    """Needs settings for scratch space, and for what graders may do."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @activity.defn(name="grade_one")
    def grade_one(self, request: GradeOneRequest) -> OneGrade:
        """Raises InvalidInput for a grader that cannot be loaded, isolated or asked."""
        began = time.monotonic()
        scratch = HostPaths(self._settings.root_path).scratch
        with beating(), scratch_folder(scratch, "grade") as folder:
            work = OneGradeWork(
                grader=request.grader, means=GraderMeans.of(self._settings), folder=folder, sample=request.sample
            )
            found = confined.call(grade_one_of, work, self._settings.confined)
        return OneGrade(grade=found.grade, error=found.error, parts=found.parts, duration_s=time.monotonic() - began)
