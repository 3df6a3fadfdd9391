"""What each rank does in test_forms_over_ranks.py: ten steps, and the last six once more from a checkpoint.

python -m megatron_worker.process.launcher N tests.megatron_worker.form_ranks OUT TRIALS
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from longshore.layout import EngineName, Layout
from longshore.training import Lora
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.trials import given_trials

STEPS = [random_rows([20, 31, 12], seed=seed) for seed in range(10)]
BINS = [[rows[:2], rows[2:]] for rows in STEPS]


class Trial(BaseModel):
    model: Path
    lora: Lora
    engine: EngineName = "megatron"
    layout: Layout = Layout()
    settings: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return f"{self.model.name}-{self.engine}-{self.layout.label}"


def run(trial: Trial, out: Path) -> None:
    def fresh():
        return ENGINES[trial.engine](trial.model, trial.layout, "float32", **trial.settings)

    engine = fresh()
    engine.add_adapter("run", trial.lora, seed=3)
    engine.save(out / "before")
    train(engine, BINS[:4])
    engine.save(out / "middle")
    train(engine, BINS[4:])
    engine.save(out / "after")
    engine = fresh()
    engine.load_adapter("run", out / "middle" / "weights", trial.lora, trainable=True, seed=3)
    engine.load(out / "middle")
    train(engine, BINS[4:])
    engine.save(out / "resumed")


def main() -> None:
    for trial, out in given_trials(Trial):
        run(trial, out / trial.name)


if __name__ == "__main__":
    main()
