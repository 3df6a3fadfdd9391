"""Weight sync from a trainer to a sampler on the same CUDA device, by each transport, and how they share the device.

    python -m benchmarks.gpu_weight_sync [--rounds 3] [--out FILE.json]

A model of Qwen3-8B's shape with random weights, in bfloat16: 16 GB. The trainer, this process, draws them on the
device, and writes them once for the sampler, another process, to start from. No optimizer.

`cuda_ipc`, `shared_memory`: medians over the rounds; the weights differ in each. `blocked_s`: until the trainer can
continue with passes; `update_s`: until its next update; `serving_s`: until the sampler uses the new weights.
`gb_per_s`: weights over `serving_s`. `nccl`: the same by `collective`, or the reason why not: NCCL needs a device for
each rank.

`sleep`: device memory that the sampler took and released, by the driver's count, and the seconds; after it wakes up, it
must give the same log-probabilities. `colocated`: the driver's count while one of the two has its weights on the device
and the other has left, against that of the larger one alone. It includes both CUDA contexts.

With `--device cpu --tiny` everything runs without a device, and the figures mean nothing.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.machine import accelerator, attempt, provenance, tell
from benchmarks.random_model import QWEN3_8B, TINY, RandomMegatron, Sizes, described, write_config
from benchmarks.timed_sync import TEXT, Receiver, sampler, target_of, timed_sync, write_weights
from examples.tiny_model import make_tiny_model
from longshore.training import Layout, Transport
from megatron_worker.weight_sync.transports.table import why_not

Figures = dict[str, object]
BUCKET_BYTES = 512 << 20


def write_folder(engine: RandomMegatron, sizes: Sizes, folder: Path) -> Path:
    """Write the engine's weights, and a tokenizer of next to nothing, as a Hugging Face folder."""
    model = write_config(folder / "model", sizes)
    shutil.copyfile(make_tiny_model(folder / "tiny", ["hello there"]) / "tokenizer.json", model / "tokenizer.json")
    write_weights(engine, model)
    return model


class Changing(RandomMegatron):
    @torch.no_grad()
    def change(self) -> None:
        """Turn every weight's sign, which takes no memory."""
        self._model.flat.buffer.neg_()


class Device:
    """A device, and the bytes that all processes use of it, as its driver counts them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def used(self) -> int:
        if self.device.type == "cpu":
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


def measure(sizes: Sizes, folder: Path, device: Device, rounds: int) -> Figures:
    empty = device.used
    engine = Changing(write_config(folder / "config", sizes), Layout(), "bfloat16", device.device)
    trainer = device.used - empty
    model = write_folder(engine, sizes, folder)
    engine.place("host")
    left = device.used
    with sampler(model, folder / "sampler", device.device.type, threads=4) as receiver:
        alone = device.used
        figures: Figures = {
            "colocated": attempt(partial(colocated, engine, receiver, device, trainer + empty, alone - left + empty)),
            "sleep": attempt(partial(sleep, receiver, device, alone - left)),
        }
        engine.place("device")
        ways: tuple[Transport, ...] = ("cuda_ipc", "shared_memory", "tcp", "collective")
        for number, way in enumerate(ways):
            name = "nccl" if way == "collective" and device.device.type == "cuda" else way
            if (reason := why_not(way, device.device)) is not None:
                figures[name] = {"not_possible": reason}
            else:
                figures[name] = attempt(partial(synced, engine, receiver, way, rounds, 1 + number * rounds))
    return figures


def colocated(engine: RandomMegatron, receiver: Receiver, device: Device, trainer: int, alone: int) -> Figures:
    """Let the two use the device in turn. `trainer`, `alone`: bytes of trainer and sampler without the other."""
    most = device.used
    receiver.client.sleep(1)
    engine.place("device")
    most = max(most, device.used)
    engine.place("host")
    receiver.client.wake()
    most = max(most, device.used)
    larger = max(trainer, alone)
    return {"peak_gb": most / 1e9, "larger_gb": larger / 1e9, "peak_over_larger": most / larger if larger else None}


def sleep(receiver: Receiver, device: Device, taken: int) -> Figures:
    """Make the sampler sleep and wake. `taken`: bytes that it uses on the device."""
    [name] = receiver.client.models()
    told, awake, by_part = receiver.client.score(name, TEXT), device.used, receiver.client.wake()
    began = time.perf_counter()
    asleep = receiver.client.sleep(1)
    slept = time.perf_counter()
    freed = awake - device.used
    began_again = time.perf_counter()
    receiver.client.wake()
    woken = time.perf_counter()
    assert receiver.client.score(name, TEXT) == told, "it is another model when it is woken"
    return {
        "freed_share": freed / taken if taken else None,
        "freed_share_of_parts": 1 - asleep.device_bytes / by_part.device_bytes,
        "freed_gb": freed / 1e9,
        "sleep_s": slept - began,
        "wake_s": woken - began_again,
    }


def synced(engine: Changing, receiver: Receiver, way: Transport, rounds: int, first: int) -> Figures:
    measured = [sync(engine, receiver, way, version) for version in range(first, first + rounds)]
    return {name: statistics.median(one[name] for one in measured) for name in measured[0]}


def sync(engine: Changing, receiver: Receiver, way: Transport, version: int) -> dict[str, float]:
    engine.change()
    seconds, done = timed_sync(engine, [receiver], target_of([receiver], way, version, BUCKET_BYTES))
    receiver.client.score(f"v{version}", TEXT)
    gigabytes = done.weight_bytes / 1e9
    return {"gb": gigabytes, **asdict(seconds), "gb_per_s": gigabytes / seconds.serving_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of next to nothing, to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = accelerator()
    if options.device == "cuda" and found is None:
        sys.exit("not measured: there is no CUDA device here")
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    sizes = TINY if options.tiny else QWEN3_8B
    with tempfile.TemporaryDirectory() as name:
        figures = measure(sizes, Path(name), Device(device), options.rounds)
    page = {"benchmark": "gpu_weight_sync", **provenance(), "accelerator": found, "torch": torch.__version__}
    page |= {"model": described(sizes), "rounds": options.rounds, "bucket_bytes": BUCKET_BYTES}
    tell(page | figures, options.out)
    # NCCL is expected to refuse.
    if any(isinstance(part, dict) and "failed" in part for name, part in figures.items() if name != "nccl"):
        sys.exit(1)


if __name__ == "__main__":
    main()
