"""Memory and time of a forward and backward pass with recomputed layers, against one without.

    python -m benchmarks.recompute [--tokens 1024] [--layers 8] [--out benchmarks/results/recompute.json]

A LoRA of rank 16 on tiny models of random weights in float32, a bin of four rows, on one thread. Bytes are those of
tensors that the pass makes, by the planner's meter. Seconds are the least of five passes of each way in turn.
`tokens_in_same_bytes`: of the largest pass with recomputation that needs no more memory, by the planner.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from longshore.training import Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.memory import measure_step, new_meter
from shared.families import FAMILIES
from tests.megatron_worker.driving import LOSS
from tests.megatron_worker.rows import bin_of, random_rows

REPEATS = 5


def measure(family: str, tokens: int, layers: int, folder: Path) -> dict[str, object]:
    model = make_tiny_model(
        folder,
        ["hello"],
        family=family,
        vocab_size=1024,
        hidden_size=256,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        tied=False,
    )
    engine = MegatronEngine(model, Layout(), "float32")
    engine.add_adapter("run", Lora(rank=16, alpha=32), seed=0)
    batch = bin_of(random_rows([tokens // 4] * 4, vocab_size=1024))
    peak, seconds = {}, {False: float("inf"), True: float("inf")}
    for engine.recompute in (False, True) * REPEATS:
        began = time.perf_counter()
        engine.forward_backward(batch, LOSS)
        seconds[engine.recompute] = min(seconds[engine.recompute], time.perf_counter() - began)
    for engine.recompute in (False, True):
        meter = new_meter(engine.facts.device)
        meter.start()
        engine.forward_backward(batch, LOSS)
        peak[engine.recompute] = meter.peak()
        meter.stop()
    engine.zero_grad()
    cost = measure_step(engine, LOSS, False, peak[False], 8 * tokens)
    return {
        "family": family,
        "tokens": tokens,
        "layers": layers,
        "mb": round(peak[False] / 1e6, 1),
        "mb_recomputed": round(peak[True] / 1e6, 1),
        "bytes_ratio": round(peak[True] / peak[False], 3),
        "s": round(seconds[False], 3),
        "s_recomputed": round(seconds[True], 3),
        "time_ratio": round(seconds[True] / seconds[False], 3),
        "tokens_in_same_bytes": cost.size_within(peak[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["qwen3", "qwen3_moe", "qwen3_5"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(family, arguments.tokens, arguments.layers, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    result = {"benchmark": "recompute", **provenance(), "torch": torch.__version__, "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
