"""The service under load: mixed reads at a fixed rate, a long list, and a thousand runs that are queued at once.

    python -m benchmarks.service_load [--rate 200] [--seconds 30] [--listed 10000] [--runs 1000] [--drained 50]
                                      [--waves 2] [--halved 300] [--out FILE.json]

Starts `longshore dev` in a temporary folder, with rate limits and quotas out of the way. `reads`: requests are sent on
schedule whether or not earlier ones were answered, and a latency counts from a request's scheduled time (so that a
service that stalls does not get fewer requests). `list`: one client reads pages of a list of `--listed` runs. `queue`:
16 clients submit runs, one worker drains some, the rest are cancelled; every run must have ended once, in one workflow,
on one lease at most. Then again, in waves. `memory_mb`: memory of each process, before, at each wave's peak and after
it; it is flat if the last wave's peak is at most a tenth above the first's. `halved`: `--halved` runs are submitted,
every second one is cancelled at once, and the others end by themselves; all must end. `peak_mb` is the memory of all
processes except workers together, including W&B's. W&B is offline, its default here. Client and stack share the cores.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from temporalio.client import Client as Temporal

from benchmarks.control_plane import stack, tiny_run
from benchmarks.light_client import LightClient
from benchmarks.machine import provenance
from benchmarks.stack_processes import Memory, processor_s
from longshore.dataset_runs import SFTRun
from longshore.runs import RunRecord
from longshore.views import RunStatus
from service.database.engine import open_database
from service.dev import Connection
from service.runs.rows import run_row
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import open_store

T = TypeVar("T")
CLIENTS = 16
SETTINGS = {
    "LONGSHORE_RATE_LIMIT__PER_S": "100000",
    "LONGSHORE_RATE_LIMIT__BURST": "100000",
    "LONGSHORE_WORKER_IDLE_S": "600",
    "LONGSHORE_CPU_THREADS": "1",
}
ENDED = ("succeeded", "failed", "cancelled")
_SETTLE_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200, help="reads a second")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--listed", type=int, default=10_000, help="runs that have ended and are listed")
    parser.add_argument("--runs", type=int, default=1000, help="runs that are queued at once")
    parser.add_argument("--drained", type=int, default=50, help="of these, runs that end by themselves")
    parser.add_argument("--waves", type=int, default=2, help="how often so many are queued")
    parser.add_argument("--halved", type=int, default=300, help="runs of which half are cancelled")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stack"
        with stack(root, **SETTINGS):
            measured = asyncio.run(_measure(root, tiny_run(Path(folder)), options))
            text = json.dumps({"what": "the service under load", **measured, **provenance()}, indent=1)
            print(text, flush=True)
            if options.out is not None:
                options.out.write_text(text + "\n")


async def _measure(root: Path, run: SFTRun, options: argparse.Namespace) -> dict[str, Any]:
    connection = Connection.read(root)
    assert connection is not None
    headers = {"authorization": f"Bearer {connection.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=connection.api_url, headers=headers, timeout=120, trust_env=False, limits=limits
    ) as api:
        await _until(lambda: _is_well(api), "the stack is well")
        warm = await _submit(api, run, "warm-up")
        await _until(lambda: _has_ended(api, warm), "the first run")
        listed = await asyncio.to_thread(_fill, root, run, options.listed)
        settle_s = 3.0
        await asyncio.sleep(settle_s)
        pages = await _list(api, listed)
        async with LightClient(connection.api_url, headers) as light:
            reads = await _reads(light, root, [warm, *listed[:50]], options.rate, options.seconds)
        halved = await _halved(api, connection, root, run, options.halved) if options.halved else None
        queue = await _queue(api, connection, root, run, options) if options.runs else None
    return {"list": pages, "reads": reads, "halved": halved, "queue": queue}


# Reads.


async def _reads(light: LightClient, root: Path, run_ids: Sequence[str], rate: float, seconds: float) -> dict[str, Any]:
    """Send requests on schedule; return latencies in milliseconds. `cores`: how many each process kept busy."""
    chance = random.Random(7)
    paths = (
        "/api/v1/runs",
        "/api/v1/runs?state=succeeded&limit=20",
        "/api/v1/runs/{run}",
        "/api/v1/runs/{run}/metrics",
        "/api/v1/runs/{run}/events?limit=100",
        "/api/v1/overview",
        "/api/v1/whoami",
        "/api/v1/usage",
        "/api/v1/files",
        "/v1/fine_tuning/jobs",
        "/v1/models",
        "/",
    )
    answers: list[tuple[str, float, int]] = []

    async def ask(path: str, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        status, _ = await light.get(path.replace("{run}", chance.choice(run_ids)))
        answers.append((path, (time.perf_counter() - due) * 1000, status))

    for path in paths:  # open connections, and fill caches
        await ask(path, time.perf_counter())
    answers.clear()
    cpu_before = processor_s(root)
    begin = time.perf_counter() + 2  # by then all requests are scheduled
    due = [begin + number / rate for number in range(round(rate * seconds))]
    await asyncio.gather(*(ask(paths[number % len(paths)], when) for number, when in enumerate(due)))
    took_s = time.perf_counter() - begin
    cpu_after = processor_s(root)
    by_path = {path: _milliseconds([ms for one, ms, _ in answers if one == path]) for path in paths}
    return {
        "rate_per_s": round(len(answers) / took_s, 1),
        "statuses": dict(Counter(status for _, _, status in answers)),
        "cores": {role: round((cpu_s - cpu_before.get(role, 0)) / took_s, 2) for role, cpu_s in cpu_after.items()},
        "all": _milliseconds([ms for _, ms, _ in answers]),
        "by_path": by_path,
    }


def _milliseconds(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: ordered[min(len(ordered) - 1, int(place * len(ordered)))] for name, place in places.items()}
    return {name: round(value, 1) for name, value in {**found, "max": ordered[-1]}.items()}


# A long list.


def _fill(root: Path, run: SFTRun, number: int) -> list[str]:
    """Runs that ended long ago, in the index alone: lists are read from nothing else. Their ids, newest first."""
    database = open_database(Settings(root=root))
    ids = [f"sft-0{n:012x}" for n in range(number)]

    def work(session: Any) -> None:
        for n, run_id in enumerate(ids):
            record = RunRecord(run_id=run_id, run=run, created_at=1_700_000_000.0 + n)
            state = ("succeeded", "failed", "cancelled")[n % 3]
            status = {"run_id": run_id, "name": f"harbour-{n % 97}", "state": state, "phase": "done", "step": 2}
            times = {"started_at": record.created_at, "ended_at": record.created_at + 60, "num_steps": 2}
            session.add(run_row(record, RunStatus.model_validate(status | times | {"metrics": {"loss": 1.5}})))

    database.write(work)
    database.close()
    return ids[::-1]


async def _list(api: httpx.AsyncClient, ids: Sequence[str], repeats: int = 20) -> dict[str, Any]:
    """One client, one page after another."""
    middle = ids[len(ids) // 2] if ids else None
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "first page": ("/api/v1/runs", {}),
        "200 runs": ("/api/v1/runs", {"limit": 200}),
        "a page in the middle": ("/api/v1/runs", {"after": middle}),
        "of one state": ("/api/v1/runs", {"state": "failed"}),
        "words that nothing has": ("/api/v1/runs", {"words": "no such run"}),
        "overview": ("/api/v1/overview", {}),
        "sparklines": ("/api/v1/sparklines", {"run_id": list(ids[:50])}),
        "the page": ("/", {}),
    }
    found: dict[str, Any] = {"runs": len(ids)}
    for name, (path, query) in asked.items():
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            (await api.get(path, params={k: v for k, v in query.items() if v is not None})).raise_for_status()
            times.append((time.perf_counter() - begin) * 1000)
        found[name] = _milliseconds(times)
    return found


# A queue.


async def _queue(
    api: httpx.AsyncClient, connection: Connection, root: Path, run: SFTRun, options: argparse.Namespace
) -> dict[str, Any]:
    """Run waves of runs in turn; return the processes' memory after each."""
    memory = Memory(root)
    waves = []
    for number in range(options.waves):
        async with memory.watched():
            waves.append(await _wave(api, connection, root, run, f"wave-{number}", options.runs, options.drained))
            await asyncio.sleep(_SETTLE_S)
    return {"runs": options.runs, "waves": waves, **memory.report()}


