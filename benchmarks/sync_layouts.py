"""Syncs from a trainer of two ranks, for `python -m benchmarks.weight_sync --layout`: rank 0 has the samplers.

python -m megatron_worker.process.launcher 2 benchmarks.sync_layouts LAYOUT MODEL FOLDER ROUNDS
"""

import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.timed_sync import Receiver, follow_sync, sampler, target_of, timed_sync
from benchmarks.weight_sync import BUCKET_BYTES, LAYOUTS, NUM_SAMPLERS, check, step
from longshore.training import Full
from megatron_worker.fsdp.engine import FsdpEngine
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.process.ranks import start_group
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.weight_sync.sender import DeltaBase

WAYS = ("shared_memory", "delta by shared_memory")


def measure(engine: Engine, samplers: list[Receiver], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of all rounds but the first, by way."""
    figures, version = {}, 0
    for way in WAYS:
        sent, measured = DeltaBase(), list[dict[str, float]]()
        for _ in range(rounds + 1):  # the first fills the copies that changes are found against
            step(engine)
            version += 1
            measured.append(one_sync(engine, samplers, way, version, sent))
            print(f"{way}: {measured[-1]}", file=sys.stderr, flush=True)
        figures[way] = {name: statistics.median(one[name] for one in measured[1:]) for name in measured[0]}
        figures[way]["sync_by_blocked"] = figures[way]["update_s"] / figures[way]["blocked_s"]
    return figures


def one_sync(engine: Engine, samplers: list[Receiver], way: str, version: int, sent: DeltaBase) -> dict[str, float]:
    """Return rank 0's figures; `blocked_s` is of the rank that was blocked longest."""
    dist.barrier()
    if not samplers:
        blocked, figures = follow_sync(engine, way, version, BUCKET_BYTES, sent), dict[str, float]()
    else:
        seconds, done = timed_sync(engine, samplers, target_of(samplers, way, version, BUCKET_BYTES), sent)
        check(samplers, f"v{version}")
        blocked = seconds.blocked_s
        figures = asdict(seconds) | {"bytes": done.num_bytes, "weight_bytes": done.weight_bytes}
    longest = torch.tensor(blocked, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return figures | {"blocked_s": float(longest), "update_s": figures.get("update_s", 0.0)}


def main() -> None:
    name, model, folder, rounds = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    start_group("gloo")
    torch.set_num_threads(1)
    kind, layout = LAYOUTS[name]
    engine = (FsdpEngine if kind == "fsdp" else MegatronEngine)(model, layout, "bfloat16")
    engine.train_full(Full())
    with ExitStack() as stack:
        samplers: list[Receiver] = []
        if dist.get_rank() == 0:
            samplers = [stack.enter_context(sampler(model, folder / f"sampler-{n}")) for n in range(NUM_SAMPLERS)]
        figures = measure(engine, samplers, rounds)
        if samplers:
            (folder / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
