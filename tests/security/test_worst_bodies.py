"""What one request may cost the web process: of every operation the worst body, and what its values multiply."""

import json
import socket
import statistics
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from longshore.training import _translated
from service.app import create_app
from service.decoding import SMALL_BYTES
from shared.settings import Settings
from tests.security.belongings import SWEEP, Belongings
from tests.security.worst_bodies import Tried, endpoints, tried, worst
from tests.service.conftest import Service

# All bounds are multiples of what other work costs here and now, so that no machine's speed has a part in them.
MOST_TIMES = 40
SFT = "POST", "/api/v1/runs/sft"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return create_app(Settings(root=tmp_path_factory.mktemp("described"), temporal_codec=True))


def plain_s(app: Any, num_bytes: int) -> float:
    """CPU seconds of a body that any API has: an object of so many bytes, whose fields are not known."""
    body = json.dumps(dict.fromkeys(map(str, range(min(900, num_bytes // 10))), "a" * (num_bytes // 9000))).encode()
    return statistics.median(tried(endpoints(app)[SFT], body).cpu_s for _ in range(5))


def test_the_worst_small_body_of_every_operation_costs_little(app: Any) -> None:
    found: dict[tuple[str, str], list[Tried]] = {}
    for operation, endpoint in endpoints(app).items():
        found[operation] = worst(app.openapi(), operation, endpoint, SMALL_BYTES, 100)
    assert len(found) > 30
    bound = MOST_TIMES * plain_s(app, SMALL_BYTES)
    # Once more: whoever shares this machine may have made one of them slow.
    over = {
        operation: each.body[:200]
        for operation, bodies in found.items()
        for each in bodies
        if min(tried(endpoints(app)[operation], each.body).cpu_s for _ in range(3)) > bound
    }
    assert not over, over


def lora_of_patterns(pattern: str, number: int) -> dict[str, Any]:
    ranks = {f"{i:03d}{pattern}": 2 for i in range(number)}
    return {"model": "org/tiny", "dataset": {"uri": "https://example.org/a"}, "steps": 1, "batch_size": 1} | {
        "trainable": {"kind": "lora", "rank_pattern": ranks}
    }


LARGE: dict[str, tuple[tuple[str, str], Any]] = {
    "patterns": (SFT, lora_of_patterns(r"\w+" * 100, 250)),
    "patterns that are too many": (SFT, lora_of_patterns(r"\w+" * 320, 80)),
    "parts of a chat": (
        ("POST", "/v1/chat/completions"),
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]},
    ),
    "labels": (
        ("PUT", "/api/v1/sessions/{run_id}/commands/{number}"),
        {
            "kind": "forward_backward",
            "data": [{"tokens": [5] * 50, "labels": [[7] * 128] * 49, "label_weights": [[1] * 128] * 49}] * 15,
        },
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_a_child_has_validated_costs_the_web_process_little(app: Any, name: str) -> None:
    operation, body = LARGE[name]
    sent = json.dumps(body).encode()
    assert len(sent) > SMALL_BYTES
    assert min(tried(endpoints(app)[operation], sent).cpu_s for _ in range(3)) < MOST_TIMES * plain_s(app, SMALL_BYTES)


def refused_sweep(num_choices: int) -> dict[str, Any]:
    """A sweep of four times as many combinations, of which the last ones are refused: nothing is left of it."""
    rates = [round(0.001 * (1 + i), 6) for i in range(num_choices - 1)]
    parameters = {"learning_rate": {"choices": [*rates, -1]}, "seed": {"choices": [1, 2, 3, 4]}}
    adapter = {"kind": "lora", "rank_pattern": {"q_proj": 2}}  # by which validations are counted
    return SWEEP | {"name": "costly", "run": SWEEP["run"] | {"trainable": adapter}, "parameters": parameters}


def test_a_sweep_costs_the_web_process_as_much_whatever_it_multiplies(owner: httpx.Client, service: Service) -> None:
    """Its trials are validated one by one, elsewhere. (The service of this test is a thread of this process.)"""

    def num_validations(num_choices: int) -> int:
        before = _translated.cache_info()
        answer = owner.post("/api/v1/sweeps", json=refused_sweep(num_choices))
        assert answer.status_code == 422 and answer.json()["error"]["place"] == "parameters.learning_rate", answer.text
        after = _translated.cache_info()
        return after.hits + after.misses - before.hits - before.misses

    assert num_validations(64) == num_validations(1) > 0


def test_a_sweep_is_not_checked_on_for_a_client_that_has_left(service: Service, belongings: Belongings) -> None:
    """Many such requests take none of the tenant's places for longer than they last: else it would be told to wait."""
    body = json.dumps(refused_sweep(64))
    head = f"POST /api/v1/sweeps HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {belongings.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    parts = urlsplit(service.url)
    for _ in range(40):  # more than the tenant's places and its line together
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall((head + body).encode())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # gone at once
    with httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {belongings.key}"}) as asking:
        answer = asking.post("/api/v1/sweeps", json=refused_sweep(3), timeout=60)
    assert answer.status_code == 422, answer.text
