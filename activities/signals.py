"""Signals from an activity's thread to the workflow that started it."""

import asyncio
import logging
from concurrent.futures import Future
from typing import Any, Protocol

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from shared.contract import Frozen

_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class Signals(Protocol):
    """Tells the workflow of the current activity something. To be called from the activity's thread."""

    def send(self, name: str, message: Frozen) -> "Future[bool]":
        """Begin to send one signal; False in the end if it did not arrive, which is no error of the activity's work."""
        ...


class WorkflowSignals:
    """Signals through the host's Temporal client, which lives in the host's event loop."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def send(self, name: str, message: Frozen) -> "Future[bool]":
        info = activity.info()
        assert info.workflow_id is not None
        handle = self._client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
        return asyncio.run_coroutine_threadsafe(_send(handle, name, message), self._loop)


async def _send(handle: WorkflowHandle[Any, Any], name: str, message: Frozen) -> bool:
    try:
        await asyncio.wait_for(handle.signal(name, message), _TIMEOUT_S)
    except (RPCError, TimeoutError) as error:
        _log.warning("signal %s did not reach %s: %s", name, handle.id, error)
        return False
    return True
