"""What ranks do with bins that have routes.

`python -m megatron_worker.process.launcher N tests.megatron_worker.replay_ranks OUT TRIALS`
"""

from pathlib import Path

from longshore.layout import Layout
from tests.megatron_worker.parallel_ranks import (
    KINDS,
    LEARNING_RATES,
    STEPS,
    Trial,
    note,
    note_step,
    start,
    step,
    with_routes,
)
from tests.megatron_worker.trials import given_trials


def measure(model: Path, layout: Layout, out: Path) -> None:
    """Scores and gradients of rows and of trees, then three steps, with a checkpoint at the end."""
    for kind in KINDS:
        engine = start(model, layout, kind)
        for name, (bins, loss) in {"rows": STEPS[0], "trees": STEPS[1]}.items():
            note_step(engine, with_routes(engine, bins), loss, out / kind / name)
        history = [step(engine, with_routes(engine, bins), loss, LEARNING_RATES[kind]) for bins, loss in STEPS]
        note(engine, out / kind / "history.json", history)
        engine.save(out / kind / "end")


if __name__ == "__main__":
    for trial, folder in given_trials(Trial):
        measure(trial.model, trial.layout, folder / trial.name)
