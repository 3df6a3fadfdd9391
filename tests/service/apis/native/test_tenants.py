"""Keys, tenants and their runs over real HTTP, on SQLite and on PostgreSQL."""

import re
import time
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import select

from service.database.engine import KeyRow, open_database
from shared.settings import DownloadSettings, Settings
from tests.files_below import files_below
from tests.service.conftest import Service, new_key, reaches, serving, started
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def settings(temporal_address: str, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("tenants")
    return Settings(
        root=root,
        temporal_address=temporal_address,
        control_queue=f"control-{root.name}-{time.time_ns()}",
        download=DownloadSettings(file_roots=(root.parent,)),
        database_url=database_url,
    )


# Keys.


def test_a_key_is_shown_once_and_kept_as_a_hash(service: Service, api, theirs) -> None:
    made = new_key(theirs, title="laptop")
    assert re.fullmatch(r"ls-[0-9a-f]{12}-[\w-]{43}", made["key"]) and made["key"].startswith(made["prefix"])
    with service.http(made["key"]) as client:
        assert client.get("/whoami").json() == {
            "tenant": "acme",
            "key_id": made["key_id"],
            "title": "laptop",
            "scopes": client.get("/whoami").json()["scopes"],
        }
        assert set(client.get("/whoami").json()["scopes"]) == {"read", "write", "inference"}
    listed = theirs.get("/keys")
    shown = {key["key_id"]: key for key in listed.json()}[made["key_id"]]
    assert made["key"] not in listed.text and "sha256" not in listed.text
    assert shown["last_used_at"] == pytest.approx(time.time(), abs=30)
    assert made["key_id"] not in api.get("/keys").text  # the first tenant's admin sees its own
    secret = made["key"].rpartition("-")[2].encode()
    assert secret not in b"".join(data for _, data in files_below(service.settings.root_path))
    with closing(open_database(service.settings)) as database:
        kept = database.write(lambda session: str(session.execute(select(KeyRow.__table__)).all()))
    assert secret.decode() not in kept and made["key_id"] in kept
    assert theirs.post("/keys", json={"expires_at": 1}).json()["error"]["place"] == "expires_at"
    assert theirs.post("/keys", json={"scopes": []}).json()["error"]["place"] == "scopes"


# Runs.


def test_pause_resume_cancel_and_retry(theirs) -> None:
    run_id = started(theirs, seed=WAITS)
    assert [theirs.post(f"/runs/{run_id}/{act}").status_code for act in ("retry", "resume")] == [409, 409]
    assert theirs.post(f"/runs/{run_id}/pause").status_code == 202
    assert reaches(theirs, run_id, "paused")["step"] == 2
    refused = theirs.post(f"/runs/{run_id}/pause")
    assert refused.status_code == 409 and "was paused" in refused.json()["error"]["message"]
    assert theirs.post(f"/runs/{run_id}/retry").status_code == 409
    assert theirs.post(f"/runs/{run_id}/resume").json()["state"] in ("running", "succeeded")
    reaches(theirs, run_id, "succeeded")
    assert theirs.post(f"/runs/{run_id}/resume").status_code == 409

    given_up = started(theirs, seed=WAITS)
    theirs.post(f"/runs/{given_up}/pause")
    reaches(theirs, given_up, "paused")
    assert theirs.post(f"/runs/{given_up}/cancel").json()["state"] == "cancelled"
    assert theirs.post(f"/runs/{given_up}/cancel").status_code == 409
    assert theirs.post(f"/runs/{given_up}/resume").status_code == 202, "it can be gone on with as any cancelled run"
    reaches(theirs, given_up, "succeeded")

    failed = started(theirs, seed=FAILS, name="harbour")
    reaches(theirs, failed, "failed")
    again = theirs.post(f"/runs/{failed}/retry")
    assert again.status_code == 201
    assert again.json()["run_id"] != failed and again.json()["run"]["name"] == "harbour"
    reaches(theirs, again.json()["run_id"], "failed")


def test_the_list_follows_without_anybody_asking(theirs) -> None:
    """Nobody looks at the run itself: its workflow records it."""
    run_id = started(theirs, seed=WAITS)

    def listed(**query: str) -> list[dict[str, Any]]:
        return [run for run in theirs.get("/runs", params=query).json()["runs"] if run["run_id"] == run_id]

    wait_until(lambda: [run for run in listed() if run["phase"] == "training"], "the row shows the phase")
    assert listed(state="running") and not listed(state="cancelled")
    theirs.post(f"/runs/{run_id}/cancel")
    wait_until(lambda: listed(state="cancelled"), "the row shows the end")
    assert not listed(state="running")


def test_two_services_share_a_database_and_a_run_ends_once(service: Service, theirs, acme: str) -> None:
    with serving(service.settings) as second, second.http(acme) as other:
        run_id = started(other, seed=SUCCEEDS)
        assert theirs.get(f"/runs/{run_id}").status_code == 200
        key = new_key(theirs)
        with second.http(key["key"]) as client:
            assert client.get("/whoami").status_code == 200
            theirs.delete(f"/keys/{key['key_id']}")
            wait_until(lambda: client.get("/whoami").status_code == 401, "the other service notices")
        reaches(theirs, run_id, "succeeded")
        assert other.get(f"/runs/{run_id}").json()["state"] == "succeeded"
