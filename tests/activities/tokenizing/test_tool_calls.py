"""Tools in a conversation: what the model is told of them, and what becomes of its calls."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from activities.host_context import HostContext
from activities.sampling.questions import ChatPrompts, chat_completion, text_before_calls, told_calls
from longshore.fields import Artifact
from shared.chat.completions import CompletionResponse
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.chat.streams import ChatChunks, StreamStart
from shared.settings import Settings
from shared.storage.artifacts import seal
from tests.activities.templates import write_model

TIDE = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
SAID = '<tool_call>\n{"name": "tide", "arguments": {"port": "nørth", "day": 2}}\n</tool_call>'
ASKED = [{"role": "user", "content": "When is the tide?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "north"}'}}
GONE_ON = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "at 06:30"},
]


@pytest.mark.parametrize(
    ("said", "text", "names"),
    [
        (SAID, "", ["tide"]),
        (f"Let me see.\n{SAID}\n{SAID}", "Let me see.", ["tide", "tide"]),
        ("At half past six.", "At half past six.", []),
        (SAID.removesuffix("</tool_call>"), None, []),
        (SAID + "<tool_call>{", None, []),
        (SAID + "<tool_call>\n{'name': 'tide'}\n</tool_call>", None, []),
        ('<tool_call>{"name": "tide", "arguments": "north"}</tool_call>', None, []),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None, []),
        (f"<tool_call>{SAID}</tool_call>", None, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
    ],
)
def test_calls_are_found_or_the_answer_is_text_as_it_is(said: str, text: str | None, names: list[str]) -> None:
    rest, calls = told_calls(said, "a")
    assert (rest, [call.function.name for call in calls]) == (said if text is None else text, names)
    assert len({call.id for call in calls}) == len(calls)


@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.dictionaries(st.text(), st.none() | st.integers() | st.text())), min_size=1
    ),
    st.text().filter(lambda text: "tool_call>" not in text),
)
def test_what_a_model_calls_is_what_the_client_reads(calls: list[tuple[str, dict[str, Any]]], before: str) -> None:
    blocks = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if any("tool_call>" in block for block in blocks):
        return  # tags within a call are no call
    rest, told = told_calls(before + "".join(f"<tool_call>{block}</tool_call>" for block in blocks), "a")
    assert rest == before.strip()
    assert [(call.function.name, json.loads(call.function.arguments)) for call in told] == calls


def drawn(text: str, finish_reason: str = "stop") -> CompletionResponse:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return CompletionResponse.model_validate(
        {"id": "cmpl-1", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


def answer_to(text: str, finish_reason: str = "stop", **asked: Any) -> ChatCompletion:
    request = ChatRequest.model_validate({"model": "m", "messages": ASKED, **asked})
    return chat_completion(request, drawn(text, finish_reason), lambda _: b"", "chatcmpl-1", [1])


def test_a_call_ends_the_answer_whole_and_in_a_stream() -> None:
    answer = answer_to(SAID, tools=[TIDE])
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("tide", {"port": "nørth", "day": 2})
    chunks = ChatChunks(StreamStart(answer_id="chatcmpl-1", created=1), "m")
    grown = [text_before_calls(SAID[:n]) for n in range(len(SAID))]
    early = [chunk for text in grown for chunk in chunks.grown((text,))]
    sent = [chunk.choices[0] for chunk in (*early, *chunks.rest(answer))]
    assert [piece.delta.get("tool_calls") for piece in sent if "tool_calls" in piece.delta] == [
        [{"index": 0, **call.model_dump()}]
    ]
    assert sent[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("finish_reason", "asked"),
    [("stop", {}), ("stop", {"tools": [TIDE], "tool_choice": "none"}), ("length", {"tools": [TIDE]})],
)
def test_what_was_not_offered_or_not_finished_is_text(finish_reason: str, asked: dict[str, Any]) -> None:
    [choice] = answer_to(SAID, finish_reason, **asked).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAID, None, finish_reason)


def with_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "tide", "parameters": schema}}


LONG = {"type": "object", "properties": {"port": {"type": "string", "description": "x" * (64 << 10)}}}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tools": [{"type": "function"}]}, r"tools[\s\S]*\[0\]: a tool is"),
        (
            {"tools": [{"type": "function", "function": {"name": "tide", "input_schema": {"type": "object"}}}]},
            r"\[0\].function: the schema of arguments is `parameters`",
        ),
        ({"tools": [TIDE, {"type": "web_search"}]}, r"tools[\s\S]*\[1\]: a tool is"),
        ({"tools": [TIDE], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there is no such tool"),
        ({"tools": [with_parameters({"type": "string"})], "tool_choice": "required"}, 'a schema of "type": "object"'),
        ({"tools": [with_parameters(LONG)], "tool_choice": "required"}, "65,536 characters can be forced"),
        ({"tools": [TIDE], "response_format": {"type": "json_object"}}, "do not go together"),
    ],
)
def test_tools_that_are_none_and_calls_that_cannot_be_forced_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ChatRequest.model_validate({"model": "m", "messages": ASKED, **asked})


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatPrompts]:
    prompts = ChatPrompts(HostContext(Settings(root=tmp_path_factory.mktemp("root"))))
    yield prompts
    prompts.close()


@pytest.mark.parametrize("messages", [ASKED, GONE_ON])
def test_the_model_is_told_of_tools_as_transformers_tells_it(
    qwen: Path, prompts: ChatPrompts, messages: list[dict[str, Any]]
) -> None:
    """The template gets arguments as objects: with the client's text it would write a text within a text."""
    from transformers import AutoTokenizer

    as_objects = json.loads(json.dumps(messages).replace('"{\\"port\\": \\"north\\"}"', '{"port": "north"}'))
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    expected = tokenizer.apply_chat_template(as_objects, tools=[TIDE], add_generation_prompt=True, return_dict=False)
    model = Artifact(uri=qwen.as_uri(), sha256=seal(qwen))
    assert list(prompts.ids(model, messages, [TIDE])) == expected
    assert list(prompts.ids(model, messages)) != expected
