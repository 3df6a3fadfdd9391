"""Overhead of the control plane: seconds from a submitted run to its job file, on a warm stack, for a tiny dataset.

    python -m benchmarks.control_plane [--runs 5]

Starts `longshore dev` in a temporary folder, lets one run warm it (worker included), then submits runs one by one over
the native API and watches the worker's folder for each one's job file. Prints JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.training import Lora
from service.dev import Connection
from shared.storage.paths import HostPaths

LONGSHORE = str(Path(sys.executable).parent / "longshore")
ROWS = 64


@contextmanager
def stack(root: Path, **settings: str) -> Iterator[Connection]:
    """Start `longshore dev` in a folder, with settings from the environment, and stop it when the block ends.

    Its messages go to standard error: a benchmark's standard output is its JSON.
    """
    environment = {**os.environ, "LONGSHORE_ROOT": str(root), **settings}
    dev = partial(subprocess.run, env=environment, check=True, stdout=sys.stderr)
    dev([LONGSHORE, "dev", "--detach", "--open", "/", "--root", str(root)])
    try:
        connection = Connection.read(root)
        assert connection is not None
        yield connection
    finally:
        dev([LONGSHORE, "dev", "--stop", "--root", str(root)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    num_runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stack"
        with stack(root, LONGSHORE_WORKER_IDLE_S="120"):
            seconds = _measure(root, Path(folder), num_runs)
    result = {
        "what": "seconds from POST /runs/sft to the job file",
        "rows": ROWS,
        "seconds": [round(s, 3) for s in seconds],
        "median": round(statistics.median(seconds), 3),
        **provenance(),
    }
    print(json.dumps(result, indent=1))


def _measure(root: Path, folder: Path, num_runs: int) -> list[float]:
    run = tiny_run(folder)
    connection = Connection.read(root)
    assert connection is not None
    with Client(connection.api_url, connection.api_key) as client:
        _finish(client, client.runs.submit(run, "warm-up").run_id)
        seconds = []
        for number in range(num_runs):
            fresh = run.model_copy(update={"seed": number + 1})  # another seed is another plan: nothing is cached
            began = time.time()
            run_id = client.runs.submit(fresh, f"run-{number}").run_id
            seconds.append(_job_file_time(HostPaths(root), run_id) - began)
            _finish(client, run_id)
    return seconds


def tiny_run(folder: Path) -> SFTRun:
    model = make_tiny_model(folder / "model", ["how many crates are on the quay? seven crates."] * 8)
    data = folder / "data.jsonl"
    rows = (
        {"messages": [{"role": "user", "content": f"quay {n}?"}, {"role": "assistant", "content": f"{n} crates"}]}
        for n in range(ROWS)
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SFTRun(
        model=f"file://{model}",
        dataset=DatasetSource(uri=f"file://{data}"),
        trainable=Lora(rank=4),
        steps=2,
        batch_size=8,
        max_tokens=128,
    )


def _job_file_time(paths: HostPaths, run_id: str) -> float:
    """When the job file of a run was written, in seconds since 1970: a rename keeps a file's modification time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in paths.workers.glob("*/*/*.json"):
            try:
                if run_id in path.read_text():
                    return path.stat().st_mtime
            except FileNotFoundError:  # renamed in the meantime: the next pass finds it
                continue
        time.sleep(0.002)
    raise TimeoutError(f"no job file of {run_id} within 60 s")


def _finish(client: Client, run_id: str) -> None:
    while (view := client.runs.get(run_id)).state == "running":
        time.sleep(0.1)
    assert view.state == "succeeded", view.problem


if __name__ == "__main__":
    main()
