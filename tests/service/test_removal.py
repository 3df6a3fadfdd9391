"""Runs that are removed, and collections of garbage, over real HTTP: what is gone, what stays, and who may."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import delete, select

from service.database.engine import UseRow, open_database
from service.host import note_uses
from service.runs.rows import Uses
from service.temporal import connect_temporal
from shared.limits import RetentionSettings
from shared.settings import Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import RunKeys, published_version, tokenized, version_claim
from shared.storage.stored_bytes import UseRequest
from tests.service.conftest import Service, ended, polling, serving, settings_below, sft, submitted
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def settings(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Whatever has ended may go."""
    settings = settings_below(tmp_path_factory.mktemp("service"), temporal_address)
    policy = RetentionSettings(checkpoints_days=0, checkpoints_kept=0, logs_days=0, data_days=0)
    return settings.model_copy(update={"retention": policy})


def _put_checkpoint(service: Service, run_id: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(b"w" * 1000)
    seal(folder)
    key = f"{RunKeys(run_id).checkpoints}/e000001-a01/step-00000004"
    upload_artifact(service.store, key, folder)
    return key


def _left(service: Service, run_id: str) -> list[str]:
    return [info.key for info in service.store.list(f"{RunKeys(run_id).prefix}/")]


def test_a_removed_run_is_gone_from_lists_and_from_the_store(api, service: Service, tmp_path: Path) -> None:
    headers = {"idempotency-key": "once"}
    run_id = api.post("/runs/sft", json=sft(seed=SUCCEEDS), headers=headers).json()["run_id"]
    ended(api, run_id)
    before = api.get("/usage").json()["stored_bytes"]
    _put_checkpoint(service, run_id, tmp_path / "made")
    gone = api.delete(f"/runs/{run_id}")
    assert gone.status_code == 200, gone.text
    assert (gone.json()["stays_published"], gone.json()["num_bytes"] > 1000) == (False, True)
    assert _left(service, run_id) == []
    assert api.get("/usage").json()["stored_bytes"] < before
    service.rebuild()
    assert [api.request(method, f"/runs/{run_id}").status_code for method in ("GET", "DELETE")] == [404, 404]
    assert run_id not in api.get("/runs").text
    again = api.post("/runs/sft", json=sft(seed=SUCCEEDS), headers=headers)
    assert again.status_code == 409 and "was removed" in again.text


def test_the_hours_of_a_removed_run_still_count(api, service: Service) -> None:
    run_id = submitted(api, seed=SUCCEEDS).run_id
    ended(api, run_id)
    keys, before = RunKeys(run_id), api.get("/usage").json()["gpu_hours"]
    result = json.loads(service.store.get_bytes(keys.result)) | {"gpu_seconds": 7200.0, "ended_at": 4e9}
    service.store.put_bytes(keys.result, json.dumps(result).encode())
    service.rebuild()
    assert api.get("/usage").json()["gpu_hours"] == before + 2
    assert api.delete(f"/runs/{run_id}").status_code == 200
    assert api.get("/usage").json()["gpu_hours"] == before + 2
    service.rebuild()
    assert api.get("/usage").json()["gpu_hours"] == before + 2


def test_what_it_published_stays_and_its_record(api, service: Service, tmp_path: Path) -> None:
    run_id = submitted(api, seed=SUCCEEDS, name="harbour").run_id
    ended(api, run_id)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x").write_text("weights")
    seal(tmp_path / "made")
    version = published_version("default", "adapters", "harbour", 1)
    service.store.put_bytes(version_claim("default", "adapters", "harbour", 1), json.dumps({"run_id": run_id}).encode())
    upload_artifact(service.store, version, tmp_path / "made")
    job = f"{RunKeys(run_id).logs}/000001/e000001-a01/job.json"
    service.store.put_bytes(job, b'{"plan":{}}')
    _put_checkpoint(service, run_id, tmp_path / "checkpoint")
    assert api.delete(f"/runs/{run_id}").json()["stays_published"]
    assert sorted(_left(service, run_id)) == sorted([RunKeys(run_id).record, RunKeys(run_id).result, job])
    assert api.get("/models/harbour").json()["run_id"] == run_id
    assert api.get(f"/runs/{run_id}").status_code == 404
    service.rebuild()
    assert run_id not in api.get("/runs").text


def test_what_is_needed_is_not_removed(api, service: Service) -> None:
    running = submitted(api, seed=WAITS).run_id
    refused = api.delete(f"/runs/{running}")
    assert refused.status_code == 409 and "cancel it" in refused.text
    source = submitted(api, seed=SUCCEEDS).run_id
    ended(api, source)
    service.note_use(RunKeys(source).prefix, running)
    refused = api.delete(f"/runs/{source}")
    assert refused.status_code == 409 and running in refused.text
    api.post(f"/runs/{running}/cancel")
    ended(api, running)
    assert api.delete(f"/runs/{source}").status_code == 200


def test_a_run_whose_state_a_policy_deleted_is_not_resumed_afresh(api, service: Service, tmp_path: Path) -> None:
    run_id = submitted(api, seed=FAILS).run_id
    ended(api, run_id)
    key = _put_checkpoint(service, run_id, tmp_path / "made")
    live = submitted(api, seed=WAITS).run_id
    kept = _put_checkpoint(service, live, tmp_path / "made")
    dry = api.post("/gc").json()
    assert dry["state"] == "done" and dry["report"]["is_dry"], dry
    assert service.store.head(f"{key}/weights") is not None
    report = api.post("/gc", params={"dry_run": False}).json()["report"]
    assert [row["what"] for row in report["freed"]] == [row["what"] for row in dry["report"]["freed"]]
    assert service.store.head(f"{key}/weights") is None and service.store.head(f"{kept}/weights") is not None
    refused = api.post(f"/runs/{run_id}/resume")
    assert refused.status_code == 409 and "deleted" in refused.text
    api.post(f"/runs/{live}/cancel")


def test_the_bytes_of_runs_are_shown_and_count(api, service: Service, cli, tmp_path: Path) -> None:
    run_id = submitted(api, seed=WAITS).run_id
    assert api.post("/gc", params={"dry_run": False}).json()["report"]
    before = api.get("/usage").json()
    key = _put_checkpoint(service, run_id, tmp_path / "made")
    size = sum(info.size for info in service.store.list(key))
    assert api.post("/gc", params={"dry_run": False}).json()["report"]
    after = api.get("/usage").json()
    assert after["measured"]["num_bytes"]["checkpoints"] >= size
    assert after["stored_bytes"] - before["stored_bytes"] >= size
    assert "of it checkpoints of runs" in cli("usage").stdout
    shown = cli("gc", "--dry-run")
    assert shown.code == 0 and "stores, beside its files" in shown.stdout
    api.post(f"/runs/{run_id}/cancel")
    ended(api, run_id)
    removed = cli("rm", run_id)
    assert (removed.code, "is removed" in removed.stderr) == (0, True), removed


async def test_what_a_host_uses_is_not_deleted_also_by_a_restored_database(service: Service) -> None:
    """It waits for a deletion that is going on; and Temporal remembers what the database has forgotten."""
    client = await connect_temporal(service.settings)
    note, request = note_uses(client, service.settings), UseRequest(unit=tokenized("0" * 32), run_id="sft-other")
    database = open_database(service.settings)
    users = select(UseRow.run_id).where(UseRow.unit == request.unit)

    def used() -> list[str]:
        return list(database.read(lambda session: session.scalars(users).all()))

    def claim() -> None:
        with Uses(database).claiming(request.unit) as (claim,):
            assert claim is not None and not claim.users
            noting = threads.submit(note, request)
            with pytest.raises(TimeoutError):
                noting.result(2)
            assert used() == []
        noting.result(60)

    with ThreadPoolExecutor(2) as threads:
        await asyncio.wrap_future(threads.submit(claim))
    assert used() == [request.run_id]
    database.write(lambda session: session.execute(delete(UseRow)))
    with serving(service.settings):
        await asyncio.to_thread(wait_until, lambda: used() == [request.run_id], "the use is known again")
    database.close()


def test_it_is_done_by_itself(temporal_address: str, tmp_path: Path) -> None:
    settings = settings_below(tmp_path / "service", temporal_address)
    settings = settings.model_copy(update={"retention": RetentionSettings(every_s=0.01)})
    with serving(settings) as service, polling(settings), service.http() as api:
        run_id = submitted(api, seed=WAITS).run_id
        wait_until(lambda: api.get("/usage").json()["measured"]["num_bytes"], "it was measured")
        api.post(f"/runs/{run_id}/cancel")
