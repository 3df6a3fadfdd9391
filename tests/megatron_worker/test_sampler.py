"""Our sampler as transformers, PEFT and the trainer; equal bits beside others; adapters, requests, grammars."""

import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from activities.sampling.client import Sampler
from longshore.losses import Reinforce
from longshore.training import LINEARS, Layout
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import Outputs
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.grammars.grammar import Grammars
from shared.chat.completions import (
    CompletionRequest,
    CompletionResponse,
    Sampling,
    StructuralTag,
    StructuredOutputs,
    Tag,
    TagContent,
    Tags,
)
from shared.errors import InvalidInput
from tests.megatron_worker.rows import VOCAB_SIZE, Row, bin_of, distinct_model
from tests.megatron_worker.sampler_process import NAME, http, post, running, write_adapter

# Of a sampler's logprob and the trainer's, both float32, over prompts and completions of up to 320 tokens.
AGREEMENT = 1e-5
GREEDY = Sampling(max_tokens=40, temperature=0, ignore_eos=True)
FREE = Sampling(max_tokens=40, ignore_eos=True)


def prompt_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model and two adapters: on all linears, and on three of them (one of a fused pair, one of a fused triple)."""
    folder = tmp_path_factory.mktemp("sampler")
    model = distinct_model(folder / "model")
    write_adapter(folder / "all", model, 1, LINEARS)
    write_adapter(folder / "some", model, 2, ("k_proj", "up_proj", "o_proj"), rank=8)
    return folder


@pytest.fixture(scope="module")
def ours(place):
    with running(place / "model", place) as ready:
        yield ready


@pytest.fixture(scope="module")
def sampler(ours, place):
    with Sampler(ours.url, ours.api_key) as sampler:
        sampler.load_adapter("all", str(place / "all"))
        sampler.load_adapter("some", str(place / "some"))
        yield sampler


# Against others.


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3_moe", False), ("qwen2", True), ("llama", False)])
def test_greedy_is_transformers_generate(tmp_path, family, tied):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(distinct_model(tmp_path / "model", family, tied))
    with running(tmp_path / "model", tmp_path) as ready, Sampler(ready.url, ready.api_key) as sampler:
        for length in (1, 7, 120, 200):
            prompt = prompt_of(length, length)
            assert greedy_ids(sampler, NAME, prompt) == generated(reference, prompt)


def test_greedy_with_an_adapter_is_pefts(place, sampler):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prompt = prompt_of(60)
    found = {NAME: greedy_ids(sampler, NAME, prompt)}
    for name in ("all", "some"):
        reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "model"), place / name)
        found[name] = greedy_ids(sampler, name, prompt)
        assert found[name] == generated(reference, prompt)
    assert len(set(found.values())) == 3


def greedy_ids(sampler, model, prompt):
    return sampler.sample(model, prompt, GREEDY, n=1, seed=0)[0].token_ids


def generated(reference, prompt):
    with torch.no_grad():
        ids = reference.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=-1
        )
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("adapter", [None, "all", "some"])
def test_logprobs_are_the_trainers(place, sampler, adapter):
    engine, sampling = trainer(place, adapter), changed(FREE, max_tokens=120)
    for length in (5, 200):
        prompt = prompt_of(length, length)
        samples = sampler.sample(adapter or NAME, prompt, sampling, n=4, seed=length)
        rows = [Row([*prompt, *s.token_ids], [0.0] * length + [1.0] * 120) for s in samples]
        with torch.no_grad():
            logprob_N = engine.forward(bin_of(rows), Outputs()).logprob_N
        told_N = torch.tensor([value for s in samples for value in s.logprobs])
        assert (logprob_N - told_N).abs().max() <= AGREEMENT


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("adapter", [None, "all"])
def test_processed_logprobs_are_the_trainers_at_the_same_temperature(place, tempered, adapter, temperature):
    engine = trainer(place, adapter)
    sampling, outputs = changed(FREE, temperature=temperature), loss_function(Reinforce(), temperature).outputs
    for length in (5, 200):
        prompt = prompt_of(length, length)
        samples = tempered.sample(adapter or NAME, prompt, sampling, n=4, seed=length)
        rows = [Row([*prompt, *s.token_ids], [0.0] * length + [1.0] * 40) for s in samples]
        with torch.no_grad():
            ours_N, natural_N = (engine.forward(bin_of(rows), o).logprob_N for o in (outputs, Outputs()))
        told_N = torch.tensor([value for s in samples for value in s.logprobs])
        assert (ours_N - told_N).abs().max() <= AGREEMENT
        assert (natural_N - told_N).abs().max() > 0.1


@pytest.fixture(scope="module")
def tempered(place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tempered")
    options = ("--logprobs-mode", "processed_logprobs")
    with running(place / "model", folder, *options) as ready, Sampler(ready.url, ready.api_key) as sampler:
        sampler.load_adapter("all", str(place / "all"))
        yield sampler


def trainer(place, adapter):
    engine = MegatronEngine(place / "model", Layout(), "float32")
    if adapter:
        engine.load_adapter(adapter, place / adapter, None, trainable=False)
    return engine


@pytest.mark.parametrize("adapter", [None, "all", "some"])
def test_scores_of_a_prompt_are_the_trainers(place, sampler, tempered, adapter):
    """Of a worker's probe above all. Always at temperature 1, whatever the sampler tells of samples."""
    engine = trainer(place, adapter)
    for length in (2, 7, 65, 66, 320):  # about the edges of a chunk too
        ids = prompt_of(length, length)
        scores = sampler.score(adapter or NAME, ids)
        assert len(scores) == length - 1
        assert torch.tensor(scores).sub(torch.tensor(Dispatcher(engine).probe(adapter, ids))).abs().max() <= AGREEMENT
    if adapter != "some":
        assert tempered.score(adapter or NAME, ids) == scores


