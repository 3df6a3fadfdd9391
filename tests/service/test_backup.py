"""The service's database and the store are saved and lost, and restored as docs/backup.md says."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from shared.settings import Settings
from tests.service.conftest import key_of_acme, polling, reaches, serving, settings_below, sft, started
from tests.service.postgres import dumped, restored
from tests.service.stand_in import SUCCEEDS, WAITS
from tests.waiting import wait_until

CONTENT = b'{"text": "a"}\n'
WEBHOOK = {"url": "https://example.org/hook", "events": ["run.failed"]}


@pytest.fixture(scope="module")
def settings(temporal_address: str, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = settings_below(tmp_path_factory.mktemp("backup"), temporal_address)
    return settings.model_copy(update={"database_url": SecretStr(database_url)})


def save(settings: Settings, to: Path) -> Callable[[], None]:
    """Save the database beside a running service. Returns what restores it."""
    assert settings.database_url is not None
    url = settings.database_url.get_secret_value()
    if url.startswith("sqlite"):
        file = Path(url.removeprefix("sqlite:///"))
        with closing(sqlite3.connect(file)) as live, closing(sqlite3.connect(to)) as copy:
            live.backup(copy)

        def restore() -> None:
            for each in file.parent.glob(f"{file.name}*"):
                each.unlink()
            shutil.copyfile(to, file)

        return restore
    dumped(url, to)
    server, _, name = url.rpartition("/")
    return lambda: restored(server, name, to)


def everything(api: httpx.Client) -> dict[str, Any]:
    keys = [{**key, "last_used_at": None} for key in api.get("/keys").json()]
    runs = [(run["run_id"], run["state"]) for run in api.get("/runs").json()["runs"]]
    paths = ("/whoami", "/files", "/webhooks", "/schedules", "/sweeps")
    return {"keys": keys, "runs": runs} | {path: api.get(path).json() for path in paths}


def test_both_are_saved_lost_and_restored(settings: Settings, tmp_path: Path) -> None:
    store = settings.root_path / "store"
    with polling(settings):
        with serving(settings) as service, service.http(key := key_of_acme(service)) as api:
            once = {"idempotency-key": "once"}
            first = api.post("/runs/sft", json=sft(seed=SUCCEEDS), headers=once).json()["run_id"]
            file = api.post("/files", params={"name": "kept.jsonl"}, content=CONTENT).json()
            gone = api.post("/files", params={"name": "gone.jsonl"}, content=CONTENT * 2).json()
            assert api.post("/webhooks", json=WEBHOOK).status_code == 201
            reaches(api, first, "succeeded")
            before = everything(api)
            restore = save(settings, tmp_path / "database")  # the database first
            shutil.copytree(store, tmp_path / "store")
            # What is newer than the backup.
            newer_run = started(api, seed=WAITS)
            newer = api.post("/files", params={"name": "newer.jsonl"}, content=CONTENT * 3).json()
            assert api.delete(f"/files/{gone['file_id']}").status_code == 200
            api.post(f"/runs/{newer_run}/cancel")
            reaches(api, newer_run, "cancelled")

        # An older database beside a store that went on.
        restore()
        with serving(settings) as service, service.http(key) as api:
            # A newer run that has ended is not listed; one that goes on would be, at its next change.
            found = wait_until(lambda: _with_runs(api, {first}), "the backup's run is listed")
            assert {name: found[name] for name in found if name != "runs"} == {
                name: before[name] for name in before if name != "runs"
            }
            assert api.get(f"/files/{newer['file_id']}").status_code == 404
            again = api.post("/files", params={"name": "newer.jsonl"}, content=CONTENT * 3).json()
            assert again["file_id"] == newer["file_id"]
            assert api.get(f"/files/{file['file_id']}/content").content == CONTENT
            again = api.post("/files", params={"name": "gone.jsonl"}, content=CONTENT * 2).json()
            assert again["file_id"] == gone["file_id"]
            assert api.get(f"/files/{gone['file_id']}/content").content == CONTENT * 2, "its bytes were put again"

        # Both are lost.
        shutil.rmtree(store)
        restore()
        shutil.copytree(tmp_path / "store", store)
        with serving(settings) as service, service.http(key) as api:
            wait_until(lambda: _with_runs(api, {first}), "the run is listed")
            assert everything(api) == before
            for each, content in ((file, CONTENT), (gone, CONTENT * 2)):
                assert api.get(f"/files/{each['file_id']}/content").content == content
            assert api.post("/runs/sft", json=sft(seed=SUCCEEDS), headers=once).json()["run_id"] == first
            reaches(api, started(api, seed=SUCCEEDS), "succeeded")


def _with_runs(api: httpx.Client, wanted: set[str]) -> dict[str, Any] | None:
    found = everything(api)
    return found if {run_id for run_id, _ in found["runs"]} == wanted else None
