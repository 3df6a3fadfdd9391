"""A sweep of 16 runs on one warm base, against the same 16 runs one after another: wall time and GPU seconds.

    python -m benchmarks.sweep [--runs 16] [--steps 40] [--parallel 8] [--hidden 64] [--layers 2]

Starts `longshore dev` three times in a temporary folder. The first does the runs by `longshore submit`, each after
the previous one and its worker have ended (LONGSHORE_WORKER_IDLE_S 0), so that each loads the base; the second does so
too, but keeps the worker, after a run that warms it up; the third, as warm, does them as a grid. All evaluate held-out
rows before and after. Prints JSON: seconds from the first submission to the last end (of the sweep with the best
published), GPU seconds from the runs' status, and how many adapters have the same SHA-256 in all three.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.control_plane import stack
from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.automation import Space, Sweep
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.training import Lora
from longshore.views import RunView
from shared.automation import grid_values, with_values

RANKS = (4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        texts = ["how many crates are on the quay? seven crates."] * 8
        model = make_tiny_model(root / "model", texts, hidden_size=given.hidden, num_layers=given.layers)
        sweep = _sweep(root, model, given.runs, given.steps, given.parallel)
        measured = {
            "one_after_another_cold": _one_after_another(root / "cold", sweep, LONGSHORE_WORKER_IDLE_S="0"),
            "one_after_another_warm": _one_after_another(root / "warm", sweep),
            "sweep": _swept(root / "swept", sweep),
        }
    adapters = [[run.adapter_sha256 for run in each.runs] for each in measured.values()]
    result = {
        "what": "runs of a grid, one after another, and as a sweep on one warm base",
        **vars(given),
        "seconds": {name: round(each.seconds, 2) for name, each in measured.items()},
        "gpu_seconds": {name: round(sum(run.gpu_seconds for run in each.runs), 2) for name, each in measured.items()},
        "load": {name: each.load for name, each in measured.items()},
        "equal_adapters": sum(len(set(of_one)) == 1 for of_one in zip(*adapters, strict=True)),
        **provenance(),
    }
    print(json.dumps(result, indent=1))


class Measured(NamedTuple):
    """Runs that have ended. `load`: of the machine in that minute, this included."""

    seconds: float
    runs: list[RunView]
    load: float


def _sweep(root: Path, model: Path, runs: int, steps: int, parallel: int) -> Sweep:
    rows = root / "rows.jsonl"
    chats = ({"prompt": f"How many at {n}?", "completion": f"{n * 7} crates"} for n in range(64))
    rows.write_text("".join(json.dumps(row) + "\n" for row in chats))
    data = DatasetSource(uri=rows.as_uri())
    base = {"model": model.as_uri(), "dataset": data, "eval_dataset": data, "trainable": Lora(rank=4)}
    rates = tuple(0.0005 * (n + 1) for n in range(runs // len(RANKS)))
    return Sweep(
        name="best",
        run=SFTRun(**base, steps=steps, batch_size=4),
        parameters={"learning_rate": Space(choices=rates), "trainable.rank": Space(choices=RANKS)},
        sampler="grid",
        parallel=parallel,
    )


def _one_after_another(root: Path, sweep: Sweep, **settings: str) -> Measured:
    with stack(root, **settings) as connection, Client(connection.api_url, connection.api_key) as client:
        _warm_up(client, sweep)
        began = time.perf_counter()
        runs = [with_values(sweep.run, grid_values(sweep, number)) for number in range(sweep.num_trials)]
        ended = [_ended(client, client.runs.submit(run, f"run-{number}").run_id) for number, run in enumerate(runs)]
        return Measured(time.perf_counter() - began, ended, os.getloadavg()[0])


def _swept(root: Path, sweep: Sweep) -> Measured:
    with stack(root) as connection, Client(connection.api_url, connection.api_key) as client:
        _warm_up(client, sweep)
        began = time.perf_counter()
        view = client.sweeps.create(sweep)
        while view.state == "running":
            time.sleep(0.1)
            view = client.sweeps.get(view.sweep_id)
        seconds = time.perf_counter() - began
        assert view.state == "succeeded", view
        return Measured(seconds, [client.runs.get(trial.run_id) for trial in view.trials], os.getloadavg()[0])


def _warm_up(client: Client, sweep: Sweep) -> None:
    run = with_values(sweep.run, {"seed": 99, "steps": 2})
    _ended(client, client.runs.submit(run, "warm-up").run_id)


def _ended(client: Client, run_id: str) -> RunView:
    while (run := client.runs.get(run_id)).ended_at is None:
        time.sleep(0.05)
    assert run.state == "succeeded", run.problem
    return run


if __name__ == "__main__":
    main()