def test_ranks_of_prompt_tokens_are_those_of_the_whole_vocabulary(place, ours):
    prompt = prompt_of(90)
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": 1, "prompt_logprobs": 3}
    (choice,) = CompletionResponse.model_validate_json(post(ours, "/v1/completions", body).content).choices
    decoder = Decoder(place / "model", torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(place / "model" / "tokenizer.json"))
    for number in range(1, 90, 8):
        token = prompt[number]
        logit_V = decoder.logits(decoder.prefill(prompt[:number], {}).hidden_H[None], {})[0]
        by_id = choice.prompt_logprobs[number]
        told = by_id[token]
        likeliest = logit_V.topk(3).indices.tolist()
        assert set(by_id) == {token, *likeliest}
        assert [by_id[each].rank for each in likeliest] == [1, 2, 3]
        assert told.rank == 1 + int((logit_V > logit_V[token]).sum())
        assert told.decoded_token == tokenizer.decode([token], skip_special_tokens=False)


def changed(sampling, **changes):
    return sampling.model_copy(update=changes)


def test_processed_logprobs_are_of_the_tempered_distribution(place, tmp_path):
    prompt, sampling = prompt_of(5), changed(FREE, temperature=0.5, top_p=0.9, max_tokens=1)
    engine = Decoder(place / "model", torch.float32, torch.device("cpu"))
    logit_V = engine.logits(engine.prefill(prompt, {}).hidden_H[None], {})[0].double()
    ranked, order = (logit_V / 0.5).softmax(-1).sort(descending=True)
    kept = order[: int((ranked.cumsum(-1) < 0.9).sum()) + 1]
    expected = (logit_V / 0.5)[kept].log_softmax(-1)
    options = ("--logprobs-mode", "processed_logprobs")
    with running(place / "model", tmp_path, *options) as ready, Sampler(ready.url, ready.api_key) as sampler:
        for sample in sampler.sample(NAME, prompt, sampling, n=20, seed=0):
            (where,) = (kept == sample.token_ids[0]).nonzero()[0].tolist()
            assert abs(sample.logprobs[0] - float(expected[where])) < 1e-5


# The same bits whatever else goes on.


