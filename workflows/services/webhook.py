"""Telling a tenant's webhooks of one thing, each until it takes it or a day has passed."""

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.records.deliver import Delivered, DeliverRequest
    from shared.runs.webhooks import WebhookRequest
    from workflows import policies
    from workflows.outcomes import was_cancelled


@workflow.defn
class WebhookWorkflow:
    """One notice. Its id is the notice's, so that the same one is never told by two workflows."""

    @workflow.run
    async def run(self, request: WebhookRequest) -> None:
        await asyncio.gather(*(self._deliver(request, webhook_id) for webhook_id in request.webhook_ids))

    async def _deliver(self, request: WebhookRequest, webhook_id: str) -> None:
        delivery = DeliverRequest(webhook_id=webhook_id, notice=request.notice)
        queue = policies.queue_of("deliver", workflow.info().task_queue)
        try:
            await workflow.execute_activity(
                "deliver",
                delivery,
                result_type=Delivered,
                task_queue=queue,
                schedule_to_close_timeout=policies.WEBHOOK_PATIENCE,
                start_to_close_timeout=policies.WEBHOOK_TIMEOUT,
                heartbeat_timeout=policies.DATA_HEARTBEAT,
                retry_policy=policies.webhook_retry(request.first_retry_s),
            )
        except ActivityError as error:
            if was_cancelled(error):
                raise
            workflow.logger.warning("%s is not told of %s: %s", webhook_id, request.notice.notice_id, error.cause)
            await workflow.execute_activity(
                "give_up_delivery",
                delivery,
                task_queue=queue,
                start_to_close_timeout=policies.RECORD_TIMEOUT,
                retry_policy=policies.RECORD_RETRY,
            )
