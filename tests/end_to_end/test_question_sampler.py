"""Weights of a run that its client drives go straight to the sampler that the client asks, on a real stack."""

import re
import threading
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
from tests.end_to_end.runs import Groups, train
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.victims import kill, sampler

pytestmark = pytest.mark.slow

_MOST_STEPS = 20  # a sampler may be given back, or come up, between any two of them


@pytest.fixture
def door(stack: Stack) -> Iterator[httpx.Client]:
    with stack.http() as client:
        yield client


def ask(door: httpx.Client, model: str, **more: Any) -> list[dict]:
    """An answer's tokens, each with its log-probability."""
    body = {"model": model, "messages": [{"role": "user", "content": "Name a ship."}], "seed": 3, "max_tokens": 8}
    answer = door.post("/v1/chat/completions", json=body | {"logprobs": True} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["content"]


@contextmanager
def asking(door: httpx.Client, model: str) -> Iterator[None]:
    """Keep the model's sampler busy, so that it is not given back."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(0.2):
            ask(door, model, max_tokens=1)

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
        ask(door, model)
        if sent_by_a_trainer(stack) - before:
            return model
    raise AssertionError(f"every version came from the store: {served(stack)}")


def the_answer_is_the_stores_too(stack: Stack, door: httpx.Client, model: str) -> None:
    """The sampler is killed: the next one reads the files."""
    answer = ask(door, model)
    kill(stack, sampler)
    assert ask(door, model) == answer
    assert not sent_by_a_trainer(stack)


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

    ask(door, "asked:v1")
    with asking(door, "asked:v1"):
        model = until_sent(stack, step, door)
    assert steps[-1]["metrics"]["sync_failed"] == 0 and steps[-1]["metrics"]["sync_bytes"] > 0
    the_answer_is_the_stores_too(stack, door, model)
    assert step(len(steps) + 1), "the sampler that it was sent to is gone"
    ask(door, "asked")
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

        ask(door, step(1))
        with asking(door, "asked-session:v1"):
            model = until_sent(stack, step, door)
        the_answer_is_the_stores_too(stack, door, model)
        session.close()
        wait_until(lambda: session.status().state == "succeeded", "the end of a closed session")
