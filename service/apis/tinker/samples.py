"""Tinker's samples, and the results of its requests."""

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from longshore.commands import CommandResult
from service.accounts.keys import require
from service.accounts.tenants import Documents
from service.apis.bodies import JsonBody, JsonRoute
from service.apis.tinker import translation
from service.apis.tinker.records import (
    AskedLoss,
    AtGateway,
    CancelFuture,
    CreateSampler,
    Gateway,
    ModelRecord,
    NamedModel,
    RetrieveFuture,
    SampleRequest,
    SamplerRecord,
    SessionRecord,
    TinkerRecord,
    TrainingFuture,
)
from service.apis.tinker.translation import metrics_of_step
from service.apis.tinker.wire import LENGTH, MESSAGES, PROTOBUF, STOP, TINKER, Likely, packed, put_top
from service.backend import Backend
from service.inference.published_models import Target
from service.inference.questions import check_length
from shared.chat.completions import TOKEN_ID, CompletionRequest, CompletionResponse, PromptLogprob
from shared.errors import Busy, InvalidInput, LongshoreError, NotFound
from shared.field_rules import refused_in_words
from shared.storage.paths import RunKeys

# --- Sampling sessions, and pending samples ---
#
# A sample is on record with its seed before it is acknowledged, so that a killed service draws it again. The results
# of the newest are kept in memory for clients that ask twice. Others are drawn again: to the same tokens.

T = TypeVar("T")
SAMPLE = "sample|"
MOST_WAITING = 2048
"""Of one tenant."""
_PLACE = re.compile(r"[0-9]{8}/[A-Za-z0-9-]{1,120}")
_AT_ONCE = 8  # of one tenant; fewer than the questions that it may have open
_KEPT = 1024
_KEPT_S = 600.0
_RECORDS_KEPT_S = 86_400.0
_HOUR_S = 3600
_ANSWER_TOKENS = 1 << 18  # of one question to a sampler, whose answer has some 25 MB
_SMALL_BYTES = 1 << 18  # of an answer that this process translates itself
_BUSY_PAUSE_S = 1.0
_ABANDONED_S = 90.0  # without a poll: a client that waits asks every half minute
_MOST_SEED = 2**62


class SampleRecord(TinkerRecord):
    """A sample as it was asked for, and its seed."""

    what = "Tinker sample"
    hour: int
    name: str
    seed: int
    asked: SampleRequest

    @property
    def id(self) -> str:
        return f"{self.hour:08d}/{self.name}"


