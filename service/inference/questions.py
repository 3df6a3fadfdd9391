"""Answers questions to published models: finds a sampler for each, and another one if that is lost.

Samplers are leased by the serving workflow of the model, which is started if necessary. Questions and
answers go between this process and the sampler's host alone.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from service.accounts.limits import FairShare
from service.host_http.connections import HostClients, HostUnreachable
from service.inference.art_models import ArtModels, ArtName, UntrainedModels
from service.inference.published_models import PublishedModels, Target
from service.runs.rows import RunRows
from service.temporal import LOST_UPDATES, PATIENCE, Temporal, causes_of, unless_unknown
from shared.chat import trajectories
from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.episodes import TurnPlace
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.chat.streams import EventStream, MessageObject, ResponseObject, StreamStart
from shared.chat.trajectories import new_answer_id
from shared.errors import InvalidInput, NotFound, SamplerUnavailable
from shared.jobs.job import LeaseGrant, SamplerKey
from shared.runs.start import timing_of
from shared.serving import (
    LOST,
    AnswerHead,
    CompleteRequest,
    LeasedSampler,
    QuestionFailure,
    SamplerPlace,
    ServedSampler,
    ServeRequest,
    ServingStart,
    sampler_of_questions,
    serving_id,
)
from shared.settings import Settings
from shared.storage.host_states import HostAddress, announced
from shared.storage.store import ObjectStore

# --- Sends questions to hosts, whose samplers answer, and reads the replies ---
# The host's end: host_http/answers.py.

T = TypeVar("T", bound=BaseModel)
_LARGE_BYTES = 1 << 20  # of an answer; of larger ones each tenant has one at a time in this process
_MAX_BYTES = 256 << 20
_READ_BYTES = 8 << 20  # reading more takes so long that others would notice


class SamplerLost(Exception):
    """The sampler, or its host, was lost during a question. Another one may answer."""


@dataclass(frozen=True)
class Reply(Generic[T]):
    """An answer, as the JSON that the host sent."""

    kind: type[T]
    content: bytes

    def read(self) -> T:
        """Raises InvalidInput if it is too large to be read here."""
        if len(self.content) > _READ_BYTES:
            raise _too_large(len(self.content))
        return self.kind.model_validate_json(self.content)


class StreamedAnswer:
    """The events of a streamed answer, as its host writes them.

    Attributes:
        changed: is set when there are events to take.
    """

    def __init__(
        self,
        asked: ChatRequest | CompletionRequest,
        begun: Callable[[str, int], ResponseObject | MessageObject] | None = None,
    ) -> None:
        """`begun`: makes the response or message that an answer belongs to, from its id and time."""
        self._asked = asked
        created = int(time.time())
        answer_id = new_answer_id(created)
        self._start = StreamStart.of(answer_id, created, begun and begun(answer_id, created))
        self._events, self._num_taken, self._part = bytearray(), 0, b""
        self.changed = asyncio.Event()

    @property
    def start(self) -> StreamStart:
        """The stream from here on, for the next host."""
        return self._start.model_copy(update={"sent": self._events.decode()})

    def begin(self) -> None:
        """Forget the part of an event that a lost host has sent."""
        self._part = b""

    def put(self, data: bytes) -> None:
        """Take bytes of the stream. Raises InvalidInput: there are too many to continue it after a loss."""
        whole, end, self._part = (self._part + data).rpartition(b"\n\n")
        if len(self._events) + len(whole) > _READ_BYTES:
            raise _too_large(len(self._events) + len(whole))
        self._events += whole + end
        if end:
            self.changed.set()

    def take(self) -> bytes:
        """Return the whole events since the last call."""
        data = bytes(memoryview(self._events)[self._num_taken :])
        self._num_taken = len(self._events)
        self.changed.clear()
        return data

    def failed(self, message: str) -> bytes:
        """Return the end of the stream if no host can continue it."""
        return EventStream(self.start, self._asked).failed(message)


def _too_large(num_bytes: int) -> InvalidInput:
    rule = f"the answer has {num_bytes:,} bytes, and {_READ_BYTES:,} may be streamed or translated"
    return InvalidInput(f"{rule}: ask without `stream`, or for less", "n")


class SamplerHostClient:
    """Hosts that answer questions."""

    def __init__(self, clients: HostClients) -> None:
        self._clients = clients
        self._large = FairShare("large answers", 1, 600.0)

    async def ask(self, at: HostAddress, request: CompleteRequest, draft: StreamedAnswer | None = None) -> bytes:
        """Return an answer's JSON; or put its events into `draft`. A caller that is cancelled hangs up.

        Raises:
            SamplerLost: host or sampler was lost, or cannot be reached. InvalidInput: the question cannot be answered.
            RuntimeError: the host failed. Busy: the tenant's large answers are awaited already.
        """
        content = request.model_dump_json().encode()
        try:
            client = await self._clients.to(at)
            async with client.stream("POST", "/answers", content=content) as response:
                if response.status_code != httpx.codes.OK:
                    raise SamplerLost(f"the sampler's host refuses: {response.status_code}")
                body = _body(response.aiter_raw())
                if draft is None:
                    return await self._whole(body, request.tenant)
                draft.begin()
                async for piece in body:
                    draft.put(piece)
                return b""
        except HostUnreachable as error:
            raise SamplerLost(f"the sampler's host cannot be asked: {error}") from error
        except (httpx.TransportError, OSError) as error:
            raise SamplerLost(f"the sampler's host does not answer: {error!r}") from error

    async def _whole(self, body: AsyncIterator[bytes], tenant: str) -> bytes:
        found, is_large = bytearray(), False
        async with AsyncExitStack() as held:
            async for piece in body:
                found += piece
                if len(found) > _MAX_BYTES:
                    raise InvalidInput(f"the answer has more than {_MAX_BYTES:,} bytes: ask for less", "n")
                if len(found) > _LARGE_BYTES and not is_large:
                    is_large = True
                    await held.enter_async_context(self._large.place(tenant))
        return bytes(found)


async def _body(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield an answer behind its head. Raises the failure that the head says; SamplerLost: LOST was in its middle."""
    head, is_begun = b"", False
    async for chunk in chunks:
        data = chunk
        while not is_begun and b"\n" in (head := head + data):
            line, _, data = head.partition(b"\n")
            head = b""
            if is_begun := bool(line):
                match AnswerHead.model_validate_json(line).failure:
                    case QuestionFailure(kind="refused", message=message, place=place):
                        raise InvalidInput(message, place)
                    case QuestionFailure(kind="lost", message=message):
                        raise SamplerLost(message)
                    case QuestionFailure(message=message):
                        raise RuntimeError(message)
        if is_begun:
            data, lost, why = data.partition(LOST)
            yield data
            if lost:
                raise SamplerLost(why.decode(errors="replace"))


