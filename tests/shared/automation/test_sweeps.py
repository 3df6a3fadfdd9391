"""Sweeps as users ask for them, the values of their trials, and which trials successive halving ends."""

import random
from typing import Any

import optuna
import pytest
from pydantic import ValidationError

from longshore.automation import Halving, Report, Sweep
from shared.automation import Reports, candidates, grid_values, pruned, with_values
from shared.errors import InvalidInput
from shared.field_rules import first_rule

DATA = {"uri": "file:///data/rows.jsonl"}
SFT = {"kind": "sft", "model": "org/m", "dataset": DATA, "eval_dataset": DATA, "steps": 8, "batch_size": 2}
REWARDED = {"type": "string_check", "name": "g", "operation": "eq", "input": "a", "reference": "a"}
RL = {"kind": "rl", "model": "org/m", "rollouts": {"prompts": DATA, "grader": REWARDED, "steps": 2}}
RATES = {"learning_rate": {"choices": [1e-4, 1e-3]}}


def sweep(**changes: Any) -> Sweep:
    return Sweep.model_validate({"name": "best", "run": SFT, "parameters": RATES, "sampler": "grid"} | changes)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"parameters": {}}, "parameters: "),
        ({"parameters": {"learning_rate": {}}}, "give choices, or min and a greater max"),
        ({"parameters": {"learning_rate": {"choices": [1, 1]}}}, "one is there twice"),
        ({"parameters": {"learning_rate": {"choices": [1], "log": True}}}, "log and integer go with these"),
        ({"parameters": {"learning_rate": {"min": 0, "max": 1, "log": True}}}, "min must be greater than 0"),
        ({"parameters": {"learning_rate": {"min": 1.5, "max": 2, "integer": True}}}, "must be whole numbers"),
        ({"parameters": {"dataset.uri": {"choices": ["https://h/a?key=s"]}}}, "may hold a secret"),
        ({"parameters": {"name": {"choices": ["a", "b"]}}}, "parameters.name: this cannot differ"),
        ({"parameters": {"learning_rate": {"min": 1e-5, "max": 1}}}, "a grid is of choices"),
        ({"parameters": {"seed": {"choices": list(range(64))}, "steps": {"choices": [1, 2, 3, 4, 5]}}}, "320 combin"),
        ({"sampler": "tpe"}, "trials is missing"),
        ({"sampler": "random", "trials": 257}, "trials: "),
        ({"run": {**SFT, "name": "mine"}}, "run.name: "),
        ({"run": {**SFT, "eval_dataset": None}}, "the run evaluates nothing"),
        ({"halving": {"first_step": 2}}, "the run evaluates at its end alone"),
        ({"run": {"kind": "session", "model": "org/m"}}, "a trial cannot be a session"),
        ({"run": {"kind": "rl", "model": "org/m"}}, "a trial cannot be a session"),
        ({"run": RL}, "the run evaluates nothing"),
    ],
)
def test_what_holds_not_together_is_refused_by_name(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError) as refused:
        sweep(**changes)
    assert rule in first_rule(refused.value)


def test_a_metric_says_what_is_better() -> None:
    assert (sweep().measured, sweep().maximizes) == ("eval_loss", False)
    rl = {**RL, "rollouts": {**RL["rollouts"], "held_out": {"prompts": DATA}}}
    rewarded = sweep(run=rl)
    assert (rewarded.measured, rewarded.maximizes) == ("eval_reward_mean", True)
    assert not sweep(metric="eval_reward_mean", direction="minimize").maximizes
    kept = sweep(run={**SFT, "eval_every": 2, "keep": "best", "best_by": "eval_accuracy"})
    assert (kept.measured, kept.maximizes) == ("best_eval_accuracy", True)
    graded = {**SFT, "eval_dataset": None, "rollouts": {"held_out": {"prompts": DATA}, "grader": REWARDED}}
    assert (sweep(run=graded).measured, sweep(run=graded).maximizes) == ("eval_reward_mean", True)
    assert sweep(run=graded | {"eval_dataset": DATA}).measured == "eval_loss"
    with pytest.raises(ValidationError, match="say every how many steps"):
        sweep(run=graded, halving={"first_step": 2})
    held_out = {"prompts": DATA, "every_steps": 1, "keep": "best"}
    assert sweep(run={**RL, "rollouts": {**RL["rollouts"], "held_out": held_out}}).measured == "best_eval_reward_mean"


def test_a_grid_goes_through_its_choices_as_nested_loops_do() -> None:
    grid = sweep(parameters=RATES | {"trainable.rank": {"choices": [4, 8, 16]}})
    rows = [tuple(grid_values(grid, number).values()) for number in range(grid.num_trials)]
    assert rows == [(rate, rank) for rate in (1e-4, 1e-3) for rank in (4, 8, 16)]
    assert sweep(trials=1).num_trials == 1 and sweep(trials=9).num_trials == 2


