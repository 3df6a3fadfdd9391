"""Errors as answers: the status of each, and that what nobody foresaw is found in the log by its request id."""

import errno
import logging

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware

from service import problems
from service.auth import ApiKeys
from service.edge import Edge
from service.problems import Conflict, TemporalUnavailable
from shared.errors import CorruptArtifact, DiskFull, InvalidInput, NotFound, StoreUnavailable, WorkerLost


async def answer_to(error: Exception, tmp_path) -> httpx.Response:
    """What a client gets when an endpoint raises this."""
    keys = ApiKeys(tmp_path / "keys.json", "key")
    edge = Middleware(Edge, keys=keys, allowed_hosts=None, max_body_bytes=1, max_upload_bytes=1)
    app = FastAPI(middleware=[edge])
    problems.install(app)

    @app.get("/")
    async def fail() -> None:
        raise error

    transport = httpx.ASGITransport(app)
    headers = {"authorization": "Bearer key", "x-request-id": "mine-1"}
    async with httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers) as client:
        return await client.get("/")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidInput("bad", "field"), 422, "invalid_input"),
        (CorruptArtifact("spoilt", "s3://b/k"), 422, "invalid_input"),
        (NotFound("no run"), 404, "not_found"),
        (Conflict("ended"), 409, "conflict"),
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
