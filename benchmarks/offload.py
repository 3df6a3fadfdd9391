"""Offload and reload of an engine's state against two plain copies of as many bytes, in one process.

    python -m benchmarks.offload [--gb 1] [--engines megatron fsdp] [--repeats 9] [--out FILE.json]

States: `full`, that of full fine-tuning (weights, gradients, both moments: all may have changed, and are copied each
time); `base`, a worker's state between LoRA jobs (frozen weights: copied to the host once, later only dropped).
Both are float32. `plain` is the same number of bytes, in one piece, copied by `copy_` to an existing buffer (on CUDA:
pinned) and back; `fresh` the same into newly allocated memory, as in every reload, since nothing stays on the device.
They take turns with offload and reload; medians of all rounds count, by the clock and by the process's CPU seconds,
which other processes disturb less. `ratio` is offload + reload over plain: it should be at most 1.3. It depends on huge
pages: if `transparent_hugepage` is `never`, a reload faults at each page of 4 KB.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import provenance, tell
from benchmarks.random_model import RandomFsdp, RandomMegatron, Sizes, described, write_config
from longshore.training import Full, Layout

ENGINES: dict[str, type[RandomMegatron] | type[RandomFsdp]] = {"megatron": RandomMegatron, "fsdp": RandomFsdp}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BYTES_A_WEIGHT = {"full": 16, "base": 4}
WIDE = Sizes(hidden=1024, layers=0, heads=16, kv_heads=8, head_dim=64, ffn=3072, vocab=32_000, tied=True)
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def measure(
    engine_name: str, state: str, num_bytes: int, repeats: int, device: torch.device, wide: Sizes = WIDE
) -> dict[str, object]:
    """One engine with as much state as comes nearest to `num_bytes`: bytes, median seconds, ratios."""
    sizes = wide.with_weights(num_bytes // BYTES_A_WEIGHT[state])
    with tempfile.TemporaryDirectory() as folder:
        engine = ENGINES[engine_name](write_config(Path(folder), sizes), Layout(), "float32", device)
    if state == "full":
        engine.train_full(Full())
    held = engine.memory().device_bytes
    there, host = plain_buffers(held, device)
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: both_ways(there, host),
        "fresh": lambda: both_ways(torch.empty_like(there), fresh(host), there),
        "offload": partial(engine.place, "host"),
        "reload": partial(engine.place, "device"),
    }
    first = timed(partial(engine.place, "host"), device)
    left = engine.memory()
    engine.place("device")
    rounds = [{name: timed(way, device) for name, way in ways.items()} for _ in range(repeats)]
    seconds = {
        clock: medians([{name: times[clock] for name, times in each.items()} for each in rounds]) for clock in CLOCKS
    }
    return {
        "engine": engine_name,
        "state": state,
        "model": described(sizes),
        "state_gb": held / 1e9,
        "device_bytes_after_offload": left.device_bytes,
        "host_bytes": left.host_bytes,
        "first_offload_s": first["wall"],
        "median_s": seconds,
        "ratio": {clock: own["offload_and_reload"] / own["plain"] for clock, own in seconds.items()},
        "ratio_to_fresh": {clock: own["offload_and_reload"] / own["fresh"] for clock, own in seconds.items()},
        "rounds_s": [{name: times["wall"] for name, times in each.items()} for each in rounds],
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return found | {"offload_and_reload": statistics.median(each["offload"] + each["reload"] for each in rounds)}


def plain_buffers(num_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """On the device and on the host, both written to before."""
    there = torch.ones(num_bytes // 4, device=device)
    return there, fresh(there).copy_(there)


def fresh(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type != "cpu" or like.is_pinned())


def both_ways(there: Tensor, host: Tensor, source: Tensor | None = None) -> None:
    host.copy_(there if source is None else source, non_blocking=True)
    there.copy_(host, non_blocking=True)


def timed(do: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds by each clock, the device's work included."""
    streams = torch.get_device_module(device)
    streams.synchronize()
    began = {clock: read() for clock, read in CLOCKS.items()}
    do()
    streams.synchronize()
    return {clock: read() - began[clock] for clock, read in CLOCKS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--states", nargs="+", choices=BYTES_A_WEIGHT, default=list(BYTES_A_WEIGHT))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_bytes = int(arguments.gb * 1e9)
    figures = [
        measure(engine, state, num_bytes, arguments.repeats, arguments.device)
        for engine in arguments.engines
        for state in arguments.states
    ]
    result = {"benchmark": "offload", **provenance(), "torch": torch.__version__, "threads": arguments.threads}
    result |= {"device": str(arguments.device), "transparent_hugepage": huge_pages(), "wanted_ratio": 1.3}
    tell(result | {"figures": figures}, arguments.out)


def huge_pages() -> str:
    return HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "unknown"


if __name__ == "__main__":
    main()
