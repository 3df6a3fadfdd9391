"""Effect of one tenant's abusive agents on another tenant's requests, and what the first one is told.

    python -m benchmarks.agent_abuse [--kinds questions forks …] [--seconds 20] [--at-once 8] [--out FILE.json]

Starts `longshore dev` in a temporary folder with a tiny model of random weights, and one more sampler host, since a
default stack has one sampler, which a run or chats hold. The second tenant reads a run four times a second, asks a chat
of 8 tokens twice a second, and submits and cancels a run every two seconds; a latency counts from a request's scheduled
time. First the stack is idle otherwise. Then the first tenant plays `--at-once` episodes of each kind of `_KINDS` for
`--seconds` each. Prints JSON: for each kind the second tenant's median, 95th percentile and maximum in seconds, how the
episodes ended, and what is shown of them. `over`: maxima more than 0.5 s above the idle stack's.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.control_plane import stack, tiny_run
from benchmarks.machine import provenance, tell, until
from benchmarks.rl_learning import Stack
from benchmarks.stack_processes import end
from service.dev import Connection
from shared.child_environment import STACK_MARK, child_environment

_MODEL = "tiny/model"
_LIMIT_S = 0.5
_BEGIN = """
import collections, concurrent.futures, http.client, json, os, socket, threading, time

