"""Anthropic's messages and what agents send to `/v1/responses`, as chats; and the events of answers in both forms."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from shared.chat.completions import Usage
from shared.chat.dialects import MessagesRequest, ResponseRequest
from shared.chat.messages import CalledFunction, ChatAnswer, ChatChoice, ChatCompletion, ChatRequest, ToolCall
from shared.chat.streams import EventStream, MessageObject, ResponseObject, StreamStart
from shared.errors import InvalidInput

TOOL = {"name": "tide", "input_schema": {"type": "object", "properties": {"port": {"type": "string"}}}}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}


def asked(**fields: Any) -> MessagesRequest:
    whole = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]} | fields
    return MessagesRequest.model_validate_json(json.dumps(whole))


def responding(**fields: Any) -> ResponseRequest:
    return ResponseRequest.model_validate_json(json.dumps({"model": "m", "input": "Hi"} | fields))


def blocks(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def test_a_conversation_with_tools_is_a_chats() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "tide", "input": {"port": "north"}}
    other = use | {"id": "t2", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("high")]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no port", "is_error": True},
    ]
    request = asked(
        system=[text("Be"), text(" brief.")],
        messages=[
            blocks(text("Is it"), text(" high?")),
            blocks(
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                text("Let me see."),
                use,
                other,
                role="assistant",
            ),
            blocks(*results, text("So?")),
            {"role": "system", "content": "Now."},
        ],
        tools=[TOOL, {"type": "web_search_20260101", "name": "web_search", "max_uses": 3}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["."],
        temperature=0.5,
        top_k=3,
    )
    chat = request.chat()
    calls = [
        {"id": id, "type": "function", "function": {"name": "tide", "arguments": json.dumps(given)}}
        for id, given in (("t1", {"port": "north"}), ("t2", {}))
    ]
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it high?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "high"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no port"},
        {"role": "user", "content": "So?"},
        {"role": "system", "content": "Now."},
    ]
    assert (chat.stop, chat.temperature, chat.top_k, chat.max_tokens) == (["."], 0.5, 3, 8)
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    [tool] = chat.tools or []
    assert tool["function"] == {"name": "tide", "description": "", "parameters": TOOL["input_schema"]}
    assert request.unused == ["tools.1", "messages.1.content.0"]


def test_what_has_no_effect_is_named() -> None:
    request = asked(
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        speed="fast",
        context_management={"edits": []},
        metadata={"user_id": "u"},
        tools=[TOOL | {"defer_loading": True, "cache_control": {"type": "ephemeral"}}],
    )
    assert request.unused == [
        "speed",
        "context_management",
        "thinking",
        "output_config.effort",
        "tools.0.defer_loading",
    ]
    assert asked(thinking={"type": "disabled"}).unused == []
    of_codex = responding(
        reasoning={"effort": "medium", "summary": "auto"},
        client_metadata={"a": "b"},
        tools=[{"type": "web_search", "external_web_access": False}, {"type": "namespace", "name": "n", "tools": []}],
        text={"verbosity": "low"},
        input=[{"type": "reasoning", "summary": []}, {"role": "user", "content": "Hi"}],
    )
    assert of_codex.unused == [
        *("tools.0", "tools.1", "input.0", "reasoning.effort", "reasoning.summary", "text.verbosity"),
    ]
    assert of_codex.chat().tools is None and len(of_codex.chat().messages) == 1


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": [blocks({"type": "image", "source": {}})]}, "messages.0.content.0"),
        ({"messages": [blocks({"type": "document"})]}, "messages.0.content.0"),
        ({"messages": [blocks({"type": "text", "text": 3})]}, "messages.0.content.0"),
        ({"messages": [blocks("text")]}, "messages.0.content.0"),  # type: ignore[arg-type]
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [blocks({"type": "tool_use", "id": "a", "name": "b", "input": {}})]}, "messages.0.content.0"),
        ({"messages": [blocks({"type": "tool_result", "tool_use_id": "a"}, role="system")]}, "messages.0.content.0"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "wind"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": [[[]]]}}}, "tools": [TOOL]}, ""),
    ],
)
def test_a_refusal_names_the_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        asked(**fields).chat()
    assert (refusal.value.place or "").startswith(place)


@pytest.mark.parametrize(
    "fields", [{"container": "c"}, {"temperatur": 1}, {"max_tokens": 0}, {"tools": [{"name": "a"}]}]
)
def test_unknown_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        asked(**fields)


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    called = [
        {"role": "user", "content": "Mend it."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    chat = responding(input=called, tools=[PATCH], tool_choice={"type": "custom", "name": "patch"}).chat()
    [tool] = chat.forced_tools
    assert "lark grammar:\nstart: A" in tool["function"]["description"]  # type: ignore[index, operator, call-overload]
    [call] = chat.messages[1]["tool_calls"]  # type: ignore[misc, union-attr]
    assert json.loads(call["function"]["arguments"]) == {"input": 'a "b"'}  # type: ignore[index, call-overload, arg-type]
    assert chat.messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "done"}


def answer(content: str | None, *calls: tuple[str, str], end: str = "stop", stopped_by: Any = None) -> ChatCompletion:
    made = tuple(ToolCall(id=f"c{i}", function=CalledFunction(name=n, arguments=a)) for i, (n, a) in enumerate(calls))
    message = ChatAnswer(content=content, tool_calls=made or None)
    choice = ChatChoice.model_validate(
        {"index": 0, "message": message, "finish_reason": end, "stop_reason": stopped_by}
    )
    usage = Usage(prompt_tokens=7, completion_tokens=3, total_tokens=10)
    return ChatCompletion(id="chatcmpl-1", created=1, model="m", choices=[choice], usage=usage)


def starts() -> list[StreamStart]:
    response = responding(tools=[PATCH]).begun("chatcmpl-1", 1)
    message = MessageObject(id="msg_1", model="m")
    return [
        StreamStart(answer_id="chatcmpl-1", created=1, response=response),
        StreamStart(answer_id="chatcmpl-1", created=1, message=message),
    ]


CHAT = ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}], stream=True)


@pytest.mark.parametrize("start", starts(), ids=["responses", "messages"])
def test_another_host_continues_a_stream_after_any_event(start: StreamStart) -> None:
    whole = answer("It is high.", ("tide", '{"port": "a"}'), ("patch", '{"input": "x\\ny"}'), end="tool_calls")
    first = EventStream(start, CHAT)
    sent = (first.grown(("It",)) + first.grown(("It is",)) + first.rest(whole)).decode()
    events = sent.split("\n\n")[:-1]
    for number in range(len(events) + 1):
        begun = "".join(f"{event}\n\n" for event in events[:number])
        rest = EventStream(start.model_copy(update={"sent": begun}), CHAT).rest(whole).decode()
        assert told_by(begun + rest) == told_by(sent)
    assert told_by(sent)[0] == "It is high."


def told_by(stream: str) -> tuple[str, list[dict[str, Any]]]:
    """A stream's text, and its other events without their numbers, which are in order."""
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: ")]
    numbers = [event.pop("sequence_number") for event in events if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))
    texts, others = [], []
    for event in events:
        match event:
            case {"type": "response.output_text.delta", "delta": piece} | {"delta": {"text": piece}}:
                texts.append(piece)
            case _:
                others.append(event)
    return "".join(texts), others


