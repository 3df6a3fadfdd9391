"""A look at what a dataset's rows become, before any training."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.preview import Preview, PreviewRequest
    from workflows import policies


@workflow.defn
class PreviewWorkflow:
    """One activity, so that the web service needs neither tokenizers nor the datasets' addresses."""

    @workflow.run
    async def run(self, request: PreviewRequest) -> Preview:
        preview: Preview = await workflow.execute_activity(
            "preview",
            request,
            result_type=Preview,
            start_to_close_timeout=policies.PREVIEW_TIMEOUT,
            heartbeat_timeout=policies.DATA_HEARTBEAT,
            retry_policy=policies.RETRY,
        )
        return preview
