"""Effect of one tenant's worst request bodies on the others: every route, ten at once, and the client gone.

    python -m benchmarks.tenant_attacks [--copies 10] [--routes PART] [--out FILE.json]

Starts `longshore dev` in a temporary folder. To each route that takes a body the first tenant sends, `--copies` at
once, the worst bodies of at most 4 kB and of the largest allowed size. For JSON these are bodies that the OpenAPI
description allows and that take longest to validate (tests/security/worst_bodies.py), and the worst accepted one; for
other types one made by hand. It hangs up after the last byte. At the same time a second tenant keeps listing its runs.
Prints a line for each: CPU seconds of the web process per request, the second tenant's median and 99th percentile, and
the growth of the web process and the disk. `over`: figures above the limits of 0.1 s, 0.5 s (beyond an idle stack's)
and 150 MiB, on a quiet machine.
"""

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import zstandard
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from benchmarks.control_plane import stack
from benchmarks.machine import PeakMemory, provenance, tell
from examples.tiny_model import make_tiny_model
from service.apis.tinker.wire import MESSAGES, PROTOBUF, TINKER
from service.app import MAX_BODY_BYTES, create_app
from service.decoding import SMALL_BYTES
from service.dev import Connection
from shared.settings import Settings
from tests.security.worst_bodies import endpoints, worst

_CORPUS = [f"Crane {n} lifts crate {n * 7 % 50}." for n in range(50)]
_CPU_S, _P99_S, _MIB = 0.1, 0.5, 150
_IDLE_S, _QUIET_S, _PATIENCE_S = 3.0, 0.4, 120.0
_JSON = "application/json"
_ART_BYTES = 100 << 20
_SETTINGS = {
    "LONGSHORE_RATE_LIMIT__PER_S": "100000",
    "LONGSHORE_RATE_LIMIT__BURST": "100000",
    "LONGSHORE_TEMPORAL_CODEC": "true",
}
Body = tuple[bytes, dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--routes", default="", help="only those whose path has this in it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", _CORPUS)
        with stack(Path(folder) / "stack", **_SETTINGS) as on:
            figures = asyncio.run(_measure(on, Path(folder) / "stack", model, options.copies, options.routes))
    tell({"what": "one tenant's worst bodies", **figures, **provenance()}, options.out)


async def _measure(connection: Connection, root: Path, model: Path, copies: int, only: str) -> dict[str, Any]:
    first = _key(connection, "first", concurrent_runs=2)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(copies))
    web, rows = _Web(connection, root), {}
    special = _special(_client(connection, first), model)
    async with httpx.AsyncClient(
        base_url=connection.api_url,
        headers={"authorization": f"Bearer {_key(connection, 'second')}"},
        timeout=600,
        trust_env=False,
    ) as second:
        await web.learn(second)
        print(f"{'route':<62}{'bytes':>9}{'CPU s':>8}{'p50':>8}{'p99':>8}{'MiB':>7}{'disk':>7}", flush=True)
        for (method, path), name, body in _attacks(special):
            if only in path:
                key = connection.api_key if path.startswith("/api/v1/codec") else first  # the operator's alone
                rows[f"{method} {path} {name}"] = row = await web.attacked(second, key, method, path, body, copies)
                print(f"{method:<7}{path[:44]:<45}{name:<10}" + "".join(f"{v:>8}" for v in row.values()), flush=True)
    over = [
        name
        for name, row in rows.items()
        if row["cpu_s"] > _CPU_S or row["p99_s"] > web.idle_p99_s + _P99_S or row["mib"] > _MIB
    ]
    return {"copies": copies, "idle_p99_s": round(web.idle_p99_s, 3), "over": over, "routes": rows}


def _attacks(special: dict[str, Body]) -> Iterator[tuple[tuple[str, str], str, Body]]:
    """Every operation of the application that may take a body, with the body to send."""
    app = create_app(Settings(root=Path(tempfile.mkdtemp()), temporal_codec=True))
    described, document = endpoints(app), app.openapi()
    for operation in sorted(_operations(app), key=lambda each: each[1]):
        if operation[1] in special:
            yield operation, "special", special[operation[1]]
        if operation not in described:
            continue
        for size, limit in (("small", SMALL_BYTES), ("large", MAX_BODY_BYTES)):
            for number, found in enumerate(worst(document, operation, described[operation], limit, 150)):
                yield (
                    operation,
                    f"{size}{' ok' if number or found.is_valid else ''}",
                    (
                        found.body,
                        {"content-type": _JSON},
                    ),
                )


