"""What ART's client says, as runs of ours; and what its jobs tell it. Nothing runs here."""

import io
import json
from typing import Any

import pytest

from longshore.losses import CISPO, GSPO, PPO
from longshore.views import Problem, StepStatus
from service.apis.art.job_request import ExperimentalConfig, SftConfig, rl_run, sft_run, split
from service.apis.art.training_jobs import JobStep
from service.apis.bodies import page_after
from service.inference.art_models import ArtName, ArtSettings, new_model
from shared.chat.trajectories import ChatTrajectory, SentGroup
from shared.errors import InvalidInput
from tests.service.art_bodies import group, model

# Groups.


def test_a_document_becomes_lines() -> None:
    document = {"model_id": "m", "trajectory_groups": [group(), group()], "experimental_config": {"ppo": True}}
    lines = io.BytesIO()
    fields = split(json.dumps(document, indent=3).encode(), lines)
    assert fields == {"model_id": "m", "experimental_config": {"ppo": True}}
    read = [SentGroup.model_validate_json(line) for line in lines.getvalue().splitlines()]
    assert [len(sent.trajectories) for sent in read] == [1, 1]
    trajectory = read[1].trajectories[0]
    assert isinstance(trajectory, ChatTrajectory)
    assert (trajectory.reward, trajectory.metrics, trajectory.policy_version) == (1.0, {"is_short": 1.0}, None)
    assert trajectory.model_version == 7, "a model's steps are the versions of its adapter"


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ("", "body"),
        ("[]", "body"),
        ('{"model_id": "m"} {}', "body"),
        ('{"model_id": "m",}', "body"),
        ('{"trajectory_groups": {}}', "trajectory_groups"),
        ('{"trajectory_groups": [' + "[" * 100_000, "body"),
        ("\xff\xfe", "body"),
        ('{"a": 1, "a": 2}', "a"),
        ('{"trajectory_groups": [{"b": {"a": 1, "a": 2}}]}', "a"),
        ('{"model_id": "m", "trajectory_groups": []}', "trajectory_groups"),
        ('{"trajectory_groups": [7]}', "trajectory_groups.0"),
        ('{"trajectory_groups": [{"trajectories": [7]}]}', "trajectory_groups.0.trajectories.0"),
        (json.dumps({"trajectory_groups": [group(), group(trajectories=[])]}), "trajectory_groups.1.trajectories"),
    ],
)
def test_what_is_no_document_is_refused(document: str, place: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        split(document.encode("latin-1"), io.BytesIO())
    assert refusal.value.place == place


# Objectives.


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        ({}, CISPO(clip_low=1.0, clip_high=4.0)),
        ({"epsilon": 0.5}, CISPO(clip_low=0.5, clip_high=4.0)),
        ({"max_negative_advantage_importance_sampling_weight": 3.0}, CISPO(clip_low=1.0, clip_high=2.0)),
        ({"precalculate_logprobs": True}, CISPO(clip_low=1.0, clip_high=4.0, old="trainer")),
        (
            {"precalculate_logprobs": True, "truncated_importance_sampling": 2.0},
            CISPO(clip_low=1.0, clip_high=4.0, old="trainer", truncated_importance=2.0),
        ),
        ({"truncated_importance_sampling": 0.0}, CISPO(clip_low=1.0, clip_high=4.0)),
        ({"loss_fn": "ppo"}, PPO()),
        ({"loss_fn": "cispo", "ppo": False}, CISPO(clip_low=1.0, clip_high=4.0)),
        ({"ppo": True}, PPO()),
        ({"ppo": True, "epsilon": 0.1}, PPO(clip_low=0.1, clip_high=0.1)),
        ({"ppo": True, "epsilon_high": 0.28}, PPO(clip_high=0.28)),
        ({"ppo": True, "max_negative_advantage_importance_sampling_weight": 3.0}, PPO(dual_clip=3.0)),
        (
            {"ppo": True, "importance_sampling_level": "sequence", "epsilon": 3e-4},
            GSPO(clip_low=3e-4, clip_high=3e-4, aggregation="token_mean"),
        ),
    ],
)
def test_an_objective_is_a_loss(config: dict[str, Any], loss: Any) -> None:
    assert rl_run(model(), ExperimentalConfig(**config), None).loss == loss


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"truncated_importance_sampling": 2.0}, "truncated_importance_sampling"),
        ({"importance_sampling_level": "average"}, "importance_sampling_level"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"epsilon": 2.0}, "epsilon"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_an_objective_that_is_no_loss_is_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        rl_run(model(), ExperimentalConfig(**config), None)
    assert refusal.value.place == f"experimental_config.{field}"