logger = logging.getLogger("longshore.service")

SERVING_WORKFLOW = "ServingWorkflow"
_ATTEMPTS = 4
_ANSWER_S = 600.0  # OpenAI's clients wait this long
_CONTROL_PATIENCE_S = 15.0  # added to a question's patience, for hosts that run workflows
_MAX_REUSE_S = 10.0
WAITS_S = 15.0
_TRIES = 3
_CHARACTERS_PER_TOKEN = 16
"""More than the tokens of any text have on average, but for long runs of blanks."""
_REFUSALS = ("invalid_input", "corrupt_artifact")


@dataclass(frozen=True)
class SamplerLease:
    """A sampler's lease: its serving workflow, and the grant with the host's queue. Good until the sampler is lost."""

    serving_id: str
    grant: LeaseGrant


class SamplerLeases:
    """Leases samplers. One question to a model requests the lease; others share the answer for some seconds.

    This saves updates: Temporal accepts only ten at a time for a workflow.
    """

    def __init__(self, settings: Settings, temporal: Temporal) -> None:
        self._settings = settings
        self._temporal = temporal
        self._asking: dict[str, asyncio.Task[LeaseGrant]] = {}
        self._asked_at: dict[str, float] = {}
        self._known: dict[str, tuple[LeaseGrant, float]] = {}
        self._reuse_s = min(_MAX_REUSE_S, settings.serving.idle_s / 3)

    async def lease(self, key: SamplerKey) -> SamplerLease:
        """Return the lease of a sampler that is up.

        Raises:
            SamplerUnavailable: none came up in time. InvalidInput: no sampler can use the model.
            TemporalUnavailable: the server, or every host that runs workflows, is away.
        """
        workflow_id = serving_id(self._settings, key)
        grant, until = self._known.get(workflow_id, (None, 0.0))
        if grant is None or time.monotonic() > until:
            grant = await asyncio.shield(self._ask_once(workflow_id, key))
        return SamplerLease(workflow_id, grant)

    def forget(self, lease: SamplerLease) -> None:
        self._known.pop(lease.serving_id, None)

    def waiting(self) -> frozenset[str]:
        """Return the serving workflows of models whose questions wait for longer than a sampler takes to start."""
        now = time.monotonic()
        return frozenset(serving_id for serving_id, since in self._asked_at.items() if now - since > WAITS_S)

    def _ask_once(self, serving_id: str, key: SamplerKey) -> asyncio.Task[LeaseGrant]:
        if serving_id not in self._asking:
            task = asyncio.create_task(self._ask(serving_id, key))
            self._asking[serving_id] = task
            self._asked_at[serving_id] = time.monotonic()
            task.add_done_callback(lambda task: self._asked(serving_id, task))
        return self._asking[serving_id]

    def _asked(self, serving_id: str, task: asyncio.Task[LeaseGrant]) -> None:
        del self._asking[serving_id], self._asked_at[serving_id]
        if not task.cancelled() and task.exception() is None:
            self._known[serving_id] = (task.result(), time.monotonic() + self._reuse_s)

    async def _ask(self, serving_id: str, key: SamplerKey) -> LeaseGrant:
        """Ask the serving workflow for its sampler, and start the workflow if it does not run."""
        settings, serving = self._settings, self._settings.serving
        start = ServingStart(
            serving_id=serving_id,
            key=key,
            shape=settings.shape,
            timing=timing_of(settings),
            idle_s=serving.idle_s,
            share_s=serving.share_s,
        )
        async with self._temporal.client() as client:
            try:
                async with asyncio.timeout(serving.patience_s + _CONTROL_PATIENCE_S):
                    for _ in range(_TRIES):
                        with _unless_it_ended():
                            return await client.execute_update_with_start_workflow(
                                "serve",
                                ServeRequest(patience_s=serving.patience_s),
                                start_workflow_operation=WithStartWorkflowOperation(
                                    SERVING_WORKFLOW,
                                    start,
                                    id=serving_id,
                                    task_queue=settings.control_queue,
                                    id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                                ),
                                result_type=LeaseGrant,
                            )
            except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
                raise SamplerUnavailable("no control host answers") from None
        raise SamplerUnavailable("the sampler's workflow ended as often as it was started")


