"""Answers of a given form, of an untrained model: always valid, seeded, and hostile forms harm nobody."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from activities.sampling.client import Sampler
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.grammars.grammar import Grammars
from shared.chat.completions import CompletionRequest, StructuralTag, StructuredOutputs, Tag, TagContent, Tags
from shared.errors import InvalidInput
from tests.megatron_worker.rows import VOCAB_SIZE, distinct_model
from tests.megatron_worker.sampler_process import NAME, post, running

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
def model(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("grammars") / "model")


@pytest.fixture(scope="module")
def ours(model, tmp_path_factory):
    with running(model, tmp_path_factory.mktemp("sampler")) as ready:
        yield ready


@pytest.fixture(scope="module")
def sampler(ours):
    with Sampler(ours.url, ours.api_key) as sampler:
        yield sampler


def asked(form, prompt=(5, 6, 7), **changes):
    told = {"max_tokens": 1500, "seed": 1, "logprobs": 3, "return_token_ids": True, "structured_outputs": form}
    return CompletionRequest.model_validate({"model": NAME, "prompt": list(prompt), **told, **changes})


def schema(schema):
    return StructuredOutputs(json=schema)


def test_200_of_200_draws_are_valid(sampler):
    choices = sampler.complete(asked(schema(CRATES), n=200, temperature=1.2)).choices
    assert len({choice.text for choice in choices}) == 200
    assert [choice.finish_reason for choice in choices] == ["stop"] * 200
    for choice in choices:
        VALIDATOR.validate(json.loads(choice.text))
    assert {len(json.loads(choice.text)["crates"]) for choice in choices} == {0, 1, 2}


def test_logprobs_are_of_what_was_allowed(model, sampler):
    """Of the masked distribution, and so are the likeliest beside a token."""
    (choice,) = sampler.complete(asked(schema(CRATES))).choices
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    place = grammars(model).compiled(schema(CRATES)).begin()
    for number in range(40):
        before = (5, 6, 7, *choice.token_ids[:number])
        logit_V = decoder.logits(decoder.prefill(before, {}).hidden_H[None], {})[0]
        logprob_V = logit_V.masked_fill(~place.allowed(), -torch.inf).log_softmax(-1)
        assert abs(choice.logprobs.token_logprobs[number] - float(logprob_V[choice.token_ids[number]])) < 1e-5
        for value in choice.logprobs.top_logprobs[number].values():
            assert (logprob_V - value).abs().min() < 1e-5
        place.accept(choice.token_ids[number])
    assert len(choice.token_ids) > 40


def grammars(model, vocab_size=VOCAB_SIZE):
    return Grammars(Tokenizer.from_file(str(model / "tokenizer.json")), vocab_size, frozenset({END_ID}))


def test_an_answer_does_not_depend_on_what_else_is_drawn(sampler):
    forms = [schema(CRATES), StructuredOutputs(json_object=True), calls(CRATES)]
    wanted = [asked(form, seed=seed, max_tokens=150) for seed, form in enumerate(forms)]
    alone = [sampler.complete(request).choices for request in wanted]
    with ThreadPoolExecutor(8) as pool:
        plain = [pool.submit(sampler.complete, asked(None, seed=i, n=9, max_tokens=90 + i)) for i in range(4)]
        among = [pool.submit(sampler.complete, request) for request in wanted]
        free = [one.result().choices for one in plain]
        assert [one.result().choices for one in among] == alone
    assert sampler.complete(asked(None, seed=1, n=9, max_tokens=91)).choices == free[1]


def calls(*schemas, once=False):
    """As forced tools are asked for."""
    tags = [
        Tag(begin=f'<tool_call>\n{{"name": "{i}", "arguments": ', content=TagContent(json_schema=each), end="}\n</x>")
        for i, each in enumerate(schemas)
    ]
    tag = StructuralTag(format=Tags(tags=tags, stop_after_first=once))
    return StructuredOutputs(structural_tag=tag.model_dump_json())


def test_tags_hold_json_and_nothing_is_around_them(sampler):
    small = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    small |= {"additionalProperties": False, "$defs": {"n": {"enum": [1, 2, 3]}}}
    other = small | {"properties": {"m": {"type": "boolean"}}, "required": ["m"]}
    for once in (True, False):
        choices = sampler.complete(asked(calls(other, small, once=once), n=20)).choices
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
def test_a_form_that_cannot_be_given_is_refused_and_says_why(ours, sampler, form, words):
    response = post(ours, "/v1/completions", asked(schema(form), max_tokens=5).model_dump(exclude_none=True))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "structured_outputs"
    assert words in error["message"]
    assert "\n" not in error["message"] and "guidance" not in error["message"]
    assert sampler.complete(asked(None, max_tokens=2)).choices


@pytest.mark.parametrize(
    "form",
    [
        {"type": "string", "pattern": "^(((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000})$"},
        {"type": "string", "pattern": "^(a|b)*a(a|b){18}$"},
        {"type": "string", "pattern": "^((([a-z]{1,100}[0-9]{1,100}){1,100} ){1,100}x){1,100}$"},
        {"type": "array", "items": {"anyOf": [{"type": "array", "items": {}}] * 50}},
    ],
)
def test_bombs_are_drawn_from_like_anything_else(sampler, form):
    (choice,) = sampler.complete(asked(schema(form), max_tokens=30)).choices
    assert choice.finish_reason in ("stop", "length")


def test_who_cannot_go_on_gives_up_alone(ours, sampler):
    """The form compiles, and its second token takes too much: in a stream too."""
    wide = schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}})
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(sampler.complete, asked(schema(CRATES), seed=7, n=4))
        for tell in (None, lambda texts: None):
            with pytest.raises(InvalidInput, match="cannot be followed further") as refused:
                sampler.complete(asked(wide, n=3), tell)
            assert refused.value.place.endswith(":structured_outputs")
        assert {choice.finish_reason for choice in other.result().choices} == {"stop"}


def test_a_form_wants_an_end_token(ours):
    body = asked(schema(CRATES), ignore_eos=True).model_dump(exclude_none=True)
    assert post(ours, "/v1/completions", body).json()["error"]["param"] == "ignore_eos"


def test_a_vocabulary_that_cannot_write_the_form_is_told(model):
    """It has no brace."""
    told = json.loads((model / "tokenizer.json").read_text())
    del told["model"]["vocab"]["{"]
    with pytest.raises(InvalidInput, match="cannot write every character of JSON"):
        Grammars(Tokenizer.from_str(json.dumps(told)), VOCAB_SIZE, frozenset({END_ID}))


def test_nobody_waits_for_a_grammar_of_anothers(model):
    ours, began, ended = grammars(model), threading.Event(), threading.Event()

    def ask_again() -> None:
        began.set()
        with ours._turn("one"):
            ended.set()

    with ours._turn("one"):
        waiting = threading.Thread(target=ask_again)
        waiting.start()
        assert began.wait(60)
        with ours._turn("another"):
            assert not ended.is_set(), "those of one tenant are tried one after another"
    waiting.join(60)
    assert ended.is_set() and not ours._trying
