"""Training throughput against transformers + PEFT, padded and packed, in one run.

    python -m benchmarks.throughput [--hidden 256 512] [--dtype float32 bfloat16] [--rounds 3] [--out FILE.json]

LoRA r=16 on all linears of a 4-layer Qwen3 model with a vocabulary of 32,000, on rows of seeded lognormal(5.6, 0.7)
lengths of at most 1,024 tokens; every token but a row's first is a target. Real tokens a second, of forward, backward
and AdamW. All use the same rows, the same threads and sdpa attention, and one step for each batch (padded: 8
rows, in their order; packed: a bin of up to 1,024 tokens with restarting positions). Rounds are interleaved, so that
a busy machine affects all equally; the best round counts. "cpu" counts the process's CPU seconds, which other processes
disturb less, instead of the clock's.
"""

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import provenance, tell
from examples.tiny_model import make_tiny_model
from longshore.losses import CrossEntropy
from longshore.training import LINEARS, Adam, Layout, Lora
from megatron_worker.engine import Batch
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine

VOCAB_SIZE = 32_000
BIN_TOKENS = 1024
NUM_ROWS = 64
Step = Callable[[], None]


def make_rows() -> list[list[int]]:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5.6, 0.7, NUM_ROWS), 32, BIN_TOKENS).astype(int)
    return [generator.integers(3, VOCAB_SIZE, n).tolist() for n in lengths]


def best_fit_decreasing(rows: list[list[int]]) -> list[list[list[int]]]:
    bins: list[list[list[int]]] = []
    for row in sorted(rows, key=len, reverse=True):
        fitting = [b for b in bins if sum(map(len, b)) + len(row) <= BIN_TOKENS]
        if fitting:
            max(fitting, key=lambda b: sum(map(len, b))).append(row)
        else:
            bins.append([row])
    return bins


def make_model(folder: Path, hidden: int) -> Path:
    """Heads of 64, half as many key/value heads, a feed-forward of 3 x hidden."""
    heads = hidden // 64
    return make_tiny_model(
        folder,
        ["a benchmark"],
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_layers=4,
        num_heads=heads,
        num_kv_heads=max(1, heads // 2),
        head_dim=64,
        tied=False,
    )


def reference(model: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
    config = LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEARS))
    # Adapters in the model's dtype, as ours: in float32, which is PEFT's default, bf16 would be slower still.
    peft_model = get_peft_model(base, config, autocast_adapter_dtype=False)
    return peft_model, torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-4)


def reference_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def padded_batch(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)], labels[i, : len(row)] = torch.tensor(row), 1, torch.tensor(row)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed_batch(rows: list[list[int]]) -> dict[str, Any]:
    """Restarting positions are transformers' own sign of packing, which it reads only if it keeps no cache; with one,
    rows attend to those before them. The first label of a row is no target.
    """
    ids = torch.tensor([[t for row in rows for t in row]])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}


def our_batch(rows: list[list[int]]) -> Batch:
    bin_ = Batch.of_sequences(rows, torch.device("cpu"))
    target_N = (bin_.position_T > 0).nonzero()[:, 0]
    zeros_N = torch.zeros(len(target_N))
    return dataclasses.replace(
        bin_,
        hidden_index_N=target_N - 1,
        label_N=bin_.token_id_T[target_N],
        weight_N=torch.ones(len(target_N)),
        advantage_N=zeros_N,
        old_logprob_N=zeros_N,
        ref_logprob_N=zeros_N,
        sampler_logprob_N=zeros_N,
        sequence_N=torch.zeros(len(target_N), dtype=torch.long),
    )


def contestants(model: Path, dtype: str, rows: list[list[int]]) -> dict[str, list[Step]]:
    """For each, the steps that train on all rows once."""
    peft_model, optimizer = reference(model, getattr(torch, dtype))
    bins = best_fit_decreasing(rows)
    padded = [padded_batch(rows[i : i + 8]) for i in range(0, len(rows), 8)]
    packed = [packed_batch(b) for b in bins]
    engine = MegatronEngine(model, Layout(), dtype)  # type: ignore[arg-type]
    engine.add_adapter("run", Lora(rank=16, alpha=32), seed=0)
    loss = loss_function(CrossEntropy())

    def ours(batch: Batch) -> None:
        sums = engine.forward_backward(batch, loss)
        engine.optim_step(Adam(), 1e-4, float(sums["weight"]))

    return {
        "transformers_padded": [partial(reference_step, peft_model, optimizer, batch) for batch in padded],
        "transformers_packed": [partial(reference_step, peft_model, optimizer, batch) for batch in packed],
        "longshore": [partial(ours, batch) for batch in map(our_batch, bins)],
    }


def measure(model: Path, dtype: str, rows: list[list[int]], rounds: int) -> dict[str, dict[str, float]]:
    """Real tokens a second of each contestant's best round, by the clock and by CPU time, after one step to warm up."""
    steps = contestants(model, dtype, rows)
    for own in steps.values():
        own[0]()
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    best = {clock: dict.fromkeys(steps, float("inf")) for clock in clocks}
    for _ in range(rounds):
        for name, own in steps.items():
            began = {clock: read() for clock, read in clocks.items()}
            for step in own:
                step()
            for clock, read in clocks.items():
                best[clock][name] = min(best[clock][name], read() - began[clock])
    num_tokens = sum(map(len, rows))
    return {clock: {name: num_tokens / seconds for name, seconds in own.items()} for clock, own in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = make_rows()
    figures = []
    for hidden in arguments.hidden:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), hidden)
            for dtype in arguments.dtype:
                speed = measure(model, dtype, rows, arguments.rounds)
                ratios = {
                    clock: {f"against_{n}": own["longshore"] / s for n, s in own.items() if n != "longshore"}
                    for clock, own in speed.items()
                }
                figures.append({"hidden": hidden, "dtype": dtype, "tokens_per_s": speed, "ratios": ratios})
    result = {"benchmark": "throughput", **provenance(), "torch": torch.__version__, "threads": arguments.threads}
    result |= {"num_rows": len(rows), "num_tokens": sum(map(len, rows)), "figures": figures}
    tell(result, arguments.out)


if __name__ == "__main__":
    main()
