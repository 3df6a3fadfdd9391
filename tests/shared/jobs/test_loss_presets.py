"""What an algorithm's name means for a run: the paper's loss and advantages, and what may be said otherwise."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from activities.trajectories.pack_trajectories import advantages_of
from longshore.fields import Artifact
from longshore.losses import PPO, PRESETS, Critic, Distillation, Kl, preset, reference_of, reference_uri, with_reference
from longshore.runs import RLRun
from longshore.training import Lora, ScalarHead

# As the papers have them, for rewards 0, 0, 1: what the mean of the group, or of the others, leaves; and whether groups
# of equal rewards count, as where the paper's mean is over all outputs.
MEAN, NORMALIZED, OTHERS = [-1 / 3, -1 / 3, 2 / 3], [-(0.5**0.5), -(0.5**0.5), 2**0.5], [-0.5, -0.5, 1.0]
PAPERS = {
    "reinforce": (OTHERS, "keep"),
    "rloo": (OTHERS, "keep"),
    "reinforce_plus_plus": (NORMALIZED, "drop"),
    "reinforce_plus_plus_baseline": (NORMALIZED, "keep"),
    "gmpo": (NORMALIZED, "keep"),
    "sapo": (NORMALIZED, "keep"),
    "grpo": (NORMALIZED, "keep"),
    "dr_grpo": (MEAN, "keep"),
    "dapo": (NORMALIZED, "drop"),
    "gspo": (NORMALIZED, "keep"),
    "cispo": (NORMALIZED, "drop"),
    "ppo": ([0.0, 0.0, 0.0], "drop"),  # until its critic has made them
    "distill": ([0.0, 0.0, 0.0], "drop"),
    "gkd": ([0.0, 0.0, 0.0], "drop"),
}
GRADED = {
    "prompts": {"uri": "file:///p"},
    "grader": {"type": "string_check", "name": "is_12", "operation": "eq", "input": "12", "reference": "12"},
    "steps": 3,
}


def run_of(**fields: object) -> RLRun:
    return RLRun.model_validate({"model": "tiny"} | fields)


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_has_the_loss_and_the_advantages_of_its_algorithm(name: str) -> None:
    run = run_of(algorithm=name)
    assert (run.loss, run.advantages, run.equal_rewards) == preset(name, 2048)
    assert run.algorithm == name
    [found] = advantages_of(run.advantages, [np.array([0.0, 0.0, 1.0])], [])
    assert (found, run.equal_rewards) == (pytest.approx(PAPERS[name][0], abs=1e-5), PAPERS[name][1])
    assert RLRun.model_validate_json(run.model_dump_json()) == run


def test_every_name_in_the_docs_is_selected_by_the_fields_that_stand_beside_it() -> None:
    """The table of names in docs/losses.md: each row's fields make a run, and change it."""
    page = (Path(__file__).parents[3] / "docs" / "losses.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page.partition("**Names.**")[2].partition("**Algorithms.**")[0], re.M)
    told = {name: re.findall(r"`([a-z_.]+): ([a-z0-9_.]+)`", fields) for name, fields in rows[1:]}
    assert len(told) > 10 and {"TIS", "MIS", "IcePop", "OPSM"} <= {name.partition(",")[0] for name in told}
    for name, fields in told.items():
        asked: dict[str, Any] = {"loss": {"kind": "ppo"}} if all(field != "algorithm" for field, _ in fields) else {}
        for field, value in fields:
            *above, last = field.split(".")
            into = asked
            for each in above:
                into = into.setdefault(each, dict(GRADED) if each == "rollouts" else {})
            into[last] = value
        assert not fields or run_of(**asked) != run_of(), name


def test_dr_grpo_divides_by_the_longest_answer() -> None:
    assert run_of(algorithm="dr_grpo", max_tokens=300).loss.constant == 300
    assert run_of(algorithm="dr_grpo", rollouts=GRADED).loss.constant == 256
    assert run_of(algorithm="dr_grpo", rollouts=GRADED | {"max_completion_tokens": 90}).loss.constant == 90
    again = run_of(algorithm="dr_grpo", rollouts=run_of(rollouts=GRADED).rollouts)
    assert again.loss.constant == 256
    with pytest.raises(ValidationError, match="max_tokens"):
        run_of(algorithm="dr_grpo", max_tokens="many")


def test_what_a_run_says_itself_goes_before_the_paper() -> None:
    run = run_of(algorithm="grpo", loss={"clip_high": 0.4, "kl": None}, advantages="leave_one_out")
    assert run.loss == PPO(aggregation="sequence_mean", clip_high=0.4)
    assert run.advantages == "leave_one_out"
    for said in ({"equal_rewards": "drop"}, {"advantages": "given"}):
        assert run_of(algorithm="grpo", **said).equal_rewards == "drop"
    assert run_of(algorithm="grpo", loss=PPO(clip_high=0.4)).loss.aggregation == "sequence_mean"


def test_a_run_without_an_algorithm_or_a_loss_is_ppo() -> None:
    assert (run_of().loss, run_of().advantages, run_of().algorithm) == (PPO(), "group_mean", None)


def test_a_decay_needs_an_end() -> None:
    with pytest.raises(ValidationError, match=r"give rollouts\.steps"):
        run_of(schedule="cosine")
    assert run_of(schedule="cosine", rollouts=GRADED, mini_batches=2, epochs=3).planned_steps == 18


def test_a_teacher_is_named_without_the_rest_and_needs_no_grader() -> None:
    rollouts = {"prompts": {"uri": "p.jsonl"}, "steps": 1, "group_size": 1}
    run = run_of(algorithm="distill", loss={"kl": {"reference": "file:///teacher"}}, rollouts=rollouts)
    assert run.loss.kl == Kl(coefficient=1, estimator="k1", placement="reward", reference="file:///teacher")
    assert reference_uri(run.loss) == "file:///teacher"
    named = Artifact(uri="file:///found", sha256="0" * 64)
    assert reference_of(with_reference(run.loss, named)) == named

    whole = run_of(algorithm="gkd", loss={"teacher": "file:///teacher", "skew": 0.9}, rollouts=rollouts)
    assert whole.loss == Distillation(divergence="jsd", skew=0.9, teacher="file:///teacher")
    assert reference_uri(whole.loss) == "file:///teacher"
    assert reference_of(with_reference(whole.loss, named)) == named
    with pytest.raises(ValueError, match="a job has the adapter itself"):
        reference_of(whole.loss)


def test_ppo_has_a_critic_beside_its_policy() -> None:
    run = run_of(algorithm="ppo", trainable=Lora(rank=8, targets=("q_proj", "lm_head")))
    assert run.critic == Critic() and run == run_of(critic={}, trainable=run.trainable).model_copy(
        update={"algorithm": "ppo"}
    )
    assert isinstance(run.trainable, Lora)
    beside = run.critic.trained_beside(run.trainable)
    assert (beside.rank, beside.targets, beside.head) == (8, ("q_proj",), ScalarHead())
    own = Critic(trainable=Lora(rank=2)).trained_beside(run.trainable)
    assert (own.rank, own.head) == (2, ScalarHead())
    assert run_of(algorithm="ppo", rollouts=GRADED | {"group_size": 1}).rollouts


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"algorithm": "grpo", "loss": {"kind": "gspo"}}, "algorithm grpo has the loss ppo: a loss gspo"),
        ({"algorithm": "grpo", "loss": {"beta": 0.1}}, "beta"),
        ({"algorithm": "dr_grpo", "loss": {"aggregation": "token_mean"}}, "constant belongs to"),
        ({"algorithm": "vtrace"}, "algorithm"),
        ({"loss": {"kind": "cross_entropy"}}, "cross_entropy"),
        ({"loss": {"kind": "ppo", "truncated_importance": 2.0}}, "would be ignored"),
        ({"advantages": "given", "equal_rewards": "keep"}, "has no meaning"),
        ({"bin_tokens": 16}, "must hold a trajectory"),
        ({"advantages": "none"}, "advantages none leave a loss to kl with placement reward alone"),
        ({"loss": {"kind": "distillation"}}, "a distillation loss reads no advantages"),
        ({"algorithm": "gkd", "trainable": {"kind": "full"}}, "full training changes the base"),
        ({"trainable": {"kind": "full"}, "initial_adapter": "/adapter"}, "drop initial_adapter"),
        ({"rollouts": {"prompts": {"uri": "p"}, "steps": 1}}, "rollouts.grader is missing"),
        (
            {
                "algorithm": "gkd",
                "rollouts": {"prompts": {"uri": "p"}, "steps": 1, "held_out": {"prompts": {"uri": "h"}}},
            },
            "rollouts.grader is missing",
        ),
        ({"advantages": "gae"}, "gae advantages are a critic's"),
        ({"algorithm": "grpo", "critic": {}}, "gae advantages are a critic's"),
        ({"critic": {}, "trainable": {"kind": "full"}}, "critic: it has the base beside the policy"),
        ({"critic": {}, "equal_rewards": "keep"}, "equal_rewards has no meaning with gae"),
        ({"critic": {"own_worker": True}, "layout": {"dp": 2, "nodes": 2}}, "critic.own_worker: both workers"),
        ({"critic": {}, "rollouts": GRADED | {"redraws": 1}}, "redraws: gae does not compare"),
        ({"critic": {"warmup_steps": 3}, "rollouts": GRADED}, "critic.warmup_steps: fewer than rollouts.steps, 3"),
        (
            {"credit": "turn"},
            "credit: turn has a formula for leave_one_out alone, and the run's advantages are group_mean",
        ),
        (
            {"rollouts": {"prompts": {"uri": "p"}, "steps": 1, "grader": {"type": "environment"}}},
            "grader: an environment's reward needs one: give environment",
        ),
        (
            {"rollouts": {"prompts": {"uri": "p"}, "steps": 1, "environment": {"source": "def reset(): pass"}}},
            "the source must define a class Environment",
        ),
        ({"truncated": "bootstrap"}, "truncated: bootstrap needs the values of a critic"),
        ({"critic": {}, "loss": Distillation()}, "a distillation loss reads no advantages"),
        ({"critic": {"trainable": Lora(head=ScalarHead(per="sequence"))}}, "a critic has one scalar a token"),
        ({"critic": {"trainable": {"targets": ["lm_head"]}}}, "a critic has no lm_head"),
        (
            {"critic": {"trainable": Lora(dropout=0.1)}, "engine": "fsdp", "layout": {"tp": 2}},
            "critic.trainable.dropout: the engine fsdp has no dropout",
        ),
        ({"critic": {"gamma": 0}}, "gamma"),
        ({"critic": {"gae_lambda": 1.5}}, "gae_lambda"),
        ({"critic": {"clip": float("nan")}}, "clip"),
    ],
)
def test_what_contradicts_the_algorithm_or_means_nothing_is_refused(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        run_of(**fields)
