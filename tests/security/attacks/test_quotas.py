"""Item 12: a quota of stored bytes holds for whatever is written at once, by whichever way it comes."""

import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.accounts.tenants import bytes_of_rows
from service.database.engine import Database
from tests.end_to_end.stack import Stack, wait_until
from tests.security.attacks.tenants import Tenant

ROW = json.dumps({"prompt": "q", "completion": "a" * 400}).encode() + b"\n"
MB = 1_000_000


@pytest.fixture
def narrow(operator: Tenant, request: pytest.FixtureRequest) -> Tenant:
    """A tenant of the test's own, with room for 1.5 MB."""
    name = f"narrow-{abs(hash(request.node.name)) % 10**8}"
    made = operator.http.post("/api/v1/tenants", json={"tenant": name, "quotas": {"stored_bytes": 3 * MB // 2}})
    assert made.status_code == 201, made.text
    return Tenant(operator.url, name, made.json()["key"]["key"])


def stored(tenant: Tenant) -> int:
    return int(tenant.http.get("/api/v1/usage").json()["stored_bytes"])


def records(stack: Stack, tenant: Tenant) -> int:
    """The bytes of the records of what it has made, and of the folders of its runs."""
    runs = [path for path in (stack.root / "store").glob("runs/*/run.json") if f'"{tenant.name}"' in path.read_text()]
    with closing(Database(f"sqlite:///{stack.root}/service/longshore.db")) as database:
        rows = database.write(lambda session: bytes_of_rows(session, tenant.name))
    return rows + sum(path.stat().st_size for run in runs for path in run.parent.rglob("*") if path.is_file())


def at_once(num: int, ask: Callable[[int], httpx.Response]) -> list[int]:
    with ThreadPoolExecutor(num) as threads:
        return sorted(answer.status_code for answer in threads.map(ask, range(num)))


def test_of_eight_uploads_at_once_with_room_for_one_one_is_taken(stack: Stack, narrow: Tenant) -> None:
    """Each sends a megabyte, in pieces, without saying beforehand how much it is."""

    def upload(number: int) -> httpx.Response:
        pieces = (bytes([number]) * 50_000 for _ in range(20))
        return narrow.http.post("/api/v1/files", params={"name": f"f{number}.jsonl"}, content=pieces)

    assert at_once(8, upload) == [201] + [429] * 7
    assert stored(narrow) == MB + records(stack, narrow)
    folder = stack.root / "store" / "tenants" / narrow.name
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) == MB


def test_of_eight_parts_at_once_with_room_for_one_one_is_taken(stack: Stack, narrow: Tenant) -> None:
    fields = {"filename": "a.jsonl", "purpose": "fine-tune", "bytes": MB, "mime_type": "text/plain"}
    uploads = [narrow.http.post("/v1/uploads", json=fields).json()["id"] for _ in range(8)]

    def part(number: int) -> httpx.Response:
        return narrow.http.post(f"/v1/uploads/{uploads[number]}/parts", files={"data": bytes([number]) * MB})

    assert at_once(8, part) == [200] + [429] * 7
    assert stored(narrow) == MB + records(stack, narrow)


def test_an_upload_that_breaks_off_gives_its_room_back(stack: Stack, narrow: Tenant) -> None:
    def breaks() -> Any:
        yield b"x" * MB
        raise OSError("the sender leaves")

    with pytest.raises(OSError):
        narrow.http.post("/api/v1/files", params={"name": "broken.jsonl"}, content=breaks())
    body = b"y" * (MB + MB // 4)
    wait_until(
        lambda: narrow.http.post("/api/v1/files", params={"name": "whole.jsonl"}, content=body).status_code == 201,
        "there is room again",
    )
    wait_until(lambda: stored(narrow) == len(body) + records(stack, narrow), "all of the room is given back")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_data_that_a_uri_leads_to_has_to_find_room(
    stack: Stack, narrow: Tenant, open_folder: Path, tiny_model: Path, suffix: str
) -> None:
    """A preview, which needs a copy of it for a moment, and a run, which keeps one."""
    data = ROW * (4 * MB // len(ROW))
    path = open_folder / f"large.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    body = {"source": {"uri": path.as_uri()}, "model_uri": str(tiny_model), "num_rows": 1}
    answer = narrow.http.post("/api/v1/preview", json=body)
    assert answer.status_code == 422 and "the quota stored_bytes" in answer.text
    run = {"model": str(tiny_model), "dataset": {"uri": path.as_uri()}, "steps": 1, "batch_size": 1}
    assert "the quota stored_bytes" in narrow.refusal("sft", **run)
    wait_until(lambda: stored(narrow) == records(stack, narrow), "nothing else counts")


def test_what_a_run_has_brought_counts_and_what_a_preview_has_does_not(
    narrow: Tenant, open_folder: Path, tiny_model: Path
) -> None:
    data = ROW * (MB // len(ROW))
    path = open_folder / "fits.jsonl"
    path.write_bytes(data)
    body = {"source": {"uri": path.as_uri()}, "model_uri": str(tiny_model), "num_rows": 1}
    assert at_once(1, lambda _: narrow.http.post("/api/v1/preview", json=body)) == [200]
    # The first run's copy has the room: whatever becomes of the run otherwise, the second has none.
    run = {"model": str(tiny_model), "dataset": {"uri": path.as_uri()}, "batch_size": 1, "max_tokens": 600}
    first = narrow.submit("sft", **run, steps=1)
    assert first.status_code == 201, first.text
    wait_until(lambda: stored(narrow) >= len(data), "its copy counts", timeout_s=300)
    assert "the quota stored_bytes" in narrow.refusal("sft", **run, steps=2)
    narrow.http.post(f"/api/v1/runs/{first.json()['run_id']}/cancel")


def test_a_backfill_is_bounded(attacker: Tenant, tiny_model: Path) -> None:
    """Which spans are: tests/service/test_stored_bytes.py."""
    data = {"uri": "s3://none/rows.jsonl"}
    run = {"kind": "sft", "model": str(tiny_model), "dataset": data, "steps": 1, "batch_size": 1}
    scheduled = {"name": "often", "run": run, "cron": "*/5 0-23 * * *"}
    assert attacker.http.post("/api/v1/schedules", json=scheduled).status_code == 201
    attacker.http.post("/api/v1/schedules/often/pause")
    try:
        span = {"begin": 1_700_000_000, "end": 1_700_000_000 + 30 * 86_400, "overlap": "allow_all"}
        answer = attacker.http.post("/api/v1/schedules/often/backfill", json=span)
        assert answer.status_code == 422 and "one backfill acts at 200 at most" in answer.text
    finally:
        attacker.http.delete("/api/v1/schedules/often")
