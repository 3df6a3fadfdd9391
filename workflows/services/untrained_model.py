"""A model as users name it made an artifact, before any run trains it."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from shared.runs.start import ModelRequest, ResolvedModel
    from workflows import control


@workflow.defn
class UntrainedModelWorkflow:
    """One activity, so that the web service reads no model files."""

    @workflow.run
    async def run(self, request: ModelRequest) -> ResolvedModel:
        return await control.do("resolve_model", request, ResolvedModel)
