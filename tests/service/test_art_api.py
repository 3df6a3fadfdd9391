"""What ART's client asks of the service, with stand-in workflows; and the keys that the installed versions send."""

import ast
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from service.apis.art.job_request import ExperimentalConfig, RlRequest, SftConfig, rl_run, sft_run, split
from shared.chat.trajectories import ChatTrajectory, SentGroup
from shared.errors import InvalidInput
from tests.art_clients import VERSIONS, client_of
from tests.service.art_bodies import CHOICE, QUESTION, group, model
from tests.service.conftest import KEY, Service, started
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS
from tests.waiting import wait_until


def preview(service: Service, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"{service.url}/v1/preview", headers=headers, timeout=300, trust_env=False)


@pytest.fixture
def art(service: Service) -> Iterator[httpx.Client]:
    with preview(service, KEY) as client:
        yield client


@pytest.fixture
def their_art(service: Service, acme: str) -> Iterator[httpx.Client]:
    with preview(service, acme) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def base_model(tiny_model: Path) -> None:
    """A registered model's base has to be there."""
    FIELDS["base_model"] = tiny_model.as_uri()


FIELDS = {"project": "harbour"}


def register(art: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return art.post("/models", json={**FIELDS, "name": name, **fields})


def sft_job(art: httpx.Client, model_id: str, **fields: Any) -> httpx.Response:
    body = {"model_id": model_id, "training_data_url": "https://example.com/a.jsonl", **fields}
    return art.post("/sft-training-jobs", json=body)


def ended(art: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    def look() -> list[dict[str, Any]] | None:
        events = art.get(f"/training-jobs/{job_id}/events").json()["data"]
        return events if events and events[-1]["type"] in ("training_ended", "training_failed") else None

    return wait_until(look, f"{job_id} ends", timeout_s=300)


def test_a_name_has_one_model(art: httpx.Client, tiny_model: Path) -> None:
    other = Path(shutil.copytree(tiny_model, tiny_model.with_name("another")))
    first = register(art, "one", longshore={"rank": 4}).json()
    assert (first["entity"], first["longshore"]["rank"]) == ("default", 4)
    assert register(art, "one", return_existing=True).json() == first == art.get(f"/models/{first['id']}").json()
    assert register(art, "one", return_existing=True, base_model=f"{tiny_model}/").json() == first, "its path"
    assert register(art, "one").status_code == 409
    assert register(art, "one", return_existing=True, base_model=other.as_uri()).status_code == 409
    assert register(art, "one", return_existing=True, longshore={"rank": 8}).status_code == 409
    second = register(art, "two").json()
    page = art.get("/models", params={"limit": 1}).json()
    assert page["has_more"] and page["data"] == [first]
    assert art.get("/models", params={"after": first["id"]}).json()["data"] == [second]
    assert art.delete(f"/models/{first['id']}").status_code == 204
    assert art.get(f"/models/{first['id']}").status_code == 404
    assert register(art, "one", return_existing=True).json()["id"] != first["id"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": "a/b"}, "name"),
        ({"base_model": ""}, "base_model"),
        ({"base_model": "gpt-4o-mini"}, "base_model"),
        ({"base_model": "http://host/model"}, "base_model"),
        ({"base_model": "file:///nowhere"}, "base_model"),
        ({"base_model": "no/such-model"}, "base_model"),
        ({"colour": "red"}, "colour"),
        ({"longshore": {"rank": 0}}, "longshore.rank"),
        ({"longshore": {"group_size": 4}}, "longshore.group_size"),
    ],
)
def test_a_wrong_model_is_refused(art: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = art.post("/models", json={**FIELDS, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_uris_lead_into_no_other_tenants_folder(service: Service, art: httpx.Client, their_art: httpx.Client) -> None:
    theirs = f"{service.store.uri}/tenants/acme/uploads/a.jsonl"
    assert register(art, "thief", base_model=theirs).status_code == 400
    answer = sft_job(art, register(art, "reader").json()["id"], training_data_url=theirs)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dataset.uri")


def test_a_job_succeeds_and_fails(art: httpx.Client) -> None:
    done = sft_job(art, register(art, "done", longshore={"seed": SUCCEEDS}).json()["id"]).json()
    assert [event["type"] for event in ended(art, done["id"])] == ["training_started", "training_ended"]
    assert art.get(f"/training-jobs/{done['id']}").json()["status"] == "succeeded"
    lost = sft_job(art, register(art, "lost", longshore={"seed": FAILS}).json()["id"]).json()
    last = ended(art, lost["id"])[-1]
    assert (last["type"], last["data"]) == ("training_failed", {"error_message": "train.jsonl:3: no assistant turn"})
    behind = art.get(f"/training-jobs/{lost['id']}/events", params={"after": last["id"]}).json()
    assert (behind["data"], behind["has_more"]) == ([], False)
    nowhere = art.get(f"/training-jobs/{lost['id']}/events", params={"after": "elsewhere"})
    assert (nowhere.status_code, nowhere.json()["error"]["param"]) == (400, "after")


def test_a_model_does_one_job_at_a_time(art: httpx.Client, api: httpx.Client) -> None:
    model = register(art, "busy", longshore={"seed": WAITS}).json()
    first = sft_job(art, model["id"]).json()
    assert sft_job(art, model["id"]).status_code == 409
    assert art.delete(f"/models/{model['id']}").status_code == 204
    wait_until(lambda: api.get(f"/runs/{first['id']}").json()["state"] == "cancelled", "its job is cancelled")
    assert ended(art, first["id"])[-1]["data"] == {"error_message": "the run was cancelled"}


@pytest.mark.parametrize("body", ["", "[]", '{"model_id": "m"}', '{"trajectory_groups": [{"trajectories": []}]}'])
def test_what_are_no_groups_is_refused(art: httpx.Client, body: str) -> None:
    answer = art.post("/training-jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_run_of_another_api_is_no_job(art: httpx.Client, api: httpx.Client) -> None:
    assert art.get(f"/training-jobs/{started(api)}/events").status_code == 404


def test_names_are_each_tenant_s_own(art: httpx.Client, their_art: httpx.Client, service: Service) -> None:
    """That ids of another tenant's are as good as nobody's: tests/security/test_tenants_apart.py."""
    mine = register(art, "mine").json()
    asked = {"model": "wandb-artifact:///default/harbour/mine", "messages": [{"role": "user", "content": "Who?"}]}
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=asked, headers=their_art.headers, trust_env=False)
    assert answer.status_code == 404
    assert register(their_art, "mine").json()["id"] != mine["id"]


def test_a_job_s_run_names_its_model_as_every_run_does(art: httpx.Client, service: Service, tiny_model: Path) -> None:
    model = register(art, "by-its-path", base_model=f"{tiny_model}/").json()
    assert model["base_model"] == f"{tiny_model}/", "the client's own word"
    job = sft_job(art, model["id"]).json()
    with service.http() as api:
        assert api.get(f"/runs/{job['run_id']}").json()["run"]["model"] == tiny_model.as_uri()


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
