"""Signals from an activity's thread to the workflow that started it."""

import asyncio
import logging
from typing import Protocol

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError

from shared.models import Frozen

_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class Signals(Protocol):
    """Tells the workflow of the current activity something. Blocking: call it from the activity's thread."""

    def send(self, name: str, message: Frozen) -> bool:
        """Send one signal; False when it did not arrive, which is never an error of the activity's work."""
        ...


class WorkflowSignals:
    """Signals through the host's Temporal client, which lives in the host's event loop."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def send(self, name: str, message: Frozen) -> bool:
        info = activity.info()
        assert info.workflow_id is not None
        handle = self._client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
        sent = asyncio.run_coroutine_threadsafe(handle.signal(name, message), self._loop)
        try:
            sent.result(_TIMEOUT_S)
        except (RPCError, TimeoutError) as error:
            sent.cancel()
            _log.warning("signal %s did not reach %s: %s", name, info.workflow_id, error)
            return False
        return True
