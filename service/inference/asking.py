"""Sends questions to hosts, whose samplers answer, and reads the replies (the host's end: host_http/answers.py)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
from pydantic import BaseModel

from service.accounts.limits import FairShare
from service.host_http.clients import HostClients, HostUnreachable
from shared.chat.answer_records import new_answer_id
from shared.errors import InvalidInput
from shared.serving import AnswerLine, CompleteRequest, QuestionFailure
from shared.storage.host_states import HostAddress

T = TypeVar("T", bound=BaseModel)
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


class PartialAnswer:
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
    """Hosts that answer questions."""

    def __init__(self, clients: HostClients) -> None:
        self._clients = clients
        self._large = FairShare("large answers", 1, 600.0)

    async def ask(self, at: HostAddress, request: CompleteRequest, draft: PartialAnswer | None = None) -> bytes:
        """Return an answer's JSON. A caller that is cancelled hangs up.

        Raises:
            QuestionLost: host or sampler was lost, or cannot be reached. InvalidInput: the question cannot be answered.
            RuntimeError: the host failed. Busy: the tenant's large answers are awaited already.
        """
        content = request.model_dump_json().encode()
        try:
            client = await self._clients.to(at)
            async with client.stream("POST", "/answers", content=content) as response:
                if response.status_code != httpx.codes.OK:
                    raise QuestionLost(f"the sampler's host refuses: {response.status_code}")
                return await self._read(response.aiter_raw(), request.tenant, draft)
        except HostUnreachable as error:
            raise QuestionLost(f"the sampler's host cannot be asked: {error}") from error
        except (httpx.TransportError, OSError) as error:
            raise QuestionLost(f"the sampler's host does not answer: {error!r}") from error

    async def _read(self, chunks: AsyncIterator[bytes], tenant: str, draft: PartialAnswer | None) -> bytes:
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
                    if line.grown and draft is not None:
                        texts += [""] * (len(line.grown) - len(texts))
                        texts = [text + new for text, new in zip(texts, line.grown, strict=True)]
                        draft.put(tuple(texts))
                if len(found) > _MAX_BYTES:
                    raise InvalidInput(f"the answer has more than {_MAX_BYTES:,} bytes: ask for less", "n")
                if len(found) > _LARGE_BYTES and not is_large:
                    is_large = True
                    await held.enter_async_context(self._large.place(tenant))
            return bytes(found)


def _refuse(failure: QuestionFailure) -> None:
    match failure.kind:
        case "refused":
            raise InvalidInput(failure.message, failure.place)
        case "lost":
            raise QuestionLost(failure.message)
        case "failed":
            raise RuntimeError(failure.message)
