"""The native API over real HTTP, with a real Temporal server behind it: runs from request to end, and uploads."""

import time
from pathlib import Path

import pytest

from shared.runs.dataset_runs import DPORun, SFTRun
from shared.runs.requests import RunRecord
from shared.storage.paths import RunKeys, run_index
from tests.service.conftest import Service, ended, sft, submitted
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS


def test_a_run_is_accepted_runs_and_succeeds(api, service: Service) -> None:
    view = submitted(api, seed=SUCCEEDS, name="harbour")
    assert view.run_id.startswith("sft-")
    assert view.run.name == "harbour"
    done = ended(api, view.run_id)
    assert (done.state, done.step, done.metrics) == ("succeeded", 4, {"loss": 1.5})
    record = RunRecord.model_validate_json(service.store.get_bytes(RunKeys(view.run_id).record))
    assert record.run == SFTRun.model_validate(sft(seed=SUCCEEDS, name="harbour", dtype="float32"))
    assert record.threads_per_rank == service.settings.cpu_threads


def test_a_preference_run_is_accepted_with_its_kind(api) -> None:
    body = sft(seed=SUCCEEDS, dtype="float32", beta=0.3, reference="file:///adapters/before")
    answer = api.post("/runs/dpo", json=body)
    assert answer.status_code == 201, answer.text
    done = ended(api, answer.json()["run_id"])
    assert done.run_id.startswith("dpo-") and done.state == "succeeded"
    assert done.run == DPORun.model_validate(body) and done.run.learning_rate == 1e-5
    for bad, place in (
        ({"beta": 0}, "beta"),
        ({"too_long": "truncate"}, "too_long"),
        ({"dataset": {"uri": "file:///d", "format": "chat"}}, "dataset"),
        ({"dataset": {"uri": "file:///d", "prompt_field": "p"}}, "dataset"),
    ):
        refused = api.post("/runs/dpo", json=body | bad)
        assert (refused.status_code, refused.json()["error"]["place"]) == (422, place)
    pairs = {"uri": "file:///d", "format": "openai_preference"}
    assert "which dpo learns from" in api.post("/runs/sft", json=sft(dataset=pairs)).json()["error"]["message"]


def test_a_failed_run_says_why(api) -> None:
    done = ended(api, submitted(api, seed=FAILS).run_id)
    assert done.state == "failed"
    assert done.problem is not None
    assert done.problem.message == "train.jsonl:3: no assistant turn"


def test_the_same_key_gives_the_same_run(api) -> None:
    headers = {"idempotency-key": "a key / with anything: in it"}
    first, second = (api.post("/runs/sft", json=sft(), headers=headers).json()["run_id"] for _ in range(2))
    assert first == second
    assert submitted(api).run_id != first


def test_a_key_is_not_taken_for_another_request(api) -> None:
    headers = {"idempotency-key": "once"}
    first = api.post("/runs/sft", json=sft(seed=0), headers=headers).json()["run_id"]
    answer = api.post("/runs/sft", json=sft(seed=1), headers=headers)
    assert answer.status_code == 422
    assert answer.json()["error"]["place"] == "Idempotency-Key"
    assert first in answer.json()["error"]["message"]


def test_an_rl_run_is_taken_whole_or_refused_with_field_and_rule(api) -> None:
    run = {"model": "org/tiny", "loss": {"kind": "ppo"}}
    for changes, place, word in (
        ({"loss": {"kind": "cross_entropy"}}, "loss", "cross_entropy"),
        ({"loss": {"kind": "ppo", "truncated_importance": 2.0}}, "loss", "would be ignored"),
        ({"advantages": "given", "equal_rewards": "keep"}, "", "has no meaning"),
        ({"bin_tokens": 16}, "", "must hold a trajectory"),
        ({"memory_budget_bytes": 1 << 30, "layout": {"pp": 2}}, "", "a pipeline holds all micro-batches of a step"),
        ({"dataset": {"uri": "file:///rows.jsonl"}}, "dataset", "no such field"),
        ({"algorithm": "gspo"}, "", "algorithm gspo has the loss gspo: a loss ppo leaves nothing of it"),
        ({"algorithm": "best"}, "algorithm", "'grpo'"),
    ):
        answer = api.post("/runs/rl", json=run | changes)
        assert answer.status_code == 422, changes
        error = answer.json()["error"]
        assert place in (error["place"] or ""), error
        assert word in error["message"], error


