"""Questions to what a tenant has published: each finds a sampler, and another one when that was lost under it."""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from functools import partial
from typing import Any

from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.exceptions import TimeoutError as TooLate
from temporalio.service import RPCError

from service.accounts.limits import FairShare
from service.inference.art_models import ArtModels, ArtName
from service.inference.published_models import PublishedModels, Target
from service.inference.sampler_leases import SamplerLease, SamplerLeases
from service.temporal import PATIENCE, Temporal, causes_of
from shared.chat import answer_records
from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.errors import InvalidInput, SamplerUnavailable
from shared.jobs.leases import SamplerKey
from shared.runs.serving import Completed, CompleteRequest, CompletionStart, LeasedSampler, SamplerPlace, ServedSampler
from shared.runs.start import timing_of
from shared.settings import Settings
from shared.storage.store import ObjectStore
from workflows import policies

logger = logging.getLogger("longshore.service")

COMPLETION_WORKFLOW = "CompletionWorkflow"
_ATTEMPTS = 4
_PLACES = ("model", "messages", "prompt", "n", "max_tokens")  # what an activity's errors name


class _Lost(Exception):
    """The sampler, or its host, went while it was asked. Another may answer."""


class Inference:
    """Asks what was published. Token ids of answers to chats are kept for a while, to be trained on."""

    def __init__(
        self,
        settings: Settings,
        store: ObjectStore,
        published: PublishedModels,
        art_models: ArtModels,
        temporal: Temporal,
        questions: FairShare,
    ) -> None:
        self._settings = settings
        self._store = store
        self._temporal = temporal
        self.leases = SamplerLeases(settings, temporal)
        self._published = published
        self._art_models = art_models
        self._questions = questions

    async def chat(self, tenant: str, asked: ChatRequest) -> ChatCompletion:
        """Answer messages with a model; `stream` is left to the caller.

        Raises:
            NotFound: no such model. InvalidInput: the question cannot be answered; names the field.
            SamplerUnavailable: there is no sampler for it now. TemporalUnavailable: nobody to ask.
            Busy: the tenant has as many questions open as it may.
        """
        async with self._questions.place(tenant):
            answer = await self._ask(tenant, asked)
        assert isinstance(answer, ChatCompletion)
        return answer

    async def complete(self, tenant: str, asked: CompletionRequest) -> CompletionResponse:
        """The same of a text, or of token ids. Raises as `chat` does."""
        async with self._questions.place(tenant):
            answer = await self._ask(tenant, asked)
        assert isinstance(answer, CompletionResponse)
        return answer

    async def prune(self) -> None:
        """Drop answers that nobody trains on any more."""
        serving = self._settings.serving
        prune = partial(answer_records.prune, self._store, time.time(), serving.answers_kept_s)
        await asyncio.to_thread(prune, serving.answers_max_bytes)

    async def _ask(self, tenant: str, asked: ChatRequest | CompletionRequest) -> ChatCompletion | CompletionResponse:
        if (name := ArtName.parse(asked.model)) is not None:
            if isinstance(asked, ChatRequest):  # ART trains on its answers, and asks for nothing of this
                ids = True if asked.return_token_ids is None else asked.return_token_ids
                logprobs = True if asked.logprobs is None else asked.logprobs
                asked = asked.model_copy(update={"logprobs": logprobs, "return_token_ids": ids})
            target = await self._art_models.target(tenant, name)
        else:
            target = await asyncio.to_thread(self._published.target_of, tenant, asked.model)
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(2.0 ** (attempt - 2))
            # An installation with an inference server of its own leases no sampler.
            lease = await self.leases.lease(self._key(target)) if self._settings.sampling.url is None else None
            try:
                return (await self._answered(self._start(tenant, target, asked, lease))).answer
            except _Lost as lost:
                problem = str(lost)
                logger.warning("a question to %s is asked again: %s", asked.model, problem)
                if lease is not None:
                    self.leases.forget(lease)
        raise SamplerUnavailable(problem)

    def _key(self, target: Target) -> SamplerKey:
        serving = self._settings.serving
        return SamplerKey(
            model=target.model,
            dtype=target.dtype,
            threads=self._settings.cpu_threads,
            slots=serving.slots,
            max_model_len=serving.max_model_len,
        )

    def _start(
        self, tenant: str, target: Target, asked: ChatRequest | CompletionRequest, lease: SamplerLease | None
    ) -> CompletionStart:
        queue = lease.grant.host_queue if lease else policies.queue_of("complete", self._settings.control_queue)
        place: SamplerPlace = ServedSampler()
        if lease:
            grant = lease.grant
            place = LeasedSampler(run_id=lease.serving_id, fence=grant.fence, worker_id=grant.worker_id)
        return CompletionStart(
            request=CompleteRequest(
                tenant=tenant,
                name=target.name,
                version=target.version,
                model=target.model,
                adapter=target.adapter,
                base=target.base,
                place=place,
                asked=asked,
            ),
            queue=queue,
            timing=timing_of(self._settings),
        )

    async def _answered(self, start: CompletionStart) -> Completed:
        """A caller that is cancelled takes the question back."""
        async with self._temporal.client() as client:
            completion_id = f"completion-{secrets.token_hex(12)}"
            options = {"execution_timeout": policies.COMPLETION_TIMEOUT, "result_type": Completed}
            starting = asyncio.ensure_future(
                self._temporal.start(COMPLETION_WORKFLOW, start, completion_id, start.request.tenant, **options)
            )
            try:
                handle = await asyncio.shield(starting)
                answer: Completed = await handle.result()
            except asyncio.CancelledError:
                await _cancel(client, completion_id, starting)
                raise
            except WorkflowFailureError as error:
                raise _failure(error) from None
        return answer


async def _cancel(client: Client, completion_id: str, starting: asyncio.Future[Any]) -> None:
    with suppress(RPCError):  # it has just been answered, or nobody answers
        await starting  # a start that is under way cannot be called off
        await client.get_workflow_handle(completion_id).cancel(rpc_timeout=PATIENCE)


def _failure(error: WorkflowFailureError) -> Exception:
    """The cause of a question's failure, as an error of ours."""
    causes = causes_of(error)
    for cause in causes:
        match cause:
            case ApplicationError(type="InvalidInput" | "CorruptArtifact" | "DiskFull"):
                return _refusal(cause.message)
            case ApplicationError(type="WorkerLost" | "SamplerUnavailable" | "StoreUnavailable") | TooLate():
                return _Lost(f"{cause.message}")
    return error


def _refusal(message: str) -> InvalidInput:
    place, separator, rest = message.partition(": ")
    return InvalidInput(rest, place) if separator and place in _PLACES else InvalidInput(message)
