"""Held-out prompts of runs on datasets: what is refused, at which field, and what is asked of a worker and samplers."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from longshore import local
from longshore.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from shared.errors import InvalidInput
from shared.jobs.job import Evaluation, HeldOutGrades
from shared.runs.acceptance import check_startable
from shared.runs.start import RunStart
from shared.settings import SamplingSettings, Settings
from workflows.rollouts.requests import held_out_start, too_many_evaluations

GRADER = {
    "type": "string_check",
    "name": "same",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "1",
}
A_RUN: dict[str, Any] = {"model": "file:///m", "dataset": "file:///d", "steps": 100, "batch_size": 4}
ROLLOUTS: dict[str, Any] = {"held_out": {"prompts": "file:///p", "every_steps": 10}, "grader": GRADER}


def sft(**fields: Any) -> SFTRun:
    return SFTRun.model_validate(A_RUN | {"rollouts": ROLLOUTS} | fields)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"rollouts": {"grader": GRADER}}, "held_out"),
        ({"rollouts": ROLLOUTS | {"held_out": {"every_steps": 3}}}, "prompts"),
        ({"rollouts": {"held_out": {"prompts": "file:///p"}}}, "grader is missing"),
        ({"rollouts": ROLLOUTS | {"grader": {"type": "environment"}}}, "give environment"),
        ({"rollouts": ROLLOUTS | {"steps": 3}}, "Extra inputs"),
        ({"rollouts": ROLLOUTS | {"held_out": {"prompts": "file:///p", "keep": "best"}}}, "Extra inputs"),
        ({"rollouts": ROLLOUTS | {"max_completion_tokens": 2048}}, "more than rollouts.max_completion_tokens"),
        ({"quantize_base": "nf4"}, "rollouts.probe_bound"),
        ({"trainable": {"kind": "full"}, "rollouts": ROLLOUTS | {"sampler_url": "http://a/v1"}}, "whole weights"),
        ({"keep": "best", "rollouts": ROLLOUTS | {"held_out": {"prompts": "file:///p"}}}, "its every_steps"),
        ({"keep": "best", "best_by": "eval_reward_meen"}, "eval_reward_meen is no metric of held-out prompts"),
        ({"keep": "best", "best_by": "eval_loss"}, "eval_loss is no metric of held-out prompts"),
        ({"early_stop": {"patience": 1, "metric": "eval_reward_mean"}, "rollouts": None}, "set rollouts.held_out"),
        ({"keep": "best", "eval_dataset": "file:///e"}, "set eval_dataset and eval_every"),
        (
            {
                **{"keep": "best", "best_by": "eval_loss", "eval_dataset": "file:///e", "eval_every": 5},
                "early_stop": {"patience": 1, "metric": "eval_reward_mean"},
            },
            "set rollouts.held_out.every_steps to eval_every",
        ),
    ],
)
def test_a_run_that_cannot_be_evaluated_so_is_refused_with_the_rule(fields: dict, rule: str) -> None:
    with pytest.raises(ValidationError) as refused:
        sft(**fields)
    assert rule in str(refused.value)


def test_a_reward_model_has_no_text_to_grade() -> None:
    with pytest.raises(ValidationError, match="writes no text"):
        RewardRun.model_validate(A_RUN | {"rollouts": ROLLOUTS})


def test_the_grades_decide_unless_rows_are_evaluated_too() -> None:
    stop = {"keep": "best", "early_stop": {"patience": 2}}
    assert (run := sft(**stop)).keeps_by == run.stops_by == "eval_reward_mean"
    by_rows = sft(**stop, eval_dataset="file:///e", eval_every=10)
    assert by_rows.keeps_by == "eval_loss"
    both = sft(
        keep="best", early_stop=stop["early_stop"], best_by="eval_reward_mean", eval_dataset="file:///e", eval_every=10
    )
    assert (both.keeps_by, both.stops_by) == ("eval_reward_mean", "eval_loss")
    sets = ROLLOUTS | {"held_out": {"sets": {"sums": "file:///p"}, "every_steps": 5}}
    assert sft(rollouts=sets, keep="best", best_by="eval_sums_reward_mean").keeps_by == "eval_sums_reward_mean"


def test_an_installation_refuses_what_its_sampling_server_cannot_do() -> None:
    served = Settings(sampling=SamplingSettings(url="http://sampler"))
    for fields, place in (
        ({"trainable": {"kind": "full"}}, "trainable"),
        ({"rollouts": ROLLOUTS | {"samplers": 2}}, "rollouts.samplers"),
        ({"rollouts": ROLLOUTS | {"sampler": "vllm"}}, "rollouts.sampler"),
    ):
        with pytest.raises(InvalidInput) as refused:
            check_startable(sft(**fields), served)
        assert refused.value.place == place
    check_startable(sft(), served)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(SFTRun, {}), (DPORun, {}), (DistillRun, {"teacher": "file:///t"}), (SFTRun, {"eval_dataset": "file:///e"})],
)
def test_samplers_are_asked_as_for_an_rl_run_without_steps(kind: type[SFTRun], fields: dict) -> None:
    run = kind.model_validate(
        A_RUN | {"rollouts": ROLLOUTS, "seed": 5, "trainable": {"kind": "lora", "rank": 3}} | fields
    )
    start = RunStart(run_id="sft-1", run=run, shape="h100", serves_sampler=True)
    asked = held_out_start(start)
    assert (asked.run_id, asked.shape, asked.serves_sampler) == ("sft-1", "h100", True)
    assert (asked.run.seed, asked.run.trainable, asked.run.max_tokens) == (5, run.trainable, run.max_tokens)
    assert asked.run.rollouts is not None and asked.run.rollouts.steps == 0
    assert asked.run.held_out is not None and asked.run.held_out.prompts == run.rollouts.held_out.prompts
    assert too_many_evaluations(asked.run, 1009) is None
    assert "set it to 11 or more" in (too_many_evaluations(asked.run, 1010 + 10) or "")


def test_a_job_ends_where_grades_are_due_and_not_given() -> None:
    grades = HeldOutGrades(step=10, metrics={}, samples={})
    for every, given, stops in (
        (10, None, {0: 0, 1: 10, 9: 10, 10: 10, 11: 20, 21: 25, 25: 25}),
        (10, grades, {0: 0, 9: 10, 10: 20, 11: 20, 25: 25}),
        (0, None, {0: 0, 1: 25, 25: 25}),
        (None, None, {0: 25, 7: 25, 25: 25}),
    ):
        evaluation = Evaluation(graded_every=every, graded=given)
        assert {step: evaluation.next_graded(step, 25) for step in stops} == stops
        waits = {step for step in range(26) if evaluation.awaits_grades(step, 25)}
        due = set() if every is None else {0, 25, *(range(0, 25, every) if every else ())}
        assert waits == due - ({10} if given else set())


def test_a_local_run_leases_no_sampler(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        local.train(sft(), tmp_path)
    assert refused.value.place == "rollouts"
