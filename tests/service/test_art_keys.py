"""The keys of ART's clients' requests, held against the versions that are installed, and what newer ones capture."""

import ast
import io
import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from service.apis.art.job_request import ExperimentalConfig, RlRequest, SftConfig, rl_run, sft_run
from service.apis.art.sent_groups import split
from shared.chat.trajectories import ChatTrajectory, SentGroup
from shared.errors import InvalidInput
from tests.art_clients import VERSIONS, client_of
from tests.service.art_bodies import CHOICE, QUESTION, group, model

CHATS = "exchanges.chat_completions"


def annotations(version: str, module: str, name: str) -> set[str]:
    """The annotated names of a class in the client's source, which may be of a newer Python than this one."""
    text = (client_of(version) / "art" / module).read_text()
    found = re.search(rf"^class {name}\(.*?\n(?=\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return set(re.findall(r"^    ([a-z]\w*): ", found[0], re.MULTILINE))


def defaults(version: str) -> dict[str, Any]:
    """The keyword arguments of the backend's `train`, with their defaults."""
    tree = ast.parse((client_of(version) / "art" / "serverless" / "backend.py").read_text())
    [train] = [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) and node.name == "train"]
    pairs = zip(train.args.kwonlyargs, train.args.kw_defaults, strict=True)
    return {argument.arg: ast.literal_eval(value) for argument, value in pairs if value is not None}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_key_of_an_installed_client_is_known_and_taken_at_its_default(version: str) -> None:
    """A new release's keys fail here first: each is to be honoured, or refused by its value."""
    rl = annotations(version, "serverless/client.py", "ExperimentalTrainingConfig")
    sft = annotations(version, "serverless/client.py", "SFTTrainingConfig")
    assert len(rl) >= 11 and rl <= ExperimentalConfig.model_fields.keys()
    assert len(sft) >= 2 and sft <= SftConfig.model_fields.keys()
    by_default = {key: value for key, value in defaults(version).items() if key in rl}
    assert by_default.keys() >= rl - {"kl_penalty_source"}
    clerk = model()
    for config in (by_default, dict.fromkeys(rl)):
        assert rl_run(clerk, ExperimentalConfig(**config), None) == rl_run(clerk, ExperimentalConfig(), None)
    assert SftConfig(**dict.fromkeys(sft - {"assistant_turns"})) == SftConfig()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_of_an_installed_clients_trajectories_is_known(version: str) -> None:
    module = "trajectories.py" if version == "0.5.18" else "trajectories/__init__.py"
    ours = {*ChatTrajectory.model_fields, "messages_and_choices", "initial_policy_version"}
    never_sent = {"start_time"}
    assert annotations(version, module, "Trajectory") - never_sent - {"exchanges"} <= ours
    assert annotations(version, module, "TrajectoryGroup") - never_sent <= SentGroup.model_fields.keys()


# As 0.5.23 sends it: by default, and with a value that means something here.
NEWER = {
    "loss_fn": "cispo",
    "normalize_advantages": True,
    "kl_penalty_coef": 0.0,
    "kl_penalty_reference_step": None,
    "kl_penalty_source": "current_learner",
    "kl_penalty_step_lag": None,
    "kl_ref_adapter_path": None,
    "allow_training_without_logprobs": False,
    "plot_tensors": False,
    "truncated_importance_sampling": None,
    "scale_learning_rate_by_reward_std_dev": False,
    "logprob_calculation_chunk_size": 1024,
    "num_trajectories_learning_rate_multiplier_power": 0.0,
    "packed_sequence_length": None,
}


def test_keys_are_honoured_by_their_value() -> None:
    clerk = model()
    plain = rl_run(clerk, ExperimentalConfig(), None)
    for same in ({}, {"kl_ref_adapter_path": "/adapters/a", "kl_penalty_step_lag": 3}, {"of_tomorrow": False}):
        assert rl_run(clerk, ExperimentalConfig(**NEWER | same), None) == plain
    for key in ("normalize_advantages", "scale_rewards"):
        assert rl_run(model(), ExperimentalConfig(**NEWER | {key: False}), None).advantages == "group_mean"
    packed = ExperimentalConfig(**NEWER | {"packed_sequence_length": 4096})
    for max_tokens, sizes in ((None, (4096, 4096)), (512, (512, 4096))):
        run = rl_run(model(max_tokens=max_tokens), packed, None)
        assert (run.max_tokens, run.bin_tokens) == sizes
    last = sft_run(clerk, "https://example.com/a.jsonl", SftConfig(assistant_turns="last"), None)
    assert last.dataset.assistant_turns == "last"
    logged = {"metric_logging": {"enabled": True, "target_training_step": 4}, "assistant_turns": "all"}
    assert sft_run(clerk, "https://example.com/a.jsonl", SftConfig(**logged), None) == sft_run(
        clerk, "https://example.com/a.jsonl", SftConfig(), None
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kimi_k2_tau", 0.1),
        ("mask_prob_ratio", True),
        ("advantage_balance", -0.5),
        ("kl_penalty_coef", 0.1),
        ("allow_training_without_logprobs", True),
        ("plot_tensors", True),
        ("num_trajectories_learning_rate_multiplier_power", 0.5),
        ("scale_learning_rate_by_reward_std_dev", True),
        ("logprob_calculation_chunk_size", 0),
        ("packed_sequence_length", 1),
        ("loss_fn", "dro"),
        ("of_tomorrow", 1),
        ("of_tomorrow", "on"),
    ],
)
def test_what_is_not_done_is_refused_by_its_key(key: str, value: Any) -> None:
    sent = {"model_id": "model-0123456789abcdef0", "experimental_config": NEWER | {key: value}}
    with pytest.raises(ValidationError) as refusal:
        RlRequest.model_validate(sent)
    assert [error["loc"] for error in refusal.value.errors()] == [("experimental_config", key)]


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(ValidationError, match="loss_fn"):
        ExperimentalConfig(loss_fn="ppo", ppo=False)
    with pytest.raises(ValidationError, match="assistant_turns"):
        SftConfig.model_validate({"assistant_turns": "first"})