@contextmanager
def _unless_it_ended() -> Iterator[None]:
    """Pass over an update that was lost because its workflow has just ended. Raises the refusal of a question."""
    try:
        yield
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
    except WorkflowUpdateFailedError as error:
        for cause in causes_of(error):
            match cause:
                case ApplicationError(type=kind) if kind in LOST_UPDATES:
                    return
                case ApplicationError(type=kind) if kind in _REFUSALS:
                    raise InvalidInput(cause.message, "model") from None
                case ApplicationError():
                    raise SamplerUnavailable(cause.message) from None
        raise


class Inference:
    """Asks published models. The token ids of chat answers are kept for a while, to be trained on."""

    def __init__(
        self,
        settings: Settings,
        store: ObjectStore,
        published: PublishedModels,
        art_models: ArtModels,
        untrained: UntrainedModels,
        temporal: Temporal,
        questions: FairShare,
        hosts: HostClients,
    ) -> None:
        self._settings = settings
        self._store = store
        self._temporal = temporal
        self.leases = SamplerLeases(settings, temporal)
        self._hosts = SamplerHostClient(hosts)
        self._announced: tuple[list[HostAddress], float] = [], 0.0
        self._published = published
        self._art_models = art_models
        self._untrained = untrained
        self._questions = questions

    async def chat(
        self, tenant: str, asked: ChatRequest, draft: StreamedAnswer | None = None, turn: TurnPlace | None = None
    ) -> Reply[ChatCompletion]:
        """Ask a model to answer messages. `draft` receives the events of a stream, and the reply is empty.

        `turn`: of an episode, before whose answer the question is kept there; one that is kept is answered as before.

        Raises:
            NotFound: no such model. InvalidInput: the question cannot be answered; names the field.
            SamplerUnavailable: there is no sampler for it now. TemporalUnavailable: nobody to ask.
            Busy: the tenant has as many questions open as it may.
        """
        _check_text(self._settings, [asked.messages, asked.offered_tools], "messages")
        async with self._place(tenant, asked):
            return Reply(ChatCompletion, await self._ask(tenant, asked, draft, turn=turn))

    async def complete(
        self, tenant: str, asked: CompletionRequest, draft: StreamedAnswer | None = None
    ) -> Reply[CompletionResponse]:
        """Continue a text, or token ids, with a model. Otherwise as `chat`."""
        check_length(self._settings, asked.prompt)
        async with self._place(tenant, asked):
            return Reply(CompletionResponse, await self._ask(tenant, asked, draft))

    async def count(self, tenant: str, asked: ChatRequest) -> int:
        """Return the number of tokens of a chat's prompt. Raises the errors of `chat`."""
        _check_text(self._settings, [asked.messages, asked.offered_tools], "messages")
        async with self._place(tenant, asked):
            told = await self._ask(tenant, asked, None, counts_only=True)
        return ChatCompletion.model_validate_json(told).usage.prompt_tokens

    async def complete_with(self, tenant: str, target: Target, asked: CompletionRequest) -> Reply[CompletionResponse]:
        """Continue token ids with weights that the caller has found. Raises the errors of `chat`, except NotFound."""
        async with self._place(tenant, asked):
            return Reply(CompletionResponse, await self._ask_target(tenant, target, asked))

    def _place(self, tenant: str, asked: ChatRequest | CompletionRequest) -> AbstractAsyncContextManager[None]:
        return self._questions.place(tenant, len(asked.model_dump_json()))

    async def prune(self) -> None:
        """Delete records of answers that are too old, or too many."""
        serving = self._settings.serving
        prune = partial(trajectories.prune_answers, self._store, time.time(), serving.answers_kept_s)
        await asyncio.to_thread(prune, serving.answers_max_bytes)

    async def _ask(
        self,
        tenant: str,
        asked: ChatRequest | CompletionRequest,
        draft: StreamedAnswer | None,
        **of_request: Any,
    ) -> bytes:
        """Ask the model that the question names. `of_request`: further fields of the request to the host."""
        if (name := ArtName.parse(asked.model)) is not None:
            # ART's clients need token ids for training, but do not ask for them
            if isinstance(asked, ChatRequest) and of_request.get("turn") is None:
                ids = True if asked.return_token_ids is None else asked.return_token_ids
                logprobs = True if asked.logprobs is None else asked.logprobs
                asked = asked.model_copy(update={"logprobs": logprobs, "return_token_ids": ids})
            target = await self._art_models.target(tenant, name)
        else:
            target = await self._named(tenant, asked.model)
        if draft is not None and asked.seed is None:  # another sampler draws the same, if this one is lost
            asked = asked.model_copy(update={"seed": secrets.randbits(61)})
        return await self._ask_target(tenant, target, asked, draft, **of_request)

    async def _named(self, tenant: str, name: str) -> Target:
        """Return the weights of a tenant's published model; else of the installation's base model of that name."""
        try:
            return await asyncio.to_thread(self._published.asked, tenant, name)
        except NotFound:
            if (uri := self._untrained.uri_of(name)) is None:
                raise
        return await self._untrained.target(tenant, uri)

    async def _ask_target(
        self,
        tenant: str,
        target: Target,
        asked: ChatRequest | CompletionRequest,
        draft: StreamedAnswer | None = None,
        **of_request: Any,
    ) -> bytes:
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(2.0 ** (attempt - 2))
            # An installation that uses an external inference server leases no sampler.
            lease = None
            if self._settings.sampling.url is None:
                lease = await self.leases.lease(sampler_of_questions(self._settings, target.model, target.dtype))
            try:
                async with asyncio.timeout(_ANSWER_S):
                    place: SamplerPlace = ServedSampler()
                    if lease is None:
                        at = await self._served_at(attempt)
                    else:
                        grant = lease.grant
                        assert grant.host_socket is not None
                        at = HostAddress(socket=grant.host_socket, address=grant.host_address)
                        place = LeasedSampler(run_id=lease.serving_id, fence=grant.fence, worker_id=grant.worker_id)
                    request = CompleteRequest(
                        tenant=tenant,
                        name=target.name,
                        version=target.version,
                        model=target.model,
                        adapter=target.adapter,
                        base=target.base,
                        place=place,
                        asked=asked,
                        stream=draft.start if draft else None,
                        **of_request,
                    )
                    return await self._hosts.ask(at, request, draft)
            except (SamplerLost, TimeoutError) as lost:
                problem = str(lost) or f"no answer came within {_ANSWER_S:g} s"
                logger.warning("a question to %s is asked again: %s", asked.model, problem)
                if lease is not None:
                    self.leases.forget(lease)
        raise SamplerUnavailable(problem)

    async def _served_at(self, attempt: int) -> HostAddress:
        """Return the control host to ask for the external inference server; each attempt gets another one."""
        known, until = self._announced
        if attempt or time.monotonic() > until or not known:
            known = await asyncio.to_thread(announced, self._store)
            self._announced = known, time.monotonic() + _MAX_REUSE_S
        if not known:
            raise SamplerLost("no control host that asks the installation's sampler is up")
        return known[attempt % len(known)]


