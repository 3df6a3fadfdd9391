"""What any sampler must do: ours always, the vLLM of .venv-vllm where that is (`make test-vllm`), and the one behind
LONGSHORE_SAMPLER_URL (and _KEY) where one is named. And what our vLLM servers let in.

export LONGSHORE_SAMPLER_URL=http://127.0.0.1:8000 LONGSHORE_SAMPLER_KEY=...
pytest tests/megatron_worker/test_sampler_conformance.py
"""

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from activities.sampling.client import Sampler
from megatron_worker.sampler.inside_vllm.longshore_weights import Gate
from shared.chat.completions import TOKEN_ID, CompletionResponse, Sampling
from shared.errors import InvalidInput
from tests.activities.sampling.injected import write_weights
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.sampler_process import NAME, running
from tests.vllm.environment import IS_THERE, running_vllm

PROMPT = (10, 20, 30, 40, 50)
OTHER_SERVER = os.environ.get("LONGSHORE_SAMPLER_URL")


@dataclass(frozen=True)
class Subject:
    url: str
    key: str
    model: str
    socket: str | None = None

    def http(self):
        return httpx.Client(transport=httpx.HTTPTransport(uds=self.socket), base_url=self.url, timeout=300)

    def ask(self, path, body, key=None):
        with self.http() as client:
            headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
            return client.post(path, json=body, headers=headers)

    def complete(self, **body):
        response = self.ask("/v1/completions", {"model": self.model, "prompt": list(PROMPT), **body})
        assert response.status_code == 200, response.text
        return CompletionResponse.model_validate_json(response.content)


@pytest.fixture(
    scope="module", params=["ours", *(["vllm"] if IS_THERE else []), *(["another"] if OTHER_SERVER else [])]
)
def subject(request, tmp_path_factory):
    if request.param == "another":
        key = os.environ.get("LONGSHORE_SAMPLER_KEY", "")
        model = next(iter(Sampler(OTHER_SERVER, key).models()))
        yield Subject(OTHER_SERVER.rstrip("/"), key, model)
        return
    folder = tmp_path_factory.mktemp("sampler")
    if request.param == "vllm":
        with running_vllm(distinct_model(folder / "model", head_dim=32), folder) as ready:
            yield Subject(ready.url, ready.api_key, ready.model, ready.socket)
        return
    with running(distinct_model(folder / "model"), folder, "--socket", str(folder / "sampler.sock")) as ready:
        yield Subject(ready.url, ready.api_key, NAME, ready.socket)


@pytest.fixture
def sampler(subject):
    with Sampler(subject.url, subject.key, socket_path=subject.socket) as sampler:
        yield sampler


def test_health_and_models(subject, sampler):
    with subject.http() as client:
        assert client.get("/health").is_success
    assert subject.model in sampler.models()


def test_tokens_come_with_their_logprobs(subject, sampler):
    for sample in sampler.sample(subject.model, PROMPT, Sampling(max_tokens=12, ignore_eos=True), n=3, seed=1):
        assert len(sample.token_ids) == len(sample.logprobs) == 12
        assert all(logprob <= 0 for logprob in sample.logprobs)
        assert sample.was_cut_off
        assert sample.stop_reason is None


def test_same_seed_same_samples_other_seed_others(subject, sampler):
    sampling = Sampling(max_tokens=16, ignore_eos=True)
    first = sampler.sample(subject.model, PROMPT, sampling, n=4, seed=5)
    assert [s.token_ids for s in sampler.sample(subject.model, PROMPT, sampling, n=4, seed=5)] == [
        s.token_ids for s in first
    ]
    assert len({s.token_ids for s in first}) == 4
    other = sampler.sample(subject.model, PROMPT, sampling, n=4, seed=50)
    assert not {s.token_ids for s in first} & {s.token_ids for s in other}


def test_sample_j_is_the_sample_of_seed_plus_j(subject, sampler):
    sampling = Sampling(max_tokens=16, ignore_eos=True)
    samples = sampler.sample(subject.model, PROMPT, sampling, n=3, seed=7)
    alone = [sampler.sample(subject.model, PROMPT, sampling, n=1, seed=7 + j)[0] for j in range(3)]
    assert [s.token_ids for s in alone] == [s.token_ids for s in samples]