def test_samples_do_not_depend_on_what_else_is_drawn(place, sampler, tmp_path):
    """Alone, among 150 others of three models in slots that fall free at all times, and in another process."""
    wanted = [
        (model, prompt_of(length, length), sampling, 100 + length)
        for model in (NAME, "all", "some")
        for length, sampling in [
            (1, FREE),
            (100, changed(FREE, temperature=0.6)),
            (127, changed(FREE, top_p=0.8, max_tokens=90)),
            (260, FREE),
        ]
    ]
    alone = [sampler.sample(*w[:3], n=1, seed=w[3])[0] for w in wanted]
    scored = [(model, prompt_of(length, length)) for model in (NAME, "all") for length in (2, 130, 260)]
    scores_alone = [sampler.score(*s) for s in scored]
    with ThreadPoolExecutor(64) as pool:
        noise = [
            pool.submit(
                sampler.sample,
                (NAME, "all", "some")[i % 3],
                prompt_of(1 + 13 * i % 150, i),
                changed(FREE, max_tokens=1 + 7 * i % 60),
                5,
                i,
            )
            for i in range(30)
        ]
        among = [pool.submit(sampler.sample, *w[:3], 1, w[3]) for w in wanted]
        scores_among = [pool.submit(sampler.score, *s) for s in scored]
        assert [a.result()[0] for a in among] == alone
        assert [s.result() for s in scores_among] == scores_alone
        assert all(len(n.result()) == 5 for n in noise)
    with running(place / "model", tmp_path) as ready, Sampler(ready.url, ready.api_key) as second:
        for name in ("all", "some"):
            second.load_adapter(name, str(place / name))
        assert [second.sample(*w[:3], n=1, seed=w[3])[0] for w in reversed(wanted)] == alone[::-1]


# Adapters.


def test_a_stream_has_the_parts_of_the_whole_answer(sampler):
    """Several prompts and samples at once, ended by tokens, strings and the length; text never has to be taken back."""
    asked = CompletionRequest(
        model="all",
        prompt=[list(prompt_of(30)), list(prompt_of(5, 1))],
        n=3,
        max_tokens=120,
        seed=4,
        logprobs=2,
        prompt_logprobs=0,
        return_token_ids=True,
    )
    first = sampler.complete(asked).choices[0]
    stops = [first.text[40:43], "nowhere"]
    changes = ({}, {"echo": True, "prompt_logprobs": None}, {"ignore_eos": True, "stop": stops})
    for request in (asked.model_copy(update=each) for each in changes):
        told = []
        whole, streamed = sampler.complete(request), sampler.complete(request, told.append)
        assert streamed.choices == whole.choices
        assert streamed.usage == whole.usage
        assert len(told) > 1, "it came in pieces"
        for before, after in pairwise(told):
            assert all(later.startswith(earlier) for earlier, later in zip(before, after, strict=True))
    assert [choice.stop_reason for choice in whole.choices].count(stops[0]) >= 1


def test_models_are_listed_with_their_parents(place, sampler):
    models = sampler.models()
    assert models["all"].parent == NAME
    assert models["all"].root == str(place / "all")
    assert models[NAME].parent is None


def test_loading_and_unloading_can_be_repeated(place, sampler, ours):
    for _ in range(2):
        sampler.load_adapter("again", str(place / "some"))
    with pytest.raises(InvalidInput, match="already been loaded"):
        sampler.load_adapter("again", str(place / "all"))
    with pytest.raises(InvalidInput, match="already been loaded"):
        sampler.load_adapter(NAME, str(place / "all"))
    for _ in range(2):
        sampler.unload_adapter("again")
    assert post(ours, "/v1/completions", {"model": "again", "prompt": [1]}).status_code == 404


def test_an_adapter_may_vanish_from_disk_once_loaded(place, sampler, tmp_path):
    shutil.copytree(place / "all", tmp_path / "copy")
    sampler.load_adapter("copy", str(tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy")
    assert sampler.sample("copy", (5, 6), FREE, 1, 3) == sampler.sample("all", (5, 6), FREE, 1, 3)
    sampler.unload_adapter("copy")


def damaged(name, source, target):
    shutil.copytree(source, target)
    weights, config = target / "adapter_model.safetensors", target / "adapter_config.json"
    match name:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "no json":
            config.write_text("{")
        case "another rank":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 3}))