def check_length(settings: Settings, prompt: str | list[int] | list[str] | list[list[int]]) -> None:
    """Raise InvalidInput for a prompt that leaves no room for an answer in the samplers of this installation."""
    of_ids = [each for each in prompt if isinstance(each, list)] or [[each for each in prompt if isinstance(each, int)]]
    longest, most = max(map(len, of_ids)), settings.serving.max_model_len
    if longest >= most and settings.sampling.url is None:  # a server of the installation's own says what it takes
        raise InvalidInput(f"{longest:,} tokens; prompt and answer together have at most {most:,}", "prompt")
    _check_text(settings, prompt if isinstance(prompt, str) else max(prompt, key=_num_characters, default=""), "prompt")


def _check_text(settings: Settings, text: Any, place: str) -> None:
    """Raise InvalidInput for more characters than a prompt can have, before a share or a sampler is taken for it.

    How many tokens they are is only known to the sampler's host, which refuses by their number.
    """
    size, most = _num_characters(text), _CHARACTERS_PER_TOKEN * settings.serving.max_model_len
    if size > most and settings.sampling.url is None:
        rule = f"up to {_CHARACTERS_PER_TOKEN} for each of the {settings.serving.max_model_len:,} tokens of a sequence"
        raise InvalidInput(f"{size:,} characters; a text may have {most:,}: {rule}", place)


