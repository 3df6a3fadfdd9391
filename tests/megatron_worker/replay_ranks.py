"""What ranks do with bins that have routes.

`python -m megatron_worker.process.launcher N tests.megatron_worker.replay_ranks OUT TRIALS`
"""

from pathlib import Path

from longshore.layout import Layout
from megatron_worker.megatron.engine import MegatronEngine
from tests.megatron_worker.parallel_ranks import (
    KINDS,
    LEARNING_RATES,
    STEPS,
    Bins,
    Trial,
    note,
    note_step,
    start,
    step,
)
from tests.megatron_worker.replayed import routed
from tests.megatron_worker.trials import given_trials


def routed_bins(engine: MegatronEngine, bins: Bins) -> Bins:
    return [routed(engine, batch, number) for number, batch in enumerate(bins)]


def measure(model: Path, layout: Layout, out: Path) -> None:
    """Scores and gradients of rows and of trees, then three steps, with a checkpoint at the end."""
    for kind in KINDS:
        engine = start(model, layout, kind)
        for name, (bins, loss) in {"rows": STEPS[0], "trees": STEPS[1]}.items():
            note_step(engine, routed_bins(engine, bins), loss, out / kind / name)
        history = [step(engine, routed_bins(engine, bins), loss, LEARNING_RATES[kind]) for bins, loss in STEPS]
        note(engine, out / kind / "history.json", history)
        engine.save(out / kind / "end")


if __name__ == "__main__":
    for trial, folder in given_trials(Trial):
        measure(trial.model, trial.layout, folder / trial.name)
