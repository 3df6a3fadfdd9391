"""Muon against AdamW, each with moments in float32 and in 8 bits: seconds of a step, and bytes of its state.

    python -m benchmarks.optimizers [--out benchmarks/results/optimizers.json]

One rank of the Megatron engine trains a model with random weights, fully and with an adapter, in float32 and bfloat16
(with float32 masters). Optimizers take turns, step by step. Seconds are the process's own CPU seconds on one thread,
which a busy machine hardly changes: of the update alone (`update_s`), and of forward, backward and update (`step_s`),
medians. `optimizer_bytes`: bytes of masters and moments on the device.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from longshore.losses import CrossEntropy
from longshore.training import Adam, Dtype, Full, Layout, Lora, Muon, Optimizer, OptimizerStates
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from tests.megatron_worker.rows import Row, bin_of

LOSS = loss_function(CrossEntropy())
HIDDEN, LAYERS, VOCAB, ROWS, ROW_TOKENS = 512, 6, 2048, 8, 128
OPTIMIZERS: dict[str, tuple[Optimizer, OptimizerStates]] = {
    "adamw": (Adam(), "float32"),
    "adamw 8bit": (Adam(), "8bit"),
    "muon": (Muon(), "float32"),
    "muon 8bit": (Muon(), "8bit"),
}
TRAINED: dict[str, Lora | Full] = {"full": Full(), "lora": Lora(rank=16, alpha=32)}


class Contestant:
    def __init__(self, model: Path, dtype: Dtype, trainable: Lora | Full, name: str) -> None:
        self._optimizer, states = OPTIMIZERS[name]
        self._engine = MegatronEngine(model, Layout(), dtype, optimizer_states=states)
        if isinstance(trainable, Lora):
            self._engine.add_adapter("run", trainable, seed=0)
        else:
            self._engine.train_full(trainable)
        self._updates, self._steps = list[float](), list[float]()

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, VOCAB, (ROWS, ROW_TOKENS), generator=generator).tolist()
        batch = bin_of([Row(ids, [0.0] + [1.0] * (ROW_TOKENS - 1)) for ids in rows])
        begun = time.process_time()
        sums = self._engine.forward_backward(batch, LOSS)
        between = time.process_time()
        self._engine.optim_step(self._optimizer, 1e-4, float(sums["weight"]))
        ended = time.process_time()
        self._updates.append(ended - between)
        self._steps.append(ended - begun)

    def figures(self) -> dict[str, float]:
        """Medians without the first step, which allocates state for the others."""
        return {
            "update_s": round(median(self._updates[1:]), 4),
            "step_s": round(median(self._steps[1:]), 4),
            "optimizer_bytes": self._engine.memory().parts["optimizer"].device,
        }


def compared(model: Path, dtype: Dtype, trainable: Lora | Full, num_steps: int) -> dict[str, Any]:
    contestants = {name: Contestant(model, dtype, trainable, name) for name in OPTIMIZERS}
    for seed in range(num_steps + 1):
        for contestant in contestants.values():
            contestant.step(seed)
    found: dict[str, Any] = {name: contestant.figures() for name, contestant in contestants.items()}
    usual = found["adamw"]
    for row in found.values():
        row |= {
            f"{name}_of_adamw": round(row[name] / usual[name], 3) for name in ("update_s", "step_s", "optimizer_bytes")
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = {"hidden": HIDDEN, "layers": LAYERS, "vocab": VOCAB, "tokens_a_step": ROWS * ROW_TOKENS}
    found: dict[str, Any] = {**provenance(), **shape, "steps": arguments.steps}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(
            Path(folder),
            ["a benchmark"],
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_layers=LAYERS,
            num_heads=HIDDEN // 64,
            num_kv_heads=HIDDEN // 128,
            head_dim=64,
            tied=False,
        )
        dtypes: list[Dtype] = ["float32", "bfloat16"]
        for dtype in dtypes:
            for trained, trainable in TRAINED.items():
                found[f"{trained}, {dtype}"] = rows = compared(model, dtype, trainable, arguments.steps)
                for name, row in rows.items():
                    print(f"{trained}, {dtype}, {name}: {row}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
