"""Answers to questions go between service and sampler's host alone, large ones too. Through kills: test_kills.py."""

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.sampling.client import Sampler
from benchmarks.one_device import samplers
from longshore.client import Client
from longshore.commands import Datum, ForwardBackward, OptimStep
from longshore.training import Lora, SessionRun
from shared.errors import SamplerUnavailable
from tests.end_to_end.conftest import TINKER_MODEL
from tests.end_to_end.runs import Groups, train
from tests.end_to_end.stack import PATIENCE_S, Stack, wait_until
from tests.end_to_end.test_secrets import files_below
from tests.end_to_end.victims import kill, sampler

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


_MOST_STEPS = 20  # a sampler may be given back, or come up, between any two of them


@pytest.fixture
def door(stack: Stack) -> Iterator[httpx.Client]:
    with stack.http() as client:
        yield client


def ask_sampler(door: httpx.Client, model: str, **more: Any) -> list[dict]:
    """An answer's tokens, each with its log-probability."""
    body = {"model": model, "messages": [{"role": "user", "content": "Name a ship."}], "seed": 3, "max_tokens": 8}
    answer = door.post("/v1/chat/completions", json=body | {"logprobs": True} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["content"]


@contextmanager
def asking_sampler(door: httpx.Client, model: str) -> Iterator[None]:
    """Keep the model's sampler busy, so that it is not given back."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(0.2):
            ask_sampler(door, model, max_tokens=1)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def served(stack: Stack) -> dict[str, str]:
    """What samplers serve for users, by name: the digest of the sync by which it came, or the folder of its files."""
    found = dict[str, str]()
    for ready in samplers(stack.root):
        with suppress(SamplerUnavailable):
            with Sampler(ready.url, ready.api_key, attempts=1, socket_path=ready.socket) as one:
                cards = one.models()
            found |= {name: card.root or "" for name, card in cards.items() if name.startswith("serving-")}
    return found


def sent_by_a_trainer(stack: Stack) -> set[str]:
    return {name for name, root in served(stack).items() if re.fullmatch("[0-9a-f]{64}", root)}


def until_sent(stack: Stack, step: Callable[[int], str], door: httpx.Client) -> str:
    """Make versions until the sampler has one from the trainer. Returns its name in requests."""
    for number in range(2, _MOST_STEPS):
        before = sent_by_a_trainer(stack)
        model = step(number)
        ask_sampler(door, model)
        if sent_by_a_trainer(stack) - before:
            return model
    raise AssertionError(f"every version came from the store: {served(stack)}")


def the_answer_is_the_stores_too(stack: Stack, door: httpx.Client, model: str) -> None:
    """The sampler is killed: the next one reads the files."""
    answer = ask_sampler(door, model)
    kill(stack, sampler)
    assert ask_sampler(door, model) == answer
    assert not sent_by_a_trainer(stack)


# First of all tests on the stack: no sampler is up yet.
def test_the_policy_of_a_clients_run_goes_to_the_sampler_that_it_asks(
    stack: Stack, rl_options: list[str], groups: Groups, door: httpx.Client
) -> None:
    run_id = stack.cli(*rl_options, "--name", "asked").json["run_id"]
    first = train(stack, run_id, groups, 1)
    assert "sync_bytes" not in first["metrics"], "nobody has asked"
    steps = [first]

    def step(number: int) -> str:
        steps.append(train(stack, run_id, groups, number))
        return f"asked:v{steps[-1]['version']}"

    ask_sampler(door, "asked:v1")
    with asking_sampler(door, "asked:v1"):
        model = until_sent(stack, step, door)
    assert steps[-1]["metrics"]["sync_failed"] == 0 and steps[-1]["metrics"]["sync_bytes"] > 0
    the_answer_is_the_stores_too(stack, door, model)
    assert step(len(steps) + 1), "the sampler that it was sent to is gone"
    ask_sampler(door, "asked")
    stack.cli("finish", run_id)


def test_a_sessions_saved_weights_go_to_the_sampler_that_is_asked(
    stack: Stack, tiny_model: Path, door: httpx.Client
) -> None:
    connection = stack.connection
    run = SessionRun(model=str(tiny_model), trainable=Lora(rank=4), max_tokens=128, seed=5, name="asked-session")
    with Client(connection.api_url, connection.api_key) as client:
        session = client.sessions.open(run)

        def step(number: int) -> str:
            session.send(ForwardBackward(data=(Datum(tokens=(5, 6, 7 + number, 8)),)))
            session.send(OptimStep(learning_rate=0.01)).result(300)
            return f"asked-session:v{session.save_state(publish=True).result(300).version}"

        ask_sampler(door, step(1))
        with asking_sampler(door, "asked-session:v1"):
            model = until_sent(stack, step, door)
        the_answer_is_the_stores_too(stack, door, model)
        session.close()
        wait_until(lambda: session.status().state == "succeeded", "the end of a closed session")


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
