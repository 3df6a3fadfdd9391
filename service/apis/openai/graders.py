"""`/v1/fine_tuning/alpha/graders`: graders tried before a job is started with them."""

from typing import Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field, JsonValue

from longshore.fields import Frozen
from service.accounts.principals import Asking, require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.backend import Backed
from shared.grading.graders import Grader, OneGrade, SampledItem

router = APIRouter(
    route_class=JsonRoute,
    prefix="/v1/fine_tuning/alpha/graders",
    tags=["graders"],
    dependencies=[Depends(require("write"))],
)

MAX_SAMPLE_CHARS = 100_000


class RunGrader(Frozen):
    """A grader, what a model wrote, and the dataset's row that this answers."""

    grader: Grader
    model_sample: str = Field(max_length=MAX_SAMPLE_CHARS)
    item: dict[str, JsonValue] | None = None


class ValidateGrader(Frozen):
    grader: Grader


class GraderErrors(BaseModel):
    """Kinds of errors: one is true where there is no grade. `details`, our own field, has the reason in words."""

    formula_parse_error: bool = False
    invalid_variable_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    other_error: bool = False
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    details: str | None = None


class GraderMetadata(BaseModel):
    name: str
    type: str
    errors: GraderErrors
    execution_time: float
    scores: dict[str, float | None]
    sampled_model_name: str | None = None
    token_usage: int | None = None


class GraderAnswer(BaseModel):
    """`reward` is 0 if there is no grade; then `metadata.errors` says why."""

    object: Literal["grader.run"] = "grader.run"
    reward: float
    sub_rewards: dict[str, float | None]
    metadata: GraderMetadata
    model_grader_token_usage_per_model: dict[str, int] = {}


@router.post("/run")
async def run_grader(body: JsonBody[RunGrader], asking: Asking, backend: Backed) -> GraderAnswer:
    """Grade one sample."""
    await backend.runs.check_access(asking.tenant, body)
    sample = SampledItem(sample={"output_text": body.model_sample}, item=body.item or {})
    return _answer(body.grader, await backend.checks.grade(asking.tenant, body.grader, sample))


@router.post("/validate")
async def validate_grader(body: JsonBody[ValidateGrader], asking: Asking, backend: Backed) -> ValidateGrader:
    """See whether a grader could be used here: its source is loaded, its templates and formula are read."""
    await backend.runs.check_access(asking.tenant, body)
    await backend.checks.grade(asking.tenant, body.grader, None)
    return body


def _answer(grader: Grader, found: OneGrade) -> GraderAnswer:
    scores = found.parts or {grader.name: found.grade}
    return GraderAnswer(
        reward=found.grade if found.grade is not None else 0.0,
        sub_rewards=found.parts,
        metadata=GraderMetadata(
            name=grader.name,
            type=grader.type,
            errors=_errors(grader, found.error),
            execution_time=found.duration_s,
            scores=scores,
        ),
    )


def _errors(grader: Grader, reason: str | None) -> GraderErrors:
    if reason is None:
        return GraderErrors()
    match grader.type:
        case "python":
            return GraderErrors(
                python_grader_runtime_error=True, python_grader_runtime_error_details=reason, details=reason
            )
        case "string_check" | "text_similarity":
            return GraderErrors(invalid_variable_error=True, details=reason)
        case _:
            return GraderErrors(other_error=True, details=reason)
