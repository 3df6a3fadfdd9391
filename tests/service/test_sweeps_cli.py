"""Sweeps on the command line, on a real service with stand-in runs."""

from pathlib import Path

import pytest

from service.cli.schedules import _parameter
from tests.service.conftest import Cli, Service
from tests.service.stand_in import WAITS


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("a=1,2.5,true,word", {"choices": [1, 2.5, True, "word"]}),
        ('a=["up", ["down"]]', {"choices": ["up", ["down"]]}),
        ("a=1e-5..1:log", {"min": "1e-5", "max": "1", "log": True, "integer": False}),
        ("a=1..8:int", {"min": "1", "max": "8", "log": False, "integer": True}),
        ("a=file:///data/../x,org/m", {"choices": ["file:///data/../x", "org/m"]}),
    ],
)
def test_values_of_a_parameter(text: str, space: dict[str, object]) -> None:
    assert _parameter(text) == ("a", space)


def test_a_sweep_on_the_command_line(service: Service, cli: Cli, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n')
    asked = ("sweep", "create", "rates", "--sampler", "grid", "--metric", "loss", "--json")
    rates = ("-p", "learning_rate=1e-3,1e-4")
    run = ("--", "submit", "sft", "-m", "org/model", "-d", rows.as_uri(), "--steps", "4")

    refused = cli(*asked, "-p", "learning_rat=1,2", *run)
    assert refused.code == 100 and "parameters.learning_rat" in refused.stderr
    assert "there is no such field: learning_rat" in refused.stderr
    assert "give choices" in cli(*asked, "-p", "learning_rate=2..1", *run).stderr
    assert "after -- give" in cli(*asked, *rates, "--", "ls").stderr
    assert "run.name" in cli(*asked, *rates, *run, "--name", "mine").stderr

    # The stand-in succeeds and publishes nothing.
    ended = cli(*asked, *rates, "--wait", "--timeout", "100", *run)
    assert (ended.code, ended.json["state"]) == (100, "failed") and "published a result" in ended.json["problem"]
    assert [trial["value"] for trial in ended.json["trials"]] == [1.5, 1.5]
    shown = cli("sweep", "show", ended.json["sweep_id"])
    assert "2 of 2 trials have ended" in shown.stdout and ended.json["trials"][0]["run_id"] in shown.stdout

    held = cli(*asked[:-1], *rates, *run, "--seed", str(WAITS)).stdout.strip()
    assert held in cli("sweep", "ls").stdout
    assert cli("sweep", "cancel", held).code == 0
    assert cli("sweep", "show", "sweep-" + "0" * 17).code == 102
