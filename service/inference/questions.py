"""Answers questions to published models: finds a sampler for each, and another one if that is lost.

Samplers are leased by the serving workflow of the model, which is started if necessary. Questions and
answers go between this process and the sampler's host alone.
"""

import asyncio
import logging
import secrets
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from service.accounts.limits import FairShare
from service.host_http.clients import HostClients
from service.inference.art_models import ArtModels, ArtName, UntrainedModels
from service.inference.asking import AnsweringHosts, PartialAnswer, QuestionLost, Reply
from service.inference.published_models import PublishedModels, Target
from service.temporal import LOST_UPDATES, PATIENCE, Temporal, causes_of
from shared.chat import answer_records
from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.errors import InvalidInput, NotFound, SamplerUnavailable
from shared.jobs.leases import LeaseGrant, SamplerKey
from shared.runs.start import timing_of
from shared.serving import (
    CompleteRequest,
    LeasedSampler,
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
        """Forget a lease whose sampler seems lost."""
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
        patience_s = self._settings.serving.patience_s
        async with self._temporal.client() as client:
            try:
                async with asyncio.timeout(patience_s + _CONTROL_PATIENCE_S):
                    for _ in range(_TRIES):
                        if grant := await self._serve(client, serving_id, patience_s):
                            return grant
                        await self._start(client, serving_id, key)
            except TimeoutError:
                raise SamplerUnavailable("no control host answers") from None
        raise SamplerUnavailable("the sampler's workflow ended as often as it was started")

    async def _serve(self, client: Client, serving_id: str, patience_s: float) -> LeaseGrant | None:
        """Ask the serving workflow for its sampler; None where there is no workflow, or it has just ended."""
        handle = client.get_workflow_handle(serving_id)
        try:
            request = ServeRequest(patience_s=patience_s)
            grant: LeaseGrant = await handle.execute_update("serve", request, result_type=LeaseGrant)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return None
            raise
        except WorkflowUpdateFailedError as error:
            _refuse(error)
            return None
        return grant

    async def _start(self, client: Client, serving_id: str, key: SamplerKey) -> None:
        settings = self._settings
        start = ServingStart(
            serving_id=serving_id,
            key=key,
            shape=settings.shape,
            timing=timing_of(settings),
            idle_s=settings.serving.idle_s,
            share_s=settings.serving.share_s,
        )
        await client.start_workflow(
            SERVING_WORKFLOW,
            start,
            id=serving_id,
            task_queue=settings.control_queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            rpc_timeout=PATIENCE,
        )


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
        self._hosts = AnsweringHosts(hosts)
        self._announced: tuple[list[HostAddress], float] = [], 0.0
        self._published = published
        self._art_models = art_models
        self._untrained = untrained
        self._questions = questions

    async def chat(self, tenant: str, asked: ChatRequest, draft: PartialAnswer | None = None) -> Reply[ChatCompletion]:
        """Ask a model to answer messages. If `stream` is requested, `draft` receives the text while it is sampled.

        Raises:
            NotFound: no such model. InvalidInput: the question cannot be answered; names the field.
            SamplerUnavailable: there is no sampler for it now. TemporalUnavailable: nobody to ask.
            Busy: the tenant has as many questions open as it may.
        """
        _check_text(self._settings, [asked.messages, asked.offered_tools], "messages")
        async with self._place(tenant, asked):
            return Reply(ChatCompletion, await self._ask(tenant, asked, draft))

    async def complete(
        self, tenant: str, asked: CompletionRequest, draft: PartialAnswer | None = None
    ) -> Reply[CompletionResponse]:
        """Continue a text, or token ids, with a model. Otherwise as `chat`."""
        check_length(self._settings, asked.prompt)
        async with self._place(tenant, asked):
            return Reply(CompletionResponse, await self._ask(tenant, asked, draft))

    async def complete_with(self, tenant: str, target: Target, asked: CompletionRequest) -> Reply[CompletionResponse]:
        """Continue token ids with weights that the caller has found. Raises the errors of `chat`, except NotFound."""
        async with self._place(tenant, asked):
            return Reply(CompletionResponse, await self._ask_target(tenant, target, asked))

    def _place(self, tenant: str, asked: ChatRequest | CompletionRequest) -> AbstractAsyncContextManager[None]:
        return self._questions.place(tenant, len(asked.model_dump_json()))

    async def prune(self) -> None:
        """Delete records of answers that are too old, or too many."""
        serving = self._settings.serving
        prune = partial(answer_records.prune_answers, self._store, time.time(), serving.answers_kept_s)
        await asyncio.to_thread(prune, serving.answers_max_bytes)

    async def _ask(self, tenant: str, asked: ChatRequest | CompletionRequest, draft: PartialAnswer | None) -> bytes:
        if (name := ArtName.parse(asked.model)) is not None:
            if isinstance(asked, ChatRequest):  # ART's clients need token ids for training, but do not ask for them
                ids = True if asked.return_token_ids is None else asked.return_token_ids
                logprobs = True if asked.logprobs is None else asked.logprobs
                asked = asked.model_copy(update={"logprobs": logprobs, "return_token_ids": ids})
            target = await self._art_models.target(tenant, name)
        else:
            target = await self._named(tenant, asked.model)
        if draft is not None and asked.seed is None:  # another sampler draws the same, if this one is lost
            asked = asked.model_copy(update={"seed": secrets.randbits(61)})
        return await self._ask_target(tenant, target, asked, draft)

    async def _named(self, tenant: str, name: str) -> Target:
        """Return the weights of a tenant's published model; else of the installation's base model of that name."""
        try:
            return await asyncio.to_thread(self._published.asked, tenant, name)
        except NotFound:
            if (uri := self._untrained.uri_of(name)) is None:
                raise
        return await self._untrained.target(tenant, uri)

    async def _ask_target(
        self, tenant: str, target: Target, asked: ChatRequest | CompletionRequest, draft: PartialAnswer | None = None
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
                    at = await self._served_at(attempt) if lease is None else _at(lease.grant)
                    request = _request(tenant, target, asked, lease, draft.answer_id if draft else None)
                    return await self._hosts.ask(at, request, draft)
            except (QuestionLost, TimeoutError) as lost:
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
            raise QuestionLost("no control host that asks the installation's sampler is up")
        return known[attempt % len(known)]


def _at(grant: LeaseGrant) -> HostAddress:
    assert grant.host_socket is not None
    return HostAddress(socket=grant.host_socket, address=grant.host_address)


def _request(
    tenant: str,
    target: Target,
    asked: ChatRequest | CompletionRequest,
    lease: SamplerLease | None,
    answer_id: str | None,
) -> CompleteRequest:
    place: SamplerPlace = ServedSampler()
    if lease is not None:
        place = LeasedSampler(run_id=lease.serving_id, fence=lease.grant.fence, worker_id=lease.grant.worker_id)
    return CompleteRequest(
        tenant=tenant,
        name=target.name,
        version=target.version,
        model=target.model,
        adapter=target.adapter,
        base=target.base,
        place=place,
        asked=asked,
        answer_id=answer_id,
    )


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


def _refuse(error: WorkflowUpdateFailedError) -> None:
    """Raise the refusal of a question. Returns if its update was lost, so that it can be sent again."""
    for cause in causes_of(error):
        match cause:
            case ApplicationError(type=kind) if kind in LOST_UPDATES:
                return
            case ApplicationError(type=kind) if kind in _REFUSALS:
                raise InvalidInput(cause.message, "model") from None
            case ApplicationError():
                raise SamplerUnavailable(cause.message) from None
    raise error
