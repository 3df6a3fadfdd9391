"""Waiting for what another process or thread does. The patience says nothing of how long that should take."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 300.0


def wait_until(
    condition: Callable[[], T | None], what: str, timeout_s: float = _PATIENCE_S, every_s: float = 0.05
) -> T:
    """Poll until the condition holds; its truthy answer is returned."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(every_s)
    raise TimeoutError(f"{what}: not within {timeout_s} s")


async def eventually(condition: Callable[[], Awaitable[Any] | Any], what: str, timeout_s: float = _PATIENCE_S) -> Any:
    """Poll until the condition, or what it makes awaitable, holds; its truthy answer is returned."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        answer = condition()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return answer
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{what}: not within {timeout_s} s")


@asynccontextmanager
async def meanwhile(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """These go on for the block, within which none may end."""
    going_on = [asyncio.create_task(work) for work in works]
    try:
        yield
        assert not any(task.done() for task in going_on), going_on
    finally:
        for task in going_on:
            task.cancel()
        await asyncio.wait(going_on)