def test_values_are_put_into_the_fields_that_paths_name() -> None:
    asked = sweep().run
    run = with_values(asked, {"trainable.rank": 4, "learning_rate": 0.5, "dataset.uri": "file:///data/b.jsonl"})
    assert run.kind == "sft" and run.trainable.kind == "lora"
    assert (run.trainable.rank, run.learning_rate, run.dataset.uri) == (4, 0.5, "file:///data/b.jsonl")
    untouched = with_values(asked, {"learning_rate": 0.5})
    assert untouched == asked.model_copy(update={"learning_rate": 0.5})
    assert "trainable" not in untouched.model_fields_set
    shaped = with_values(sweep(run=SFT | {"trainable": {"kind": "lora", "rank": 5}}).run, {"learning_rate": 0.5})
    assert shaped.kind == "sft" and shaped.trainable.kind == "lora" and shaped.trainable.rank == 5


@pytest.mark.parametrize(
    ("values", "place", "rule"),
    [
        ({"learning_rat": 1}, "parameters.learning_rat", "there is no such field"),
        ({"learning_rate": -1}, "parameters.learning_rate", "greater than 0"),
        ({"trainable.rank": 0}, "parameters.trainable.rank", "with trainable.rank=0: "),
        ({"trainable.rank.low": 0}, "parameters.trainable.rank.low", "there is no field rank"),
        ({"max_tokens": 64, "bin_tokens": 32}, "parameters", "bin_tokens must hold an example"),
    ],
)
def test_values_that_a_run_refuses_are_named(values: dict[str, Any], place: str, rule: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        with_values(sweep().run, values)
    assert refused.value.place == place and rule in refused.value.message


def test_every_combination_of_a_grid_and_every_end_is_tried_beforehand() -> None:
    parameters = {"learning_rate": {"min": 1e-5, "max": 1}, "trainable.rank": {"choices": [4, 8, 16]}}
    tried = list(candidates(sweep(parameters=parameters, sampler="tpe", trials=4)))
    pairs = ((1e-5, 4), (1, 4), (1e-5, 8), (1e-5, 16), (1, 16))
    assert tried == [{"learning_rate": rate, "trainable.rank": rank} for rate, rank in pairs]
    assert len(list(candidates(sweep()))) == 2


def optunas(values: list[list[float]], halving: Halving, maximizes: bool) -> dict[int, Report]:
    """The trials that Optuna's own pruner ends, one trial after another; a trial's values are after steps 2, 4, …"""
    pruner = optuna.pruners.SuccessiveHalvingPruner(
        min_resource=halving.first_step, reduction_factor=halving.reduction, min_early_stopping_rate=0
    )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=pruner, direction="maximize" if maximizes else "minimize")
    found = {}
    for number, series in enumerate(values):
        trial, state = study.ask(), optuna.trial.TrialState.FAIL
        for n, value in enumerate(series, 1):
            trial.report(value, 2 * n)
            if trial.should_prune():
                found[number], state = Report(2 * n, value), optuna.trial.TrialState.PRUNED
                break
        study.tell(trial, state=state)
    return found


@pytest.mark.parametrize("maximizes", [False, True])
@pytest.mark.parametrize("reduction", [2, 3])
def test_halving_ends_the_trials_that_optunas_pruner_ends(reduction: int, maximizes: bool) -> None:
    halving, dice = Halving(first_step=3, reduction=reduction), random.Random(reduction)
    for _ in range(20):
        # Few distinct values, so that some are equal; some trials report less than others, as those that fail.
        values = [[float(dice.randint(0, 9)) for _ in range(dice.choice((0, 3, 20)))] for _ in range(16)]
        reports = [Reports({2 * n: value for n, value in enumerate(v, 1)}, has_ended=True) for v in values]
        expected = optunas(values, halving, maximizes)
        assert pruned(reports, halving, maximizes) == expected and len(expected) > 2


def test_a_decision_is_the_same_whatever_is_known_first() -> None:
    """Trials that go on beside each other: what is decided early stays, and in the end all is decided alike."""
    halving, dice = Halving(first_step=2, reduction=2), random.Random(1)
    for _ in range(20):
        values = [[dice.random() for _ in range(16)] for _ in range(8)]
        at_last = pruned([Reports(dict(enumerate(v, 1)), True) for v in values], halving, False)
        known, early = [0] * 8, 0
        while any(number < 16 for number in known):
            behind = [n for n in range(8) if known[n] < 16]
            known[dice.choice(behind)] += dice.randint(1, 4)
            seen = [dict(enumerate(v[:n], 1)) for v, n in zip(values, known, strict=True)]
            found = pruned([Reports(s, n >= 16) for s, n in zip(seen, known, strict=True)], halving, False)
            assert found.items() <= at_last.items()
            early += bool(found) and min(known) < 16
        assert found == at_last and early