def test_settings_hold_for_both_kinds() -> None:
    ours = model(rank=4, rank_pattern={"q": 2}, max_tokens=512, dtype="bfloat16", temperature=0.7, broken="refuse")
    rl = rl_run(ours, ExperimentalConfig(scale_rewards=False, learning_rate=1e-4), "file:///a")
    assert (rl.trainable.rank, rl.max_tokens, rl.dtype, rl.temperature, rl.broken) == (
        4,
        512,
        "bfloat16",
        0.7,
        "refuse",
    )
    assert rl.trainable.rank_pattern == (("q", 2),)
    assert (rl.advantages, rl.learning_rate, rl.initial_adapter) == ("group_mean", 1e-4, "file:///a")
    sft = sft_run(ours, "https://example.com/a.jsonl", SftConfig(learning_rate=0.01), None)
    assert (sft.trainable.kind, sft.max_tokens, sft.batch_size, sft.epochs) == ("lora", 512, 2, 1)
    assert (sft.learning_rate, sft.schedule, sft.name) == (0.01, "constant", rl.name)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"bin_tokens": 16}, "longshore.bin_tokens"),
        ({"engine": "fsdp", "quantize_base": "nf4"}, "longshore.quantize_base"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], place: str) -> None:
    """Of settings that do not fit together; the bounds of each are refused with the model (test_art_api.py)."""
    with pytest.raises(InvalidInput) as refusal:
        rl_run(model(**settings), ExperimentalConfig(), None)
    assert refusal.value.place == place


# Names.


@pytest.mark.parametrize(
    ("text", "title", "step"),
    [
        ("wandb-artifact:///dock/Harbour/Quay Clerk", "dock/Harbour/Quay Clerk", None),
        ("wandb-artifact:///dock/Harbour/Quay Clerk:step5", "dock/Harbour/Quay Clerk", 5),
        ("dock/Harbour/clerk:step0", "dock/Harbour/clerk", 0),
        ("dock/Harbour/clerk:latest", "dock/Harbour/clerk", None),
    ],
)
def test_names_of_models(text: str, title: str, step: int | None) -> None:
    assert ArtName.parse(text) == ArtName(title, step)


@pytest.mark.parametrize("text", ["quay", "quay:v2", "a/b", "a/b/c/d", "a/b/c:v1", "file:///models/tiny", "a/b/c:step"])
def test_other_names_are_none(text: str) -> None:
    assert ArtName.parse(text) is None


@pytest.mark.parametrize("name", ["Quay Clerk", "日本", "-._", "x" * 64])
def test_every_model_is_published_under_a_name(name: str) -> None:
    named = new_model("acme", "dock", "Harbour", name, "tiny/model", ArtSettings(), "float32")
    assert rl_run(named, ExperimentalConfig(), None).name == named.published_as


# Events.


def step(state: Any, **fields: Any) -> JobStep:
    return JobStep("rl-1.3", StepStatus(step=3, key="k", groups="g", state=state, **fields))


def told(one: JobStep) -> list[str]:
    return [event.type.removeprefix("training_") for event in page_after(one.events(), None, 10).data]


def test_a_step_tells_its_beginning_first() -> None:
    metrics = {"loss": 0.5, "reward_mean": 1.5, "broken": float("nan")}
    done = step("done", metrics=metrics)
    assert told(done) == ["started", "gradient_step", "ended"]
    assert done.events()[1].data == {"loss": 0.5, "reward_mean": 1.5, "policy_loss": 0.5, "reward": 1.5}
    assert [event.type for event in page_after(done.events(), "rl-1.3:training_started", 1).data] == ["gradient_step"]
    assert told(step("queued")) == []
    assert told(step("running")) == ["started"]


def test_a_step_that_changed_nothing_has_no_gradient() -> None:
    assert told(step("skipped", metrics={"reward_mean": 1.0})) == ["started", "ended"]
    assert told(step("skipped")) == ["started", "failed"], "not one trajectory was whole"
    lost = {"trajectories": 3.0, "broken_trajectories": 3.0, "dropped_for_differs": 2.0, "dropped_for_too_long": 1.0}
    failed = step("skipped", metrics=lost | {"reward_mean": 1.0})
    assert told(failed) == ["started", "failed"]
    assert str(failed.error).endswith("3 of 3 trajectories could not be trained: differs 2, too_long 1")
    assert told(step("skipped", metrics=lost | {"trajectories": 4.0})) == ["started", "ended"]


def test_a_step_that_fails_says_why() -> None:
    failed = step("failed", problem=Problem(kind="invalid_input", message="groups.jsonl:1: too long"))
    assert failed.events()[-1].data == {"error_message": "groups.jsonl:1: too long"}
    lost = JobStep("rl-1.3", None, "the run was cancelled")
    assert (told(lost), lost.status) == (["started", "failed"], "failed")
