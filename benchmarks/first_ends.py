"""Many small runs of several tenants at once on a default stack: when they end, and how long submits take.

    python -m benchmarks.first_ends [--runs 100] [--tenants 3] [--out FILE.json]

Starts `longshore dev` in a temporary folder. The tenants submit their runs in turn, without waiting. Prints the
seconds from the first submit to the end of the first run, of a tenth, of half and of all runs, in total and for each
tenant; the seconds of a submit (median and slowest); and how the runs ended. Runs are minimal, so the order of their
preparation decides the result.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.control_plane import stack, tiny_run
from benchmarks.machine import provenance, tell
from service.dev import Connection

_ENDED = ("succeeded", "failed", "cancelled")
_PATIENCE_S, _LOOK_S = 3600.0, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--tenants", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stack"
        with stack(root, LONGSHORE_RATE_LIMIT__PER_S="1000", LONGSHORE_RATE_LIMIT__BURST="1000") as connection:
            run = json.loads(tiny_run(Path(folder)).model_dump_json())
            figures = _measure(connection, run, options.runs, options.tenants)
    tell({"what": "seconds, many runs at once", **figures, **provenance()}, options.out)


def _measure(connection: Connection, run: dict[str, Any], num_runs: int, num_tenants: int) -> dict[str, Any]:
    operator = _client(connection, connection.api_key)
    clients = []
    for number in range(num_tenants):
        made = operator.post("/api/v1/tenants", json={"tenant": f"tenant-{number}"}).raise_for_status().json()
        clients.append(_client(connection, made["key"]["key"]))
    began, submits = time.monotonic(), list[float]()

    def submit(number: int) -> str:
        start = time.monotonic()
        answer = clients[number % num_tenants].post("/api/v1/runs/sft", json=run | {"seed": number})
        submits.append(time.monotonic() - start)
        return str(answer.raise_for_status().json()["run_id"])

    with ThreadPoolExecutor(2 * num_tenants) as threads:
        owners = {run_id: number % num_tenants for number, run_id in enumerate(threads.map(submit, range(num_runs)))}
    ended: dict[str, tuple[float, str]] = {}
    while len(ended) < num_runs and time.monotonic() - began < _PATIENCE_S:
        for client in clients:
            runs = client.get("/api/v1/runs", params={"limit": 100}).raise_for_status().json()["runs"]
            now = time.monotonic() - began
            ended.update(
                {r["run_id"]: (now, r["state"]) for r in runs if r["state"] in _ENDED and r["run_id"] not in ended}
            )
        time.sleep(_LOOK_S)
    return {
        "runs": num_runs,
        "ends_s": _ends([at for at, _ in ended.values()]),
        "by_tenant": [
            _ends([at for run_id, (at, _) in ended.items() if owners[run_id] == n]) for n in range(num_tenants)
        ],
        "submit_s": {"median": round(statistics.median(submits), 3), "slowest": round(max(submits), 3)},
        "states": Counter(state for _, state in ended.values()),
    }


def _ends(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    places = {"first": 0, "tenth": len(times) // 10, "half": len(times) // 2, "last": len(times) - 1}
    return {name: round(times[place], 1) for name, place in places.items() if times}


def _client(connection: Connection, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=connection.api_url, headers=headers, timeout=300, trust_env=False)


if __name__ == "__main__":
    main()
