"""Samplers of published adapters: leased, lost, shared, replaced; what questions over them are answered and refused."""

import asyncio
import json
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.host_context import HostContext
from activities.hosts.workers import processes_of
from activities.sampling.client import Sampler
from activities.sampling.questions import OpenQuestion, Questions, chat_completion
from activities.sampling.samplers import OpenSampler, SamplerLeaseRequest, Samplers, ServingAdapters
from longshore.accounts import QuotaSettings
from longshore.fields import Artifact, Fence
from longshore.runs import RLRun, RunRecord
from service.accounts.tenants import Quotas
from service.database import engine
from service.database.engine import Database
from service.inference.published_models import PublishedModels
from service.inference.questions import IdleEviction, StreamedAnswer
from service.runs.rows import RunRows, run_row
from service.runs.runs import queued
from service.temporal import Temporal
from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.messages import ChatCompletion
from shared.chat.streams import ChatChunks, StreamStart
from shared.chat.trajectories import AnswerLookup, AnswerRecord, look_up, parse_record
from shared.errors import InvalidInput, NotFound, SamplerUnavailable
from shared.jobs.job import LeaseGrant, SamplerKey
from shared.runs.start import RunTiming
from shared.serving import CompleteRequest, ServedSampler, ServeRequest, ServingStart
from shared.settings import SamplingSettings, ServingSettings
from shared.storage.artifacts import find_artifact
from shared.storage.paths import published_version
from tests.depth import drawn
from tests.megatron_worker.sampler_process import running
from tests.service.conftest import KEY, serving
from tests.workflows.leases.harbour import IDLE_S, NUM_TOKENS, Harbour, greedy, said, there_is
from tests.workflows.published import BASE, CREATED_AT, publish
from workflows import policies
from workflows.leases import ServingWorkflow


@pytest.mark.drawn
@pytest.mark.parametrize("waits_s", drawn([0.0, 0.01, 0.1, 1.0, None], 1, always=[None]))
async def test_a_caller_that_leaves_takes_the_question_back(harbour: Harbour, waits_s: float | None) -> None:
    """However far it has come: on its way to the host, waiting, drawn. None: a part of the answer is there."""
    inference = harbour.inference()
    await inference.chat("default", greedy("north"))
    endless = greedy("north", temperature=1, max_tokens=1900, n=128, stream=True)
    draft = StreamedAnswer(endless)
    asked = asyncio.create_task(inference.chat("default", endless, draft))
    await (there_is(draft.changed.is_set) if waits_s is None else asyncio.sleep(waits_s))
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    [sampler] = harbour.samplers()
    await there_is(lambda: is_idle(sampler))
    assert said((await inference.chat("default", greedy("north"))).read())


async def is_idle(sampler: str) -> bool:
    """True if a sampler's processes have used no processor time for a while."""

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes_of(sampler))

    before = used()
    await asyncio.sleep(0.5)
    return used() - before < 0.1


async def test_a_sampler_that_is_killed_over_a_question_is_replaced(harbour: Harbour) -> None:
    """The new one goes on with what the old one drew, though the question names no seed."""
    inference, long = harbour.inference(), greedy("north", max_tokens=1900, temperature=1, stream=True)
    draft = StreamedAnswer(long)
    asked = asyncio.create_task(inference.chat("default", long, draft))
    await there_is(draft.changed.is_set)
    before = draft.take()
    assert not asked.done()
    [sampler] = harbour.samplers()
    for process in processes_of(sampler):
        process.kill()
    await asked
    assert harbour.samplers() != [sampler]
    whole = before + draft.take()
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        for line in whole.decode().split("\n")
        if line.startswith("data: {")
    )
    record = parse_record(look_up(harbour.store, "default", AnswerLookup(ids=(draft.start.answer_id,)))[0])
    assert before and record is not None and text == record.choices[0].content, "nothing twice, and nothing left out"


