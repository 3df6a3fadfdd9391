"""What ranks do with optimizers: train, and from a checkpoint in the middle once more; measure the gradient's noise.

`python -m tests.megatron_worker.optimizers.optimizer_ranks OUT TRIALS`
"""

import json
from pathlib import Path

from pydantic import BaseModel

from longshore.layout import EngineName, Layout
from longshore.training import Adam, Optimizer
from megatron_worker.tensors.slot_engine import Engine
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import ENGINES, LORA, start
from tests.megatron_worker.parallel_ranks import SFT_LOSS, accumulate
from tests.megatron_worker.rows import bin_of, random_rows

STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25], seed=s) for s in range(4))]
RATES = {"lora": 3e-3, "full": 3e-4}
NOISY = Adam(noise_scale=True, clip_norm=0)


class Trial(BaseModel):
    model: Path
    kind: str
    optimizer: Optimizer
    engine: EngineName = "megatron"
    layout: Layout = Layout()
    states: str = "float32"
    measures: bool = False  # the gradient's noise, and nothing else

    @property
    def name(self) -> str:
        options = self.optimizer.model_dump_json(exclude_defaults=True)
        parts = self.model.name, self.engine, self.kind, self.layout.label, self.optimizer.kind, self.states
        return "-".join([*parts, str(sum(options.encode())), str(self.measures)])


def begin(trial: Trial) -> Engine:
    if trial.states == "float32":
        return start(trial.engine, trial.model, trial.kind, layout=trial.layout)
    engine = ENGINES["megatron"](trial.model, trial.layout, "float32", optimizer_states="8bit")
    engine.add_adapter("run", LORA, seed=3)
    return engine


def resumed(trial: Trial, out: Path) -> None:
    """Train, and go on from the middle once more."""
    for name in ("end", "again"):
        engine = begin(trial)
        if name == "end":
            train(engine, STEPS[:2], trial.optimizer, RATES[trial.kind])
            engine.save(out / "middle")
        else:
            engine.load(out / "middle")
        train(engine, STEPS[2:], trial.optimizer, RATES[trial.kind])
        engine.save(out / name)


def noise(trial: Trial, out: Path) -> None:
    engine = begin(trial)
    train(engine, STEPS[:1], Adam(), RATES[trial.kind])  # LoRA's A has a gradient from then on
    sums = accumulate(engine, [bin_of(rows) for rows in STEPS[1]], SFT_LOSS)
    found = engine.optim_step(NOISY, 1e-4, sums["weight"]).noise
    out.mkdir(parents=True, exist_ok=True)
    (out / f"noise-{engine.facts.rank}.json").write_text(json.dumps(dict(found)))


def do(trial: Trial, out: Path) -> None:
    (noise if trial.measures else resumed)(trial, out / trial.name)


def main() -> None:
    from tests.megatron_worker.trials import given_trials

    for trial, results in given_trials(Trial):
        do(trial, results)


if __name__ == "__main__":
    main()
