"""What the ranks of the table of layouts do (`do_trials`, under launch.on_ranks).

One rank's results, made with the same functions, are what they are compared with (layout_table.py). Everybody begins at
the same checkpoint of one rank and has the same bins, from one file.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from activities.tokenizing.units import pair_unit
from longshore.losses import DPO, PPO, CrossEntropy, Kl, Loss, Reinforce
from longshore.training import Layout
from megatron_worker.engine import Batch, Outputs
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from shared.jobs.prefix_tree import TreeUnit
from tests.megatron_worker.parallel_ranks import (
    KINDS,
    LEARNING_RATES,
    Bins,
    Trial,
    note,
    note_step,
    rl_bins,
    round_adapter,
    sft_bins,
    start,
    start_rounded,
    step,
    with_routes,
)
from tests.megatron_worker.rows import VOCAB_SIZE
from tests.megatron_worker.trees import as_batch

OBJECTIVES: dict[str, Loss] = {"sft": CrossEntropy(), "rl": PPO(kl=Kl(coefficient=0.1)), "dpo": DPO(beta=0.1)}
# Rounding moves ratios across PPO's clip, where its gradient jumps: what rounding does is asked of a smooth loss.
SMOOTH: dict[str, Loss] = OBJECTIVES | {"rl": Reinforce(kl=Kl(coefficient=0.1))}
NUM_STEPS = 3
BEGIN, ROUNDED, DATA = "begin", "rounded", "data.pt"


def dpo_bins(seed: int) -> Bins:
    """Three bins of two pairs; what both answers begin with stands once."""
    generator = np.random.default_rng(seed)

    def pair() -> TreeUnit:
        prompt, *answers = (generator.integers(3, VOCAB_SIZE, generator.integers(4, 30)) for _ in range(3))
        rows = [np.concatenate([prompt, answer]) for answer in answers]
        masks = [np.arange(len(row)) >= len(prompt) for row in rows]
        return pair_unit(rows[0], masks[0], rows[1], masks[1])

    return [as_batch([pair(), pair()]) for _ in range(3)]


def make_data(model: Path) -> dict[str, list[Bins]]:
    """Steps of each objective. The reference is the model itself; the sampler was near it."""
    engine, generator = MegatronEngine(model, Layout(), "float32"), torch.Generator().manual_seed(0)

    def scored(batch: Batch) -> Batch:
        with torch.no_grad():
            logprob_N = engine.forward(batch, Outputs()).logprob_N
        assert logprob_N is not None
        old_N = logprob_N + 0.1 * torch.randn(logprob_N.shape, generator=generator)
        return dataclasses.replace(batch, ref_logprob_N=logprob_N, old_logprob_N=old_N, sampler_logprob_N=old_N)

    makers = {"sft": sft_bins, "rl": rl_bins, "dpo": dpo_bins}
    return {
        name: [[scored(batch) for batch in make(10 * number)] for number in range(NUM_STEPS)]
        for name, make in makers.items()
    }


def make_beginning(model: Path, single: Path) -> None:
    """Data; by kind a checkpoint after one step, in which no matrix of an adapter is zero; an adapter in bfloat16."""
    single.mkdir(parents=True)
    torch.save(make_data(model), single / DATA)
    for kind in KINDS:
        engine = start(model, Layout(), kind)
        step(engine, sft_bins(7), loss_function(CrossEntropy()), LEARNING_RATES[kind])
        engine.save(single / kind / BEGIN)
    round_adapter(single / "lora" / BEGIN / "weights", single / ROUNDED)


def measure(model: Path, layout: Layout, single: Path, out: Path) -> None:
    """By kind and objective: scores, gradients, three steps, and the last two of them again from their checkpoint."""
    data: dict[str, list[Bins]] = torch.load(single / DATA, weights_only=False)
    for kind in KINDS:
        for objective, loss in OBJECTIVES.items():
            own, function, steps = out / kind / objective, loss_function(loss), data[objective]
            engine = start(model, layout, kind)
            engine.load(single / kind / BEGIN)
            note_step(engine, steps[0], function, own)
            history = [step(engine, steps[0], function, LEARNING_RATES[kind])]
            engine.save(own / "middle")
            history += [step(engine, bins, function, LEARNING_RATES[kind]) for bins in steps[1:]]
            engine.save(own / "end")
            note(engine, own / "history.json", history)
            engine.load(own / "middle")
            for bins in steps[1:]:
                step(engine, bins, function, LEARNING_RATES[kind])
            engine.save(own / "again")


def measure_rounded(model: Path, layout: Layout, single: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Scores and gradients of weights that bfloat16 can say; in float32, what they are without rounding."""
    data: dict[str, list[Bins]] = torch.load(single / DATA, weights_only=False)
    for kind in KINDS:
        engine = start_rounded(model, layout, kind, single / ROUNDED, dtype)
        for objective, loss in SMOOTH.items():
            bins = with_routes(engine, data[objective][0])
            note_step(engine, bins, loss_function(loss), out / kind / objective)


def do_trials(trials: Sequence[Trial], results: Path) -> None:
    for trial in trials:
        single, out = results / trial.model.name / "single", results / trial.name
        measure(trial.model, trial.layout, single, out / "float32")
        measure_rounded(trial.model, trial.layout, single, out / "bfloat16")