def test_an_algorithm_is_a_loss_and_advantages(api) -> None:
    view = api.post("/runs/rl", json={"model": "org/tiny", "algorithm": "dapo", "loss": {"clip_high": 0.3}}).json()
    run = view["run"]
    assert (run["algorithm"], run["advantages"]) == ("dapo", "group_normalized")
    assert (run["loss"]["kind"], run["loss"]["clip_low"], run["loss"]["clip_high"]) == ("ppo", 0.2, 0.3)


def test_only_rl_runs_take_train_steps(api) -> None:
    run_id = submitted(api, seed=WAITS).run_id
    step = {"key": "a", "groups": "file:///groups.jsonl"}
    for answer in (
        api.post(f"/runs/{run_id}/steps", json=step),
        api.get(f"/runs/{run_id}/steps/1"),
        api.post(f"/runs/{run_id}/finish"),
    ):
        assert answer.status_code == 409
        assert "is no RL run" in answer.json()["error"]["message"]
    assert api.post("/runs/nothing/steps", json=step).status_code == 404
    assert api.post(f"/runs/{run_id}/steps", json=step | {"key": ""}).status_code == 422


def test_cancel_and_resume(api) -> None:
    run_id = submitted(api, seed=WAITS).run_id
    assert api.post(f"/runs/{run_id}/resume").status_code == 409
    assert api.post(f"/runs/{run_id}/cancel").status_code == 202
    assert ended(api, run_id).state == "cancelled"
    refused = api.post(f"/runs/{run_id}/cancel")
    assert refused.status_code == 409
    assert "was cancelled" in refused.json()["error"]["message"]
    assert api.post(f"/runs/{run_id}/resume").status_code == 202
    assert ended(api, run_id).state == "succeeded"
    assert api.post(f"/runs/{run_id}/resume").status_code == 409


def test_runs_are_listed_newest_first_in_pages(api) -> None:
    mine = [submitted(api, seed=SUCCEEDS).run_id for _ in range(5)]
    mine = mine[::-1]
    first = api.get("/runs", params={"limit": 3}).json()
    assert [run["run_id"] for run in first["runs"]] == mine[:3]
    assert first["has_more"] and first["next"] == mine[2]
    second = api.get("/runs", params={"limit": 2, "after": first["next"]}).json()
    assert [run["run_id"] for run in second["runs"]] == mine[3:]


def test_runs_are_filtered_by_state(api) -> None:
    failed, waiting = submitted(api, seed=FAILS).run_id, submitted(api, seed=WAITS).run_id
    ended(api, failed)
    states = {
        state: {run["run_id"] for run in api.get("/runs", params={"state": state, "limit": 200}).json()["runs"]}
        for state in ("failed", "running")
    }
    assert failed in states["failed"] - states["running"]
    assert waiting in states["running"] - states["failed"]
    api.post(f"/runs/{waiting}/cancel")


def test_an_upload_is_stored_under_its_hash(api, service: Service) -> None:
    data = b'{"messages": []}\n' * 200_000
    chunks = (data[i : i + 65536] for i in range(0, len(data), 65536))
    first = api.post("/files", params={"name": "train.jsonl"}, content=chunks)
    assert first.status_code == 201
    uri = first.json()["uri"]
    assert Path(uri.removeprefix("file://")).read_bytes() == data
    assert api.post("/files", params={"name": "train.jsonl"}, content=data).json()["uri"] == uri
    assert list((service.settings.root_path / "service" / "uploads").iterdir()) == []


@pytest.mark.parametrize("name", ["../train.jsonl", "/etc/passwd", "", ".hidden", "a/b"])
def test_an_upload_needs_a_plain_name(api, name) -> None:
    answer = api.post("/files", params={"name": name}, content=b"x")
    assert answer.status_code == 422
    assert answer.json()["error"]["place"] == "name"


def test_an_empty_upload_is_refused(api) -> None:
    assert "empty" in api.post("/files", params={"name": "x"}, content=b"").json()["error"]["message"]


def test_what_was_accepted_is_started_by_the_sweep(service: Service) -> None:
    from tests.service.conftest import serving

    run_id = f"sft-{int(time.time() * 1000):011x}lost00"
    record = RunRecord(run_id=run_id, run=SFTRun.model_validate(sft(seed=SUCCEEDS)), created_at=time.time())
    service.store.put_bytes(RunKeys(run_id).record, record.model_dump_json().encode())
    service.store.put_bytes(run_index(run_id), b"")
    service.store.put_bytes(run_index("sft-0-half"), b"")  # the service died before its record
    with serving(service.settings) as another, another.http() as api:
        assert ended(api, run_id).state == "succeeded"
        assert "sft-0-half" not in api.get("/runs", params={"limit": 200}).text
