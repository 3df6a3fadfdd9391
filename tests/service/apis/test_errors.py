"""Errors as answers: the status of each, and that what nobody foresaw is found in the log by its request id."""

import errno
import logging

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware

from service.accounts.audit import Audit
from service.accounts.keys import Keys, SignIns
from service.accounts.limits import RateLimit
from service.apis import errors as problems
from service.apis.edge import Edge
from service.database import engine
from service.database.engine import Database
from service.errors import Conflict, DatabaseUnavailable, Forbidden, QuotaExceeded, TemporalUnavailable
from shared.errors import CorruptArtifact, DiskFull, InvalidInput, NotFound, StoreUnavailable, WorkerLost
from shared.settings import Settings
from shared.storage.store import LocalStore


async def answer_to(error: Exception, tmp_path, path: str = "/") -> httpx.Response:
    """What a client gets when an endpoint raises this."""
    database = Database(f"sqlite:///{tmp_path}/service.db")
    engine.upgrade(database)
    keys = Keys(Settings(root=tmp_path, api_key="key"), LocalStore(tmp_path), database)
    edge = Middleware(
        Edge,
        keys=keys,
        sign_ins=SignIns(database, keys),
        audit=Audit(database, 1),
        rate_limit=RateLimit(1, 1),
        allowed_hosts=None,
        max_body_bytes=1,
        max_upload_bytes=1,
        in_hand=set(),
    )
    app = FastAPI(middleware=[edge])
    problems.install(app)

    @app.get(path)
    async def fail() -> None:
        raise error

    transport = httpx.ASGITransport(app)
    headers = {"authorization": "Bearer key", "x-request-id": "mine-1"}
    async with httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers) as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidInput("bad", "field"), 422, "invalid_input"),
        (CorruptArtifact("spoilt", "s3://b/k"), 422, "invalid_input"),
        (NotFound("no run"), 404, "not_found"),
        (Conflict("ended"), 409, "conflict"),
        (Forbidden("no scope"), 403, "forbidden"),
        (QuotaExceeded("gpu_hours", "used up"), 429, "quota_exceeded"),
        (DatabaseUnavailable("away"), 503, "unavailable"),
        (StoreUnavailable("away"), 503, "unavailable"),
        (TemporalUnavailable("away"), 503, "unavailable"),
        (DiskFull("no space"), 507, "disk_full"),
        (OSError(errno.ENOSPC, "no space"), 507, "disk_full"),
    ],
    ids=repr,
)
async def test_an_error_has_its_status(error: Exception, status: int, kind: str, tmp_path) -> None:
    answer = await answer_to(error, tmp_path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


@pytest.mark.parametrize("error", [ValueError("a bug"), WorkerLost("a bug"), OSError(errno.EIO, "a bug")], ids=repr)
async def test_a_bug_is_found_in_the_log_and_not_in_the_answer(error, tmp_path, caplog) -> None:
    with caplog.at_level(logging.ERROR, "longshore.service"):
        answer = await answer_to(error, tmp_path)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine-1")
    assert "a bug" not in answer.text and "x-request-id" in answer.json()["error"]["message"]
    [record] = caplog.records
    assert "mine-1 GET / failed" in record.getMessage() and record.exc_info is not None


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidInput("bad", "field"), 400, "invalid_request_error", "invalid_input"),
        (NotFound("no job"), 404, "invalid_request_error", "not_found"),
        (QuotaExceeded("gpu_hours", "used up"), 429, "insufficient_quota", "insufficient_quota"),
        (StoreUnavailable("away"), 503, "server_error", "unavailable"),
        (ValueError("a bug"), 500, "server_error", "error"),
    ],
    ids=repr,
)
async def test_below_v1_an_error_has_the_shape_of_openai(error, status: int, kind: str, code: str, tmp_path) -> None:
    answer = await answer_to(error, tmp_path, "/v1/things")
    said = answer.json()["error"]
    assert (answer.status_code, said["type"], said["code"]) == (status, kind, code)
    assert set(said) == {"message", "type", "param", "code"}
    assert said["param"] == ("field" if status == 400 else None)
    assert answer.headers.get("x-should-retry") == ("false" if status == 429 else None)