async def test_of_many_adapters_the_one_asked_longest_ago_makes_room(harbour: Harbour) -> None:
    await harbour.inference().chat("default", greedy("north"))
    ready = harbour.ready()
    adapters = ServingAdapters(HostContext(harbour.settings), max_adapters=2)
    first, second, third = (
        find_artifact(harbour.store, published_version("default", "adapters", name, version))
        for name, version in (("north", 1), ("north", 2), ("south", 1))
    )

    def load() -> None:
        with Sampler(ready.url, ready.api_key, socket_path=ready.socket) as client:
            opened = OpenSampler(client, ready.model)
            for name in set(client.models()) - {ready.model}:
                client.unload_adapter(name)
            client.load_adapter("r1-0123456789abcdef", str(harbour.adapters["south"]))
            names = [adapters.use(opened, adapter) for adapter in (first, second, first, third)]
            assert set(client.models()) == {ready.model, "r1-0123456789abcdef", names[0], names[3]}
            assert adapters.use(opened, None) == ready.model
            client.unload_adapter("r1-0123456789abcdef")

    await asyncio.to_thread(load)


async def test_a_sampler_is_gone_after_the_idle_time_and_makes_room_for_another_model(harbour: Harbour) -> None:
    """There is one sampler host: a whole model is asked while it still serves the adapters' model."""
    shutil.copytree(harbour.model, harbour.settings.root_path / "whole")
    publish(harbour.store, harbour.settings.root_path / "whole", "whole", harbour.artifact, kind="models")
    inference = harbour.inference()
    before = said((await inference.chat("default", greedy("north"))).read())
    [sampler] = harbour.samplers()
    whole = said((await inference.chat("default", greedy("whole"))).read())
    assert sampler not in harbour.samplers()
    assert whole != before
    await there_is(lambda: [], lambda _: not harbour.samplers(), timeout_s=IDLE_S + 30)
    mine = f'TaskQueue = "{harbour.settings.control_queue}" AND ExecutionStatus = "Running"'
    await there_is(lambda: harbour.client.count_workflows(mine), lambda found: found.count == 0)


async def test_an_idle_sampler_makes_room_for_a_run_that_waits(harbour: Harbour, tmp_path: Path) -> None:
    idle_s = 60.0
    serving = harbour.settings.serving.model_copy(update={"idle_s": idle_s})
    await harbour.inference(serving=serving).chat("default", greedy("north"))
    [sampler] = harbour.samplers()
    database = Database(f"sqlite:///{tmp_path}/longshore.db")
    engine.upgrade(database)
    rows = RunRows(database, Quotas(QuotaSettings(), harbour.store, database))
    eviction = IdleEviction(harbour.settings, rows, Temporal(harbour.settings), frozenset)
    try:
        await eviction.evict()
        run = RLRun.model_validate({"model": "m"})
        record = RunRecord(run_id="rl-1", run=run, created_at=1.0)
        status = queued(record).model_copy(update={"phase": "waiting_for_sampler"})
        await asyncio.sleep(1)
        assert harbour.samplers() == [sampler], "nobody waits"
        database.write(lambda session: session.add(run_row(record, status)))
        await eviction.evict()
        await there_is(lambda: [], lambda _: not harbour.samplers(), timeout_s=idle_s - 10)
    finally:
        database.close()
    mine = f'TaskQueue = "{harbour.settings.control_queue}" AND ExecutionStatus = "Running"'
    await there_is(lambda: harbour.client.count_workflows(mine), lambda found: found.count == 0)