def test_temperature_0_ignores_the_seed(subject, sampler):
    sampling = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
    assert len({s.token_ids for j in range(2) for s in sampler.sample(subject.model, PROMPT, sampling, 1, j)}) == 1


@pytest.mark.parametrize("cut", [{"top_p": 1e-9}, {"top_k": 1}])
def test_what_leaves_one_token_is_greedy(subject, sampler, cut):
    greedy = sampler.sample(subject.model, PROMPT, Sampling(max_tokens=8, temperature=0, ignore_eos=True), 1, 0)
    left = sampler.sample(subject.model, PROMPT, Sampling(max_tokens=8, ignore_eos=True, **cut), 1, 3)
    assert left[0].token_ids == greedy[0].token_ids


def test_stop_token_ends_and_stays_in_the_ids(subject, sampler):
    (free,) = sampler.sample(subject.model, PROMPT, Sampling(max_tokens=20, ignore_eos=True), n=1, seed=2)
    stop = free.token_ids[7]
    end = free.token_ids.index(stop) + 1
    sampling = Sampling(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    (stopped,) = sampler.sample(subject.model, PROMPT, sampling, n=1, seed=2)
    assert stopped.token_ids == free.token_ids[:end]
    assert not stopped.was_cut_off
    assert stopped.stop_reason == stop


def test_stop_string_ends_the_text_before_it(subject, sampler):
    free, stop, place = next(_completions_with_a_word(subject, sampler))
    sampling = Sampling(max_tokens=60, ignore_eos=True, stop=("\u2603 never", stop))
    (stopped,) = sampler.sample(subject.model, PROMPT, sampling, n=1, seed=free[0])
    assert stopped.text == free[1].text[:place]
    assert stopped.token_ids == free[1].token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 60
    assert not stopped.was_cut_off
    assert stopped.stop_reason == stop


def _completions_with_a_word(subject, sampler):
    """Completions in whose text two plain letters stand side by side, not at the beginning."""
    for seed in range(50):
        (free,) = sampler.sample(subject.model, PROMPT, Sampling(max_tokens=60, ignore_eos=True), n=1, seed=seed)
        for place in range(4, len(free.text) - 2):
            pair = free.text[place : place + 2]
            if pair.isascii() and pair.isalpha() and "\ufffd" not in free.text[: place + 2] and place < 40:
                yield (seed, free), pair, free.text.index(pair)


def test_several_prompts_answer_in_order(subject):
    prompts = [[10, 11, 12], [20, 21, 22, 23]]
    answer = subject.complete(prompt=prompts, n=2, max_tokens=3, seed=1, return_token_ids=True, ignore_eos=True)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.prompt_token_ids for c in answer.choices] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == 12


def test_text_prompts_are_tokenized(subject):
    answer = subject.complete(prompt="hello there", max_tokens=2, return_token_ids=True)
    assert answer.choices[0].prompt_token_ids
    assert answer.model == subject.model


def test_without_asking_there_are_no_ids_and_no_logprobs(subject):
    (choice,) = subject.complete(max_tokens=2).choices
    assert choice.token_ids is None
    assert choice.logprobs is None


def test_top_logprobs(subject):
    (choice,) = subject.complete(max_tokens=3, temperature=0, logprobs=3).choices
    assert choice.logprobs is not None
    for own, likeliest in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert own == max(likeliest.values())
        assert len(likeliest) <= 4


def test_tokens_are_named_by_their_ids_where_that_is_asked_for(subject):
    asked = {"max_tokens": 4, "temperature": 0, "logprobs": 2, "return_token_ids": True}
    (named,) = subject.complete(**asked, return_tokens_as_token_ids=True).choices
    assert named.token_ids is not None
    assert named.logprobs.tokens == [f"{TOKEN_ID}{token}" for token in named.token_ids]
    for token, likeliest in zip(named.token_ids, named.logprobs.top_logprobs, strict=True):
        assert max(likeliest, key=likeliest.__getitem__) == f"{TOKEN_ID}{token}" and len(likeliest) == 2


