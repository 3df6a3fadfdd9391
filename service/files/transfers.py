"""Moving files into the store: on threads of its own, since each may take minutes, and all else needs a thread too."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

_AT_ONCE = 8
_threads = ThreadPoolExecutor(_AT_ONCE, "transfers")
P = ParamSpec("P")
T = TypeVar("T")


async def transferred(move: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `move` returns. Others' transfers may come first."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(move, *args, **kwargs))