@dataclass
class Samples:
    """Draws samples in tasks of this process."""

    backend: Backend
    _tasks: dict[tuple[str, str], asyncio.Task[bytes]] = field(default_factory=dict)
    _ended: dict[tuple[str, str], float] = field(default_factory=dict)
    _asked_at: dict[tuple[str, str], float] = field(default_factory=dict)
    _places: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    _num_waiting: Counter[str] = field(default_factory=Counter)

    async def ask(self, gateway: Gateway, sampler: SamplerRecord, asked: SampleRequest) -> str:
        """Begin to draw. Returns the request's id; the same request of a sampling session has the same one.

        Raises Busy: the tenant has as many samples under way as it may.
        """
        if self._num_waiting[gateway.tenant] >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING:,} samples of yours are under way: ask again when some are done")
        hour = int(time.time()) // _HOUR_S
        number = secrets.randbelow(2**62) if asked.seq_id is None else asked.seq_id
        seed = asked.sampling_params.seed
        seed = secrets.randbelow(_MOST_SEED) if seed is None else seed % _MOST_SEED
        name = f"{sampler.session_id}-{sampler.number}-{number}"
        record = SampleRecord(hour=hour, name=name, seed=seed, asked=asked)
        record = await gateway.records.add(record) or record
        if record.asked != asked:
            raise InvalidInput("another sample was asked for under this number", "seq_id")
        request_id = f"{SAMPLE}{record.id}"
        self._begin(gateway, request_id, record)
        return request_id

    async def result(self, gateway: Gateway, request_id: str, wait_s: float) -> bytes | None:
        """Return a SampleResponse; None if it is not drawn in time.

        Raises NotFound: nobody has asked for it, or too long ago. Other errors: why it cannot be drawn.
        """
        key = (gateway.tenant, request_id)
        if (task := self._tasks.get(key)) is None:
            task = self._begin(gateway, request_id, await self._record(gateway, request_id))
        if not task.done():
            self._asked_at[key] = time.monotonic()
        done, _ = await asyncio.wait([task], timeout=wait_s)
        if not done:
            self._asked_at[key] = time.monotonic()
            return None
        if task.cancelled():
            raise InvalidInput("this sample was cancelled")
        return task.result()

    async def _record(self, gateway: Gateway, request_id: str) -> SampleRecord:
        place = request_id.removeprefix(SAMPLE)
        if not _PLACE.fullmatch(place):
            raise NotFound(f"there is no request {request_id[:120]}")
        with suppress(NotFound):
            return await gateway.records.find(SampleRecord, place)
        raise NotFound(f"there is no request {request_id[:120]}")

    def cancel(self, tenant: str, request_id: str) -> None:
        if (task := self._tasks.get((tenant, request_id))) is not None:
            task.cancel()

    def _begin(self, gateway: Gateway, request_id: str, record: SampleRecord) -> asyncio.Task[bytes]:
        key = (gateway.tenant, request_id)
        if key not in self._tasks:
            self._asked_at[key] = time.monotonic()
            self._tasks[key] = task = asyncio.create_task(self._draw(gateway, key, record))
            self._num_waiting[gateway.tenant] += 1
            task.add_done_callback(partial(self._end, key))
        return self._tasks[key]

    def _end(self, key: tuple[str, str], task: asyncio.Task[bytes]) -> None:
        self._num_waiting[key[0]] -= 1
        if not task.cancelled():
            task.exception()  # asked for by whoever polls, or by nobody
        now = time.monotonic()
        self._asked_at.pop(key, None)
        if self._tasks.get(key) is task:
            self._ended[key] = now
        while self._ended and (len(self._ended) > _KEPT or next(iter(self._ended.values())) < now - _KEPT_S):
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._tasks.pop(oldest, None)

    async def _draw(self, gateway: Gateway, key: tuple[str, str], record: SampleRecord) -> bytes:
        """Draw a sample when it has its turn. One whose client has gone is left, until it is asked for again."""
        asked = record.asked
        async with self._places.setdefault(gateway.tenant, asyncio.Semaphore(_AT_ONCE)):
            if time.monotonic() - self._asked_at[key] > _ABANDONED_S:
                del self._tasks[key]
                raise NotFound("nobody waits for this sample")
            target, name = await target_of(gateway, asked)
            whole = question(asked, name)
            drawn = b""
            for part in parts(asked):
                drawn += await self._part(gateway, target, asked, part_of(whole, record.seed, *part))
        return drawn

    async def _part(self, gateway: Gateway, target: Target, asked: SampleRequest, question: CompletionRequest) -> bytes:
        """Return a SampleResponse with some of a request's samples. One behind the other they are one with all."""
        reply = await _patiently(partial(self.backend.inference.complete_with, gateway.tenant, target, question))
        if len(reply.content) <= _SMALL_BYTES:
            return await asyncio.to_thread(answer_bytes, asked, reply.content)
        decoding = self.backend.decoding
        async with decoding.scratch() as sent, decoding.scratch() as made:
            await asyncio.to_thread(sent.write_bytes, reply.content)
            files = {"reads": [sent], "writes": [made]}
            call = partial(decoding.call_for, gateway.tenant, write_answer, asked, sent, made, is_large=True, **files)
            await _patiently(call)
            return await asyncio.to_thread(made.read_bytes)

    async def prune(self) -> None:
        """Delete records of samples that nobody will ask for."""
        samples = Documents(self.backend.database, self.backend.quotas, SampleRecord.what, SampleRecord)
        await samples.delete_older(_RECORDS_KEPT_S)


