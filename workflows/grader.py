"""A grader tried on one sample, before any run."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.grade_one import GradeOneRequest, OneGrade
    from workflows import policies


@workflow.defn
class GraderWorkflow:
    """One activity, so that a stranger's code runs in the control host's sandbox and not in the web service."""

    @workflow.run
    async def run(self, request: GradeOneRequest) -> OneGrade:
        grade: OneGrade = await workflow.execute_activity(
            "grade_one",
            request,
            result_type=OneGrade,
            start_to_close_timeout=policies.PREVIEW_TIMEOUT,
            heartbeat_timeout=policies.DATA_HEARTBEAT,
            retry_policy=policies.RETRY,
        )
        return grade
