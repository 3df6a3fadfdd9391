"""Keys, tenants and their runs over real HTTP; the index, on SQLite and on PostgreSQL, is lost and built again."""

import re
import time
from typing import Any

import pytest

from service.database.engine import AuditRow, KeyRow, RunRow, Table, open_database
from service.rebuild import rebuild
from shared.settings import DownloadSettings, Settings
from shared.storage.paths import RunKeys, key_record
from tests.files_below import files_below
from tests.service.conftest import Service, longshore, new_key, reaches, serving, started
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
    kept = b"".join(data for _, data in files_below(service.settings.root_path))
    assert secret not in kept and made["key_id"].encode() in kept


def test_a_revoked_key_and_an_expired_one_are_strangers(service: Service, api, theirs) -> None:
    revoked, short = new_key(theirs), new_key(theirs, expires_at=time.time() + 6)
    with service.http(revoked["key"]) as one, service.http(short["key"]) as two:
        assert one.get("/runs").status_code == two.get("/runs").status_code == 200
        assert api.delete(f"/keys/{revoked['key_id']}").status_code == 404
        assert theirs.delete(f"/keys/{revoked['key_id']}").json()["revoked_at"] is not None
        assert one.get("/runs").status_code == 401
        assert one.get("/runs").json()["error"]["type"] == "unauthorized"
        wait_until(lambda: two.get("/runs").status_code == 401, "the key expires")
    assert theirs.delete(f"/keys/{revoked['key_id']}").status_code == 200
    assert theirs.post("/keys", json={"expires_at": 1}).json()["error"]["place"] == "expires_at"
    assert theirs.post("/keys", json={"scopes": []}).json()["error"]["place"] == "scopes"


# Runs.


def test_pause_resume_cancel_and_retry(theirs) -> None:
    run_id = started(theirs, seed=WAITS)
    assert theirs.post(f"/runs/{run_id}/retry").status_code == 409
    assert theirs.post(f"/runs/{run_id}/pause").status_code == 202
    assert reaches(theirs, run_id, "paused")["step"] == 2
    refused = theirs.post(f"/runs/{run_id}/pause")
    assert refused.status_code == 409 and "was paused" in refused.json()["error"]["message"]
    assert theirs.post(f"/runs/{run_id}/retry").status_code == 409
    assert theirs.post(f"/runs/{run_id}/resume").json()["state"] in ("running", "succeeded")
    reaches(theirs, run_id, "succeeded")

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
    """Nobody looks at the run itself: the watch moves its row."""
    run_id = started(theirs, seed=WAITS)

    def listed(**query: str) -> list[dict[str, Any]]:
        return [run for run in theirs.get("/runs", params=query).json()["runs"] if run["run_id"] == run_id]

    wait_until(lambda: [run for run in listed() if run["phase"] == "training"], "the row shows the phase")
    theirs.post(f"/runs/{run_id}/cancel")
    wait_until(lambda: listed(state="cancelled"), "the row shows the end")


# The database is lost.


def test_a_lost_database_is_built_again_from_the_store(service: Service, api, theirs, acme: str) -> None:
    ended, waiting = started(theirs, seed=SUCCEEDS, name="quay"), started(theirs, seed=WAITS)
    theirs.post("/files", params={"name": "kept.jsonl"}, content=b"kept\n")
    dead = new_key(theirs)
    theirs.delete(f"/keys/{dead['key_id']}")
    reaches(theirs, ended, "succeeded")

    def everything() -> dict[str, Any]:
        runs = theirs.get("/runs", params={"limit": 200}).json()["runs"]
        keys = [{**key, "last_used_at": None} for key in theirs.get("/keys").json()]
        return {
            "runs": runs,
            "keys": keys,
            "tenants": api.get("/tenants").json(),
            "files": theirs.get("/files").json(),
            "own": [run["run_id"] for run in api.get("/runs", params={"limit": 200}).json()["runs"]],
        }

    def steady() -> dict[str, Any] | None:
        found = everything()
        time.sleep(1.2)
        return found if found == everything() else None

    before = wait_until(steady, "nothing moves")
    environment = service.environment | {
        "LONGSHORE_ROOT": str(service.settings.root_path),
        "LONGSHORE_DATABASE_URL": service.settings.database_url.get_secret_value(),
        "LONGSHORE_API_URL": service.url,
    }
    database = open_database(service.settings)
    assert not rebuild(service.store, database, only_look=True).any
    for table in Table.metadata.sorted_tables:
        if table.name != AuditRow.__tablename__:
            database.write(lambda session, table=table: session.execute(table.delete()))
    lost = rebuild(service.store, database, only_look=True).missing
    assert lost["runs"] >= 1 and lost["keys"] >= 2 and lost["files"] >= 1  # the watch may have found what runs
    database.close()
    time.sleep(2.1)  # what a service knows of a key for so long
    with service.http(acme) as client:
        assert client.get("/runs").status_code == 401

    assert longshore("db", "check", env=environment).code == 100
    said = longshore("db", "rebuild", env=environment)
    assert said.code == 0 and "keys: " in said.stdout, said
    assert re.search(r"read from the store: .*\d+ keys.*\d+ runs", said.stderr), said
    wait_until(lambda: theirs.get(f"/runs/{waiting}").json()["phase"] == "training", "the watch sees the run")
    assert wait_until(steady, "nothing moves", 60) == before
    with service.http(dead["key"]) as client:
        assert client.get("/runs").status_code == 401
    theirs.post(f"/runs/{waiting}/cancel")


def test_what_a_record_says_wins_over_a_row(service: Service, theirs) -> None:
    run_id = started(theirs, seed=SUCCEEDS)
    reaches(theirs, run_id, "succeeded")
    made = new_key(theirs)
    database = open_database(service.settings)

    def spoil(session) -> None:
        session.get(RunRow, run_id).state = "failed"
        session.get(KeyRow, made["key_id"]).scopes = ["admin"]
        ghost = session.get(KeyRow, made["key_id"])
        copy = {c.name: getattr(ghost, c.name) for c in KeyRow.__table__.columns}
        session.add(KeyRow(**copy | {"key_id": "key-ghost", "sha256": "0" * 64, "created_at": 1.0}))

    database.write(spoil)
    service.rebuild()
    with service.http(made["key"]) as client:
        wait_until(lambda: client.get("/runs").status_code == 200, "the key has its scopes again")
    assert run_id in [run["run_id"] for run in theirs.get("/runs", params={"state": "succeeded"}).json()["runs"]]
    assert database.write(lambda session: session.get(KeyRow, "key-ghost")) is None
    assert service.store.head(key_record(made["key_id"])) and service.store.head(RunKeys(run_id).result)
    database.close()


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
