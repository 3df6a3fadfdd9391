"""The native API's graders, `/api/v1/graders`: tried on a sample before a run uses them."""

from fastapi import APIRouter

from service.accounts.principals import Asking
from service.apis.json_bodies import JsonBody, JsonRoute
from service.backend import Backed
from shared.contract import Frozen
from shared.grading.graders import Grader, OneGrade, SampledItem

router = APIRouter(route_class=JsonRoute)


class GraderTrial(Frozen):
    """A grader, and what it is to grade; without a sample it is only made ready."""

    grader: Grader
    sample: SampledItem | None = None


@router.post("/graders/run")
async def try_grader(trial: JsonBody[GraderTrial], backend: Backed, asking: Asking) -> OneGrade:
    """Grade one sample, or see whether the grader can be loaded. Without a grade, `error` says why."""
    await backend.runs.check_access(asking.tenant, trial)
    return await backend.graders.run(asking.tenant, trial.grader, trial.sample)
