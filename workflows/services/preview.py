"""A look at what a dataset's rows become, before any training."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from shared.runs.previews import Preview, PreviewStart
    from workflows import control, policies


@workflow.defn
class PreviewWorkflow:
    """One activity, so that the web service needs neither tokenizers nor the datasets' addresses."""

    @workflow.run
    async def run(self, start: PreviewStart) -> Preview:
        return await control.do("preview", start, Preview, within=policies.PREVIEW_TIMEOUT)
