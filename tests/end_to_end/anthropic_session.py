"""A session with Anthropic's client, of whichever version is on PYTHONPATH: ask, stream, use a tool. Tells JSON.

python -m tests.end_to_end.anthropic_session URL KEY MODEL
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic

QUESTION = {"role": "user", "content": "How many crates are on quay 3?"}
PORT = {"type": "object", "properties": {"port": {"enum": ["north", "south"]}}, "required": ["port"]}
TIDE = {"name": "tide", "description": "How high it is.", "input_schema": PORT | {"additionalProperties": False}}


def refused(call: Callable[[], Any]) -> dict[str, Any]:
    """How the client tells of a refusal."""
    try:
        call()
    except anthropic.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "body": error.body}
    raise AssertionError("nothing was refused")


def streamed(client: anthropic.Anthropic, **asked: Any) -> dict[str, Any]:
    """The events of a stream, and the message that the client makes of them."""
    with client.messages.stream(**asked) as stream:
        names = [event.type for event in stream]
        message = stream.get_final_message()
    with client.messages.create(**asked, stream=True) as events:
        raw = [event.model_dump() for event in events]
    return {"names": names, "message": message.model_dump(), "raw": raw}


def main() -> None:
    url, key, model = sys.argv[1:]
    client = anthropic.Anthropic(base_url=url, api_key=key, timeout=300)
    # The newest clients have no argument for a temperature: a body may have one all the same.
    greedy: Any = {"model": model, "max_tokens": 8, "messages": [QUESTION], "extra_body": {"temperature": 0}}
    raw = client.messages.with_raw_response.create(**greedy, thinking={"type": "enabled", "budget_tokens": 1024})

    forced: Any = {"model": model, "max_tokens": 300, "messages": [QUESTION], "tools": [TIDE]}
    forced["tool_choice"] = {"type": "tool", "name": "tide"}
    called = client.messages.create(**forced)
    [use] = called.content
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "It is high."}]}
    turns = [
        {"role": "assistant", "content": [use.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    conversation: Any = {
        "model": model,
        "messages": [QUESTION, *turns],
        "system": [{"type": "text", "text": "Be brief."}],
    }

    form: Any = {"output_config": {"format": {"type": "json_schema", "schema": TIDE["input_schema"]}}}
    picture = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    stranger = anthropic.Anthropic(base_url=url, api_key="ls-none", max_retries=0)
    told = {
        "version": anthropic.__version__,
        "whole": raw.parse().model_dump(),
        "unused": raw.headers.get("longshore-unused"),
        "streamed": streamed(client, **greedy),
        "called": called.model_dump(),
        "streamed_call": streamed(client, **forced),
        "after": client.messages.create(**conversation, max_tokens=8).model_dump(),
        "counted": client.messages.count_tokens(**conversation).input_tokens,
        "formed": client.messages.create(
            model=model,
            max_tokens=300,
            messages=[QUESTION],
            extra_body=form,  # type: ignore[list-item]
        ).model_dump(),
        "refusals": [
            refused(lambda: client.messages.create(**greedy | {"model": "Qwen/Qwen3-9B"})),
            refused(lambda: client.messages.create(**greedy | {"messages": [{"role": "user", "content": [picture]}]})),
            refused(lambda: client.messages.create(**greedy | {"max_tokens": 10**6})),
            refused(lambda: client.messages.create(**greedy | {"extra_body": {"temperatur": 1}})),
            refused(lambda: stranger.messages.create(**greedy)),
        ],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
