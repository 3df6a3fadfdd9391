"""Eight LoRA runs at once on one shared worker, against one after another: wall time, GPU seconds, and equal bits.

    python -m benchmarks.shared_worker [--steps 40] [--hidden 64] [--layers 2]
    python -m benchmarks.shared_worker --switches 4 [--hidden 64] [--layers 2]

Starts `longshore dev` twice in a temporary folder, with LONGSHORE_QUOTAS__WORKER_SHARING `none` and `all`, warms it up
with one run, and submits eight runs at once: supervised and preference runs and RL runs whose client sends the
trajectories, of ranks 4 to 64. Prints JSON: seconds from the first submission to the last end, GPU seconds from the
runs' status, and how many adapters have the same SHA-256 in both.

With `--switches` instead: runs of two bases in turn, with LONGSHORE_WARM_BYTES 0 and with its default. Prints the
median seconds from the request for a worker to the end of two steps, of runs whose base has had a run before.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.control_plane import stack
from benchmarks.machine import provenance
from benchmarks.rl_step import write_groups
from examples.tiny_model import make_tiny_model
from longshore import Client
from longshore.dataset_runs import DatasetSource, DPORun, SFTRun
from longshore.losses import PPO
from longshore.runs import RLRun
from longshore.training import Lora
from longshore.views import RunView

RANKS = (4, 8, 16, 32, 64, 4, 8, 16)
KINDS = ("sft", "dpo", "rl", "sft", "dpo", "sft", "rl", "sft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--switches", type=int, default=0, help="between two bases")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = ["how many crates are on the quay? seven crates."] * 8
        sizes = {"hidden_size": given.hidden, "num_layers": given.layers}
        model = make_tiny_model(Path(folder) / "model", texts, **sizes)
        if given.switches:
            models = [model, shutil.copytree(model, Path(folder) / "other")]
            cold, warm = (_switching(Path(folder), models, given.switches, budget) for budget in ("0", None))
            _print({"what": "a run whose base has just had another one's place", **sizes, "cold": cold, "warm": warm})
            return
        measured = {sharing: _measure(Path(folder), model, given.steps, sharing) for sharing in ("none", "all")}
    alone, shared = measured["none"], measured["all"]
    _print(
        {
            "what": "eight LoRA runs at once: each on the worker alone, and all on a shared one",
            "steps_of_each": given.steps,
            **sizes,
            "seconds_alone": round(alone.seconds, 2),
            "seconds_shared": round(shared.seconds, 2),
            "speedup": round(alone.seconds / shared.seconds, 2),
            "gpu_seconds_alone": round(alone.gpu_seconds, 2),
            "gpu_seconds_shared": round(shared.gpu_seconds, 2),
            "longest_wait_for_the_shared_worker_s": round(max(shared.waits_s), 3),
            "equal_adapters": sum(a == b for a, b in zip(alone.adapters, shared.adapters, strict=True)),
        }
    )


def _print(result: dict[str, Any]) -> None:
    print(json.dumps({**result, **provenance()}, indent=1))


class Measured:
    """Eight runs that have ended well."""

    def __init__(self, seconds: float, runs: Sequence[RunView]) -> None:
        assert all(run.state == "succeeded" for run in runs), [run.problem for run in runs]
        self.seconds = seconds
        self.gpu_seconds = sum(run.gpu_seconds for run in runs)
        spans = [next(span for span in run.timeline if span.phase == "waiting_for_worker") for run in runs]
        self.waits_s = [span.ended - span.began for span in spans if span.ended is not None]
        self.adapters = [run.adapter_sha256 for run in runs]


def _measure(folder: Path, model: Path, num_steps: int, sharing: str) -> Measured:
    with _started(folder / sharing, LONGSHORE_QUOTAS__WORKER_SHARING=sharing) as client:
        _sft(client, folder, model, 4, 2, 99)()
        begin = {"sft": _sft, "dpo": _dpo, "rl": _rl}
        works = [
            begin[kind](client, folder, model, rank, num_steps, seed)
            for seed, (kind, rank) in enumerate(zip(KINDS, RANKS, strict=True))
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(works)) as threads:
            runs = list(threads.map(lambda work: work(), works))
        return Measured(time.perf_counter() - began, runs)


def _switching(folder: Path, models: Sequence[Path], num: int, budget: str | None) -> float:
    """Return the median seconds of runs of two steps on the bases in turn; each base has had a run before."""
    settings = {"LONGSHORE_WARM_BYTES": budget} if budget else {}
    with _started(folder / f"switching-{budget}", **settings) as client:
        runs = [_sft(client, folder, models[n % 2], 4, 2, n)() for n in range(num + 2)][2:]
    return round(statistics.median(map(_until_trained, runs)), 3)


def _until_trained(run: RunView) -> float:
    """Return the seconds from asking for a worker to having trained."""
    began = {span.phase: span.began for span in reversed(run.timeline)}  # of each phase the first time
    return began["publishing"] - began["waiting_for_worker"]


@contextmanager
def _started(root: Path, **settings: str) -> Iterator[Client]:
    """Start a stack, and stop it when the block ends."""
    with stack(root, **settings) as connection, Client(connection.api_url, connection.api_key) as client:
        yield client


Work = Callable[[], RunView]


def _sft(client: Client, folder: Path, model: Path, rank: int, num_steps: int, seed: int) -> Work:
    rows = [
        {"messages": [_said("user", f"How many at {n}?"), _said("assistant", f"{n * 7} crates")]} for n in range(64)
    ]
    source = DatasetSource(uri=_jsonl(folder / f"sft-{seed}.jsonl", rows).as_uri())
    run = SFTRun(
        model=model.as_uri(), dataset=source, trainable=Lora(rank=rank), steps=num_steps, batch_size=4, seed=seed
    )
    return lambda: _ended(client, client.runs.submit(run, f"run-{seed}").run_id)


def _dpo(client: Client, folder: Path, model: Path, rank: int, num_steps: int, seed: int) -> Work:
    rows = [
        {
            "input": {"messages": [_said("user", f"How many at {n}?")]},
            "preferred_output": [_said("assistant", f"{n * 7} crates")],
            "non_preferred_output": [_said("assistant", f"{n % 9} sacks")],
        }
        for n in range(64)
    ]
    source = DatasetSource(uri=_jsonl(folder / f"dpo-{seed}.jsonl", rows).as_uri())
    run = DPORun(
        model=model.as_uri(), dataset=source, trainable=Lora(rank=rank), steps=num_steps, batch_size=4, seed=seed
    )
    return lambda: _ended(client, client.runs.submit(run, f"run-{seed}").run_id)


def _rl(client: Client, folder: Path, model: Path, rank: int, num_steps: int, seed: int) -> Work:
    """A tenth as many train steps, since each is a separate job."""
    run = RLRun(model=model.as_uri(), loss=PPO(), trainable=Lora(rank=rank), max_tokens=128, bin_tokens=2048)
    files = [write_groups(folder / f"rl-{seed}-{n}.jsonl", 100 * seed + n) for n in range(max(1, num_steps // 10))]

    def work() -> RunView:
        run_id = client.runs.submit(run, f"run-{seed}").run_id
        for number, file in enumerate(files):
            step = client.runs.train(run_id, client.files.upload(file).uri, f"key-{number}")
            while not step.is_final:
                step = client.runs.step(run_id, step.step, wait_s=30)
        client.runs.finish(run_id)
        return _ended(client, run_id)

    return work


def _ended(client: Client, run_id: str) -> RunView:
    for _ in client.runs.follow(run_id):
        pass
    while (run := client.runs.get(run_id)).ended_at is None:
        time.sleep(0.02)
    return run


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
