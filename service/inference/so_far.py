"""What an answer that is still being drawn has so far, as the heartbeats of its activity tell it."""

import asyncio
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from temporalio.client import Client, WorkflowHandle
from temporalio.converter import ActivitySerializationContext
from temporalio.exceptions import TemporalError

from shared.chat.answer_records import new_answer_id
from shared.runs.serving import DrawnSoFar

_ASK_EVERY_S = 0.1
_PATIENCE = timedelta(seconds=2)


class AnswerSoFar:
    """The texts of an answer's choices, which only grow.

    Attributes:
        answer_id: the id that the answer will have.
        created: when it was asked for, in seconds since 1970.
        changed: is set when the texts have grown.
    """

    def __init__(self) -> None:
        self.created = int(time.time())
        self.answer_id = new_answer_id(self.created)
        self.texts: tuple[str, ...] = ()
        self.changed = asyncio.Event()

    async def follow(self, client: Client, handle: WorkflowHandle[Any, Any]) -> None:
        """Ask for the activity's last heartbeat again and again, until cancelled. A fault only delays the texts."""
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            with suppress(TemporalError):
                for texts in await _texts_of(client, handle):
                    self._put(texts)

    def _put(self, texts: tuple[str, ...]) -> None:
        """Take texts that are longer. A sampler that takes the place of a lost one begins with shorter ones."""
        if sum(map(len, texts)) > sum(map(len, self.texts)):
            self.texts = texts
            self.changed.set()


async def _texts_of(client: Client, handle: WorkflowHandle[Any, Any]) -> list[tuple[str, ...]]:
    """Return the texts in the last heartbeat of a question's activity, if it is running and has told any."""
    described = await handle.describe(rpc_timeout=_PATIENCE)
    found = []
    for pending in described.raw_description.pending_activities:
        context = ActivitySerializationContext(
            namespace=client.namespace,
            workflow_id=handle.id,
            workflow_type=described.workflow_type,
            activity_type=pending.activity_type.name,
            activity_id=pending.activity_id,
            activity_task_queue=None,
            is_local=False,
        )
        converter = client.data_converter.with_context(context)
        decoded = await converter.decode(pending.heartbeat_details.payloads, [cast(type, DrawnSoFar | None)])
        found += [each.texts for each in decoded if each is not None]
    return found