def _operations(app: FastAPI) -> set[tuple[str, str]]:
    found = set()
    for context in iter_route_contexts(app.routes):
        if isinstance(context.original_route, APIRoute) and context.path is not None:
            found |= {(method, context.path) for method in (context.methods or ()) if method not in ("GET", "HEAD")}
    return found


class _Web:
    """The web process of a stack, and its load without the second tenant's requests."""

    def __init__(self, connection: Connection, root: Path) -> None:
        self._connection = connection
        self._root = root
        assert connection.pid is not None
        children = psutil.Process(connection.pid).children(recursive=True)
        self._process = next(each for each in children if "service.app" in each.cmdline())
        self.idle_p99_s = 0.0
        self._idle_cpu = self._cpu_each = 0.0

    async def learn(self, second: httpx.AsyncClient) -> None:
        """Measure the load of the idle process, and that of each request of the second tenant."""
        began, cpu = time.monotonic(), self._cpu()
        await asyncio.sleep(_IDLE_S)
        self._idle_cpu = (self._cpu() - cpu) / (time.monotonic() - began)
        began, cpu, times = time.monotonic(), self._cpu(), []
        while time.monotonic() - began < _IDLE_S:
            times.append(await _timed(second))
        self._cpu_each = max(0.0, self._cpu() - cpu - self._idle_cpu * _IDLE_S) / len(times)
        self.idle_p99_s = _quantile(times, 0.99)

    async def attacked(
        self, second: httpx.AsyncClient, key: str, method: str, path: str, body: Body, copies: int
    ) -> dict[str, float]:
        """Attack, send requests as the second tenant until the process is quiet again, and return the cost."""
        for name in ("run_id", "file_id", "name", "model_id", "job_id"):
            path = path.replace(f"{{{name}}}", "nobodys")
        request = _request(key, method, path.replace("{number}", "1"), body)
        memory, disk = PeakMemory(self._process.pid), _disk(self._root)
        memory.start()
        began, cpu, times = time.monotonic(), self._cpu(), list[float]()
        # On threads: this loop, on which the second tenant is timed, would else copy what the sockets do not take.
        sending = [asyncio.create_task(asyncio.to_thread(_send, self._connection, request)) for _ in range(copies)]
        quiet_since, seen = time.monotonic(), cpu
        while not all(one.done() for one in sending) or time.monotonic() - quiet_since < _QUIET_S:
            times.append(await _timed(second))
            seen, before = self._cpu(), seen
            if seen - before > 0.05:
                quiet_since = time.monotonic()
            if time.monotonic() - began > _PATIENCE_S:
                break
            await asyncio.sleep(0.01)
        await asyncio.gather(*sending, return_exceptions=True)
        own_s = self._idle_cpu * (time.monotonic() - began) + self._cpu_each * len(times)
        return {
            "bytes": len(body[0]),
            "cpu_s": round(max(0.0, self._cpu() - cpu - own_s) / copies, 3),
            "p50_s": round(statistics.median(times), 3),
            "p99_s": round(_quantile(times, 0.99), 3),
            "mib": round(memory.extra_bytes() / (1 << 20)),
            "disk_mib": round((_disk(self._root) - disk) / (1 << 20), 1),
        }

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


def _request(key: str, method: str, path: str, body: Body) -> bytes:
    headers = {"host": "127.0.0.1", "authorization": f"Bearer {key}", "content-length": str(len(body[0])), **body[1]}
    lines = [f"{method} {path}?name=a.jsonl HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body[0]


def _send(connection: Connection, request: bytes) -> None:
    """Send a request, and hang up behind its last byte. It may be refused before."""
    parts = urlsplit(connection.api_url)
    with socket.create_connection((parts.hostname, parts.port)) as client, suppress(ConnectionError):
        client.sendall(request)
        time.sleep(0.2)  # let the service read it: an unread request has no effect


def _disk(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "store").rglob("*") if path.is_file())


def _quantile(times: list[float], part: float) -> float:
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


async def _timed(second: httpx.AsyncClient) -> float:
    began = time.perf_counter()
    (await second.get("/api/v1/runs")).raise_for_status()
    return time.perf_counter() - began


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


def _made(answer: httpx.Response) -> Any:
    assert answer.is_success, answer.text
    return answer.json()


def _key(connection: Connection, tenant: str, **quotas: int) -> str:
    operator = _client(connection, connection.api_key)
    key: str = _made(operator.post("/api/v1/tenants", json={"tenant": tenant}))["key"]["key"]
    _made(operator.put(f"/api/v1/tenants/{tenant}/quotas", json=quotas))
    return key


def _client(connection: Connection, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=connection.api_url, headers=headers, timeout=600, trust_env=False)


if __name__ == "__main__":
    main()
