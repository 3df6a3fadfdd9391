"""What the native API tells of a run: its events, metrics, logs and checkpoints, and the files that it published."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from shared.jobs.events import Evaluated, Saved, Started, Step, Succeeded
from shared.runs.status import RunStatus
from shared.storage import artifacts
from shared.storage.paths import Fence, RunKeys
from tests.service.conftest import Service, ended, submitted
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS


def write_log(service: Service, run_id: str, fence: Fence, events: list) -> None:
    data = "".join(event.model_dump_json() + "\n" for event in events).encode()
    service.store.put_bytes(RunKeys(run_id).log("000001", fence), data)


@pytest.fixture
def trained(service: Service, api) -> str:
    """A run whose step 2 was done by two workers."""
    run_id = submitted(api, seed=SUCCEEDS).run_id
    ended(api, run_id)
    one, two = Fence(epoch=1), Fence(epoch=2)
    common = {"run_id": run_id, "job_id": "000001", "num_steps": 3, "device": "cpu", "world_size": 1}
    write_log(
        service,
        run_id,
        one,
        [
            Started(seq=1, time=1.0, fence=one, first_step=0, **common),
            Evaluated(seq=2, time=1.5, step=0, metrics={"eval_loss": 3.0}),
            Step(seq=3, time=2.0, step=1, metrics={"loss": 2.5}),
            Saved(seq=4, time=2.5, step=1, path="/x", manifest_sha256="0" * 64),
            Step(seq=5, time=3.0, step=2, metrics={"loss": 9.0}),
        ],
    )
    write_log(
        service,
        run_id,
        two,
        [
            Started(seq=1, time=4.0, fence=two, first_step=1, **common),
            Step(seq=2, time=5.0, step=2, metrics={"loss": 2.0}),
            Step(seq=3, time=6.0, step=3, metrics={"loss": 1.5}),
            Succeeded(seq=4, time=7.0, step=3, device="released"),
        ],
    )
    return run_id


def test_metrics_take_the_newest_worker_of_each_step(api, trained: str) -> None:
    found = api.get(f"/runs/{trained}/metrics").json()
    assert [(row["step"], row["metrics"]["loss"]) for row in found["steps"]] == [(1, 2.5), (2, 2.0), (3, 1.5)]
    assert [(row["step"], row["metrics"]["eval_loss"]) for row in found["evaluations"]] == [(0, 3.0)]


def test_events_go_on_behind_a_cursor(api, trained: str) -> None:
    path = f"/runs/{trained}/events"
    first = api.get(path, params={"limit": 4}).json()
    second = api.get(path, params={"after": first["next"]}).json()
    kinds = [item["event"]["event"] for item in first["events"] + second["events"]]
    assert kinds == ["started", "evaluated", "step", "saved", "step", "started", "step", "step", "succeeded"]
    wait_s = 30
    end = api.get(path, params={"after": second["next"], "wait_s": wait_s})
    assert (end.json()["events"], end.json()["next"]) == ([], second["next"])
    assert end.elapsed.total_seconds() < wait_s, "an ended run is not waited for"
    lines = api.get(path, headers={"accept": "application/x-ndjson"}).text.splitlines()
    assert [json.loads(line)["event"]["event"] for line in lines] == kinds
    assert api.get(path, params={"after": "nonsense"}).status_code == 422


def test_events_are_streamed_to_the_end(api, trained: str) -> None:
    with api.stream("GET", f"/runs/{trained}/events", headers={"accept": "text/event-stream"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields = [line.partition(": ")[::2] for line in answer.iter_lines() if line]
    names = [value for field, value in fields if field == "event"]
    assert names[0] == "started" and names[-2:] == ["succeeded", "end"]
    assert len([field for field, _ in fields if field == "id"]) == len(names) - 1


def test_a_long_log_is_read_to_its_end(api, service: Service) -> None:
    run_id = submitted(api, seed=SUCCEEDS).run_id
    ended(api, run_id)
    steps = [Step(seq=n, time=float(n), step=n, metrics={"loss": 1.0}) for n in range(1, 2502)]
    write_log(service, run_id, Fence(epoch=1), steps)
    lines = api.get(f"/runs/{run_id}/logs").text.splitlines()
    assert len(lines) == 2502
    assert lines[-2:] == ["1970-01-01T00:41:41Z step 2501: loss 1", "the run succeeded"]
    assert len(api.get(f"/runs/{run_id}/metrics").json()["steps"]) == 2501


def test_a_live_stream_brings_events_as_they_come(api, service: Service) -> None:
    run_id = submitted(api, seed=WAITS).run_id
    fence = Fence(epoch=1)
    with api.stream("GET", f"/runs/{run_id}/logs", params={"follow": True}) as answer:
        lines = answer.iter_lines()
        part = RunKeys(run_id).log_part("000001", fence, 1)
        service.store.put_bytes(
            part, Step(seq=1, time=1.0, step=1, metrics={"loss": 2.5}).model_dump_json().encode() + b"\n"
        )
        assert next(lines) == "1970-01-01T00:00:01Z step 1: loss 2.5"
        with service.http() as other:
            other.post(f"/runs/{run_id}/cancel")
        assert next(lines) == "the run was cancelled"


def test_checkpoints_are_listed_with_their_hashes(api, service: Service, tmp_path: Path) -> None:
    run_id = submitted(api, seed=SUCCEEDS).run_id
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "adapter_model.safetensors").write_bytes(b"weights")
    artifacts.seal(tmp_path)
    keys = RunKeys(run_id)
    expected = [
        artifacts.upload_artifact(service.store, keys.checkpoint(Fence(epoch=epoch), step), tmp_path)
        for epoch, step in ((1, 2), (2, 4))
    ]
    service.store.put_bytes(keys.checkpoint(Fence(epoch=2), 6) + "/weights/unsealed", b"")
    found = api.get(f"/runs/{run_id}/checkpoints").json()
    assert [(c["step"], c["fence"]["epoch"], c["artifact"]["uri"]) for c in found] == [
        (2, 1, expected[0].uri),
        (4, 2, expected[1].uri),
    ]
    assert found[0]["artifact"]["sha256"] == expected[0].sha256


@pytest.fixture
def published(service: Service, api, tmp_path: Path) -> str:
    run_id = submitted(api, seed=SUCCEEDS).run_id
    status = RunStatus.model_validate(ended(api, run_id).model_dump(include=set(RunStatus.model_fields)))
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 9000)
    (folder / "README.md").write_text("a card")
    artifacts.seal(folder)
    artifact = artifacts.upload_artifact(service.store, f"tenants/default/adapters/{run_id}/v000001", folder)
    status = status.model_copy(update={"adapter": artifact.uri, "adapter_sha256": artifact.sha256})
    service.store.put_bytes(RunKeys(run_id).result, status.model_dump_json().encode())
    service.rebuild()
    return run_id


def test_published_files_are_read_by_name(api, published: str) -> None:
    paths = [entry["path"] for entry in api.get(f"/runs/{published}/files").json()]
    assert paths == ["README.md", "adapter_model.safetensors", "manifest.json"]
    assert api.get(f"/runs/{published}/files/README.md").text == "a card"
    assert api.get(f"/runs/{published}/files/adapter_model.safetensors").content == bytes(range(256)) * 9000
    for name in ("nothing", "md", "..%2f..%2frun.json", "%2fetc%2fpasswd"):
        assert api.get(f"/runs/{published}/files/{name}").status_code == 404


def test_a_download_is_a_tar_of_everything(api, published: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(api.get(f"/runs/{published}/download").content)) as archive:
        names = archive.getnames()
        weights = archive.extractfile(f"{published}/adapter_model.safetensors")
        assert weights is not None and weights.read() == bytes(range(256)) * 9000
    assert names == [f"{published}/{n}" for n in ("README.md", "adapter_model.safetensors", "manifest.json")]


def test_nothing_can_be_downloaded_of_a_run_that_published_nothing(api) -> None:
    run_id = submitted(api, seed=FAILS).run_id
    ended(api, run_id)
    answer = api.get(f"/runs/{run_id}/download")
    assert answer.status_code == 409
    assert "published nothing" in answer.json()["error"]["message"]
