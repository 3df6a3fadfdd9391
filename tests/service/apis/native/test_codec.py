"""The codec of Temporal's page and command line: it opens payloads for the operator, and for nobody else."""

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import Client

from service.accounts.keys import COOKIE
from service.apis.native.installation import CODEC
from service.sealing import ENCRYPTED
from shared.settings import Settings
from tests.opened import on_the_wire
from tests.security.belongings import new_tenant
from tests.security.conftest import client
from tests.service.conftest import KEY, Service, new_key, serving, settings_below, sft

DECODE = f"{CODEC}/decode"
UI = "http://temporal.test:8233"
NAME = "canary-run"


@pytest.fixture(scope="module")
def settings(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    given = settings_below(tmp_path_factory.mktemp("codec"), temporal_address)
    return given.model_copy(update={"temporal_codec": True, "temporal_ui": f"{UI}/namespaces/default"})


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    with serving(settings) as service:
        yield service


@pytest.fixture(scope="module")
def payloads(service: Service) -> list[dict[str, Any]]:
    """A run's input, as Temporal has it, in JSON as its page sends it."""
    with service.http() as api:
        run_id = api.post("/runs/sft", json=sft(name=NAME)).json()["run_id"]
    first = asyncio.run(first_event(service.settings.temporal_address, run_id))
    return [on_the_wire(payload) for payload in first]


async def first_event(address: str, run_id: str) -> list[Payload]:
    raw = await Client.connect(address)
    async for event in raw.get_workflow_handle(run_id).fetch_history_events():
        return list(event.workflow_execution_started_event_attributes.input.payloads)
    raise AssertionError("a history begins")


def test_an_operator_reads_what_temporal_cannot(service: Service, payloads: list[dict[str, Any]]) -> None:
    assert NAME not in json.dumps(payloads) and b64decode(payloads[0]["metadata"]["encoding"]) == ENCRYPTED
    foreign = on_the_wire(Payload(metadata={"encoding": b"json/plain"}, data=b"1"))
    broken = payloads[0] | {"data": payloads[0]["data"][:-8] + "AAAAAAA="}
    elsewhere = {**payloads[0]["metadata"], "longshore-scope": b64encode(b'["default", "other"]').decode()}
    odd = [
        {"metadata": payloads[0]["metadata"] | {"longshore-scope": b64encode(each).decode()}, "data": "AAAA"}
        for each in (b"", b"1", b'"\\ud800"', b"[" * 50_000, b"\xff", b'["\\ud800"]')
    ]
    sent = [*payloads, foreign, broken, payloads[0] | {"metadata": elsewhere}, *odd]
    with service.http() as operator:
        answer = operator.post(DECODE.removeprefix("/api/v1"), json={"payloads": sent})
    assert answer.status_code == 200, answer.text
    opened, *others = answer.json()["payloads"]
    assert b64decode(opened["metadata"]["encoding"]) == b"json/plain"
    assert json.loads(b64decode(opened["data"]))["run"]["name"] == NAME
    assert others == sent[1:], "what is not sealed for where it says comes back as it was"


def test_nobody_else_does(service: Service, payloads: list[dict[str, Any]]) -> None:
    with service.http() as operator:
        partly = new_key(operator, scopes=["read", "write", "inference"])["key"]
    for key, status in ((new_tenant(service, "tenant"), 403), (partly, 403), ("", 401), ("ls-1", 401)):
        with client(service, key) as asking:
            answer = asking.post(DECODE, json={"payloads": payloads})
            assert (answer.status_code, NAME in answer.text) == (status, False), answer.text


def test_it_seals_nothing(service: Service) -> None:
    with client(service, KEY) as operator:
        answer = operator.post(f"{CODEC}/encode", json={"payloads": [{"data": "MQ=="}]})
    assert answer.status_code == 403 and "none is sealed" in answer.text


@pytest.mark.parametrize("body", [{}, {"payloads": [{"data": "A"}]}, {"payloads": [{"metadata": {"a": 1}}]}])
def test_bad_bodies_are_refused_by_their_place(service: Service, body: dict[str, Any]) -> None:
    with client(service, KEY) as operator:
        answer = operator.post(DECODE, json=body)
        assert answer.status_code == 422 and "payloads" in answer.text
        assert operator.post(DECODE, json={"payloads": [{"data": "A" * (1 << 20)}]}).status_code == 413


def test_temporals_page_may_ask_with_the_session_of_an_admin(service: Service, payloads: list[dict[str, Any]]) -> None:
    """As a browser asks. Another page is told nothing, by the browser or by us, and no other address is opened."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-namespace"}
    with client(service, "") as browser:
        assert browser.post("/login", data={"key": KEY, "after": "/"}).status_code == 303
        assert browser.cookies[COOKIE]
        for origin, may in ((UI, True), ("http://evil.test", False), ("null", False)):
            allowed = browser.options(DECODE, headers={"origin": origin, **asked})
            assert allowed.headers.get("access-control-allow-origin") == (UI if may else None), origin
            answer = browser.post(DECODE, json={"payloads": payloads}, headers={"origin": origin})
            assert answer.status_code == (200 if may else 403), answer.text
            assert answer.headers.get("access-control-allow-origin") == (UI if may else None)
        assert browser.post(DECODE, json={"payloads": payloads}).status_code == 403
        for path in ("/api/v1/whoami", "/api/v1/keys", "/api/v1/codecs"):
            assert "access-control-allow-origin" not in browser.get(path, headers={"origin": UI}).headers
        assert browser.post("/api/v1/keys", json={}, headers={"origin": UI}).status_code == 403


def test_it_is_off_unless_it_is_set(temporal_address: str, tmp_path: Path) -> None:
    settings = settings_below(tmp_path, temporal_address).model_copy(update={"temporal_ui": UI})
    with serving(settings) as service, client(service, KEY) as operator:
        for path in (DECODE, f"{CODEC}/encode"):
            answer = operator.post(path, json={"payloads": []}, headers={"origin": UI})
            assert answer.status_code == 404 and "LONGSHORE_TEMPORAL_CODEC" in answer.text
            assert "access-control-allow-origin" not in answer.headers