async def _wave(
    api: httpx.AsyncClient, connection: Connection, root: Path, run: SFTRun, name: str, number: int, drained: int
) -> dict[str, Any]:
    begin = time.perf_counter()
    keys = [f"{name}-{n}" for n in range(number)]
    ids = await _side_by_side(keys, lambda key: _submit(api, run.model_copy(update={"name": "queued"}), key))
    submitted_s = time.perf_counter() - begin
    again = await _side_by_side(keys[:20], lambda key: _submit(api, run.model_copy(update={"name": "queued"}), key))
    assert again == ids[:20], "the same key is another run"

    async def are_drained() -> bool:
        views = (await api.get("/api/v1/runs", params={"state": "succeeded", "limit": 200})).json()["runs"]
        return sum(view["run_id"] in known for view in views) >= drained

    known = set(ids)
    await _until(are_drained, f"{drained} runs have succeeded", 1800)
    drained_s = time.perf_counter() - begin
    statuses = Counter(await _side_by_side(ids, lambda run_id: _cancel(api, run_id)))
    await _until(lambda: _have_ended(api, known), "every run has ended", 1800)
    ended_s = time.perf_counter() - begin
    views = await _side_by_side(ids, lambda run_id: _view(api, run_id))
    return {
        "submitted_s": round(submitted_s, 1),
        "drained_s": round(drained_s, 1),
        "ended_s": round(ended_s, 1),
        "states": dict(Counter(view["state"] for view in views)),
        "answers_to_cancel": dict(statuses),
        "lost": number - sum(view["state"] in ENDED for view in views),
        "started_twice": await _twice(connection, root, ids),
    }


