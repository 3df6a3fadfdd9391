"""What a second tenant waits while a first one sends the worst body of its kind to every route.

    python -m benchmarks.second_tenant [--copies 4]

Starts `longshore dev` in a temporary folder. To each route that may take a body the first tenant sends `--copies` of
such a body at once; meanwhile the second one asks for its runs again and again. Prints a line for each route: the
second tenant's slowest answer, how many it had, and how much the web process has grown; then JSON.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import zstandard
from fastapi.routing import APIRoute, iter_route_contexts

from benchmarks.control_plane import stack
from benchmarks.machine import PeakMemory, provenance
from examples.tiny_model import make_tiny_model
from service.apis.tinker.addresses import TINKER
from service.apis.tinker.wire import MESSAGES, PROTOBUF
from service.app import MAX_BODY_BYTES, create_app
from service.dev.connection import Connection
from shared.settings import Settings

_CORPUS = [f"Crane {n} lifts crate {n * 7 % 50}." for n in range(50)]
_BOUND_S, _BOUND_MIB = 0.5, 150
_IDLE_ANSWERS = 50
_JSON = "application/json"
_ART_BYTES = 100 << 20
Body = tuple[bytes, dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=4)
    copies = parser.parse_args().copies
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", _CORPUS)
        with stack(
            Path(folder) / "stack", LONGSHORE_RATE_LIMIT__PER_S="1000", LONGSHORE_RATE_LIMIT__BURST="1000"
        ) as on:
            figures = _measure(on, model, copies)
    print(json.dumps({"what": "seconds and MiB, by route", **figures, **provenance()}, indent=1))


def _measure(connection: Connection, model: Path, copies: int) -> dict[str, Any]:
    first, web = _key(connection, "first"), _web_process(connection)
    second = _client(connection, _key(connection, "second"))
    bodies = _special(_client(connection, first), model)
    idle_s = max(_timed(second) for _ in range(_IDLE_ANSWERS))
    print(f"{'idle':<62}{idle_s:8.3f} s")
    memory, routes = PeakMemory(web.pid), {}
    for method, path in _routes():
        body = bodies.get(path, (_worst_json(), {"content-type": _JSON}))
        memory.start()
        slowest_s, num_answers = _beside(second, partial(_send, connection, first, method, path, body), copies)
        grown_mib = memory.extra_bytes() / (1 << 20)
        print(f"{method:<7}{path:<55}{slowest_s:8.3f} s {num_answers:6,} answers {grown_mib:8.1f} MiB", flush=True)
        routes[f"{method} {path}"] = {"slowest_s": round(slowest_s, 3), "grown_mib": round(grown_mib, 1)}
    over = [
        name for name, each in routes.items() if each["slowest_s"] > idle_s + _BOUND_S or each["grown_mib"] > _BOUND_MIB
    ]
    return {"idle_s": round(idle_s, 3), "copies": copies, "over": over, "routes": routes}


def _routes() -> list[tuple[str, str]]:
    """Every operation of the application that may take a body."""
    app = create_app(Settings(root=Path(tempfile.mkdtemp())))
    found = set()
    for context in iter_route_contexts(app.routes):
        if isinstance(context.original_route, APIRoute) and context.path is not None:
            found |= {(method, context.path) for method in (context.methods or ()) if method not in ("GET", "HEAD")}
    return sorted(found, key=lambda each: each[1])


def _worst_json() -> bytes:
    """Nearly as many values as a body may have, each of which is wrong."""
    body = b'{"model":"m","prompt":[' + b",".join([b'{"a":1}'] * 95_000) + b"]}"
    assert len(body) <= MAX_BODY_BYTES
    return body


def _special(first: httpx.Client, model: Path) -> dict[str, Body]:
    """Bodies of other kinds than JSON, by path."""
    session = _made(first.post(f"{TINKER}/create_session", json={"tags": [], "user_metadata": {}}))["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": str(model), "lora_config": {"rank": 4}}
    model_id = _made(first.post(f"{TINKER}/create_model", json=asked))["model_id"]
    head = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=1).SerializeToString()
    chunks = b"\x0a\x02\x0a\x00" * 300_000
    batch = zstandard.compress(head + b"\x1a" + _length(len(chunks)) + chunks, 19)
    group = {"trajectories": [{"messages_and_choices": [{"role": "user", "content": "?"}], "reward": 0.0}] * 100}
    one = json.dumps(group).encode()
    groups = b",".join([one] * (_ART_BYTES // len(one)))
    job = b'{"model_id":"model-00000000000000000","trajectory_groups":[' + groups + b"]}"
    sampled = {"prompt": {"chunks": [{"tokens": [5] * 8000}]}, "num_samples": 1024, "prompt_logprobs": True}
    sampler = _made(
        first.post(
            f"{TINKER}/create_sampling_session",
            json={"session_id": session, "sampling_session_seq_id": 0, "base_model": str(model)},
        )
    )["sampling_session_id"]
    sample = sampled | {"sampling_session_id": sampler, "sampling_params": {"max_tokens": 8}}
    return {
        f"{TINKER}/forward_backward": (batch, {"content-type": PROTOBUF, "content-encoding": "zstd"}),
        f"{TINKER}/asample": (json.dumps(sample).encode(), {"content-type": _JSON}),
        "/v1/preview/training-jobs": (job, {"content-type": _JSON}),
        "/api/v1/files": (b'{"text": "a"}\n' * (1 << 20), {}),
    }


def _length(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _length(rest) if rest else bytes([low])


def _send(connection: Connection, key: str, method: str, path: str, body: Body) -> None:
    first, (content, headers) = _client(connection, key), body
    for name in ("run_id", "file_id", "name", "model_id", "job_id"):
        path = path.replace(f"{{{name}}}", "nobodys")
    answer = first.request(method, path.replace("{number}", "1"), content=content, headers=headers)
    assert answer.status_code < 500 or answer.status_code == 503, answer.text


def _beside(second: httpx.Client, send: Callable[[], None], copies: int) -> tuple[float, int]:
    """Return the second tenant's slowest answer while the first one's requests go on, and how many it had."""
    # Processes: a thread that writes 100 MiB would hold up what is measured in this one.
    senders = [multiprocessing.get_context("fork").Process(target=send) for _ in range(copies)]
    for sender in senders:
        sender.start()
    times = [_timed(second)]
    while any(sender.is_alive() for sender in senders):
        times.append(_timed(second))
    assert not any(sender.exitcode for sender in senders)
    return max(times), len(times)


def _timed(second: httpx.Client) -> float:
    began = time.perf_counter()
    _made(second.get("/api/v1/runs"))
    return time.perf_counter() - began


def _made(answer: httpx.Response) -> Any:
    assert answer.is_success, answer.text
    return answer.json()


def _key(connection: Connection, tenant: str) -> str:
    operator = _client(connection, connection.api_key)
    key: str = _made(operator.post("/api/v1/tenants", json={"tenant": tenant}))["key"]["key"]
    return key


def _client(connection: Connection, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=connection.api_url, headers=headers, timeout=600, trust_env=False)


def _web_process(connection: Connection) -> psutil.Process:
    assert connection.pid is not None
    children = psutil.Process(connection.pid).children(recursive=True)
    return next(each for each in children if "service.app" in each.cmdline())


if __name__ == "__main__":
    main()
