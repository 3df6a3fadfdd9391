"""Sweeps on a real Temporal server, with stand-in runs: trials, the best one published, kills, quotas, cancels."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from longshore.automation import Report, Sweep, SweepView
from longshore.runs import RunRecord, Source, SweepTrial
from longshore.views import RunStatus
from service.automation.sweeps import Trial, may_start, next_values
from service.runs.rows import IndexedRun
from shared.errors import Conflict, InvalidInput, NotFound
from shared.storage.paths import RunKeys
from tests.service.apis.native.sweep_stack import (
    BEST_RATE,
    GREATEST,
    HELD,
    HELD_AT_THE_END,
    STEPS,
    TENANT,
    SweepStack,
    loss_of,
    started,
)
from tests.service.conftest import put_versions

RUN = {"kind": "sft", "model": "org/m", "dataset": {"uri": "file:///r"}, "steps": 1, "batch_size": 1}
GONE = RunRecord.model_validate({"run_id": "r", "tenant": TENANT, "run": RUN, "created_at": 0})


@pytest.fixture(scope="module")
async def stack(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SweepStack]:
    async with started(temporal_address, tmp_path_factory.mktemp("sweeps")) as stack:
        yield stack


def rates(view: SweepView) -> list[Any]:
    return [trial.values["learning_rate"] for trial in view.trials]


async def test_a_grid_ends_with_the_best_trial_published(stack: SweepStack) -> None:
    view = await stack.done(name="grid")
    assert (view.state, view.problem, view.metric, view.direction) == ("succeeded", None, "eval_loss", "minimize")
    assert rates(view) == [1e-4, 1e-3, 1e-2, 1e-1] and {trial.state for trial in view.trials} == {"succeeded"}
    assert [trial.value for trial in view.trials] == [loss_of(rate, STEPS) for rate in rates(view)]
    assert (view.best, view.version) == (2, 1)
    assert view.adapter == f"{stack.store.uri}/tenants/{TENANT}/adapters/grid/v000001"
    assert stack.store.get_bytes(f"tenants/{TENANT}/adapters/grid/v000001/adapter_model.safetensors") == b"0.01"

    best = view.trials[2].run_id or ""
    found = stack.backend.published.find(TENANT, "grid")
    assert stack.backend.published.record(TENANT, found).run_id == best
    record = await stack.backend.runs.record(TENANT, best)
    assert (record.owner, record.source.trial) == (
        "key-1", SweepTrial(sweep=view.sweep_id, number=2, values={"learning_rate": 0.01}),
    )  # fmt: skip
    ids = [trial.run_id or "" for trial in view.trials]
    assert ids == sorted(ids)
    assert [each.sweep_id for each in await stack.sweeps.of(TENANT, 1)] == [view.sweep_id]
    for other in ("nobody", TENANT + "2"):
        with pytest.raises(NotFound):
            await stack.sweeps.show(other, view.sweep_id)


async def test_numbers_are_drawn_from_their_ranges(stack: SweepStack) -> None:
    space = {"learning_rate": {"min": 1e-5, "max": 0.3, "log": True}}
    space |= {"warmup_steps": {"min": 0, "max": 4, "integer": True}}
    view = await stack.done(name="random", sampler="random", trials=4, parallel=4, parameters=space, seed=5)
    assert len(set(rates(view))) == 4 and all(1e-5 <= rate <= 0.3 for rate in rates(view))
    assert all(type(trial.values["warmup_steps"]) is int for trial in view.trials)
    assert min(rates(view)) < 0.01, "they are drawn by their logarithm"


async def test_halving_cancels_what_is_worse(stack: SweepStack) -> None:
    choices = [BEST_RATE, 1e-4, 1e-1, 2e-2, 1e-3, 1e-5]
    view = await stack.done(
        name="halved",
        run={"seed": HELD_AT_THE_END},  # so that none ends by itself before it is cancelled
        parameters={"learning_rate": {"choices": choices}},
        halving={"first_step": 2, "reduction": 2},
    )
    assert [trial.state for trial in view.trials] == ["succeeded", *["pruned"] * 5]
    # The fourth was among the better half at the first rung, and no longer at the second.
    steps = [2, 2, 4, 2, 2]
    compared = [loss_of(rate, step) for rate, step in zip(choices[1:], steps, strict=True)]
    assert [trial.value for trial in view.trials[1:]] == compared
    states = [(await stack.backend.runs.view(TENANT, t.run_id or "")).state for t in view.trials]
    assert states == ["succeeded", *["cancelled"] * 5]
    assert view.best == 0 and view.state == "succeeded"


async def test_a_service_that_is_killed_goes_on_with_the_same_sweep(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path / "kills") as stack:
        space = {"learning_rate": {"min": 1e-5, "max": 0.3, "log": True}}
        asked = stack.asked(name="killed", sampler="tpe", trials=12, parameters=space)
        whole = await stack.ended((await stack.sweeps.create(stack.asking, asked)).sweep_id)
        sweep_id = (await stack.sweeps.create(stack.asking, asked, "once")).sweep_id
        assert (await stack.sweeps.create(stack.asking, asked, "once")).sweep_id == sweep_id
        with pytest.raises(InvalidInput, match="this key was used for another request"):
            await stack.sweeps.create(stack.asking, stack.asked(), "once")
        await asyncio.sleep(1)
        assert len((await stack.sweeps.show(TENANT, sweep_id)).trials) in range(1, 12)
        await stack.kill_service()
        stack.start_service()
        again = await stack.ended(sweep_id, within_s=90)
        assert [(t.values, t.value) for t in again.trials] == [(t.values, t.value) for t in whole.trials]
        assert again.best == whole.best


async def test_a_failed_trial_is_left_out(stack: SweepStack) -> None:
    view = await stack.done(name="some", parameters={"learning_rate": {"choices": [GREATEST, 1e-3]}})
    assert [trial.state for trial in view.trials] == ["failed", "succeeded"] and view.best == 1

    view = await stack.done(name="none", parameters={"learning_rate": {"choices": [GREATEST]}})
    assert (view.state, view.best, view.problem) == (
        "failed",
        None,
        "no trial succeeded, reported eval_loss and published a result",
    )

    sizes = {"max_tokens": {"choices": [32, 64, 48]}, "bin_tokens": {"choices": [64, 32, 48]}}
    view = await stack.done(name="pairs", sampler="random", trials=8, run={"max_tokens": 32}, parameters=sizes)
    assert view.state == "succeeded" and len(view.trials) == 8
    assert all(t.values["max_tokens"] <= t.values["bin_tokens"] for t in view.trials), "others are drawn anew"


async def test_a_sweep_whose_model_has_gone_ends_when_its_runs_have(stack: SweepStack) -> None:
    put_versions(stack.store, TENANT, "base", stack.settings.root_path / "v", 1, 1, "models")
    stack.store.put_bytes(RunKeys("r").record, GONE.model_dump_json().encode())
    view = await stack.sweeps.create(stack.asking, stack.asked(name="gone", run={"model": "base"}, parallel=1))
    while not view.trials:
        await asyncio.sleep(0.1)
        view = await stack.sweeps.show(TENANT, view.sweep_id)
    stack.backend.published.delete_model(TENANT, "base")
    view = await stack.ended(view.sweep_id)
    assert view.state == "failed" and "cannot be started: run.model: " in (view.problem or "")
    assert view.trials and view.adapter is None and {trial.state for trial in view.trials} == {"succeeded"}


async def test_a_cancelled_sweep_cancels_its_runs(stack: SweepStack) -> None:
    view = await stack.sweeps.create(stack.asking, stack.asked(name="held", run={"seed": HELD}))
    while len(view.trials) < 2:
        await asyncio.sleep(0.1)
        view = await stack.sweeps.show(TENANT, view.sweep_id)
    await stack.sweeps.cancel(TENANT, view.sweep_id)
    view = await stack.ended(view.sweep_id)
    assert view.state == "cancelled" and [trial.state for trial in view.trials] == ["cancelled"] * 2
    assert view.adapter is None
    with pytest.raises(Conflict):
        await stack.sweeps.cancel(TENANT, view.sweep_id)


async def test_a_quota_holds_trials_back(
    temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSHORE_QUOTAS__CONCURRENT_RUNS", "1")
    async with started(temporal_address, tmp_path / "quota") as stack:
        view = await stack.sweeps.create(stack.asking, stack.asked(name="one", parallel=4))
        told = set()
        while (view := await stack.sweeps.show(TENANT, view.sweep_id)).state == "running":
            told.add(view.problem)
            await asyncio.sleep(0.1)
        assert view.state == "succeeded" and len(view.trials) == 4 and view.problem is None
        assert any("1 of sweepers's runs are going on" in (problem or "") for problem in told)


@pytest.mark.parametrize(
    ("path", "choices", "place"),
    [
        ("learning_rate", [0.1, -1], "parameters.learning_rate"),
        ("layout.dp", [1, 512], "run.layout.dp"),
        ("dataset.uri", ["https://example.org/a", "STORE/runs/a"], "parameters.dataset.uri.choices.1"),
    ],
)
async def test_what_no_run_could_have_is_refused_before_anything_starts(
    stack: SweepStack, path: str, choices: list[Any], place: str
) -> None:
    before = len(await stack.sweeps.of(TENANT, 100))
    choices = [each.replace("STORE", stack.store.uri) if isinstance(each, str) else each for each in choices]
    with pytest.raises(InvalidInput) as refused:
        await stack.sweeps.create(stack.asking, stack.asked(parameters={path: {"choices": choices}}))
    assert refused.value.place == place
    assert len(await stack.sweeps.of(TENANT, 100)) == before


def trial(number: int, value: float | None, rank: int, pruned_by: Report | None = None) -> Trial:
    """A trial that has ended with this value; that goes on if it has none."""
    source = Source(trial=SweepTrial(sweep="s", number=number, values={"trainable.rank": rank}))
    record = RunRecord(run_id=f"sft-{number}", source=source, run=RUN, created_at=0)
    state, metrics = ("running", {}) if value is None else ("succeeded", {"loss": value})
    return Trial(
        number, IndexedRun(record, RunStatus(run_id=f"sft-{number}", state=state, metrics=metrics), 0), pruned_by
    )


def test_tpe_learns_from_the_trials_that_have_ended_for_certain() -> None:
    space = {"trainable.rank": {"min": 1, "max": 64, "integer": True}}
    sweep = Sweep.model_validate(
        {"name": "s", "run": RUN, "parameters": space, "trials": 64, "parallel": 2, "metric": "loss"}
    )
    ranks = [1 + 7 * n % 64 for n in range(24)]
    good = [trial(n, abs(rank - 40), rank) for n, rank in enumerate(ranks)]
    bad = [trial(n, abs(rank - 8), rank) for n, rank in enumerate(ranks)]

    def drawn(trials: list[Trial]) -> list[Any]:
        values = []
        for _ in range(12):  # each is drawn beside those before it, which go on
            values.append(next_values(sweep, trials)["trainable.rank"])
            trials = [*trials, trial(len(trials), abs(values[-1] - (40 if trials[0] == good[0] else 8)), values[-1])]
        return values

    assert sum(abs(v - 40) < 12 for v in drawn(good)) > 6 < sum(abs(v - 8) < 12 for v in drawn(bad))
    # The end of the one trial that may still go on where there are two at once changes nothing.
    open_one = [*good[:-1], trial(23, None, ranks[-1])]
    assert may_start(sweep, open_one) and next_values(sweep, open_one) == next_values(sweep, good)
    two = [*good[:-2], trial(22, None, ranks[-2]), trial(23, None, ranks[-1])]
    assert not may_start(sweep, two)
    assert not may_start(sweep, [*good[:-2], trial(22, None, ranks[-2]), good[-1]]), (
        "the 25th is to know the 23rd's end"
    )
    pruned = [*good[:5], trial(5, 1.0, ranks[5], Report(1, 50.0)), *good[6:]]
    assert next_values(sweep, pruned)["trainable.rank"] in range(1, 65)