async def _halved(
    api: httpx.AsyncClient, connection: Connection, root: Path, run: SFTRun, number: int
) -> dict[str, Any]:
    """Submit runs; when all are accepted, cancel every second one. The others end by themselves."""
    memory = Memory(root)
    begin = time.perf_counter()
    async with memory.watched():
        ids = await _side_by_side(
            [f"halved-{n}" for n in range(number)],
            lambda key: _submit(api, run.model_copy(update={"name": "halved"}), key),
        )
        submitted_s = time.perf_counter() - begin
        answers = Counter(await _side_by_side(ids[::2], lambda run_id: _cancel(api, run_id)))
        await _until(lambda: _have_ended(api, set(ids)), "every run has ended", 3600)
        ended_s = time.perf_counter() - begin
        written = await _written(root, ids)
        await asyncio.sleep(_SETTLE_S)
    views = await _side_by_side(ids, lambda run_id: _view(api, run_id))
    return {
        "runs": number,
        "submitted_s": round(submitted_s, 1),
        "ended_s": round(ended_s, 1),
        "states": dict(Counter(view["state"] for view in views)),
        "answers_to_cancel": dict(answers),
        "lost": number - sum(view["state"] in ENDED for view in views),
        "started_twice": await _twice(connection, root, ids),
        "written_to_wandb": written,
        **memory.report(),
    }


async def _written(root: Path, ids: Sequence[str]) -> int:
    """How many runs W&B has a folder of, once no more come for a while."""
    found, before = -1, -2
    while found != before:
        before = found
        await asyncio.sleep(_SETTLE_S)
        found = sum((root / "wandb" / run_id).is_dir() for run_id in ids)
    return found


async def _submit(api: httpx.AsyncClient, run: SFTRun, key: str) -> str:
    body = run.model_dump(mode="json", exclude={"kind"})
    answer = await api.post("/api/v1/runs/sft", json=body, headers={"idempotency-key": key})
    answer.raise_for_status()
    return str(answer.json()["run_id"])


async def _cancel(api: httpx.AsyncClient, run_id: str) -> int:
    return (await api.post(f"/api/v1/runs/{run_id}/cancel")).status_code


async def _view(api: httpx.AsyncClient, run_id: str) -> dict[str, Any]:
    view: dict[str, Any] = (await api.get(f"/api/v1/runs/{run_id}")).raise_for_status().json()
    return view


async def _is_well(api: httpx.AsyncClient) -> bool:
    return (await api.get("/api/v1/health")).status_code == 200


async def _has_ended(api: httpx.AsyncClient, run_id: str) -> bool:
    return (await _view(api, run_id))["state"] in ENDED


async def _have_ended(api: httpx.AsyncClient, run_ids: set[str]) -> bool:
    running = (await api.get("/api/v1/runs", params={"state": "running", "limit": 200})).json()["runs"]
    return not any(view["run_id"] in run_ids for view in running)


async def _twice(connection: Connection, root: Path, ids: Sequence[str]) -> list[str]:
    """Runs with more than one workflow, or more than one lease."""
    temporal = await Temporal.connect(connection.temporal_address)
    workflows = Counter([execution.id async for execution in temporal.list_workflows()])
    settings = Settings(root=root)
    store = open_store(settings.store, settings.s3)
    leases = {run_id: sum(1 for _ in store.list(RunKeys(run_id).leases)) for run_id in ids}
    return [run_id for run_id in ids if workflows[run_id] != 1 or leases[run_id] > 1]


async def _side_by_side(items: Sequence[str], work: Callable[[str], Awaitable[T]]) -> list[T]:
    """So many clients, each with one request at a time; answers in order."""
    places = asyncio.Semaphore(CLIENTS)

    async def one(item: str) -> T:
        async with places:
            return await work(item)

    return list(await asyncio.gather(*map(one, items)))


async def _until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    main()