def _num_characters(value: Any) -> int:
    """Count the characters of all strings in a JSON value."""
    match value:
        case str():
            return len(value)
        case list() | tuple():
            return sum(map(_num_characters, value))
        case dict():
            return sum(len(name) + _num_characters(item) for name, item in value.items())
        case _:
            return 0


# --- Evicts idle samplers and workers that other runs or users wait for ---
#
# A sampler that answers users is given back soon if there are no questions, and otherwise when its share of time is
# over. The worker of an RL run or session whose client sends nothing is given back at once, as the client may have
# crashed.

_AGAIN_S = 60.0
_GIVEN_BACK_IN_S = 15.0  # for this long a worker that was requested counts as on its way
_UNTAKEN = PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED

_Lease = tuple[str, int]
"""A lease: a run's id, and the lease's epoch."""


class IdleEviction:
    """Signals workflows that hold an idle worker while others wait for one. (Hosts do not know who waits.)"""

    def __init__(
        self, settings: Settings, rows: RunRows, temporal: Temporal, waiting: Callable[[], frozenset[str]]
    ) -> None:
        """`waiting`: the serving workflows whose own users wait for a sampler."""
        here = f'TaskQueue = "{settings.control_queue}" AND ExecutionStatus = "Running"'
        self._servings = f'WorkflowType = "{SERVING_WORKFLOW}" AND {here}'
        self._rows = rows
        self._temporal = temporal
        self._waiting = waiting
        self._asked: dict[str, float] = {}
        self._asked_runs: dict[_Lease, float] = {}

    async def evict(self) -> None:
        """Signal the workflows. Raises TemporalUnavailable, DatabaseUnavailable: not all were signalled."""
        phases = await self._rows.open()
        if (waiting := self._waiting()) or "waiting_for_sampler" in phases.values():
            await self._evict_samplers(waiting)
        if for_worker := [run_id for run_id, phase in phases.items() if phase == "waiting_for_worker"]:
            await self._evict_workers(for_worker)

    async def _evict_samplers(self, waiting: frozenset[str]) -> None:
        now = time.monotonic()
        self._asked = {run: since for run, since in self._asked.items() if now - since < _AGAIN_S}
        async with self._temporal.client() as client:
            async for execution in client.list_workflows(self._servings, rpc_timeout=PATIENCE):
                if execution.run_id in self._asked or execution.id in waiting:
                    continue
                await _ask_to_make_room(client.get_workflow_handle(execution.id, run_id=execution.run_id), "a sampler")
                self._asked[execution.run_id] = now

    async def _evict_workers(self, waiting: Sequence[str]) -> None:
        """Ask idle runs for their workers, as many as are missing, the longest idle ones first; each once a lease.

        `waiting`: runs in the phase of waiting for a worker. Only those whose lease no host has taken count.
        """
        idle = [(run.run_id, run.status.epoch) for run in await self._rows.waiting_for_clients(time.time())]
        now = time.monotonic()
        self._asked_runs = {lease: since for lease, since in self._asked_runs.items() if lease in idle}
        on_their_way = sum(now - since < _GIVEN_BACK_IN_S for since in self._asked_runs.values())
        asked = [lease for lease in idle if lease[1] and lease not in self._asked_runs]
        if not asked:
            return
        async with self._temporal.client() as client:
            num_missing = await _num_untaken(client, waiting, len(asked) + on_their_way) - on_their_way
            for lease in asked[: max(0, num_missing)]:
                await _ask_to_make_room(client.get_workflow_handle(lease[0]), "a worker")
                self._asked_runs[lease] = now


async def _num_untaken(client: Client, run_ids: Sequence[str], at_most: int) -> int:
    """Count the runs, up to `at_most`, whose lease activity no host has taken."""
    found = 0
    for run_id in run_ids:
        if found == at_most:
            break
        with unless_unknown():  # it may have ended
            description = await client.get_workflow_handle(run_id).describe(rpc_timeout=PATIENCE)
            pending = description.raw_description.pending_activities
            found += any(a.activity_type.name == "lease" and a.state == _UNTAKEN for a in pending)
    return found


async def _ask_to_make_room(handle: WorkflowHandle[Any, Any], what: str) -> None:
    with unless_unknown():  # it may have ended
        await handle.signal("make_room", rpc_timeout=PATIENCE)
        logger.info("%s: others wait for %s", handle.id, what)