def test_scores_of_a_prompt_are_those_of_its_tokens_as_a_sample(subject, sampler):
    """A greedy continuation, told once as it is drawn and once as a part of the prompt; and over again."""
    sampling = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    (drawn,) = sampler.sample(subject.model, PROMPT, sampling, n=1, seed=0)
    scores = sampler.score(subject.model, PROMPT + drawn.token_ids)
    assert len(scores) == len(PROMPT) + 8 - 1
    assert scores[len(PROMPT) - 1 :] == pytest.approx(drawn.logprobs, abs=1e-4 if subject.model == NAME else 0.1)
    assert sampler.score(subject.model, PROMPT) == pytest.approx(scores[: len(PROMPT) - 1], abs=0.1)


def test_prompt_logprobs_stand_by_token_id(subject):
    (choice,) = subject.complete(max_tokens=1, prompt_logprobs=0).choices
    assert choice.prompt_logprobs is not None
    assert choice.prompt_logprobs[0] is None
    for token, by_id in zip(PROMPT[1:], choice.prompt_logprobs[1:], strict=True):
        assert by_id[token].logprob <= 0
        assert by_id[token].rank is None or by_id[token].rank >= 1
    (unasked,) = subject.complete(max_tokens=1).choices
    assert unasked.prompt_logprobs is None


@pytest.mark.parametrize("num_drawn", [0, 4])
def test_an_echo_has_the_scores_of_the_prompt_before_those_of_the_answer(subject, num_drawn):
    """Of a batch, as evaluation harnesses ask."""
    prompts = [list(PROMPT), [60, 70]]
    asked = {"prompt": prompts, "temperature": 0, "max_tokens": num_drawn, "ignore_eos": True}
    choices = subject.complete(**asked, echo=True, logprobs=1).choices
    plain = subject.complete(**(asked | {"max_tokens": 4}), logprobs=1, prompt_logprobs=1).choices
    for prompt, choice, other in zip(prompts, choices, plain, strict=True):
        told = choice.logprobs
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(prompt) + num_drawn
        assert told.token_logprobs[0] is None
        scores = [by_id[token].logprob for token, by_id in zip(prompt[1:], other.prompt_logprobs[1:], strict=True)]
        assert told.token_logprobs[1:] == pytest.approx(scores + other.logprobs.token_logprobs[:num_drawn], abs=1e-4)
        best = [max(each.logprob for each in by_id.values()) for by_id in other.prompt_logprobs[1:]]
        assert [max(each.values()) for each in told.top_logprobs[1 : len(prompt)]] == pytest.approx(best, abs=1e-4)
        assert "".join(told.tokens) == choice.text
        assert [choice.text[at:].startswith(token) for token, at in zip(told.tokens, told.text_offset, strict=True)]


BAD = [
    ({"prompt": []}, 400),
    ({"prompt": [10**9]}, 400),
    ({"max_tokens": 0}, 400),
    ({"max_tokens": 10**7}, 400),
    ({"temperature": -1.0}, 400),
    ({"top_p": 0.0}, 400),
    ({"logprobs": 1000}, 400),
    ({"model": "nobody-has-this"}, 404),
]


@pytest.mark.parametrize(("change", "status"), BAD)
def test_bad_requests_are_refused_in_openais_shape(subject, change, status):
    response = subject.ask("/v1/completions", {"model": subject.model, "prompt": [1, 2], "max_tokens": 2, **change})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_a_body_that_is_no_json_is_refused(subject):
    headers = {"Authorization": f"Bearer {subject.key}", "Content-Type": "application/json"}
    with subject.http() as client:
        response = client.post("/v1/completions", content=b"{", headers=headers)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]


def test_a_wrong_key_is_refused(subject):
    if not subject.key:
        pytest.skip("this server asks for no key")
    assert subject.ask("/v1/completions", {"model": subject.model, "prompt": [1]}, key="wrong").status_code == 401
    with pytest.raises(InvalidInput, match="401"):
        Sampler(subject.url, "wrong", socket_path=subject.socket).models()


def test_unloading_what_is_not_there_is_a_404(subject):
    response = subject.ask("/v1/unload_lora_adapter", {"lora_name": "nobody"})
    if response.status_code == 405 or "Not Found" in response.text:
        pytest.skip("this server does not load adapters at run time")
    assert response.status_code == 404
    assert response.json()["error"]["message"]


KEY = "key-of-this-test"
COMPLETIONS, LOAD = "/v1/completions", "/v1/load_weights"


@dataclass
class Named:
    name: str
    model_path: str


