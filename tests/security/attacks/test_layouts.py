"""Layouts that would take a machine's memory along: refused at every door, and by a gpu host whatever comes."""

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.hosts.workers import launch
from longshore.fields import Artifact
from longshore.training import Layout
from shared.errors import InvalidInput
from shared.jobs.job import WorkerKey
from shared.storage.paths import HostPaths
from tests.security.belongings import DATA, ROLLOUTS
from tests.service.conftest import Service, sft

MANY = {"dp": 1000}
HUGE = {"dp": 4096, "cp": 4096, "pp": 4096}


def scheduled(run: dict[str, Any]) -> dict[str, Any]:
    return {"name": "many", "run": run | {"kind": "sft"}, "cron": "0 2 1 1 *"}


def openai_job(**longshore: Any) -> dict[str, Any]:
    return {"model": "org/tiny", "training_file": DATA, "longshore": longshore}


DOORS = [
    ("/api/v1/runs/sft", sft(batch_size=4096, layout=MANY), "layout.dp", "1,000 ranks (dp1000); a host"),
    ("/api/v1/runs/sft", sft(batch_size=8, layout={"tp": 4, "pp": 4}), "layout", "16 ranks (tp4-pp4); a host"),
    ("/api/v1/runs/sft", sft(layout=HUGE), "layout", "ranks; a layout has up to 4,096"),
    ("/api/v1/runs/sft", sft(batch_size=2, layout={"dp": 3}), "layout.dp", "dp may be 2 at most"),
    ("/api/v1/runs/dpo", sft(layout=MANY), "layout.dp", "1,000 ranks"),
    ("/api/v1/runs/rl", {"model": "org/tiny", "rollouts": ROLLOUTS, "layout": MANY}, "layout.dp", "1,000 ranks"),
    ("/api/v1/schedules", scheduled(sft(layout=MANY)), "run.layout.dp", "1,000 ranks"),
    ("/v1/fine_tuning/jobs", openai_job(layout=MANY, batch_tokens=4096), "longshore.layout.dp", "1,000 ranks"),
    ("/v1/fine_tuning/jobs", openai_job(layout=HUGE), "longshore.layout", "a layout has up to"),
    (
        "/v1/preview/models",
        {"name": "many", "base_model": "tiny", "longshore": {"layout": MANY}},
        "longshore.layout.dp",
        "1,000 ranks",
    ),
]


@pytest.mark.parametrize(("path", "body", "place", "rule"), DOORS, ids=range(len(DOORS)))
def test_a_layout_that_no_host_offers_is_refused_where_it_comes_in(
    service: Service, stranger: httpx.Client, path: str, body: dict[str, Any], place: str, rule: str
) -> None:
    answer = stranger.post(path, json=body)
    assert answer.status_code == (400 if path.startswith("/v1/") else 422), answer.text
    error = answer.json()["error"]
    assert (error.get("place") or error.get("param")) == place
    assert rule in error["message"]
    assert not [run for run in stranger.get("/api/v1/runs").json()["runs"] if run["run"]["layout"]["dp"] > 8]


def test_the_command_line_is_told_the_field(service: Service) -> None:
    said = service.cli("submit", "sft", "--model", "org/tiny", "--dataset", DATA, "--steps", "1", "--dp", "1000")
    assert said.code != 0 and "1,000 ranks" in said.stderr and "--dp" in said.stderr, said.stderr


def test_a_host_starts_no_process_of_a_layout_beyond_its_own(tmp_path: Path) -> None:
    paths, started = HostPaths(tmp_path), tmp_path / "started"
    key = WorkerKey(model=Artifact(uri="file:///any", sha256="0" * 64), layout=Layout(dp=1000), dtype="float32")
    command = [sys.executable, "-c", f"open({str(started)!r}, 'w')"]
    with pytest.raises(InvalidInput, match=r"^layout\.dp: 1,000 ranks .* up to 8"):
        launch(paths, key, lambda folder, key: command, {}, max_ranks=8)
    assert not started.exists() and not list(paths.workers.glob("*"))
