"""What ranks do with a quantized base, and with moments in 8 bits:

`python -m tests.megatron_worker.quantized.quantized_ranks OUT TRIALS`
"""

import json
from pathlib import Path

import torch
from pydantic import BaseModel

from longshore.layout import Layout
from longshore.training import Lora, Quantization
from megatron_worker.megatron.engine import MegatronEngine
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import LORA as ENGINES_LORA
from tests.megatron_worker.parallel_ranks import SFT_LOSS, scores, sft_bins, step
from tests.megatron_worker.quantized.whole_models import write_whole
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.trials import given_trials

LORA = Lora(rank=3, alpha=6, targets=("q_proj", "down_proj"))  # other linears have a backward of their own


class Trial(BaseModel):
    model: Path
    layout: Layout
    quantize: Quantization | None = None  # none: moments in 8 bits


def resumed(trial: Trial, out: Path) -> None:
    """Train six steps, and the last three of them again from a checkpoint."""
    steps = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s % 3) for s in range(6))]
    for name, before, own in (("end", None, steps), ("again", out / "middle", steps[3:])):
        engine = MegatronEngine(trial.model, trial.layout, "float32", optimizer_states="8bit")
        engine.add_adapter("run", ENGINES_LORA, seed=3)
        if before is not None:
            engine.load(before)
        train(engine, own[:-3])
        if before is None:
            engine.save(out / "middle")
        train(engine, own[-3:])
        engine.save(out / name)


def trained(engine: MegatronEngine) -> list[list[float]]:
    """Scores before a step with an adapter and after it."""
    bins = sft_bins(0)
    before = scores(engine, bins[0])
    engine.add_adapter("run", LORA, seed=5)
    for seed in range(2):
        step(engine, sft_bins(seed), SFT_LOSS, 1e-2)
    return [before[0], scores(engine, bins[0])[0]]


def main() -> None:
    for trial, results in given_trials(Trial):
        name = f"{trial.model.name}-{trial.layout.label}"
        if trial.quantize is None:
            resumed(trial, results / name)
            continue
        engine = MegatronEngine(trial.model, trial.layout, "float32", quantize=trial.quantize)
        named = {name: tensor.clone() for name, tensor in engine.named_weights()}
        whole = results / f"{name}-whole-{engine.facts.rank}"
        write_whole(named, trial.model, whole)
        found, expected = trained(engine), trained(MegatronEngine(whole, trial.layout, "float32"))
        furthest = max(
            float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in zip(found, expected, strict=True)
        )
        moved = float((torch.tensor(found[0]) - torch.tensor(found[1])).abs().max())
        (results / f"{name}-{engine.facts.rank}.json").write_text(json.dumps({"furthest": furthest, "moved": moved}))


if __name__ == "__main__":
    main()