def test_a_list_of_rates_is_a_step_for_each() -> None:
    run = sft_run(model(), "https://example.com/a.jsonl", SftConfig(learning_rate=(0.01, 0.02, 0.0)), None)
    assert (run.steps, run.epochs, run.learning_rate, run.learning_rates) == (3, None, 0.02, (0.01, 0.02, 0.0))
    for wrong in ((), (0.0,), (-0.1, 0.1), (float("nan"),)):
        with pytest.raises(InvalidInput) as refusal:
            sft_run(model(), "https://example.com/a.jsonl", SftConfig(learning_rate=wrong), None)
        assert refusal.value.place == "config.learning_rate", wrong


# What newer clients capture, in place of messages.


def exchange(model: str, completion_id: str, *messages: dict[str, Any], **choice: Any) -> dict[str, Any]:
    said = CHOICE | {"message": {"role": "assistant", "content": "12."}} | choice
    return {
        "request": {"model": model, "messages": [QUESTION, *messages], "temperature": 1.0},
        "response": {"id": completion_id, "object": "chat.completion", "choices": [said]},
        "start_time": "2026-11-25T02:00:00Z",
        "model": model,
    }


def test_captured_answers_of_ours_are_conversations() -> None:
    mine = "wandb-artifact:///dock/Harbour/Quay Clerk:step2"
    captured = {
        "chat_completions": [
            exchange(mine, "chatcmpl-1"),
            exchange("gpt-6", "chatcmpl-of-another-server"),
            exchange("quay-clerk", "chatcmpl-0", {"role": "user", "content": "Sure?"}, answer_id="chatcmpl-2"),
        ],
        "messages": [{"request": {"model": "a-judge"}, "response": {}}],
    }
    lines = io.BytesIO()
    sent = {"exchanges": captured, "initial_policy_version": 2}  # a reward of 0 is not sent
    split(json.dumps({"trajectory_groups": [{"trajectories": [sent, sent]}]}).encode(), lines)
    [trajectory, _] = SentGroup.model_validate_json(lines.getvalue()).trajectories
    assert isinstance(trajectory, ChatTrajectory)
    assert trajectory.own_answers and (trajectory.model_version, trajectory.reward) == (2, 0.0)
    assert [history.messages[-1]["answer_id"] for history in trajectory.histories] == ["chatcmpl-1", "chatcmpl-2"]
    assert [len(history.messages) for history in trajectory.histories] == [2, 3]


@pytest.mark.parametrize(
    ("captured", "place"),
    [
        ({"chat_completions": [exchange("gpt-6", "chatcmpl-0")]}, CHATS),
        ({"completions": [{"request": {"model": "dock/Harbour/clerk"}}]}, "exchanges.completions"),
        (
            {"chat_completions": [{"request": {}, "response": {"choices": []}}]},
            "exchanges.chat_completions.0.request.messages",
        ),
        ([1], "exchanges"),
    ],
)
def test_captures_without_an_answer_to_train_are_refused(captured: Any, place: str) -> None:
    document = {"trajectory_groups": [{"trajectories": [{"exchanges": captured, "reward": 1.0}]}]}
    with pytest.raises(InvalidInput) as refusal:
        split(json.dumps(document).encode(), io.BytesIO())
    assert refusal.value.place == f"trajectory_groups.0.trajectories.0.{place}"


def test_empty_captures_change_nothing() -> None:
    kept = group()
    kept["trajectories"][0]["exchanges"] = {}
    lines = io.BytesIO()
    split(json.dumps({"trajectory_groups": [kept]}).encode(), lines)
    [trajectory] = SentGroup.model_validate_json(lines.getvalue()).trajectories
    assert isinstance(trajectory, ChatTrajectory) and not trajectory.own_answers
