"""Inputs of many times their size, layouts beyond the machine, quotas at once: refused once, at every door."""

import gzip
import json
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from activities.hosts.workers import launch
from longshore.fields import Artifact
from longshore.training import Layout
from service.accounts.tenants import bytes_of_rows
from service.database.engine import Database
from shared.errors import InvalidInput
from shared.jobs.job import WorkerKey
from shared.storage.paths import HostPaths
from tests.depth import drawn
from tests.end_to_end.stack import Stack, wait_until
from tests.security.attacks.bounds import CONFINED_BYTES, PROCESS_BYTES
from tests.security.attacks.tenants import Tenant
from tests.security.belongings import DATA, ROLLOUTS
from tests.service.conftest import Service, sft


def control_host(stack: Stack) -> psutil.Process:
    return min(stack.processes("service.host", "--role control"), key=lambda process: process.create_time())


def peak_bytes(process: psutil.Process) -> int:
    """The most memory that a process ever had."""
    [line] = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) << 10


@contextmanager
def standing(stack: Stack, victim: Tenant, tiny_model: Path) -> Iterator[None]:
    """While something is attacked: the control host lives on, grows by no part of it, and others' work goes on."""
    host, stop, answers = control_host(stack), threading.Event(), list[int]()
    before = peak_bytes(host)
    uri = victim.upload("small.jsonl", b'{"text": "a small row"}\n')

    def look() -> None:
        while not stop.wait(0.2):
            asked = {"source": {"uri": uri}, "model_uri": str(tiny_model)}
            answers.append(victim.http.post("/api/v1/preview", json=asked).status_code)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert answers and set(answers) == {200}
    assert host.is_running() and control_host(stack).pid == host.pid
    assert peak_bytes(host) - before < 0.4 * CONFINED_BYTES


def one_long_row(_: Path) -> bytes:
    """15.6 KB, of which tokenizers would make 2 to 4 GB."""
    return gzip.compress(json.dumps({"text": "a" * (16 << 20)}).encode())


def one_wide_line(_: Path) -> bytes:
    """Python's own objects take twenty-four bytes for each of its."""
    return gzip.compress(b'{"text": "a", "more": [' + b"{}," * (12 << 20) + b"{}]}")


def a_dictionary(folder: Path) -> bytes:
    """A few KB: 4,096 rows that are all the same 8 MB, which the file holds once."""
    import pyarrow
    from pyarrow import parquet

    indices = pyarrow.array([0] * 4096, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, ["a" * (8 << 20)])
    path = folder / "rows.parquet"
    options: dict[str, Any] = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 1 << 30}
    parquet.write_table(pyarrow.table({"text": column}), path, **options)
    return path.read_bytes()


ROWS = [
    ("rows.jsonl.gz", one_long_row, "rows.jsonl:1: the row has 16,777,216 characters; it may have up to 4,194,304"),
    ("rows.jsonl.gz", one_wide_line, "rows.jsonl:1: reading it takes more memory than the 1 GiB that it may"),
    ("rows.parquet", a_dictionary, "rows.parquet"),
]


@pytest.mark.parametrize(("name", "make", "sentence"), drawn(ROWS, 1), ids=lambda given: getattr(given, "__name__", ""))
def test_rows_that_take_a_hosts_memory_are_refused_once(
    stack: Stack, attacker: Tenant, victim: Tenant, tiny_model: Path, tmp_path: Path, name: str, make, sentence: str
) -> None:
    content = make(tmp_path)
    assert len(content) < 1 << 20
    uri = attacker.upload(name, content)
    with standing(stack, victim, tiny_model):
        seen = attacker.http.post("/api/v1/preview", json={"source": {"uri": uri}, "model_uri": str(tiny_model)})
        assert seen.status_code == 422 and sentence in seen.json()["error"]["message"], seen.text
        fields = {"model": str(tiny_model), "dataset": {"uri": uri}, "steps": 1, "batch_size": 1}
        run_id = attacker.submit("sft", **fields).json()["run_id"]
        problem = attacker.ended(run_id)["problem"]
    assert problem["kind"] == "invalid_input" and sentence in problem["message"] and "\n" not in problem["message"]
    assert stack.most_attempts(run_id) == 1


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


def test_a_host_starts_no_process_of_a_layout_beyond_its_own(tmp_path: Path) -> None:
    paths, started = HostPaths(tmp_path), tmp_path / "started"
    key = WorkerKey(model=Artifact(uri="file:///any", sha256="0" * 64), layout=Layout(dp=1000), dtype="float32")
    command = [sys.executable, "-c", f"open({str(started)!r}, 'w')"]
    with pytest.raises(InvalidInput, match=r"^layout\.dp: 1,000 ranks .* up to 8"):
        launch(paths, key, lambda folder, key: command, {}, max_ranks=8)
    assert not started.exists() and not list(paths.workers.glob("*"))


def test_every_process_of_the_stack_is_bounded(stack: Stack) -> None:
    processes = stack.processes()
    assert len(processes) >= 5, processes  # supervisor, Temporal, web service, host, and what the host starts
    for process in processes:
        assert resource.prlimit(process.pid, resource.RLIMIT_AS)[0] == PROCESS_BYTES, process


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
