"""Checks before a run, done by the control host: a preview of a dataset, a grader tried on one sample."""

import re
import secrets
from datetime import timedelta

from pydantic import JsonValue

from service.accounts.limits import FairShare
from service.runs.runs import Runs
from service.temporal import Temporal
from shared.errors import InvalidInput
from shared.grading.graders import GradeOneRequest, Grader, OneGrade, SampledItem
from shared.jobs.steps import Cut
from shared.runs.previews import Preview, PreviewRequest, PreviewStart

PREVIEW_WORKFLOW, GRADER_WORKFLOW = "PreviewWorkflow", "GraderWorkflow"
_PATIENCE = timedelta(minutes=5)
_DEEPEST = 64
"""Levels of JSON within a sample. Beyond about 200, a workflow cannot read what the service has read."""
_PLACED = re.compile(r"(?P<place>grader[\w.]*): (?P<message>.*)", re.DOTALL)


class Checks:
    """Runs checks, and keeps nothing of them. Each method raises Busy if a tenant has too many checks open."""

    def __init__(self, runs: Runs, temporal: Temporal, places: FairShare) -> None:
        self._runs = runs
        self._temporal = temporal
        self._places = places

    async def preview(self, tenant: str, request: PreviewRequest, cut: Cut | None = None) -> Preview:
        """Tokenize a dataset's first rows; with a cut, return the length of a run on them.

        Raises InvalidInput: the data cannot be read.
        """
        await self._runs.check_access(tenant, request)
        start = PreviewStart(tenant=tenant, request=await self._runs.sealed(tenant, request), cut=cut)
        async with self._places.place(tenant):
            workflow_id = f"preview-{secrets.token_hex(8)}"
            return await self._temporal.ask(
                PREVIEW_WORKFLOW, start, Preview, workflow_id=workflow_id, tenant=tenant, within=_PATIENCE
            )

    async def grade(self, tenant: str, grader: Grader, sample: SampledItem | None) -> OneGrade:
        """Grade a sample; without one, only load the grader.

        Raises InvalidInput: the grader cannot be used here, with the reason; or the sample is nested too deep.
        """
        if sample is not None and any(_depth(part) > _DEEPEST for part in (sample.sample, sample.item)):
            raise InvalidInput(f"the sample is nested more than {_DEEPEST} levels deep", "sample")
        request = GradeOneRequest(grader=grader, sample=sample)
        async with self._places.place(tenant):
            workflow_id = f"grader-{secrets.token_hex(8)}"
            try:
                return await self._temporal.ask(
                    GRADER_WORKFLOW, request, OneGrade, workflow_id=workflow_id, tenant=tenant, within=_PATIENCE
                )
            except InvalidInput as error:  # Temporal carries its place and its message in one text
                found = _PLACED.fullmatch(str(error))
                raise InvalidInput(found["message"], found["place"]) if found else error from None


def _depth(value: JsonValue) -> int:
    """The number of objects and lists that are nested in each other."""
    match value:
        case dict():
            return 1 + max(map(_depth, value.values()), default=0)
        case list():
            return 1 + max(map(_depth, value), default=0)
        case _:
            return 0
