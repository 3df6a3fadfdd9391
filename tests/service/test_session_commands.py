"""Commands of sessions at the native API: what of them is stored, and that one may be sent again."""

from pathlib import Path

import httpx
import pytest

from longshore.commands import Datum, Forward, ForwardBackward, SaveState
from service.apis.bodies import judged
from service.apis.native import runs
from shared.jobs.commands import stored_form
from shared.storage.paths import RunKeys
from tests.service.conftest import Service

SEND = f"{runs.__name__}:{runs.send_command.__name__}"
SMALL = Forward(data=(Datum(tokens=(5, 6, 7), weights=(0.1, 0.2)),))
LARGE = ForwardBackward(data=tuple(Datum(tokens=tuple(range(n, n + 500)), weights=(0.5,) * 499) for n in range(1, 20)))


@pytest.fixture(scope="module")
def session(service: Service, tiny_model: Path) -> str:
    body = {"model": str(tiny_model), "trainable": {"kind": "lora", "rank": 4}}
    with service.http() as api:
        opened = api.post("/sessions", json=body)
    assert opened.status_code == 201, opened.text
    return opened.json()["run_id"]


def put(service: Service, session: str, number: int, asked: Forward | ForwardBackward | SaveState) -> httpx.Response:
    with service.http() as api:
        path, headers = f"/sessions/{session}/commands/{number}", {"content-type": "application/json"}
        return api.put(path, content=asked.model_dump_json(), headers=headers)


@pytest.mark.parametrize(("number", "asked"), [(1, SMALL), (2, LARGE)], ids=["small", "large"])
def test_a_command_is_stored_with_its_data_as_arrays(
    service: Service, session: str, number: int, asked: Forward | ForwardBackward
) -> None:
    """Whether the service's own process reads it or a child does, and however often it is sent."""
    for _ in range(2):
        assert put(service, session, number, asked).status_code == 202
    assert service.store.get_bytes(RunKeys(session).command(number)) == stored_form(asked)
    refused = put(service, session, number, asked.model_copy(update={"temperature": 0.5}))
    assert refused.status_code == 422 and "was another one" in refused.text


def test_steps_are_in_the_audit_log_once_a_minute(service: Service, session: str) -> None:
    """As a session has many of them a second. Saves and refusals are there each time."""
    for number in range(11, 15):
        assert put(service, session, number, SMALL).status_code == 202
    assert put(service, session, 14, LARGE).status_code == 422
    for number in (15, 16):
        assert put(service, session, number, SaveState()).status_code == 202
    with service.http() as api:
        entries = api.get("/audit", params={"limit": 500}).json()["entries"]
    about = [each for each in reversed(entries) if each["path"].startswith(f"/api/v1/sessions/{session}/commands/")]
    noted = {(each["path"].rsplit("/", 1)[1], each["status"]) for each in about}
    assert {("14", 422), ("15", 202), ("16", 202)} <= noted
    assert len([number for number, status in noted if status == 202 and number not in ("15", "16")]) == 1, noted
    assert all(each["target"] == session for each in about)


def test_what_is_wrong_with_a_large_command_is_said(service: Service, session: str) -> None:
    short = LARGE.data[3].model_copy(update={"weights": (0.5,)})
    refused = put(service, session, 4, LARGE.model_copy(update={"data": (*LARGE.data, short)}))
    assert refused.status_code == 422
    assert "weights has 1 entries" in refused.text and "data" in refused.json()["error"]["place"]
    assert service.store.head(RunKeys(session).command(4)) is None


def test_a_child_hands_on_the_file_and_no_text() -> None:
    found = judged(SEND, LARGE.model_dump_json())
    assert found.packed == stored_form(LARGE) and found.text is None
    assert judged(SEND, SaveState().model_dump_json()).text is not None
