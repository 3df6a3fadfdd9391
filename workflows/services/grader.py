"""A grader tried on one sample, before any run."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from shared.grading.graders import GradeOneRequest, OneGrade
    from workflows import control, policies


@workflow.defn
class GraderWorkflow:
    """One activity, so that a stranger's code runs in the control host's sandbox and not in the web service."""

    @workflow.run
    async def run(self, request: GradeOneRequest) -> OneGrade:
        return await control.do("grade_one", request, OneGrade, within=policies.PREVIEW_TIMEOUT)
