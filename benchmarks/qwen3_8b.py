"""LoRA training of a model of Qwen3-8B's shape, bfloat16 with random weights, on one CUDA device: speed and memory.

    python -m benchmarks.qwen3_8b [--bin-tokens 4096] [--bins 8] [--steps 5] [--peak-tflops 989] [--device cpu --tiny]

Nothing is downloaded: weights are drawn on the device. LoRA r=16 on all linears. A step is forward and backward of its
bins, as the runner makes them from packed data, and AdamW. The median of --steps counts, after two that compile.

- `sft`: rows of seeded lognormal(5.6, 0.7) lengths, packed into bins; every token but a row's first is a target.
- `rl`: PPO on groups of 16 completions of 256 tokens behind a prompt of 1,024, a group a bin, its prefix there once.
  `logical_tokens_per_s` counts the prefix once a completion, as an engine that shares nothing would have to.
- `offload`: seconds of the first offload, which page-locks the host's buffers, and of those and the reloads after it.

mfu = FLOPs / (seconds * peak), with the FLOPs of random_model.flops: two products for a frozen linear (forward, and
gradient of the input), nothing for recomputation. The peak is the vendor's figure for dense bfloat16; for a device that
is not in PEAK_TFLOPS pass it, or mfu is null. `--tiny` is the same code on a model for tests.

If a part fails, its result is the error, and the other parts still run; the exit status is then 1.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import accelerator, attempt, provenance
from benchmarks.prefix_sharing import as_batch
from benchmarks.random_model import QWEN3_8B, TINY, RandomMegatron, Sizes, described, flops, write_config
from longshore.losses import PPO, CrossEntropy
from longshore.training import Adam, Layout, Lora
from megatron_worker.engine import Batch, LossFunction, Where
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from shared.jobs.bins import best_fit_decreasing
from shared.jobs.prefix_tree import SequenceRow, TreeUnit, build_tree

RANK = 16
Figures = dict[str, object]
PEAK_TFLOPS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "GH200": 989.4, "A100": 312.0, "B200": 2250.0}


@dataclass(frozen=True)
class Work:
    """What is trained on: bins of tokens, and for RL the shape of a group."""

    bin_tokens: int = 4096
    bins: int = 8
    prompt: int = 1024
    group: int = 16
    completion: int = 256


TINY_WORK = Work(bin_tokens=512, bins=2, prompt=24, group=3, completion=8)


@dataclass(frozen=True)
class Step:
    """One step's batches, its loss, and its counts."""

    batches: list[Batch]
    loss: LossFunction
    num_tokens: int
    num_logical_tokens: int
    num_pairs: int

    @property
    def num_targets(self) -> int:
        return sum(len(batch.label_N) for batch in self.batches)


