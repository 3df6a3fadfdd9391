"""An agent at an episode's address: a loop of a tool through OpenAI's client, a helper through Anthropic's. Tells JSON.

python -m tests.end_to_end.agent_session ADDRESS MODEL

It knows nothing of episodes: both clients are given a base URL and a key that means nothing.
"""

import json
import sys
from typing import Any

import anthropic
import openai

QUESTION: Any = {"role": "user", "content": "How many crates are on quay 3?"}
TIDE: Any = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


def main() -> None:
    address, model = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300)
    asked: Any = {"model": model, "messages": [QUESTION], "tools": [TIDE], "temperature": 0, "seed": 3}
    first = client.chat.completions.create(**asked)
    again = client.chat.completions.create(**asked)
    said: Any = first.choices[0].message.model_dump(exclude_none=True, include={"role", "content"})
    later = asked | {"messages": [QUESTION, said, {"role": "user", "content": "And on quay 4?"}]}
    chunks = list(client.chat.completions.create(**later, stream=True))
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    responded = client.responses.create(model=model, input="Which quay has most crates?", temperature=0)

    helper = anthropic.Anthropic(base_url=address, api_key="none", timeout=300)
    counted = helper.messages.count_tokens(model="a-small-model", messages=[QUESTION])
    titled = helper.messages.create(model="a-small-model", max_tokens=5, messages=[QUESTION])
    told = {
        "first": first.model_dump(),
        "is_same": first.model_dump() == again.model_dump(),
        "streamed": [chunks[0].id, streamed],
        "responded": responded.output_text,
        "counted": counted.input_tokens,
        "titled": titled.model_dump(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
