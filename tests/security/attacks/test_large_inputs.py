"""Inputs that take a hundred or a million times their size: refused in one sentence, once, and nobody else notices."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.depth import drawn
from tests.end_to_end.stack import Stack
from tests.security.attacks.bounds import CONFINED_BYTES
from tests.security.attacks.tenants import Tenant


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
