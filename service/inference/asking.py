"""Asks hosts to have their samplers answer, and reads the replies (service/answering.py is the other end)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import httpx
from pydantic import BaseModel

from service.accounts.limits import FairShare
from service.trust import Trust
from shared.chat.answer_records import new_answer_id
from shared.errors import InvalidInput
from shared.runs.serving import AnswerLine, AnswersAt, CompleteRequest, QuestionFailure
from shared.settings import Settings
from shared.storage.files import reachable

T = TypeVar("T", bound=BaseModel)
_CONNECT_S = 5.0
_LARGE_BYTES = 1 << 20  # of an answer; of larger ones each tenant has one at a time in this process
_MAX_BYTES = 256 << 20
_READ_BYTES = 8 << 20  # reading more takes so long that others would notice


class QuestionLost(Exception):
    """The sampler, or its host, was lost during a question. Another one may answer."""


@dataclass(frozen=True)
class Reply(Generic[T]):
    """An answer, as the JSON that the host sent."""

    kind: type[T]
    content: bytes

    def read(self) -> T:
        """Raises InvalidInput if it is too large to be read here."""
        if len(self.content) > _READ_BYTES:
            rule = f"the answer has {len(self.content):,} bytes, and {_READ_BYTES:,} may be streamed or translated"
            raise InvalidInput(f"{rule}: ask without `stream`, or for less", "n")
        return self.kind.model_validate_json(self.content)


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

    def put(self, texts: tuple[str, ...]) -> None:
        """Take texts that are longer. A sampler that takes the place of a lost one begins with shorter ones."""
        if sum(map(len, texts)) > sum(map(len, self.texts)):
            self.texts = texts
            self.changed.set()


class AnsweringHosts:
    """Connections to hosts that answer questions, kept for the next ones.

    Args:
        silence_s: a host that sends nothing for so long is taken for lost.
    """

    def __init__(self, settings: Settings, silence_s: float) -> None:
        self._settings = settings
        self._timeout = httpx.Timeout(silence_s, connect=_CONNECT_S)
        self._large = FairShare("large answers", 1, 600.0)
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._open = AsyncExitStack()

    async def close(self) -> None:
        self._clients.clear()
        await self._open.aclose()

    async def ask(self, at: AnswersAt, request: CompleteRequest, so_far: AnswerSoFar | None = None) -> bytes:
        """Return an answer's JSON. A caller that is cancelled hangs up.

        Raises:
            QuestionLost: host or sampler was lost, or cannot be reached. InvalidInput: the question cannot be answered.
            RuntimeError: the host failed. Busy: the tenant's large answers are awaited already.
        """
        content = request.model_dump_json().encode()
        try:
            client = await self._client(at)
            async with client.stream("POST", "/answers", content=content, timeout=self._timeout) as response:
                if response.status_code != httpx.codes.OK:
                    raise QuestionLost(f"the sampler's host refuses: {response.status_code}")
                return await self._read(response.aiter_raw(), request.tenant, so_far)
        except (httpx.TransportError, OSError) as error:
            raise QuestionLost(f"the sampler's host does not answer: {error!r}") from error

    async def _read(self, chunks: AsyncIterator[bytes], tenant: str, so_far: AnswerSoFar | None) -> bytes:
        found, texts, has_ended, is_large = bytearray(), list[str](), False, False
        async with AsyncExitStack() as held:
            async for chunk in chunks:
                found += chunk
                while not has_ended and (end := found.find(b"\n")) >= 0:
                    line = AnswerLine.model_validate_json(bytes(found[:end]) or b"{}")
                    del found[: end + 1]
                    has_ended = line.ends
                    if line.failure is not None:
                        _refuse(line.failure)
                    if line.grown and so_far is not None:
                        texts += [""] * (len(line.grown) - len(texts))
                        texts = [text + new for text, new in zip(texts, line.grown, strict=True)]
                        so_far.put(tuple(texts))
                if len(found) > _MAX_BYTES:
                    raise InvalidInput(f"the answer has more than {_MAX_BYTES:,} bytes: ask for less", "n")
                if len(found) > _LARGE_BYTES and not is_large:
                    is_large = True
                    await held.enter_async_context(self._large.place(tenant))
            return bytes(found)

    async def _client(self, at: AnswersAt) -> httpx.AsyncClient:
        """Return a client of a host: by its socket where that is on this machine, else by its address."""
        is_here = await asyncio.to_thread(Path(at.socket).is_socket)
        place = at.socket if is_here else at.address
        if place is None:
            setting = "LONGSHORE_SAMPLING__ANSWERS_ADDRESS"
            raise QuestionLost(f"the sampler's host is on another machine, and names no address: set {setting} there")
        if place not in self._clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            if is_here:
                uds = self._open.enter_context(reachable(Path(place)))
                transport, url = httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False), "http://host"
            else:
                verify = Trust.of(self._settings).client_context()
                transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False)
                url = f"https://{place}"
            client = httpx.AsyncClient(transport=transport, base_url=url, headers={"accept-encoding": "identity"})
            self._clients[place] = await self._open.enter_async_context(client)
        return self._clients[place]


def _refuse(failure: QuestionFailure) -> None:
    match failure.kind:
        case "refused":
            raise InvalidInput(failure.message, failure.place)
        case "lost":
            raise QuestionLost(failure.message)
        case "failed":
            raise RuntimeError(failure.message)
