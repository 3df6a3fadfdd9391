"""What ranks do with a slot that has a head of scalars: `… tests.megatron_worker.scalar_head_ranks OUT TRIALS`"""

import json
from pathlib import Path

from pydantic import BaseModel

from longshore.layout import EngineName, Layout
from longshore.training import Full, Lora
from megatron_worker.tensors.slot_engine import Engine
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.scored_rows import bins_of_steps, scored_bin, step, values
from tests.megatron_worker.trials import given_trials


class Trial(BaseModel):
    model: Path
    engine: EngineName
    layout: Layout = Layout()
    trainable: Lora | Full
    single: Path  # where one rank's results are

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.layout.label}-{self.trainable.kind}"


def started(trial: Trial) -> Engine:
    engine = ENGINES[trial.engine](trial.model, trial.layout, "float32")
    if isinstance(trial.trainable, Lora):
        engine.add_adapter("run", trial.trainable, seed=3)
    else:
        engine.train_full(trial.trainable, seed=3)
    return engine


def measure(trial: Trial, out: Path) -> None:
    """Values and four steps; the last two again from this one's checkpoint, and from one rank's."""
    engine, rate = started(trial), 3e-3 if trial.trainable.kind == "lora" else 3e-4
    assert trial.trainable.head is not None
    per = trial.trainable.head.per
    steps = bins_of_steps(per, 4)

    def train(first: int, end: int) -> list[tuple[float, float]]:
        return [step(engine, per, bins, rate) for bins in steps[first:end]]

    noted = [train(0, 2)]
    engine.save(out / "middle")
    noted += [values(engine, scored_bin(per, rows)).tolist() for rows in steps[2]]
    noted.append(train(2, 4))
    engine.save(out / "end")
    for name, begin in (("again", out), ("from-single", trial.single)):
        engine.load(begin / "middle")
        noted.append(train(2, 4))
        engine.save(out / name)
    (out / f"noted-{engine.facts.rank}.json").write_text(json.dumps(noted))


def main() -> None:
    for trial, out in given_trials(Trial):
        measure(trial, out / trial.name)


if __name__ == "__main__":
    main()
