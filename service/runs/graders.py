"""Graders behind the APIs: tried on one sample by the control host."""

import re
import secrets
from datetime import timedelta

from pydantic import JsonValue
from temporalio.client import WorkflowFailureError

from service.accounts.limits import FairShare
from service.runs.runs import cause_of
from service.temporal import Temporal, share_of
from shared.errors import InvalidInput
from shared.grading.graders import GradeOneRequest, Grader, OneGrade, SampledItem
from shared.settings import Settings

GRADER_WORKFLOW = "GraderWorkflow"
_PATIENCE = timedelta(minutes=5)
_DEEPEST = 64
"""Of JSON within a sample. Beyond about 200, what was read at the door is no longer read in a workflow."""
_PLACED = re.compile(r"(?P<place>grader[\w.]*): (?P<message>.*)", re.DOTALL)


class Graders:
    """Keeps nothing of what is graded."""

    def __init__(self, settings: Settings, temporal: Temporal, checks: FairShare) -> None:
        self._queue = settings.control_queue
        self._temporal = temporal
        self._checks = checks

    async def run(self, tenant: str, grader: Grader, sample: SampledItem | None) -> OneGrade:
        """Grade a sample; or, without one, see whether the grader can be loaded.

        Raises:
            InvalidInput: the grader cannot be used here, with the reason; or the sample is nested too deep.
            Busy: the tenant has as many checks going on as it may.
        """
        if sample is not None and any(_depth(part) > _DEEPEST for part in (sample.sample, sample.item)):
            raise InvalidInput(f"what is graded is nested more than {_DEEPEST} deep", "sample")
        async with self._checks.place(tenant), self._temporal.client() as client:
            try:
                answer: OneGrade = await client.execute_workflow(
                    GRADER_WORKFLOW,
                    GradeOneRequest(grader=grader, sample=sample),
                    id=f"grader-{secrets.token_hex(8)}",
                    task_queue=self._queue,
                    priority=share_of(tenant),
                    execution_timeout=_PATIENCE,
                    result_type=OneGrade,
                )
            except WorkflowFailureError as error:
                raise _refusal(cause_of(error)) from None
        return answer


def _depth(value: JsonValue) -> int:
    """How deep objects and lists stand in each other."""
    match value:
        case dict():
            return 1 + max(map(_depth, value.values()), default=0)
        case list():
            return 1 + max(map(_depth, value), default=0)
        case _:
            return 0


def _refusal(error: Exception) -> Exception:
    """With the grader's field as its place: Temporal carries the two in one text."""
    match = _PLACED.fullmatch(str(error)) if isinstance(error, InvalidInput) else None
    return InvalidInput(match["message"], match["place"]) if match else error
