"""What sharing prefixes saves: a training step on trees against the same engine on the same sequences unshared.

    python -m benchmarks.prefix_sharing [--shapes 512+16x64 ...] [--vocab 512 32000] [--rounds 5] [--out FILE.json]

A shape P+GxC is one prompt of P tokens and G completions of C. Both sides train LoRA r=16 on all linears of a 4-layer
Qwen3 model of hidden size 256, from the two tables on disk; the completions are the targets. The tree is one bin;
without sharing, bins of one sequence are tried, and bins of as many as fit into 4,096 tokens, and the faster of both
counts. Timed is a whole step: forward, backward, optimizer. Rounds are interleaved, so that a busy machine hits
all alike; the best round counts, by CPU seconds, which other processes disturb less, and by the clock.

The bound is the ratio of the floating-point operations that both sides cannot avoid (a multiply-add is two):

    linears     T * (4 P + 6 R)     P weights of the frozen linears: forward and gradient of the input; R of LoRA: also
                                    their own gradient
    attention   A * 14 H D          A pairs of a token and one that it sees; H heads of size D: 2 products forward, 5
                                    backward (Dao 2023, arXiv:2307.08691, algorithm 2)
    head        N * 4 V h           N targets: their logits, and the rows that are their gradient; hidden size h

with T, A and N of all sequences on one side, and of the tree on the other (N is the same). `of_bound` is measured
speed-up / bound. `shares` says where a step's time went, by torch's profiler: matrix products (linears and head),
attention kernels, and the rest (norms, rotation, activation, residuals, copies, optimizer, Python).
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import provenance
from benchmarks.random_model import Sizes, flops
from examples.tiny_model import make_tiny_model
from longshore.layout import Layout
from longshore.losses import CrossEntropy
from longshore.training import Adam, Lora
from megatron_worker.engine import Batch
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.training.batches import to_batch
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsWriter
from shared.jobs.prefix_tree import SequenceRow, TreeUnit, build_tree

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, RANK = 256, 4, 4, 2, 64, 768, 16
CPU = torch.device("cpu")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Step = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """One prompt and its completions, in tokens."""

    prompt: int
    group: int
    completion: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        prompt, rest = text.split("+")
        group, completion = rest.split("x")
        return cls(int(prompt), int(group), int(completion))

    def __str__(self) -> str:
        return f"{self.prompt}+{self.group}x{self.completion}"


SHAPES = [Shape(512, 16, 64), Shape(1024, 16, 64), Shape(2048, 8, 128)]


def make_rows(shape: Shape, vocab_size: int) -> list[SequenceRow]:
    generator = np.random.default_rng(0)
    prompt = generator.integers(3, vocab_size, shape.prompt)
    # Completions begin with different ids, so that the tree is the one that the shape says.
    first = 3 + np.arange(shape.group)
    rows = []
    for number in range(shape.group):
        completion = generator.integers(3, vocab_size, shape.completion - 1)
        ids = np.concatenate([prompt, first[number : number + 1], completion])
        ones, zeros = np.ones(len(ids)), np.zeros(len(ids))
        rows.append(SequenceRow(ids, np.arange(len(ids)) >= shape.prompt, ones, ones, zeros, zeros))
    return rows


def as_batch(units: Sequence[TreeUnit], device: torch.device = CPU) -> Batch:
    with tempfile.TemporaryDirectory() as folder:
        writer = UnitsWriter(Path(folder), (*TOKEN_COLUMNS, *TARGET_COLUMNS))
        for unit in units:
            writer.append(**unit.columns())
        writer.close()
        with Units(Path(folder)) as stored:
            return to_batch(stored.read_bin(np.arange(len(units))), device)


def both_flops(shape: Shape, vocab_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Without sharing, and with: the docstring's formulas."""
    p, g, c = shape.prompt, shape.group, shape.completion
    sizes = Sizes(HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, vocab_size)
    whole, own = (p + c) * (p + c + 1) // 2, c * (c + 1) // 2
    return (
        flops(sizes, RANK, g * (p + c), g * whole, g * c, attention_products=7),
        flops(sizes, RANK, p + g * c, p * (p + 1) // 2 + g * (p * c + own), g * c, attention_products=7),
    )


def make_model(folder: Path, vocab_size: int) -> Path:
    return make_tiny_model(
        folder,
        ["a benchmark"],
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tied=False,
    )


def contestants(engine: MegatronEngine, shape: Shape, vocab_size: int) -> dict[str, Step]:
    """A training step on all sequences, shared, and unshared in bins of different sizes."""
    rows = make_rows(shape, vocab_size)
    tree, chains = build_tree(rows), [build_tree([row]) for row in rows]
    assert tree.num_tokens == shape.prompt + shape.group * shape.completion
    loss = loss_function(CrossEntropy())

    def step(batches: list[Batch]) -> None:
        weight = sum(float(engine.forward_backward(batch, loss)["weight"]) for batch in batches)
        engine.optim_step(Adam(), 1e-4, weight)

    sizes = sorted({max(1, bin_tokens // chains[0].num_tokens) for bin_tokens in (0, 4096)})
    batches = {"shared": [as_batch([tree])]}
    for size in sizes:
        bins = [chains[i : i + size] for i in range(0, len(chains), size)]
        batches[f"unshared, {size} a bin"] = [as_batch(b) for b in bins]
    return {name: partial(step, own) for name, own in batches.items()}


def best_times(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each contestant's best round, by each clock."""
    for step in steps.values():
        step()
    best = {clock: dict.fromkeys(steps, float("inf")) for clock in CLOCKS}
    for _ in range(rounds):
        for name, step in steps.items():
            began = {clock: read() for clock, read in CLOCKS.items()}
            step()
            for clock, read in CLOCKS.items():
                best[clock][name] = min(best[clock][name], read() - began[clock])
    return best


def shares(step: Step) -> dict[str, float]:
    """Parts of a step's time, which add up to 1."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        began = time.perf_counter()
        step()
        total_us = (time.perf_counter() - began) * 1e6
    parts = {"matrix_products": 0.0, "attention_kernels": 0.0}
    for event in profiled.key_averages():
        if "flash_attention" in event.key:
            parts["attention_kernels"] += event.self_cpu_time_total / total_us
        elif event.key in ("aten::mm", "aten::addmm", "aten::addmm_"):
            parts["matrix_products"] += event.self_cpu_time_total / total_us
    return {**parts, "rest": 1 - sum(parts.values())}


def measure(engine: MegatronEngine, shape: Shape, vocab_size: int, rounds: int) -> dict[str, object]:
    steps = contestants(engine, shape, vocab_size)
    seconds = best_times(steps, rounds)
    unshared, shared = both_flops(shape, vocab_size)
    bound = sum(unshared.values()) / sum(shared.values())
    fastest = {clock: min((n for n in own if n != "shared"), key=own.__getitem__) for clock, own in seconds.items()}
    speedup = {clock: own[fastest[clock]] / own["shared"] for clock, own in seconds.items()}
    return {
        "shape": str(shape),
        "vocab_size": vocab_size,
        "speedup": speedup,
        "flop_bound": bound,
        "of_bound": {clock: value / bound for clock, value in speedup.items()},
        "step_s": seconds,
        "flop": {"unshared": unshared, "shared": shared},
        "gflop_per_cpu_s": {
            "unshared": sum(unshared.values()) / seconds["cpu"][fastest["cpu"]] / 1e9,
            "shared": sum(shared.values()) / seconds["cpu"]["shared"] / 1e9,
        },
        "shares": {name: shares(steps[name]) for name in ("shared", fastest["cpu"])},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=SHAPES)
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 32_000])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = []
    for vocab_size in arguments.vocab:
        with tempfile.TemporaryDirectory() as folder:
            engine = MegatronEngine(make_model(Path(folder), vocab_size), Layout(), "float32")
            engine.add_adapter("run", Lora(rank=RANK, alpha=2 * RANK), seed=0)
            for shape in arguments.shapes:
                figures.append(measure(engine, shape, vocab_size, arguments.rounds))
                print(json.dumps(figures[-1]), flush=True)
    result = {"benchmark": "prefix_sharing", **provenance(), "torch": torch.__version__}
    result |= {"threads": arguments.threads, "rounds": arguments.rounds, "figures": figures}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