def sft_step(work: Work, vocab_size: int, device: torch.device) -> Step:
    generator = np.random.default_rng(0)
    longest = min(work.bin_tokens, 2048)
    lengths = np.clip(generator.lognormal(5.6, 0.7, work.bins * work.bin_tokens // 32), 8, longest).astype(np.int64)
    lengths = lengths[: np.searchsorted(lengths.cumsum(), work.bins * work.bin_tokens * 0.98)]
    rows = [make_row(generator.integers(3, vocab_size, length), 1, 0.0, 0.0) for length in lengths]
    units = [[build_tree([rows[i]]) for i in bin_] for bin_ in best_fit_decreasing(lengths.tolist(), work.bin_tokens)]
    num_tokens = int(lengths.sum())
    pairs = int((lengths * (lengths + 1) // 2).sum())
    return Step(on_device(units, device), loss_function(CrossEntropy()), num_tokens, num_tokens, pairs)


def rl_step(work: Work, vocab_size: int, device: torch.device) -> Step:
    generator = np.random.default_rng(0)
    units, old_logprob = [], -float(np.log(vocab_size))
    for _ in range(work.bins):
        prompt = generator.integers(3, vocab_size, work.prompt)
        rows = []
        for number in range(work.group):
            # Completions begin with different ids, so that nothing but the prompt is shared.
            own = np.concatenate([[3 + number], generator.integers(3, vocab_size, work.completion - 1)])
            rows.append(make_row(np.concatenate([prompt, own]), work.prompt, (-1.0) ** number, old_logprob))
        units.append([build_tree(rows)])
    p, g, c = work.prompt, work.group, work.completion
    pairs = p * (p + 1) // 2 + g * (p * c + c * (c + 1) // 2)
    num_tokens = sum(unit.num_tokens for bin_ in units for unit in bin_)
    assert num_tokens == work.bins * (p + g * c)
    logical = work.bins * g * (p + c)
    return Step(on_device(units, device), loss_function(PPO()), num_tokens, logical, work.bins * pairs)


def make_row(ids: np.ndarray, first_target: int, advantage: float, old_logprob: float) -> SequenceRow:
    ones = np.ones(len(ids))
    return SequenceRow(
        ids, np.arange(len(ids)) >= first_target, ones, ones * advantage, ones * old_logprob, ones * old_logprob
    )


def on_device(bins: Sequence[Sequence[TreeUnit]], device: torch.device) -> list[Batch]:
    return [as_batch(units, device) for units in bins]


def run(engine: MegatronEngine, step: Step) -> None:
    """As the runner does it. The last line waits for the device: the norm is a number of the host's."""
    weight = sum(float(sums["weight"]) for _, sums in engine.forward_backward_all(step.batches, step.loss))
    norms = engine.optim_step(Adam(), 1e-5, weight)
    assert 0 < norms.grad_norm < float("inf"), norms


def train(engine: MegatronEngine, sizes: Sizes, step: Step, repeats: int, peak_tflops: float | None) -> Figures:
    device = engine.facts.device
    engine.zero_grad()  # of a part before that failed
    for _ in range(2):
        run(engine, step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run(engine, step)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    parts = flops(sizes, RANK, step.num_tokens, step.num_pairs, step.num_targets)
    tflops = sum(parts.values()) / median / 1e12
    return {
        "bins": len(step.batches),
        "tokens": step.num_tokens,
        "targets": step.num_targets,
        "step_s": {"median": median, "all": seconds},
        "tokens_per_s": step.num_tokens / median,
        "logical_tokens_per_s": step.num_logical_tokens / median,
        "flop": parts,
        "tflop_per_s": tflops,
        "mfu": tflops / peak_tflops if peak_tflops else None,
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
    }


def offloading(engine: MegatronEngine, repeats: int) -> Figures:
    """Seconds of moving everything that the engine holds: the base, an adapter, its gradients and moments."""
    streams = torch.get_device_module(engine.facts.device)

    def timed(where: Where) -> float:
        streams.synchronize()
        began = time.perf_counter()
        engine.place(where)
        streams.synchronize()
        return time.perf_counter() - began

    before = engine.memory().device_bytes
    first_s = timed("host")
    left = engine.memory()
    timed("device")
    pairs = [(timed("host"), timed("device")) for _ in range(repeats)]
    offload_s, reload_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "device_gb_before": before / 1e9,
        "device_gb_after": left.device_bytes / 1e9,
        "host_gb": left.host_bytes / 1e9,
        "first_offload_s": first_s,
        "offload_s": offload_s,
        "reload_s": reload_s,
        "reload_gb_per_s": left.host_bytes / 1e9 / reload_s,
    }


def measure(sizes: Sizes, work: Work, repeats: int, device: torch.device, peak_tflops: float | None) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        engine = RandomMegatron(write_config(Path(folder), sizes), Layout(), "bfloat16", device)
    engine.add_adapter("run", Lora(rank=RANK, alpha=2 * RANK), seed=0)

    def trained(make: Callable[[Work, int, torch.device], Step]) -> Figures:
        return train(engine, sizes, make(work, sizes.vocab, device), repeats, peak_tflops)

    parts = {"sft": partial(trained, sft_step), "rl": partial(trained, rl_step)}
    return {name: attempt(part) for name, part in (parts | {"offload": partial(offloading, engine, repeats)}).items()}


def peak_of(device_name: str) -> float | None:
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin-tokens", type=int, default=Work.bin_tokens)
    parser.add_argument("--bins", type=int, default=Work.bins)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, help="of the device, for mfu; what its maker says if absent")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    found = accelerator()
    if options.device == "cuda" and found is None:
        sys.exit("not measured: there is no CUDA device here")
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    peak = options.peak_tflops or (peak_of(str(found["name"])) if found else None)
    work = TINY_WORK if options.tiny else Work(bin_tokens=options.bin_tokens, bins=options.bins)
    sizes = TINY if options.tiny else QWEN3_8B
    figures = measure(sizes, work, options.steps, device, peak)
    page = {"benchmark": "qwen3_8b", **provenance(), "accelerator": found, "torch": torch.__version__}
    page |= {"model": described(sizes), "work": vars(work), "peak_tflops": peak}
    print(json.dumps(page | figures, indent=1))
    if any(isinstance(part, dict) and "failed" in part for part in figures.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
