"""Deliver one notice to a tenant's webhooks, trying each until it accepts the notice or 28 hours have passed."""

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.records.deliver import Deliver, DeliverRequest
    from shared.automation.webhooks import WebhookRequest
    from workflows import policies
    from workflows.outcomes import was_cancelled


@workflow.defn(versioning_behavior=policies.MOVES)
class WebhookWorkflow:
    """Delivers one notice. The workflow's id is the notice's, so that no notice has two workflows."""

    @workflow.run
    async def run(self, request: WebhookRequest) -> None:
        await asyncio.gather(*(self._deliver(request, webhook_id) for webhook_id in request.webhook_ids))

    async def _deliver(self, request: WebhookRequest, webhook_id: str) -> None:
        delivery = DeliverRequest(webhook_id=webhook_id, notice=request.notice)
        queue = policies.queue_of("deliver", workflow.info().task_queue)
        try:
            await workflow.execute_activity_method(
                Deliver.deliver,
                delivery,
                task_queue=queue,
                schedule_to_close_timeout=policies.WEBHOOK_PATIENCE,
                start_to_close_timeout=policies.WEBHOOK_TIMEOUT,
                heartbeat_timeout=policies.DATA_HEARTBEAT,
                retry_policy=policies.webhook_retry(request.first_retry_s),
            )
        except ActivityError as error:
            if was_cancelled(error):
                raise
            workflow.logger.warning("%s did not take %s: %s", webhook_id, request.notice.notice_id, error.cause)
            await workflow.execute_activity_method(
                Deliver.give_up,
                delivery,
                task_queue=queue,
                start_to_close_timeout=policies.RECORD_TIMEOUT,
                retry_policy=policies.RECORD_RETRY,
            )