@dataclass
class Vllm:
    """The few attributes and methods of vLLM's application that the middleware uses, behind one that it is in."""

    served: list[Named]
    done: list[str] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False

    def __post_init__(self) -> None:
        self.may_answer.set()
        models, args = SimpleNamespace(base_model_paths=self.served), SimpleNamespace(enable_lora=False)
        self.state = SimpleNamespace(openai_serving_models=models, args=args, engine_client=self)
        self.gate = Gate(self.answer)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.gate(scope | {"app": self}, receive, send)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.done.append(f"{scope['path']} begins")
        self.has_begun.set()
        await self.may_answer.wait()
        self.done.append(f"{scope['path']} ends")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert clear_cache, "or keys and values of old weights are used again"

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> None:
        assert self.served == [], "nobody can name weights that are half there"
        self.done.append(f"{method} {Path(*args).name}")
        if self.fails:
            raise OSError("read error")

    async def resume_generation(self) -> None:
        pass


@pytest.fixture
def vllm(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    return Vllm([Named("base", str(tiny_model))])


@pytest.fixture(scope="module")
def other(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("other") / "other", tiny_model, 1)


def client_of(vllm: Vllm, key: str = KEY) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(vllm), base_url="http://vllm", headers=headers)


async def test_only_what_samplers_are_asked_is_let_in_and_only_with_the_key(vllm: Vllm) -> None:
    async with client_of(vllm, "another") as stranger, client_of(vllm) as client:
        for path in (COMPLETIONS, LOAD, "/invocations", "/collective_rpc", "/v1//completions"):
            assert (await stranger.post(path, json={})).status_code == 401
        for path in ("/invocations", "/collective_rpc", "/update_weights", "/sleep", "/v1//completions", "/metrics"):
            assert (await client.post(path, json={})).status_code == 404
        assert vllm.done == []
        assert (await stranger.get("/health")).status_code == 200
        assert (await client.post(COMPLETIONS, json={})).status_code == 200
        for body in (b"", b"[]", b"{}", b'{"name": "", "path": "/"}', b'{"name": 1, "path": "/"}'):
            assert (await client.post(LOAD, content=body)).status_code == 400
        assert (await client.post(LOAD, content=b" " * (65 << 10))).status_code == 413
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await vllm({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)
        assert [message["type"] for message in sent] == ["websocket.close"]


async def test_weights_are_replaced_while_nothing_is_drawn(vllm: Vllm, other: Path) -> None:
    vllm.may_answer.clear()
    async with client_of(vllm) as client:
        first = asyncio.create_task(client.post(COMPLETIONS, json={}))
        await vllm.has_begun.wait()
        load = asyncio.create_task(client.post(LOAD, json={"name": "new", "path": str(other)}))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(client.post(COMPLETIONS, json={}))
        await asyncio.sleep(0.05)
        assert vllm.done == [f"{COMPLETIONS} begins"]
        vllm.may_answer.set()
        assert [(await each).status_code for each in (first, load, second)] == [200, 200, 200]
    one = [f"{COMPLETIONS} begins", f"{COMPLETIONS} ends"]
    assert vllm.done == [*one, "replace_weights other", *one]
    assert vllm.served == [Named("new", str(other))]


async def test_other_tensors_are_refused_and_half_read_weights_are_never_used(
    vllm: Vllm, other: Path, tmp_path: Path
) -> None:
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if "norm" in name)
    for number, wrong in enumerate(({name: tensors[name][:-1]}, {"more": tensors[name].clone()}, {})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_bytes((other / "config.json").read_bytes())
        changed = {key: tensor for key, tensor in tensors.items() if key != name or wrong} | wrong
        save_file(changed, folder / "model.safetensors")
        async with client_of(vllm) as client:
            refused = await client.post(LOAD, json={"name": "new", "path": str(folder)})
        assert refused.status_code == 400 and "not those of the model" in refused.text
    assert vllm.done == [] and [one.name for one in vllm.served] == ["base"]
    vllm.fails = True
    async with client_of(vllm) as client:
        assert (await client.post(LOAD, json={"name": "new", "path": str(other)})).status_code == 503
        vllm.fails = False
        for path in (COMPLETIONS, LOAD):
            refused = await client.post(path, json={"name": "new", "path": str(other)})
            assert refused.status_code == 503 and "OSError: read error" in refused.text
        assert (await client.get("/health")).status_code == 503
    assert vllm.done == ["replace_weights other"] and vllm.served == []
