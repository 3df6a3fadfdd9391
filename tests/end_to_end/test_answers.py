"""Answers to questions go between service and sampler's host alone: large ones too. Through kills: test_kills.py."""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.end_to_end.conftest import TINKER_MODEL
from tests.end_to_end.stack import PATIENCE_S, Stack
from tests.end_to_end.test_secrets import files_below

pytestmark = pytest.mark.slow

Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(stack: Stack) -> Iterator[Ask]:
    with asking(stack) as ask:
        yield ask


@contextmanager
def asking(stack: Stack) -> Iterator[Ask]:
    """Ask as patiently as clients do: what breaks off, or is refused for now, is asked again."""
    connection = stack.connection
    headers = {"authorization": f"Bearer {connection.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with httpx.Client(
        base_url=f"{connection.api_url}/v1", headers=headers, timeout=300, trust_env=False, limits=limits
    ) as client:

        def asked(path: str, **body: object) -> httpx.Response:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    answer = client.post(path, json={"model": TINKER_MODEL, **body})
                    if answer.status_code not in (429, 503) or time.monotonic() > deadline:
                        return answer
                except httpx.TransportError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(0.2)

        yield asked


def chat(ask: Ask, number: int, tokens: int = 200) -> str:
    """One streamed answer's text. A stream that ends with an error is asked again, as one that breaks off."""
    body = {"messages": [{"role": "user", "content": f"Count crate {number}."}], "max_tokens": tokens}
    while True:
        streamed = ask("/chat/completions", **body, seed=number, ignore_eos=True, stream=True, temperature=1)
        assert streamed.status_code == 200, streamed.text
        lines = [line[6:] for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        if not any("error" in event for event in events) and streamed.text.endswith("data: [DONE]\n\n"):
            return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_an_answer_may_have_twenty_megabytes(ask: Ask) -> None:
    """Log-probabilities of prompts, of which each place has twenty likely tokens beside it."""
    prompt = [n % 200 + 20 for n in range(2000)]
    asked = {"prompt": [prompt] * 8, "max_tokens": 1, "prompt_logprobs": 20, "logprobs": 20}
    answer = ask("/completions", **asked)
    assert answer.status_code == 200, answer.text[:500]
    assert len(answer.content) > 20_000_000
    choices = answer.json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2000] * 8
    assert all(len(place) >= 20 for choice in choices for place in choice["prompt_logprobs"][1:])


def test_nothing_of_questions_and_answers_is_in_temporals_database(stack: Stack, ask: Ask) -> None:
    canary = secrets.token_hex(12)
    text = chat(ask, 1, tokens=60)
    told = ask("/completions", prompt=f"{canary} ", max_tokens=60, temperature=0, ignore_eos=True, echo=True)
    assert told.status_code == 200 and canary in told.text
    ask("/chat/completions", messages=[{"role": "user", "content": canary}], max_tokens=8)
    searched = [data for place, data in files_below(stack.root) if place.startswith("temporal.db")]
    assert any(b"ServingWorkflow" in data for data in searched), "its lease is there"
    for data in searched:
        assert canary.encode() not in data
        assert json.dumps(text)[1:-1].encode() not in data