async def _patiently(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Ask until the tenant's share has room."""
    while True:
        try:
            return await ask()
        except Busy:
            await asyncio.sleep(_BUSY_PAUSE_S)


async def target_of(gateway: Gateway, asked: SampleRequest) -> tuple[Target, str]:
    """Find the weights that a sample is drawn from, and their name. Raises NotFound, InvalidInput."""
    if asked.sampling_session_id is None:
        return await weights_of(gateway, asked.base_model, asked.model_path)
    sampler = await gateway.records.known(SamplerRecord, asked.sampling_session_id)
    if sampler.command is None:
        return await weights_of(gateway, sampler.base_model, sampler.model_path)
    assert sampler.model_id is not None
    model = await gateway.records.model(sampler.model_id)
    newest = sampler
    if sampler.inflight:  # then the newest state of the model that is for all such sessions
        of_session = await gateway.records.all(SamplerRecord, f"{sampler.session_id}/")
        inflight = [each for each in of_session if each.inflight and each.model_id == sampler.model_id]
        newest = max(inflight, key=lambda each: each.command or 0)
    view = await gateway.outcome(model, newest.command or sampler.command, 30.0)
    if view.result is None or view.result.step is None:
        raise NotFound(f"{sampler.id}: its weights are not saved ({view.state})")
    return await _published(gateway, f"{model.run_id}:step-{view.result.step}")


async def weights_of(gateway: Gateway, base_model: str | None, model_path: str | None) -> tuple[Target, str]:
    """Find a checkpoint's weights, or those of a base model, and their name. Raises NotFound, InvalidInput."""
    if model_path is None:
        if base_model is None:
            raise InvalidInput("give model_path or base_model", "model_path")
        uri = gateway.uri_of(base_model)
        await gateway.backend.runs.check_access(gateway.tenant, NamedModel(model=uri))
        return await gateway.backend.untrained.target(gateway.tenant, uri), base_model
    checkpoint = await gateway.records.checkpoint(model_path)
    model, result = await gateway.saved(checkpoint)
    if result.version is not None:
        return await _published(gateway, f"{model.published_as}:v{result.version}")
    return await _published(gateway, f"{model.run_id}:step-{result.step}")


async def _published(gateway: Gateway, name: str) -> tuple[Target, str]:
    try:
        return await asyncio.to_thread(gateway.backend.published.target_of, gateway.tenant, name), name
    except NotFound:
        message = f"{name} is no longer in the store: of a model the newest {gateway.settings.keep_states} states stay"
        raise NotFound(message) from None


# Questions to samplers, and their answers. Pure.


def parts(asked: SampleRequest) -> list[tuple[int, int]]:
    """Divide a request's samples over questions whose answers have a bounded size: (first, how many).

    The prompt is scored with the first of them alone.
    """
    drawn = (asked.sampling_params.max_tokens or 1) * (1 + asked.topk_sample_logprobs)
    told = (1 + asked.topk_prompt_logprobs) * len(asked.prompt.ids) if _scores_prompt(asked) else 0
    most = max(1, _ANSWER_TOKENS // drawn)
    first = min(asked.num_samples, max(1, (_ANSWER_TOKENS - told) // drawn))
    rest = range(first, asked.num_samples, most)
    return [(0, first), *((begin, min(most, asked.num_samples - begin)) for begin in rest)]


def question(asked: SampleRequest, model: str) -> CompletionRequest:
    """Translate a request to draw its first sample. Raises InvalidInput that names the setting."""
    params = asked.sampling_params
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    stop, stop_ids = ([each for each in stops if isinstance(each, kind)] for kind in (str, int))
    with refused_in_words("sampling_params"):
        return CompletionRequest.model_validate(
            {
                "model": model,
                "prompt": asked.prompt.ids,
                "max_tokens": params.max_tokens or 1,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k if params.top_k > 0 else None,
                "stop": stop or None,
                "stop_token_ids": stop_ids or None,
                "ignore_eos": params.stop is not None and not stop and not stop_ids,
                "logprobs": asked.topk_sample_logprobs,
                "return_tokens_as_token_ids": True if asked.topk_sample_logprobs else None,
                "prompt_logprobs": asked.topk_prompt_logprobs if _scores_prompt(asked) else None,
                "return_token_ids": True,
            }
        )


def part_of(question: CompletionRequest, seed: int, first: int, n: int) -> CompletionRequest:
    """Return the question for some of a request's samples. Its prompt, which may be long, is not read again."""
    changes: dict[str, Any] = {"n": n, "seed": seed + first}
    return question.model_copy(update=changes if first == 0 else changes | {"prompt_logprobs": None})


def _scores_prompt(asked: SampleRequest) -> bool:
    return bool(asked.prompt_logprobs or asked.topk_prompt_logprobs)


def write_answer(asked: SampleRequest, answer: Path, made: Path) -> None:
    """Translate the answer in a file, as a child does for large ones."""
    made.write_bytes(answer_bytes(asked, answer.read_bytes()))


def answer_bytes(asked: SampleRequest, content: bytes) -> bytes:
    """Translate the answer to one of a request's questions into a SampleResponse.

    The prompt's scores are in the first question's answer alone.
    """
    answer, response = CompletionResponse.model_validate_json(content), MESSAGES["SampleResponse"]()
    for choice in sorted(answer.choices, key=lambda each: each.index):
        assert choice.token_ids is not None and choice.logprobs is not None
        sequence = response.sequences.add(
            stop_reason=STOP if choice.finish_reason == "stop" else LENGTH,
            tokens=packed(choice.token_ids, "<i4"),
            logprobs=packed(choice.logprobs.token_logprobs, "<f4"),
        )
        top = [_likeliest(each or {}, asked.topk_sample_logprobs) for each in choice.logprobs.top_logprobs or ()]
        put_top(sequence.topk_sampled_logprobs, top, asked.topk_sample_logprobs)
    if (told := answer.choices[0].prompt_logprobs) is not None:
        _put_prompt_scores(response, asked, told)
    return bytes(response.SerializeToString())


def _likeliest(told: Mapping[str, float], k: int) -> Likely:
    """Return the k likeliest tokens of a position. `told` also has the sampled token, however unlikely."""
    ranked = sorted(told.items(), key=lambda each: -each[1])[:k]
    return [(int(name.removeprefix(TOKEN_ID)), logprob) for name, logprob in ranked]


def _put_prompt_scores(response: Any, asked: SampleRequest, told: Sequence[Mapping[int, PromptLogprob] | None]) -> None:
    """Write the prompt's scores as Tinker has them: NaN for the first token and for those that were not asked for."""
    ids, k = asked.prompt.ids, asked.topk_prompt_logprobs
    unwanted = len(told) - (asked.prompt_logprobs_last_n or len(told))
    known = [None if place < unwanted else each for place, each in enumerate(told)]
    if asked.prompt_logprobs:
        scores = [None if each is None else each[ids[place]].logprob for place, each in enumerate(known)]
        response.prompt_logprobs = packed(scores, "<f4")
    ranked = [sorted((of.rank or 0, token, of.logprob) for token, of in (each or {}).items()) for each in known]
    put_top(response.topk_prompt_logprobs, [[(token, p) for rank, token, p in row if rank <= k] for row in ranked], k)


# Operations.

router = APIRouter(
    route_class=JsonRoute, prefix=TINKER, include_in_schema=False, dependencies=[Depends(require("inference"))]
)


@router.post("/create_sampling_session", dependencies=[Depends(require("write"))])
async def create_sampler(body: JsonBody[CreateSampler], gateway: AtGateway) -> dict[str, str]:
    """Make a sampling session of a checkpoint, or of a base model."""
    await gateway.records.find(SessionRecord, body.session_id)
    base_model = body.base_model
    if body.model_path is not None:
        checkpoint = await gateway.records.checkpoint(body.model_path)
        base_model = (await gateway.records.model(checkpoint.model_id)).base_model
        gateway.check_same(body.base_model, base_model)
    if base_model is None:
        raise InvalidInput("give model_path or base_model", "model_path")
    sampler = SamplerRecord(
        session_id=body.session_id,
        number=body.sampling_session_seq_id,
        base_model=base_model,
        model_path=body.model_path,
    )
    await gateway.records.add(sampler)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, gateway: AtGateway) -> dict[str, Any]:
    sampler = await gateway.records.find(SamplerRecord, sampler_id)
    return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}


@router.post("/asample")
async def sample(body: JsonBody[SampleRequest], request: Request, gateway: AtGateway) -> dict[str, Any]:
    """Begin to draw samples."""
    body.check()
    check_length(gateway.backend.settings, body.prompt.ids)
    async with gateway.backend.decoding.turn(gateway.tenant):
        sampler = await gateway.records.known(SamplerRecord, body.sampling_session_id or "")
        request_id = await _samples(request).ask(gateway, sampler, body)
    return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}/{n}" for n in range(body.num_samples)]}


# --- `retrieve_future`: the result of a pending request, or that it is not done yet ---

results_router = APIRouter(
    route_class=JsonRoute, prefix=TINKER, include_in_schema=False, dependencies=[Depends(require("write", "inference"))]
)
_SMALL_COMMAND_BYTES = 64 << 10  # of a command's file
_WAIT_S = 30.0  # the SDK gives up after 45
_OPEN_POLL_S = 0.1
_BEING_OPENED = ("queued", "checking")


@dataclass(frozen=True)
class FailedFuture:
    """Why a request came to nothing."""

    message: str
    category: str = "user"


DoneFuture = dict[str, Any] | bytes | FailedFuture


@results_router.post("/retrieve_future")
async def retrieve_future(body: JsonBody[RetrieveFuture], request: Request, gateway: AtGateway) -> Response:
    """Wait for a request's result for half a minute: 408 if it takes longer, so that the client asks again."""
    if body.request_id.startswith(SAMPLE):
        done = await _sample(gateway, request, body.request_id)
    else:
        done = await _trained(gateway, request, TrainingFuture.parse(body.request_id))
    match done:
        case None:
            pending = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(pending, status_code=408)
        case FailedFuture(message, category):
            return JSONResponse({"error": message, "category": category})
        case bytes():
            return Response(done, media_type=PROTOBUF)
        case _:
            return JSONResponse(done)


@results_router.post("/cancel_future")
async def cancel_future(body: JsonBody[CancelFuture], request: Request, gateway: AtGateway) -> dict[str, str]:
    """Cancel a sample that nobody waits for. Requests that train a model are never cancelled."""
    if body.request_id.startswith(SAMPLE):
        _samples(request).cancel(gateway.tenant, body.request_id)
    return {"request_id": body.request_id}


def _samples(request: Request) -> Samples:
    samples: Samples = request.app.state.tinker_samples
    return samples


async def _sample(gateway: Gateway, request: Request, request_id: str) -> DoneFuture | None:
    try:
        return await _samples(request).result(gateway, request_id, _WAIT_S)
    except NotFound:
        raise
    except LongshoreError as error:
        return FailedFuture(str(error))


async def _trained(gateway: Gateway, request: Request, future: TrainingFuture) -> DoneFuture | None:
    model = await gateway.records.model(future.model_id)
    if future.kind == "create":
        return await _created(gateway, model)
    view = await gateway.outcome(model, future.command, _WAIT_S)
    if view.state == "waiting":
        return None
    if view.result is None:
        return FailedFuture(view.message or "the request was dropped", "server")
    if (problem := view.result.problem) is not None:
        return FailedFuture(problem.message, "user" if problem.kind in ("invalid_input", "not_finite") else "server")
    if view.result.expired:
        return FailedFuture("the scores of this request are no longer kept")
    async with gateway.backend.decoding.turn(gateway.tenant):
        return await _answer(gateway, request, model, future, view.result)


async def _created(gateway: Gateway, model: ModelRecord) -> DoneFuture | None:
    """Wait until the session's model and adapter have been checked."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_S
    while True:
        view = await gateway.backend.runs.view(gateway.tenant, model.run_id)
        if view.problem is not None:
            return FailedFuture(view.problem.message)
        if view.phase not in _BEING_OPENED:
            return {"type": "create_model", "model_id": model.id}
        if loop.time() > end:
            return None
        await asyncio.sleep(_OPEN_POLL_S)


async def _answer(
    gateway: Gateway, request: Request, model: ModelRecord, future: TrainingFuture, result: CommandResult
) -> DoneFuture:
    """Say a command's result as the request's answer. Raises NotFound for a request of another kind."""
    match future.kind, result.kind:
        case "passes", "forward" | "forward_backward" if future.loss is not None:
            return await _scores(gateway, request, RunKeys(model.run_id).command(future.command), future.loss, result)
        case "optim", "optim_step":
            return {"metrics": metrics_of_step(result)}
        case "save", "save_state":
            return {"path": future.detail}
        case "sampler", "save_state":
            return {"path": None, "sampling_session_id": future.detail}
        case "load", "load_state":
            return {"path": future.detail, "model_id": model.id}
    raise NotFound(f"there is no request {future.request_id[:120]}")


async def _scores(gateway: Gateway, request: Request, key: str, loss: AskedLoss, result: CommandResult) -> bytes:
    """Return the answer to a command in the store; a child process converts large results."""
    decoding = gateway.backend.decoding
    data = await asyncio.to_thread(gateway.backend.store.get_bytes, key)
    if len(data) <= _SMALL_COMMAND_BYTES:
        return await asyncio.to_thread(translation.scores_of, data, loss, result)
    async with decoding.scratch() as command, decoding.scratch() as made:
        await asyncio.to_thread(command.write_bytes, data)
        asked = str(command), loss, result, str(made)
        await decoding.call(request, translation.write_scores, *asked, reads=[command], writes=[made])
        return await asyncio.to_thread(made.read_bytes)