async def test_a_sampler_that_is_asked_all_the_time_is_shared(
    harbour: Harbour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question a second does not keep the only sampler from another model's users."""
    monkeypatch.setattr("service.inference.questions.WAITS_S", 1.0)
    shutil.copytree(harbour.model, harbour.settings.root_path / "other")
    publish(harbour.store, harbour.settings.root_path / "other", "other", harbour.artifact, kind="models")
    serving = harbour.settings.serving.model_copy(update={"idle_s": 60.0, "share_s": 3.0})
    inference = harbour.inference(serving=serving)
    database = Database(f"sqlite:///{tmp_path}/longshore.db")
    engine.upgrade(database)
    rows = RunRows(database, Quotas(QuotaSettings(), harbour.store, database))
    eviction = IdleEviction(harbour.settings, rows, Temporal(harbour.settings), inference.leases.waiting)

    async def again_and_again(work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await work()
            await asyncio.sleep(0.5)

    async def keep() -> None:
        with suppress(SamplerUnavailable):  # while the other model has its turn
            await inference.chat("default", greedy("north", max_tokens=1))

    await keep()
    loops = [asyncio.create_task(again_and_again(work)) for work in (keep, eviction.evict)]
    try:
        assert said((await inference.chat("default", greedy("other"))).read())
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        database.close()
    # The last question, which nobody waits for any more, begins anew a workflow that it finds terminated.
    await there_is(lambda: terminate_servings(harbour), lambda _: not inference.leases._asking)
    await terminate_servings(harbour)


async def terminate_servings(harbour: Harbour) -> None:
    mine = f'WorkflowType = "ServingWorkflow" AND TaskQueue = "{harbour.settings.control_queue}"'
    async for found in harbour.client.list_workflows(f'{mine} AND ExecutionStatus = "Running"'):
        with suppress(RPCError):  # it has ended meanwhile
            await harbour.client.get_workflow_handle(found.id, run_id=found.run_id).terminate()


async def happened(handle: WorkflowHandle[Any, Any], what: str) -> bool:
    return any(event.HasField(f"{what}_event_attributes") for event in (await handle.fetch_history()).events)


async def test_a_sampler_that_is_lost_before_its_share_is_over_is_waited_for(temporal_address: str) -> None:
    """Its share ends while the next one is not up yet: questions wait for that, and the workflow sleeps meanwhile."""
    client = await Client.connect(temporal_address, data_converter=pydantic_data_converter)
    serving_id, queue = f"serving-{uuid.uuid4().hex}", f"q-{uuid.uuid4().hex}"
    lost, share_over = asyncio.Event(), asyncio.Event()

    @activity.defn(name="lease_sampler")
    async def lease_sampler(request: SamplerLeaseRequest) -> None:
        if request.epoch == 2:  # another model's is before it
            await share_over.wait()
        grant = LeaseGrant(fence=Fence(epoch=request.epoch), host_queue="h", worker_id=f"w{request.epoch}")
        await client.get_workflow_handle(serving_id).signal("sampler_leased", grant)
        await lost.wait() if request.epoch == 1 else await asyncio.Event().wait()

    key = SamplerKey(model=Artifact(uri="file:///m", sha256="0" * 64), threads=1, slots=1, max_model_len=128)
    timing = RunTiming(heartbeat_timeout_s=600)
    start = ServingStart(serving_id=serving_id, key=key, shape=queue, idle_s=600, share_s=3, timing=timing)
    async with (
        Worker(client, task_queue=queue, workflows=[ServingWorkflow], workflow_runner=UnsandboxedWorkflowRunner()),
        Worker(client, task_queue=policies.sampler_queue(queue), activities=[lease_sampler]),
    ):
        handle = await client.start_workflow(ServingWorkflow.run, start, id=serving_id, task_queue=queue)
        first = await handle.execute_update(ServingWorkflow.serve, ServeRequest(patience_s=60))
        await handle.signal(ServingWorkflow.make_room)
        lost.set()
        while not await happened(handle, "activity_task_completed"):  # noqa: ASYNC110 (in another process)
            await asyncio.sleep(0.1)
        asking = asyncio.create_task(handle.execute_update(ServingWorkflow.serve, ServeRequest(patience_s=60)))
        await asyncio.sleep(2 * start.share_s)
        share_over.set()
        assert (first.worker_id, (await asking).worker_id) == ("w1", "w2")
        assert not await happened(handle, "workflow_task_failed"), "it did not yield"
        await handle.terminate()


async def test_without_a_sampler_host_a_question_is_told_so(harbour: Harbour) -> None:
    inference = harbour.inference(shape="nowhere", serving=ServingSettings(idle_s=1, patience_s=0.5))
    with pytest.raises(SamplerUnavailable, match=r"no sampler host of shape nowhere had one up within 0\.5 s"):
        await inference.chat("default", greedy("north"))


async def test_a_model_that_samplers_refuse_is_named(harbour: Harbour) -> None:
    folder = harbour.settings.root_path / "broken"
    shutil.copytree(harbour.model, folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    publish(harbour.store, folder, "broken", harbour.artifact, kind="models")
    with pytest.raises(InvalidInput, match="the sampler cannot use this model"):
        await harbour.inference().chat("default", greedy("broken"))


async def questions_and_a_kill(harbour: Harbour) -> None:
    """All that a serving workflow does in its life; for the record of histories."""
    inference = harbour.inference(serving=harbour.settings.serving.model_copy(update={"idle_s": 20}))
    await asyncio.gather(*(inference.chat("default", greedy(name)) for name in ("north", "south")))
    for process in processes_of(harbour.samplers()[0]):
        process.kill()
    await inference.chat("default", greedy("north"))
    mine = f'TaskQueue = "{harbour.settings.control_queue}" AND ExecutionStatus = "Running"'
    await there_is(lambda: harbour.client.count_workflows(mine), lambda found: found.count == 0)


PLAIN = [{"role": "system", "content": "You count crates."}, {"role": "user", "content": "How many crates are there?"}]
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


def reference(model: Path, adapter: Path) -> tuple[list[int], str, list[float]]:
    """transformers' prompt, and its own greedy answer with the adapter: text, and a logprob a token."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.apply_chat_template(PLAIN, add_generation_prompt=True, return_dict=False)
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    with torch.no_grad():
        ids = tuned.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1
        )
        logprobs = tuned(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    drawn = ids[0, len(prompt) :]
    told = logprobs.gather(1, drawn[:, None])[:, 0].tolist()
    return prompt, tokenizer.decode(drawn, skip_special_tokens=True), told


def remembered(harbour: Harbour, tenant: str, answer_id: str) -> AnswerRecord | None:
    [text] = look_up(harbour.store, tenant, AnswerLookup(ids=(answer_id,)))
    return parse_record(text)


async def test_two_adapters_of_one_model_say_at_once_what_transformers_says(harbour: Harbour) -> None:
    inference = harbour.inference()
    asked = [inference.chat("default", greedy(name, logprobs=True, top_logprobs=2)) for name in harbour.adapters]
    answers = [reply.read() for reply in await asyncio.gather(*asked)]
    assert len(harbour.samplers()) == 1
    assert len({said(answer) for answer in answers}) == 3
    for answer, (name, adapter) in zip(answers, harbour.adapters.items(), strict=True):
        prompt, text, logprobs = reference(harbour.model, adapter)
        assert (answer.model, said(answer), answer.choices[0].finish_reason) == (name, text, "length")
        assert answer.usage.model_dump() == {
            "prompt_tokens": len(prompt),
            "completion_tokens": NUM_TOKENS,
            "total_tokens": len(prompt) + NUM_TOKENS,
        }
        told = answer.choices[0].logprobs
        assert told is not None
        assert [token.logprob for token in told.content] == pytest.approx(logprobs, abs=1e-4)
        assert all(token.top_logprobs[0].logprob == token.logprob for token in told.content)
        assert {len(token.top_logprobs) for token in told.content} <= {1, 2}  # one: both have the same text
        assert bytes(b for token in told.content for b in token.bytes or ()).decode(errors="replace") == text


async def test_choices_are_seeded_and_a_text_is_continued(harbour: Harbour) -> None:
    inference = harbour.inference()
    free = greedy("south", temperature=1, seed=5, n=3)
    changes = [{}, {}, {"seed": 6, "n": 1}, {"model": "north"}]
    asked = [inference.chat("default", free.model_copy(update=update)) for update in changes]
    first, again, alone, other = [reply.read() for reply in await asyncio.gather(*asked)]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    drawn = [[choice.model_dump(exclude={"answer_id"}) for choice in one.choices] for one in (first, again)]
    assert drawn[0] == drawn[1]
    assert len({choice.message.content for choice in first.choices}) == 3
    assert alone.choices[0].message == first.choices[1].message
    assert other.choices[0].message != first.choices[0].message
    text = CompletionRequest(model="south", prompt="How many crates", max_tokens=8, temperature=0, logprobs=0)
    continued = (await inference.complete("default", text)).read()
    assert (continued.model, continued.choices[0].index) == ("south", 0)
    assert continued.choices[0].logprobs is not None
    assert continued.usage.completion_tokens == len(continued.choices[0].logprobs.tokens) <= 8
    whole = alone.choices[0].message.content
    stop = next(character for character in whole[1:] if character.isascii() and character.isprintable())
    ends = free.model_copy(update={"seed": 6, "n": 1, "stop": [stop, "nowhere"]})
    stopped = (await inference.chat("default", ends)).read()
    assert (stopped.choices[0].finish_reason, said(stopped)) == ("stop", whole[: whole.index(stop)])


async def test_what_was_drawn_is_told_on_request_and_remembered_for_its_tenant(harbour: Harbour) -> None:
    """In vLLM's fields, and in the store; answers that cannot be kept are given all the same."""
    asked = greedy("north", temperature=1, seed=5, n=2, return_token_ids=True, logprobs=True)
    answer = (await harbour.inference().chat("default", asked)).read()
    record = remembered(harbour, "default", answer.id)
    assert record is not None and remembered(harbour, "other", answer.id) is None
    assert (record.name, record.version, record.model_sha256) == ("north", 2, harbour.artifact.sha256)
    assert list(record.prompt_ids) == answer.prompt_token_ids
    assert answer.usage.prompt_tokens == len(record.prompt_ids)
    for choice, kept in zip(answer.choices, record.choices, strict=True):
        assert (choice.answer_id, choice.token_ids) == (answer.id, list(kept.token_ids))
        assert choice.logprobs is not None
        assert tuple(token.logprob for token in choice.logprobs.content) == kept.logprobs
        assert kept.content == choice.message.content
    start = StreamStart(answer_id="chatcmpl-1", created=1)
    chunks = list(ChatChunks(start, "north").rest(answer))
    named = [chunk.choices[0].answer_id for chunk in chunks if chunk.choices[0].answer_id]
    assert named == [start.answer_id, answer.id] * 2, "of each choice the first chunk and the last"
    assert [chunk.prompt_token_ids for chunk in chunks] == [answer.prompt_token_ids, *[None] * (len(chunks) - 1)]
    told = [chunk.choices[0].token_ids for chunk in chunks if chunk.choices[0].token_ids]
    assert told == [choice.token_ids for choice in answer.choices]
    plain = (await harbour.inference().chat("default", greedy("north"))).read()
    assert plain.prompt_token_ids is plain.choices[0].token_ids is plain.choices[0].logprobs is None
    kept_too = remembered(harbour, "default", plain.id)
    assert kept_too is not None and len(kept_too.choices[0].logprobs) == NUM_TOKENS, "also where nobody asked for ids"


async def test_text_comes_while_it_is_drawn(harbour: Harbour) -> None:
    """In events, whose texts make the answer that is remembered under the id that its stream had."""
    inference, events = harbour.inference(), list[bytes]()
    await inference.chat("default", greedy("north", max_tokens=1))
    asked_at = time.monotonic()
    asked = greedy("north", temperature=1, n=2, max_tokens=1500, stream=True)
    draft = StreamedAnswer(asked)
    answering = asyncio.ensure_future(inference.chat("default", asked, draft))
    while not answering.done():
        await asyncio.wait(
            [answering, asyncio.ensure_future(draft.changed.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        if not events:
            print(f"first text after {time.monotonic() - asked_at:.2f} s")
        events.append(draft.take())
    events.append(draft.take())
    assert len(events) > 3 and b'"content":"' in events[0]
    record = remembered(harbour, "default", draft.start.answer_id)
    assert record is not None
    assert [choice.content for choice in record.choices] == texts_of(b"".join(events))


def texts_of(events: bytes) -> list[str]:
    """The texts of a stream's two choices."""
    found = ["", ""]
    for line in events.decode().split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] += choice["delta"].get("content") or ""
    return found


async def test_what_cannot_be_answered_is_refused_by_name(harbour: Harbour) -> None:
    inference = harbour.inference()
    for tenant, model in [("default", "west"), ("default", "north:v3"), ("other", "north"), ("default", BASE)]:
        with pytest.raises(NotFound, match="no published model"):
            await inference.chat(tenant, greedy(model))
    for changes, place, rule in [
        ({"messages": [{"role": "pilot", "content": "?"}]}, "messages", r"messages\[0\]\.role must be one of"),
        ({"messages": [{"role": "user"}]}, "messages", r"messages\[0\]\.content is missing"),
        ({"max_tokens": 3000}, "max_tokens", "do not fit into 2048 tokens"),
        ({"messages": [{"role": "user", "content": "crates " * 3000}]}, "messages", "do not fit into 2048 tokens"),
    ]:
        with pytest.raises(InvalidInput, match=rule) as refused:
            await inference.chat("default", greedy("north", **changes))
        assert refused.value.place == place
    with pytest.raises(InvalidInput, match="a token id is outside the vocabulary") as refused:
        await inference.complete("default", CompletionRequest(model="north", prompt=[100_000]))
    assert "http:" not in str(refused.value) and ".sock" not in str(refused.value)


async def test_a_server_behind_a_url_is_asked_for_what_it_serves(harbour: Harbour, tmp_path: Path) -> None:
    """A sampler of our own stands for the server."""
    adapter = find_artifact(harbour.store, published_version("default", "adapters", "north", 2))
    request = CompleteRequest(
        model=harbour.artifact, adapter=adapter, base=BASE, place=ServedSampler(), asked=greedy("north")
    )

    def ask() -> None:
        with running(harbour.model, tmp_path) as ready:
            own = SamplingSettings(url=ready.url, api_key=ready.api_key)
            settings = harbour.settings.model_copy(update={"sampling": own})
            with closing(Questions(HostContext(settings), Samplers(settings))) as questions:
                answer = questions.answer(request, OpenQuestion())
                assert isinstance(answer, ChatCompletion)
                assert said(answer) == reference(harbour.model, harbour.adapters["north"])[1]
                with pytest.raises(InvalidInput, match="serves tiny, and this was trained from org/large@main"):
                    questions.answer(request.model_copy(update={"base": "org/large@main"}), OpenQuestion())

    await asyncio.to_thread(ask)


async def test_clients_are_answered_over_http_whole_or_in_a_stream(harbour: Harbour) -> None:
    body = {"model": "north", "messages": PLAIN, "temperature": 0, "max_completion_tokens": 70, "ignore_eos": True}

    def ask() -> None:
        with serving(harbour.settings) as service, service.http() as admin:
            bearer = {"authorization": f"Bearer {KEY}"}
            with httpx.Client(base_url=f"{service.url}/v1", headers=bearer, timeout=200, trust_env=False) as http:
                assert "north" in [model["id"] for model in http.get("/models").json()["data"]]
                assert http.get("/models/north:v1").json()["parent"] == BASE
                whole = http.post("/chat/completions", json=body)
                assert whole.status_code == 200, whole.text
                message = whole.json()["choices"][0]["message"]
                streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
                lines = http.post("/chat/completions", json=streamed).text.split("\n\n")
                assert lines[-2:] == ["data: [DONE]", ""]
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if not line.startswith(":")]
                deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
                assert deltas[0]["role"] == message["role"] == "assistant"
                assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
                assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-2:] == [None, "length"]
                assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole.json()["usage"])
                offered = http.post("/chat/completions", json=body | {"tools": [TOOL]}).json()["usage"]
                assert offered["prompt_tokens"] > whole.json()["usage"]["prompt_tokens"], "its template shows the tool"
                text = http.post("/completions", json={"model": "south", "prompt": "How many", "max_tokens": 4})
                assert text.json()["usage"]["completion_tokens"] <= 4
                longer = {"model": "south", "prompt": "How many", "max_tokens": 40, "temperature": 0, "logprobs": 0}
                texts = http.post("/completions", json=longer | {"stream": True}).text.split("\n\n")[:-2]
                parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in texts]
                [whole_text] = http.post("/completions", json=longer).json()["choices"]
                assert "".join(part["text"] for part in parts) == whole_text["text"]
                assert {**parts[-1], "text": whole_text["text"]} == whole_text
                for changes, status, place in [
                    ({"model": "west"}, 404, None),
                    ({"model": "west", "stream": True}, 404, None),
                    ({"temperature": 3}, 400, "temperature"),
                    ({"tools": [{"type": "function"}]}, 400, "tools"),
                    ({"crates": 1}, 400, "crates"),
                    ({"messages": [{"role": "pilot", "content": ""}]}, 400, "messages"),
                ]:
                    refused = http.post("/chat/completions", json=body | changes)
                    assert (refused.status_code, refused.json()["error"]["param"]) == (status, place), refused.text
                reader = admin.post("/keys", json={"title": "reader", "scopes": ["read"]}).json()["key"]
                assert http.get("/models", headers={"authorization": f"Bearer {reader}"}).status_code == 403

    await asyncio.to_thread(ask)


async def test_two_models_are_asked_side_by_side_on_the_page(harbour: Harbour) -> None:
    from tests.page.guest import Guest, chromium, expect

    def ask() -> dict[str, list[str]]:
        with serving(harbour.settings) as service, chromium() as browser:
            guest = Guest(browser, service.url)
            page = guest.page
            page.goto("/models?ask=north")
            expect(page.locator("#models").get_by_title(BASE).first).to_have_text("tiny")
            page.get_by_label("Compare with").select_option("south")
            page.get_by_label("Temperature").fill("0")
            page.get_by_label("Max tokens").fill("12")
            page.get_by_label("System message").fill("You count crates.")
            page.get_by_label("Message", exact=True).fill("How many crates are there?")
            page.get_by_role("button", name="Send").click()
            expect(page.get_by_label("Message", exact=True)).to_have_value("")
            for name in ("north", "south"):
                answer = page.get_by_label(f"Conversation with {name}").locator("pre").nth(1)
                expect(answer).not_to_have_text("…", timeout=120_000)
            shown = {
                name: page.get_by_label(f"Conversation with {name}").locator("pre").all_text_contents()
                for name in ("north", "south")
            }
            page.get_by_label("Max tokens").fill("9000")
            page.get_by_label("Message", exact=True).fill("And now?")
            page.get_by_role("button", name="Send").click()
            expect(page.locator("#ask .problem")).to_contain_text("do not fit into 2048 tokens", timeout=120_000)
            assert page.get_by_label("Conversation with north").locator("pre").count() == 2, "what was refused is gone"
            assert [trouble for trouble in guest.troubles if "400" not in trouble] == []
            guest.context.close()
        return shown

    for name, texts in (await asyncio.to_thread(ask)).items():
        asked = greedy(name, messages=PLAIN, max_tokens=12, ignore_eos=None)
        assert texts == [PLAIN[1]["content"], said((await harbour.inference().chat("default", asked)).read())], name


def test_models_are_listed_by_name_and_found_by_version(harbour: Harbour) -> None:
    published = PublishedModels(harbour.store)
    listed = {model.id: model for model in published.served("default")}
    assert {"north", "south"} <= set(listed)
    assert (listed["north"].root, listed["north"].version, listed["north"].parent) == ("north:v2", 2, BASE)
    assert (listed["north"].created, listed["north"].owned_by) == (int(CREATED_AT), "default")
    assert published.show("default", "north:v1").model_dump() == {
        **listed["north"].model_dump(),
        "id": "north:v1",
        "root": "north:v1",
        "version": 1,
    }
    assert published.served("other") == []
    for unknown in ("north:v3", "north:v0", "north:v01", "../default/adapters/north", "", "north:v1/claims"):
        with pytest.raises(NotFound):
            published.show("default", unknown)


def test_a_version_on_its_way_is_not_the_newest_yet(harbour: Harbour) -> None:
    harbour.store.put_bytes("tenants/default/adapters/south/claims/v000002.json", b'{"run_id": "sft-1"}')
    assert PublishedModels(harbour.store).find("default", "south").version == 1


def test_bytes_of_half_characters_are_their_own() -> None:
    drawn = CompletionResponse.model_validate(
        {
            "id": "cmpl-1",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "text": "é",
                    "finish_reason": "stop",
                    "token_ids": [7, 8],
                    "logprobs": {
                        "tokens": ["\ufffd", "\ufffd"],
                        "token_logprobs": [-0.5, None],
                        "top_logprobs": [{"\ufffd": -0.5, "e": -2.0}, {"x": -9.0, "\ufffd": -10.0}],
                    },
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        }
    )
    asked = greedy("m", logprobs=True, top_logprobs=1)
    answer = chat_completion(asked, drawn, {7: b"\xc3", 8: b"\xa9"}.__getitem__, "chatcmpl-1", [1])
    told = answer.choices[0].logprobs
    assert told is not None
    assert answer.id == "chatcmpl-1"
    assert [(token.bytes, token.logprob) for token in told.content] == [([0xC3], -0.5), ([0xA9], -9999.0)]
    assert [[(top.token, top.bytes) for top in t.top_logprobs] for t in told.content] == [
        [("\ufffd", None)],
        [("x", [120])],
    ]
