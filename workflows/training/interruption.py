"""A run's work, and what may end it before its time: Temporal's cancellation, or a pause."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from temporalio import workflow

Result = TypeVar("Result")


class Work:
    """What a run does. A pause ends it where a cancellation would: at a step boundary, with a checkpoint."""

    def __init__(self) -> None:
        self.is_pausing = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def is_ending(self) -> bool:
        return self.is_pausing or workflow.cancellation_reason() is not None

    async def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Raises CancelledError, or what the work makes of it, when it is interrupted."""
        self._task = asyncio.create_task(work)
        if self.is_pausing:
            self._task.cancel()
        return await self._task

    def pause(self) -> None:
        self.is_pausing = True
        if self._task is not None:
            self._task.cancel()

    @staticmethod
    async def whole(part: Coroutine[Any, Any, Result]) -> Result:
        """A part that nothing interrupts; a cancellation that comes meanwhile is raised when it is done."""
        task = asyncio.create_task(part)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await task
            raise

    def check(self) -> None:
        """Raises CancelledError when a pause came after the work was done."""
        if self.is_pausing:
            raise asyncio.CancelledError
