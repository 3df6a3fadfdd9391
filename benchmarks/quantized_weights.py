"""A LoRA's base in 4 and 8 bits against one in bfloat16: bytes of the weights, and loss after 50 steps.

    python -m benchmarks.quantized_weights [--models dense ...] [--out benchmarks/results/quantized_weights.json]

Models with random weights are first fully trained on text where each token has four possible successors. Then an
adapter learns text where every other token has different successors. The result is the loss on held-out rows of that
text, with the base that the adapter was trained on; seeds and rows are the same for all. It should be within 1 % of
bfloat16's. On a CPU the seconds say little: plain torch dequantizes the weights there.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch

from benchmarks.machine import provenance
from examples.tiny_model import make_tiny_model
from longshore.losses import CrossEntropy
from longshore.training import Adam, Full, Layout, Lora, Quantization
from megatron_worker.engine import Batch
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from tests.megatron_worker.rows import Row, bin_of

LOSS, LORA, ADAM = loss_function(CrossEntropy()), Lora(rank=16, alpha=32), Adam()
NUM_STEPS, ROWS_A_STEP, ROW_TOKENS = 50, 8, 64
WANTED = 0.01


@dataclass(frozen=True)
class Model:
    family: str
    hidden: int
    layers: int
    vocab: int
    whole_steps: int
    whole_rate: float
    rate: float


MODELS = {
    "dense": Model("qwen3", 128, 2, 320, 200, 3e-3, 3e-3),
    "mixture": Model("qwen3_moe", 128, 2, 320, 200, 3e-3, 3e-3),
    "delta nets": Model("qwen3_5", 128, 2, 320, 200, 3e-3, 3e-3),
    "larger": Model("qwen3", 512, 6, 1024, 200, 1e-3, 1e-3),
}


def followers(vocab: int, is_new: bool) -> torch.Tensor:
    """Which tokens may follow each: [V, 4]."""
    old, new = (torch.randint(3, vocab, (vocab, 4), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    if is_new:
        old[::2] = new[::2]
    return old


def rows_of(follower: torch.Tensor, num_rows: int, seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    choice = torch.multinomial(torch.tensor([0.7, 0.1, 0.1, 0.1]), num_rows * ROW_TOKENS, True, generator=generator)
    token = torch.randint(3, len(follower), (num_rows,), generator=generator)
    tokens = [token]
    for chosen in choice.view(ROW_TOKENS, num_rows)[1:]:
        tokens.append(token := follower[token, chosen])
    return [Row(ids, [0.0] + [1.0] * (len(ids) - 1)) for ids in torch.stack(tokens, dim=1).tolist()]


def train(engine: MegatronEngine, follower: torch.Tensor, num_steps: int, rate: float) -> None:
    for step in range(num_steps):
        batch = bin_of(rows_of(follower, ROWS_A_STEP, seed=100 + step))
        sums = engine.forward_backward(batch, LOSS)
        engine.optim_step(ADAM, rate * min(1.0, (step + 1) / 10), float(sums["weight"]))


def loss_of(engine: MegatronEngine, batch: Batch) -> float:
    with torch.no_grad():
        sums = LOSS.sums(engine.forward(batch, LOSS.outputs), batch).detached()
    return float(sums["loss"] / sums["weight"])


def trained_whole(model: Model, folder: Path) -> Path:
    made = make_tiny_model(
        folder / "random",
        ["hello"],
        family=model.family,
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        num_layers=model.layers,
        num_heads=model.hidden // 32,
        num_kv_heads=model.hidden // 64,
        head_dim=32,
        tied=False,
    )
    engine = MegatronEngine(made, Layout(), "float32")
    engine.train_full(Full())
    train(engine, followers(model.vocab, is_new=False), model.whole_steps, model.whole_rate)
    engine.save(folder / "trained")
    return folder / "trained" / "weights"


def measure(model: Model, folder: Path, quantize: Quantization | None) -> dict[str, float]:
    engine = MegatronEngine(folder, Layout(), "bfloat16", quantize=quantize)
    new = followers(model.vocab, is_new=True)
    held_out = bin_of(rows_of(new, 32, seed=1))
    held, before = engine.memory().parts["weights"].device, loss_of(engine, held_out)
    engine.add_adapter("run", LORA, seed=0)
    began = time.perf_counter()
    train(engine, new, NUM_STEPS, model.rate)
    seconds = time.perf_counter() - began
    return {
        "weights_mb": held / 1e6,
        "loss_before": before,
        "loss_after": loss_of(engine, held_out),
        "seconds_a_step": seconds / NUM_STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            whole = trained_whole(MODELS[name], Path(folder))
            found = {kind: measure(MODELS[name], whole, kind) for kind in (None, *get_args(Quantization))}
        for kind, figures in found.items():
            of_plain = {
                "loss_ratio": figures["loss_after"] / found[None]["loss_after"],
                "bytes_ratio": figures["weights_mb"] / found[None]["weights_mb"],
            }
            rows.append({"model": name, "base": kind or "bfloat16", **figures, **of_plain})
            print(json.dumps(rows[-1]), flush=True)
    result = {"benchmark": "quantized_weights", **provenance(), "torch": torch.__version__, "wanted": WANTED}
    result |= {"models": {name: asdict(MODELS[name]) for name in arguments.models}, "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("| model | base | weights MB | of bfloat16's | loss before | after 50 steps | of bfloat16's |")
    print("|---" * 7 + "|")
    for row in rows:
        print(
            f"| {row['model']} | {row['base']} | {row['weights_mb']:.2f} | {row['bytes_ratio']:.2f} "
            f"| {row['loss_before']:.4f} | {row['loss_after']:.4f} | {row['loss_ratio']:.4f} |"
        )


if __name__ == "__main__":
    main()
