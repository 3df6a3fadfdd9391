"""The log reader: whole lines alone, in order, from where it stopped."""

from pathlib import Path

import pytest

from activities.hosts.run_job import LogReader
from shared.jobs.events import Step


def line(seq: int) -> bytes:
    return Step(seq=seq, time=1.0, step=seq, metrics={"loss": 0.5}).model_dump_json().encode() + b"\n"


def test_a_log_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    assert LogReader(tmp_path / "log.jsonl").read() == []


def test_half_a_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    whole = line(1) + line(2)
    reader = LogReader(path)
    seen: list[int] = []
    for end in range(1, len(whole) + 1):  # the writer is seen after every single byte
        path.write_bytes(whole[:end])
        seen += [found.event.seq for found in reader.read()]
        assert reader.offset == len(line(1)) * (end >= len(line(1))) + len(line(2)) * (end == len(whole))
    assert seen == [1, 2]


def test_the_bytes_of_a_line_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(line(1) + line(2))
    assert b"".join(found.data for found in LogReader(path).read()) == path.read_bytes()


def test_reading_goes_on_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(line(1) + line(2) + line(3))
    assert [found.event.seq for found in LogReader(path, offset=len(line(1)), seq=1).read()] == [2, 3]


def test_a_gap_in_seq_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(line(1) + line(3))
    with pytest.raises(ValueError, match="event 3 follows event 1"):
        LogReader(path).read()


def test_a_line_that_is_no_event_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "nonsense"}\n')
    with pytest.raises(ValueError, match="nonsense"):
        LogReader(path).read()
