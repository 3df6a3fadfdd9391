"""Decodes tenants' requests. A large body is read in a child process, under limits of memory and
processor time, in its tenant's share of such processes, and only for as long as its client waits.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from fastapi import HTTPException, Request
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from activities.sandbox.calls import Child, Limits, Server, machine_bytes
from activities.sandbox.child import types_of
from service.accounts.limits import FairShare
from service.database.engine import KeyedLocks
from service.files import Incoming, Received, uploads_folder
from shared.settings import Settings

AnswerT = TypeVar("AnswerT")
Arguments = TypeVarTuple("Arguments")

SMALL_BYTES = 64 << 10
"""Smaller bodies are read by the web process: the worst takes about a tenth of a second."""
_MEMORY_BYTES, _LARGE_MEMORY_BYTES = 1 << 30, 2 << 30
_CPU_S, _LARGE_CPU_S = 10, 120
_SILENCE_S = 300.0
_FILE_BYTES = 1 << 30
_AT_ONCE = 16  # small requests of a tenant
_PREPARED_AFTER_S = 30.0  # a service that starts has other work, and smaller bodies are read without children
_server = Server(("numpy", "service.app"), "decoder", niceness=10)  # whose routes have the decoders of bodies


class Decoding:
    """Calls functions on bodies of requests in child processes."""

    def __init__(self, settings: Settings) -> None:
        limits = settings.tenant_limits
        self._share = FairShare("large bodies", limits.bodies, limits.patience_s)
        self._room = asyncio.Semaphore(max(limits.bodies + 1, machine_bytes() // _LARGE_MEMORY_BYTES))
        self._incoming = Incoming(uploads_folder(settings.root_path))
        self.scratch = self._incoming.scratch
        self._turns = KeyedLocks(_AT_ONCE)

    def turn(self, tenant: str) -> asyncio.Semaphore:
        """Return what a tenant's request holds while this process works on it, and not while it waits for a result.

        Hundreds that come at once would otherwise share the event loop in small steps, and each short request beside
        them, of whatever tenant, would wait for a step of each of them, several times.
        """
        return self._turns.of(tenant)

    async def call(
        self,
        request: Request,
        function: Callable[[*Arguments], AnswerT],
        *arguments: *Arguments,
        is_small: bool = False,
        is_large: bool = False,
        reads: Sequence[Path] = (),
        writes: Sequence[Path] = (),
    ) -> AnswerT:
        """Call a module-level function in a child, which is ended when the request's client hangs up.

        Args:
            request: its body has been received.
            function: its parameters and its result are annotated with types that JSON can carry.
            is_small: the body may be read in this process, on a thread.
            is_large: the body may have more than some MiB.
            reads, writes: the files that the function sees.

        Raises:
            LongshoreError: the function's error. InvalidInput also if the child exceeded a limit or crashed.
            Busy: the tenant has as many bodies read as it may.
        """
        if is_small:
            return await asyncio.to_thread(function, *arguments)
        asking = getattr(request.state, "principal", None)
        tenant = asking.tenant if asking else ""
        work = self.call_for(tenant, function, *arguments, is_large=is_large, reads=reads, writes=writes)
        return await while_connected(request, work)

    async def call_for(
        self,
        tenant: str,
        function: Callable[[*Arguments], AnswerT],
        *arguments: *Arguments,
        is_large: bool = False,
        reads: Sequence[Path] = (),
        writes: Sequence[Path] = (),
    ) -> AnswerT:
        """Call a module-level function in a child, in a tenant's share. Raises as `call` does."""
        limits = Limits(
            _LARGE_MEMORY_BYTES if is_large else _MEMORY_BYTES,
            _LARGE_CPU_S if is_large else _CPU_S,
            _SILENCE_S,
            _FILE_BYTES,
            reads=reads,
            writes=writes,
        )
        async with self._share.place(tenant), self._room:
            frame = await _frame(limits, function, arguments)
        result: AnswerT = TypeAdapter(types_of(function)[1]).validate_json(frame)
        return result

    @asynccontextmanager
    async def received(self, request: Request, max_bytes: int) -> AsyncIterator[Received]:
        """Receive a body into a file, which lasts as long as the block.

        Raises HTTPException: it is larger (413), or does not come.
        """

        async def admit(size: int) -> None:
            if size > max_bytes:
                raise HTTPException(413, f"the body is larger than the {max_bytes} bytes that are taken here")

        tenant = request.state.principal.tenant
        async with self._incoming.received(tenant, request.stream(), admit) as body:
            yield body


async def small_body(request: Request) -> bytes | None:
    """Receive the body of a request that names a small length. None: it names another or none, and nothing is read."""
    length = request.headers.get("content-length", "")
    return await request.body() if length.isdigit() and int(length) <= SMALL_BYTES else None


async def _frame(limits: Limits, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytearray:
    """Call a function in a child, and return its result's JSON. A task that is cancelled ends the child."""
    children, is_over = list[Child](), threading.Event()

    def ask() -> bytearray:
        child = Child(_server, limits, function, arguments)
        children.append(child)
        try:
            if is_over.is_set():  # cancelled before there was a child
                raise RuntimeError("nobody waits for this call any more")
            [frame] = child.results()
            return frame
        finally:
            child.close()

    try:
        return await asyncio.to_thread(ask)
    finally:
        is_over.set()
        for child in children:
            child.abandon()


async def while_connected(request: Request, work: Coroutine[Any, Any, AnswerT]) -> AnswerT:
    """Await work, and cancel it when the client hangs up. The request's body has been received."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def prepare_children() -> None:
    """Start the sandbox's server soon, so that the first large body does not wait for it."""
    timer = threading.Timer(_PREPARED_AFTER_S, _server.start)
    timer.daemon = True
    timer.start()


os.register_at_fork(after_in_child=_server.forget_parents)
