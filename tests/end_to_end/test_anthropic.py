"""A model asked through Anthropic's own clients, on the real stack."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.depth import drawn
from tests.end_to_end.conftest import TINKER_MODEL
from tests.end_to_end.stack import Stack
from tests.end_to_end.test_openai import transformers_answer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
VERSIONS = drawn(("anthropic-0", "anthropic-1", "anthropic-2"), 0, always=["anthropic-0", "anthropic-2"])


@pytest.fixture(scope="module", params=VERSIONS)
def session(request: pytest.FixtureRequest, stack: Stack) -> dict[str, Any]:
    client, connection = ROOT / ".venv" / "clients" / request.param, stack.connection
    assert client.is_dir(), "the clients are not installed: requirements/clients.sh"
    address = [connection.api_url, connection.api_key, TINKER_MODEL]
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.anthropic_session", *address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(client), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_messages_say_what_chats_say(session: dict[str, Any], tiny_model: Path) -> None:
    whole, streamed = session["whole"], session["streamed"]
    [block] = whole["content"]
    assert block["text"] == transformers_answer(tiny_model)
    assert [each["text"] for each in streamed["message"]["content"]] == [block["text"]]
    assert whole["stop_reason"] == streamed["message"]["stop_reason"] in ("max_tokens", "end_turn")
    usage = [each["usage"]["input_tokens"] for each in (whole, streamed["message"])]
    assert usage[0] == usage[1] > 0 and whole["usage"]["output_tokens"] <= 8
    kinds = [event["type"] for event in streamed["raw"]]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert session["unused"] == "thinking"


def test_tools_are_called_and_answered(session: dict[str, Any]) -> None:
    for message in (session["called"], session["streamed_call"]["message"]):
        [use] = message["content"]
        assert (use["type"], use["name"], message["stop_reason"]) == ("tool_use", "tide", "tool_use")
        assert use["input"]["port"] in ("north", "south")
    assert session["counted"] == session["after"]["usage"]["input_tokens"]
    assert session["after"]["usage"]["output_tokens"] >= 1
    [said] = session["formed"]["content"]
    if session["formed"]["stop_reason"] == "end_turn":
        assert json.loads(said["text"])["port"] in ("north", "south")


def test_a_client_reads_the_refusals(session: dict[str, Any]) -> None:
    found = [(each["class"], each["status"], each["body"]["error"]["type"]) for each in session["refusals"]]
    wrong = ("BadRequestError", 400, "invalid_request_error")
    unknown = ("NotFoundError", 404, "not_found_error")
    assert found == [unknown, wrong, wrong, wrong, ("AuthenticationError", 401, "authentication_error")]
    messages = [each["body"]["error"]["message"] for each in session["refusals"]]
    assert messages[0] == "there is no published model Qwen/Qwen3-9B"
    assert messages[1].startswith("messages.0.content.0: a text block")
    assert messages[2].startswith("max_tokens: ") and messages[3].startswith("temperatur: ")
