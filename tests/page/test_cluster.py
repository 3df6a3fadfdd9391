"""The page and the API on PostgreSQL and S3, as a cluster has them."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared.settings import DownloadSettings, Settings
from tests.conftest import S3Server
from tests.page import measured
from tests.page.guest import Browser, Guest, expect
from tests.service.conftest import Service, new_key, polling, reaches, serving, sft, started
from tests.service.postgres import new_database
from tests.service.stand_in import SUCCEEDS


@pytest.fixture
def cluster(settings: Settings, postgres_server: str, s3_server: S3Server, tmp_path: Path) -> Iterator[Service]:
    """A service whose database is PostgreSQL and whose store is on S3."""
    changes = {
        "root": tmp_path / "root",
        "control_queue": f"control-cluster-{os.getpid()}",
        "database_url": SecretStr(new_database(postgres_server, f"page-{time.time_ns()}")),
        "store_uri": f"{s3_server.uri}/page-{os.getpid()}",
        "s3": s3_server.settings,
        "download": DownloadSettings(file_roots=(tmp_path,)),
    }
    chosen = settings.model_copy(update=changes)
    with serving(chosen) as service, polling(chosen):
        yield service


def test_postgresql_and_s3_carry_the_page_and_the_api(
    browser: Browser, cluster: Service, tiny_model: Path, tmp_path: Path
) -> None:
    with cluster.http() as api:
        run_id = started(api, seed=SUCCEEDS, name="harbour-chat", steps=240)
        again = [api.post("/runs/sft", json=sft(), headers={"idempotency-key": "once"}) for _ in range(2)]
        assert [answer.status_code for answer in again] == [201, 201]
        assert again[0].json()["run_id"] == again[1].json()["run_id"]
        reaches(api, run_id, "succeeded")
        measured.sft_course(cluster.store, run_id)
        measured.finish(cluster.store, run_id, tmp_path)
        cluster.rebuild()
        found = api.get("/runs", params={"words": "HARBOUR", "kind": "sft", "state": "succeeded"}).json()["runs"]
        assert [run["run_id"] for run in found] == [run_id]
        assert api.get("/runs", params={"words": "100%_"}).json()["runs"] == []
        page = api.get("/runs", params={"limit": 1}).json()
        assert [run["run_id"] for run in api.get("/runs", params={"after": page["next"]}).json()["runs"]] == [run_id]
        assert len(api.get(f"/runs/{run_id}/metrics").json()["steps"]) == 240
        assert len(api.get(f"/runs/{run_id}/events", params={"limit": 5}).json()["events"]) == 5

        rows = b'{"prompt": "Who climbs aboard?", "completion": "The pilot."}\n'
        file = api.post("/files", params={"name": "rows.jsonl"}, content=rows).json()
        assert file["uri"].startswith(f"{cluster.settings.store_uri}/tenants/default/")
        shutil.copytree(tiny_model, tmp_path / "model")
        asked = {"source": {"uri": file["uri"]}, "model_uri": (tmp_path / "model").as_uri(), "max_tokens": 64}
        checked = api.post("/validate", json=asked)
        assert checked.status_code == 200, checked.text
        hook = api.post("/webhooks", json={"url": "https://example.org/hook"}).json()
        assert [view["id"] for view in api.get("/webhooks").json()] == [hook["id"]]
        assert api.post(
            "/schedules", json={"name": "s", "cron": "0 2 * * *", "run": {"kind": "sft", **sft()}}
        ).is_success
        assert [one["scheduled"]["name"] for one in api.get("/schedules").json()] == ["s"]
        assert api.delete("/schedules/s").is_success and api.delete(f"/webhooks/{hook['id']}").is_success
        made = new_key(api, title="of the browser", scopes=["read", "write"])
        usage = api.get("/usage").json()
        assert usage["stored_bytes"] >= len(rows) and usage["concurrent_runs"] <= 1

        one = Guest(browser, cluster.url, made["key"])
        one.page.goto("/")
        row = one.page.get_by_role("row").filter(has=one.page.get_by_role("link", name="harbour-chat"))
        expect(row).to_contain_text("240 / 240")
        expect(row.get_by_role("img", name=re.compile(r"loss from 2\.\d+ to 0\.\d+"))).to_be_visible()
        row.get_by_role("link", name="harbour-chat").click()
        expect(one.page.get_by_label("Summary")).to_contain_text("step 240 of 240")
        with one.page.expect_download() as download:
            one.page.get_by_role("link", name="Download the checkpoint of step 240").click()
        assert bytes(range(256)) * 300 in Path(download.value.path()).read_bytes()
        assert one.troubles == []
        signed_in = api.get("/audit", params={"limit": 1}).json()["entries"][0]
        assert (signed_in["path"], signed_in["key_id"]) == ("/login", made["key_id"])
        assert api.delete(f"/keys/{made['key_id']}").is_success
        assert one.context.request.get("/api/v1/runs").status == 401
        one.context.close()