@pytest.mark.parametrize("damage", ["truncated", "no json", "another rank"])
def test_a_damaged_adapter_is_refused(place, sampler, ours, tmp_path, damage):
    damaged(damage, place / "all", tmp_path / "bad")
    response = post(ours, "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path / "bad")})
    assert response.status_code == 400, response.text
    assert str(tmp_path / "bad") in response.json()["error"]["message"]
    assert "bad" not in sampler.models()


def test_a_missing_adapter_is_a_404(ours, tmp_path):
    response = post(ours, "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path / "none")})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "lora_path"


# Requests.


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 2.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"100000": 1}},
        {"structured_outputs": {"json": {}, "json_object": True}},
        {"structured_outputs": {"regex": "a"}},
        {"stream_options": {"include_usage": True}},
        {"max_tokens": 0},
        {"best_of": 3},
        {"min_tokens": 2},
        {"prompt_logprobs": 21},
        {"nonsense": 1},
        {"n": "2"},
        {"stop": ""},
        {"prompt": [1.5]},
        {"prompt": [[1], []]},
        {"prompt": [-1]},
        {"prompt": [[1]] * 600, "n": 2},
        {"seed": -1},
    ],
)
def test_what_would_be_ignored_is_refused(ours, change):
    response = post(ours, "/v1/completions", {"model": NAME, "prompt": [1, 2], "max_tokens": 1, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] in change


def test_prompt_and_completion_must_fit(place, tmp_path):
    with running(place / "model", tmp_path, "--max-model-len", "50") as ready:
        fits = post(ready, "/v1/completions", {"model": NAME, "prompt": [1] * 40, "max_tokens": 10})
        assert fits.status_code == 200
        over = post(ready, "/v1/completions", {"model": NAME, "prompt": [1] * 40, "max_tokens": 11})
        assert over.json()["error"]["code"] == "context_length_exceeded"


def test_the_models_own_end_token_ends_a_sample(sampler):
    """Among many samples some draw it; it stays in the ids, is none of the stop reasons, and has no text."""
    ended = [s for s in sampler.sample(NAME, (5, 6, 7), Sampling(max_tokens=200), 32, 0) if not s.was_cut_off]
    assert ended
    for sample in ended:
        assert sample.token_ids.index(2) == len(sample.token_ids) - 1
        assert sample.stop_reason is None
        assert "<|im_end|>" not in sample.text


def test_paths_methods_and_bodies_that_are_wrong(ours):
    with http(ours) as client:
        assert client.get("/v1/nothing").status_code == 404
        assert client.get("/v1/completions").status_code == 405
        assert client.delete("/v1/models").json()["error"]["type"] == "invalid_request_error"
        assert client.post("/v1/completions", content=iter([b"{}"])).status_code == 411
        assert client.get("/v1/models").headers["x-request-id"]
    assert httpx.get(f"{ours.url}/health", trust_env=False).status_code == 200
    assert httpx.get(f"{ours.url}/v1/models", trust_env=False).json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("given", ["", "Authorization: Bearer guessed\r\n"])
def test_a_stranger_is_refused_before_the_body_is_read(ours, given):
    """None of its 30 MB is sent: whoever waits for them answers after the client's patience, if ever."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{given}Content-Length: 30000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(ours.url.rsplit(":", 1)[1])), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_a_client_that_hangs_up_frees_its_slots(ours, sampler):
    body = json.dumps({"model": NAME, "prompt": [1], "n": 900, "max_tokens": 4000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ours.api_key}\r\n"
    with socket.create_connection(("127.0.0.1", int(ours.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.3)
    sampler.sample(NAME, (1, 2), Sampling(max_tokens=2), n=1, seed=0)  # all 900 would outlast this test's time


END_ID = 2
CRATES = {
    "type": "object",
    "properties": {
        "port": {"type": "string", "maxLength": 4},
        "quay": {"$ref": "#/$defs/quay"},
        "crates": {
            "type": "array",
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["tea", "tin", None]},
                    "weight": {"type": "integer", "minimum": -5, "maximum": 99},
                },
                "required": ["kind", "weight"],
                "additionalProperties": False,
            },
        },
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "open": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["port", "quay", "crates", "open"],
    "additionalProperties": False,
    "$defs": {"quay": {"type": "integer", "minimum": 1, "maximum": 40}},
}
VALIDATOR = jsonschema.Draft202012Validator(CRATES)


@pytest.fixture(scope="module")
def form_model(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("grammars") / "model")


@pytest.fixture(scope="module")
def forming(form_model, tmp_path_factory):
    with running(form_model, tmp_path_factory.mktemp("sampler")) as ready:
        yield ready


@pytest.fixture(scope="module")
def form_sampler(forming):
    with Sampler(forming.url, forming.api_key) as form_sampler:
        yield form_sampler


def asked(form, prompt=(5, 6, 7), **changes):
    told = {"max_tokens": 1500, "seed": 1, "logprobs": 3, "return_token_ids": True, "structured_outputs": form}
    return CompletionRequest.model_validate({"model": NAME, "prompt": list(prompt), **told, **changes})


def schema(schema):
    return StructuredOutputs(json=schema)


def test_200_of_200_draws_are_valid(form_sampler):
    choices = form_sampler.complete(asked(schema(CRATES), n=200, temperature=1.2)).choices
    assert len({choice.text for choice in choices}) == 200
    assert [choice.finish_reason for choice in choices] == ["stop"] * 200
    for choice in choices:
        VALIDATOR.validate(json.loads(choice.text))
    assert {len(json.loads(choice.text)["crates"]) for choice in choices} == {0, 1, 2}


def test_logprobs_are_of_what_was_allowed(form_model, form_sampler):
    """Of the masked distribution, and so are the likeliest beside a token."""
    (choice,) = form_sampler.complete(asked(schema(CRATES))).choices
    decoder = Decoder(form_model, torch.float32, torch.device("cpu"))
    place = grammars(form_model).compiled(schema(CRATES)).begin()
    for number in range(40):
        before = (5, 6, 7, *choice.token_ids[:number])
        logit_V = decoder.logits(decoder.prefill(before, {}).hidden_H[None], {})[0]
        logprob_V = logit_V.masked_fill(~place.allowed(), -torch.inf).log_softmax(-1)
        assert abs(choice.logprobs.token_logprobs[number] - float(logprob_V[choice.token_ids[number]])) < 1e-5
        for value in choice.logprobs.top_logprobs[number].values():
            assert (logprob_V - value).abs().min() < 1e-5
        place.accept(choice.token_ids[number])
    assert len(choice.token_ids) > 40


def grammars(form_model, vocab_size=VOCAB_SIZE):
    return Grammars(Tokenizer.from_file(str(form_model / "tokenizer.json")), vocab_size, frozenset({END_ID}))


def test_an_answer_does_not_depend_on_what_else_is_drawn(form_sampler):
    forms = [schema(CRATES), StructuredOutputs(json_object=True), calls(CRATES)]
    wanted = [asked(form, seed=seed, max_tokens=150) for seed, form in enumerate(forms)]
    alone = [form_sampler.complete(request).choices for request in wanted]
    with ThreadPoolExecutor(8) as pool:
        plain = [pool.submit(form_sampler.complete, asked(None, seed=i, n=9, max_tokens=90 + i)) for i in range(4)]
        among = [pool.submit(form_sampler.complete, request) for request in wanted]
        free = [one.result().choices for one in plain]
        assert [one.result().choices for one in among] == alone
    assert form_sampler.complete(asked(None, seed=1, n=9, max_tokens=91)).choices == free[1]


def calls(*schemas, once=False):
    """As forced tools are asked for."""
    tags = [
        Tag(begin=f'<tool_call>\n{{"name": "{i}", "arguments": ', content=TagContent(json_schema=each), end="}\n</x>")
        for i, each in enumerate(schemas)
    ]
    tag = StructuralTag(format=Tags(tags=tags, stop_after_first=once))
    return StructuredOutputs(structural_tag=tag.model_dump_json())


def test_tags_hold_json_and_nothing_is_around_them(form_sampler):
    small = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    small |= {"additionalProperties": False, "$defs": {"n": {"enum": [1, 2, 3]}}}
    other = small | {"properties": {"m": {"type": "boolean"}}, "required": ["m"]}
    for once in (True, False):
        choices = form_sampler.complete(asked(calls(other, small, once=once), n=20)).choices
        assert {choice.finish_reason for choice in choices} == {"stop"}
        counts = set()
        for choice in choices:
            blocks = choice.text.split("<tool_call>\n")
            assert blocks[0] == ""
            counts.add(len(blocks) - 1)
            for block in blocks[1:]:
                said = json.loads(block.removesuffix("\n").removesuffix("\n</x>"))
                jsonschema.validate(said["arguments"], [other, small][int(said["name"])])
        assert min(counts) == 1 and (max(counts) == 1) == once


# Forms of strangers.


def chain(length):
    """References one after the other: llguidance recurses along them, without a bound of its own."""
    links = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {}}}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "crate"}, "Invalid type: crate"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, 'Unimplemented keys: ["not"]'),
        ({"type": "string", "format": "quay"}, "Unknown format: quay"),
        ({"$ref": "#/$defs/none"}, "'/$defs/none' does not exist"),
        ({"$ref": "http://127.0.0.1:1/x"}, "does not fetch"),
        ({"type": "integer", "multipleOf": 999999937}, "fuel exhausted"),
        (chain(800), "too much to compile"),
    ],
)
def test_a_form_that_cannot_be_given_is_refused_and_says_why(forming, form_sampler, form, words):
    response = post(forming, "/v1/completions", asked(schema(form), max_tokens=5).model_dump(exclude_none=True))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "structured_outputs"
    assert words in error["message"]
    assert "\n" not in error["message"] and "guidance" not in error["message"]
    assert form_sampler.complete(asked(None, max_tokens=2)).choices


@pytest.mark.parametrize(
    "form",
    [
        {"type": "string", "pattern": "^(((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000})$"},
        {"type": "string", "pattern": "^(a|b)*a(a|b){18}$"},
        {"type": "string", "pattern": "^((([a-z]{1,100}[0-9]{1,100}){1,100} ){1,100}x){1,100}$"},
        {"type": "array", "items": {"anyOf": [{"type": "array", "items": {}}] * 50}},
    ],
)
def test_bombs_are_drawn_from_like_anything_else(form_sampler, form):
    (choice,) = form_sampler.complete(asked(schema(form), max_tokens=30)).choices
    assert choice.finish_reason in ("stop", "length")


def test_who_cannot_go_on_gives_up_alone(forming, form_sampler):
    """The form compiles, and its second token takes too much: in a stream too."""
    wide = schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}})
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(form_sampler.complete, asked(schema(CRATES), seed=7, n=4))
        for tell in (None, lambda texts: None):
            with pytest.raises(InvalidInput, match="cannot be followed further") as refused:
                form_sampler.complete(asked(wide, n=3), tell)
            assert refused.value.place.endswith(":structured_outputs")
        assert {choice.finish_reason for choice in other.result().choices} == {"stop"}


def test_a_form_wants_an_end_token(forming):
    body = asked(schema(CRATES), ignore_eos=True).model_dump(exclude_none=True)
    assert post(forming, "/v1/completions", body).json()["error"]["param"] == "ignore_eos"


def test_a_vocabulary_that_cannot_write_the_form_is_told(form_model):
    """It has no brace."""
    told = json.loads((form_model / "tokenizer.json").read_text())
    del told["model"]["vocab"]["{"]
    with pytest.raises(InvalidInput, match="cannot write every character of JSON"):
        Grammars(Tokenizer.from_str(json.dumps(told)), VOCAB_SIZE, frozenset({END_ID}))


def test_nobody_waits_for_a_grammar_of_anothers(form_model):
    forming, began, ended = grammars(form_model), threading.Event(), threading.Event()

    def ask_again() -> None:
        began.set()
        with forming._turn("one"):
            ended.set()

    with forming._turn("one"):
        waiting = threading.Thread(target=ask_again)
        waiting.start()
        assert began.wait(60)
        with forming._turn("another"):
            assert not ended.is_set(), "those of one tenant are tried one after another"
    waiting.join(60)
    assert ended.is_set() and not forming._trying