def ask(number, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", 8321, timeout=600)
    messages = [{"role": "user", "content": f"quay {number}?"}]
    connection.request("POST", "/v1/chat/completions", body or json.dumps({"model": "policy", "messages": messages}))
    return connection.getresponse().status

def forever(work):
    while True:
        try:
            work()
        except OSError:
            pass

print("asked:", ask("first"), flush=True)
until = time.monotonic() + float(os.environ["SECONDS"])
"""
_KINDS = {
    # Asks 10,000 questions over 64 connections at once, as fast as they are answered or refused.
    "questions": """
def status(number):
    try:
        return ask(number) if time.monotonic() < until else "not asked"
    except OSError as error:
        return type(error).__name__
with concurrent.futures.ThreadPoolExecutor(64) as threads:
    print("answers:", collections.Counter(threads.map(status, range(10_000))))
""",
    # Forks until it may not, and computes, each process in a session of its own with the priority that it likes.
    "forks": """
try:
    while os.fork():
        pass
    os.setsid()
except BlockingIOError as error:
    print("forks:", error, flush=True)
def work():
    sum(range(1_000_000))
    with open("/proc/self/autogroup", "w") as file:
        file.write("0")
forever(work)
""",
    # Fills its disk, again and again.
    "disk": """
def work():
    with open("/work/large", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
forever(work)
""",
    # Sends bodies of 100 MB, and of 8 MB that take long to read.
    "bodies": """
def large():
    with socket.create_connection(("127.0.0.1", 8321)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nContent-Length: 100000000\\r\\n\\r\\n")
        for _ in range(100):
            connection.sendall(bytes(1 << 20))
slow = lambda: ask(0, b'{"messages": [' + b"[]," * 2_700_000 + b"[]]}")
for work in [large, slow] * 8:
    threading.Thread(target=forever, args=(work,), daemon=True).start()
time.sleep(until - time.monotonic())
""",
    "sleep": "time.sleep(100_000)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--seconds", type=int, default=20, help="of each kind, and of the idle stack")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, run = Path(folder) / "stack", tiny_run(Path(folder))
        names = {"LONGSHORE_TINKER__MODELS": json.dumps({_MODEL: run.model.removeprefix("file://")})}
        with stack(root, **names) as connection:
            second = _Second(connection, run.model_dump(mode="json"))

            def play(kind: str) -> dict[str, Any]:
                return _played(Stack(root), run.model, kind, options.seconds, options.at_once)

            warm = threading.Thread(target=play, args=("sleep",))  # takes the stack's own sampler
            warm.start()
            until(lambda: any((root / "workers").glob("*/ready")), "a sampler", 300.0, 0.1)
            with _sampler_host(root, connection):
                asyncio.run(second.felt(warm.join))  # chats take the other sampler
                found = {"idle": asyncio.run(second.felt(lambda: time.sleep(options.seconds)))}
                for kind in options.kinds:
                    found[kind] = asyncio.run(second.felt(lambda: play(kind)))  # noqa: B023
                    print(kind, json.dumps(found[kind]), file=sys.stderr, flush=True)
    over = [
        f"{kind} {name}"
        for kind, one in found.items()
        for name, felt in one["felt"].items()
        if felt["max"] > found["idle"]["felt"][name]["max"] + _LIMIT_S
    ]
    what = f"seconds of a second tenant's requests beside {options.at_once} abusive agents of {options.seconds} s"
    tell({"what": what, "over": over, **found, **provenance()}, options.out)


def _played(on: Stack, model: str, kind: str, seconds: int, at_once: int) -> dict[str, Any]:
    """Play the episodes as the first tenant. Returns how they ended, and the end of what is shown of the first one."""
    rows = on.root.parent / f"{kind}.jsonl"
    own = {"files": {"agent.py": _BEGIN + _KINDS[kind]}, "variables": {"SECONDS": str(seconds)}}
    rows.write_text(json.dumps({"prompt": kind} | own) + "\n")
    options = ["--model", model, "--prompts", str(rows), "--agent", "python3 agent.py", "-n", str(at_once)]
    options += ["--agent-time-s", str(seconds + 60), "--agent-verifier", "echo 1 > /logs/verifier/reward.txt"]
    options += ["--max-completion-tokens", "8", "--max-tokens", "256", "--max-ungraded-fraction", "1"]
    try:
        run_id = on.run("rollout", *options, "--json")["run_id"]
    except subprocess.CalledProcessError as failed:  # as a run whose program could not ask is
        print(failed.output, file=sys.stderr)
        raise
    shown: Any = on.run("episodes", run_id, "--of", "eval", "--json")
    ends = Counter(one["episode"]["end"] for one in shown)
    return {"ends": dict(ends), "shown": shown[0]["episode"]["output"].splitlines()[-8:]}


@contextmanager
def _sampler_host(root: Path, connection: Connection) -> Iterator[None]:
    own = {
        "LONGSHORE_ROOT": str(root),
        "LONGSHORE_TEMPORAL_ADDRESS": connection.temporal_address,
        STACK_MARK: str(root),
    }
    command = [sys.executable, "-P", "-m", "service.host", "--role", "sampler"]
    host = subprocess.Popen(
        command, env=child_environment("sampler", os.environ | own), cwd=root, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        end(host)


class _Second:
    """The tenant whose requests are small, and timed."""

    def __init__(self, connection: Connection, run: dict[str, Any]) -> None:
        self._url, self._submitted = connection.api_url, run
        with httpx.Client(base_url=self._url, headers=_as(connection.api_key), timeout=600) as operator:
            made = operator.post("/api/v1/tenants", json={"tenant": "second"}).raise_for_status().json()
        self._key = made["key"]["key"]

    async def felt(self, meanwhile: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Make requests until `meanwhile` returns. Returns seconds of them by kind, and what it has returned."""
        async with httpx.AsyncClient(base_url=self._url, headers=_as(self._key), timeout=600) as self._client:
            self._run_id = await self._submit()
            doing = asyncio.ensure_future(asyncio.to_thread(meanwhile))
            kinds = {"read": (0.25, self._read), "chat": (0.5, self._chat), "submit": (2.0, self._submit)}
            times = await asyncio.gather(*(_paced(every_s, ask, doing) for every_s, ask in kinds.values()))
            return {
                "felt": {name: _summary(one) for name, one in zip(kinds, times, strict=True)},
                **(await doing or {}),
            }

    async def _read(self) -> None:
        (await self._client.get(f"/api/v1/runs/{self._run_id}")).raise_for_status()

    async def _chat(self) -> None:
        asked = {"model": _MODEL, "messages": [{"role": "user", "content": "Which quay?"}], "max_tokens": 8}
        while True:
            answer = await self._client.post("/v1/chat/completions", json=asked)
            if answer.status_code not in (429, 503):
                break
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))  # as clients do; it counts
        answer.raise_for_status()

    async def _submit(self) -> str:
        made = (await self._client.post("/api/v1/runs/sft", json=self._submitted)).raise_for_status().json()
        (await self._client.post(f"/api/v1/runs/{made['run_id']}/cancel")).raise_for_status()
        return str(made["run_id"])


def _as(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def _paced(every_s: float, ask: Callable[[], Awaitable[Any]], doing: "asyncio.Future[Any]") -> list[float]:
    """Ask at a fixed pace, whether or not earlier questions were answered. Returns their seconds."""
    began, asked = time.perf_counter(), list["asyncio.Task[float]"]()

    async def timed(scheduled: float) -> float:
        await ask()
        return time.perf_counter() - scheduled

    while not doing.done():
        scheduled = began + len(asked) * every_s
        await asyncio.sleep(max(0.0, scheduled - time.perf_counter()))
        asked.append(asyncio.create_task(timed(scheduled)))
    return await asyncio.gather(*asked)


def _summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    places = {"p50": len(times) // 2, "p95": int(len(times) * 0.95), "max": -1}
    return {"num": len(times)} | {name: round(ordered[place], 3) for name, place in places.items()}


if __name__ == "__main__":
    main()