def test_a_message_says_why_it_ended() -> None:
    start = starts()[1]
    ends = {
        ("stop", None): ("end_turn", None),
        ("stop", 7): ("end_turn", None),
        ("stop", "."): ("stop_sequence", "."),
        ("length", None): ("max_tokens", None),
    }
    for (end, by), told in ends.items():
        events = EventStream(start, CHAT).rest(answer("Yes", end=end, stopped_by=by)).decode()
        [delta] = [
            json.loads(line[6:]) for line in events.split("\n") if line.startswith('data: {"type":"message_delta')
        ]
        assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == told
        assert delta["usage"] == {"input_tokens": 7, "output_tokens": 3}


def test_a_custom_call_hands_its_text_on() -> None:
    start = starts()[0]
    assert isinstance(start.response, ResponseObject)
    for arguments, given in (('{"input": "a\\nb"}', "a\nb"), ('{"patch": 1}', '{"patch": 1}')):
        events = EventStream(start, CHAT).rest(answer(None, ("patch", arguments), end="tool_calls")).decode()
        told = [json.loads(line[6:]) for line in events.split("\n") if line.startswith("data: ")]
        [item] = told[-1]["response"]["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", given)
        assert [e["delta"] for e in told if e["type"] == "response.custom_tool_call_input.delta"] == [given]
