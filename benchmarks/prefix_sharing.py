"""Savings of prefix sharing: a training step on trees against the same engine on the same sequences unshared.

    python -m benchmarks.prefix_sharing [--shapes 512+16x64 ...] [--vocab 512 32000] [--family qwen3_5_moe] [--rounds 5]
        [--out FILE.json]
    python -m benchmarks.prefix_sharing --short [--rounds 12]  # the shortest prefix worth sharing

A shape P+GxC is one prompt of P tokens and G completions of C. Both sides train LoRA r=16 on all linears of a 4-layer
model of hidden size 256, from the two tables on disk; the completions are the targets. The tree is one bin;
without sharing, the faster of two ways counts: bins of one sequence, and bins of as many as fit into 4,096 tokens.
A whole step is timed: forward, backward, optimizer. Rounds are interleaved, so that a busy machine affects both sides;
the best round counts, by CPU seconds, which other processes disturb less, and by the clock.

The bound is the ratio of the floating-point operations that both sides cannot avoid (a multiply-add is two):

    linears     T * (4 P + 6 R)     P weights of the frozen linears: forward and gradient of the input; R of LoRA: also
                                    their own gradient
    attention   A * 14 H D          A pairs of a token and one that it sees; H heads of size D: 2 products forward, 5
                                    backward (Dao 2023, arXiv:2307.08691, algorithm 2)
    states      T * 18 G K V        of gated delta nets: G value heads with states of K * V: read, written and read
                                    again for each token, and twice as much backward
    head        N * 4 V h           N targets: their logits, and the rows that are their gradient; hidden size h

Only the experts that a token is routed to count. The sums are over the layers. T, A and N are those of all sequences on
one side, and of the tree on the other (N is the same). `of_bound` is measured speed-up / bound. `shares` are the shares
of a step's time, by torch's profiler: matrix products (linears and head), attention kernels, and the rest (norms,
rotation, activation, recurrences, residuals, copies, optimizer, Python).

`--short` compares forward and backward of prefixes of 1 to 32 tokens with 2 to 16 branches of 16 and of 64, in one bin
with sharing and without: CPU seconds without / with. TrainerRank shares a prefix if that saves
LEAST_SAVED tokens (`megatron_worker/forwards.py`), which is about where this ratio passes 1, for any number of
branches.
"""

import argparse
import itertools
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
from examples.tiny_model import make_tiny_model
from longshore.losses import CrossEntropy
from longshore.training import Adam, Layout, Lora
from megatron_worker.engine import Batch
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.training.batches import to_batch
from shared.families import FAMILIES, read_architecture
from shared.families.architecture import Architecture, Attention, DeltaNet, Mixture
from shared.families.tensor_slices import linears_of
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsWriter
from shared.jobs.prefix_tree import SequenceRow, TreeUnit, build_tree

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, RANK = 256, 4, 4, 2, 64, 16
CPU = torch.device("cpu")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Step = Callable[[], object]


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
    # Completions begin with different ids, so that the tree has exactly this shape.
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


def both_flops(shape: Shape, architecture: Architecture) -> tuple[dict[str, float], dict[str, float]]:
    """Without sharing, and with: the docstring's formulas."""
    p, g, c = shape.prompt, shape.group, shape.completion
    whole, own = (p + c) * (p + c + 1) // 2, c * (c + 1) // 2
    return (
        step_flops(architecture, g * (p + c), g * whole, g * c),
        step_flops(architecture, p + g * c, p * (p + 1) // 2 + g * (p * c + own), g * c),
    )


def step_flops(a: Architecture, num_tokens: int, num_pairs: int, num_targets: int) -> dict[str, float]:
    linears = attention = states = 0.0
    mixture = next((mlp for mlp in a.mlps if isinstance(mlp, Mixture)), None)
    for part in (part for linear in linears_of(a.slices(1)) for part in linear.slices):
        (num_outputs, num_inputs), used = part.shape, 1.0
        if mixture is not None and part.expert is not None:
            used = mixture.experts_per_token / mixture.num_experts
        linears += used * (4.0 * num_outputs * num_inputs + 6 * RANK * (num_outputs + num_inputs))
    for mixer in a.mixers:
        match mixer:
            case Attention():
                attention += num_pairs * 14.0 * mixer.num_heads * mixer.head_dim
            case DeltaNet():
                states += num_tokens * 18.0 * mixer.num_value_heads * mixer.key_size * mixer.value_size
    head = num_targets * 4.0 * a.vocab_size * a.hidden_size
    return {"linears": num_tokens * linears, "attention": attention, "states": states, "head": head}


def make_model(folder: Path, vocab_size: int, family: str) -> Path:
    return make_tiny_model(
        folder,
        ["a benchmark"],
        family=family,
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


def measure(engine: MegatronEngine, model: Path, shape: Shape, vocab_size: int, rounds: int) -> dict[str, object]:
    steps = contestants(engine, shape, vocab_size)
    seconds = best_times(steps, rounds)
    unshared, shared = both_flops(shape, read_architecture(model))
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


def short_prefixes(engine: MegatronEngine, vocab_size: int, rounds: int) -> list[dict[str, object]]:
    figures: list[dict[str, object]] = []
    for completion, group in itertools.product((16, 64), (2, 4, 8, 16)):
        ratios = {}
        for prompt in (1, 2, 4, 8, 16, 32):
            rows = make_rows(Shape(prompt, group, completion), vocab_size)
            batches = {"shared": as_batch([build_tree(rows)]), "unshared": as_batch([build_tree([r]) for r in rows])}
            passes: dict[str, Step] = {
                name: partial(engine.forward_backward, batch, loss_function(CrossEntropy()))
                for name, batch in batches.items()
            }
            best = best_times(passes, rounds)["cpu"]
            ratios[prompt] = round(best["unshared"] / best["shared"], 3)
        engine.zero_grad()
        first = next((prompt for prompt, ratio in ratios.items() if ratio >= 1), None)
        saved = None if first is None else first * (group - 1)
        figures.append({"completion": completion, "group": group, "unshared/shared": ratios, "saved_tokens": saved})
        print(json.dumps(figures[-1]), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=SHAPES)
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 32_000])
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--short", action="store_true", help="the shortest prefixes that pay, in place of the shapes")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = []
    for vocab_size in arguments.vocab:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), vocab_size, arguments.family)
            engine = MegatronEngine(model, Layout(), "float32")
            engine.add_adapter("run", Lora(rank=RANK, alpha=2 * RANK), seed=0)
            if arguments.short:
                figures += short_prefixes(engine, vocab_size, arguments.rounds)
                continue
            for shape in arguments.shapes:
                figures.append(measure(engine, model, shape, vocab_size, arguments.rounds))
                print(json.dumps(figures[-1]), flush=True)
    result = {"benchmark": "prefix_sharing", **provenance(), "torch": torch.__version__}
    result |= {"family": arguments.family, "threads": arguments.threads, "rounds": arguments.rounds, "figures": figures}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
