"""The event writer: whole lines, no gaps, nothing after the end, nothing of a line that did not fit."""

import resource
import signal
from pathlib import Path

import pytest

from megatron_worker.process.job_queue import EventLog
from shared.errors import InvalidInput
from shared.jobs.events import Cancelled, Evaluated, Failed, Step, Succeeded
from tests.megatron_worker.workshop import read_log


def test_events_are_numbered_from_one_and_readable_at_once(tmp_path: Path):
    report = EventLog(tmp_path / "deep" / "log.jsonl")
    for step in (1, 2, 3):
        report.emit(Step, step=step, metrics={"loss": 1.0})
        assert [event.seq for event in read_log(tmp_path / "deep" / "log.jsonl")] == list(range(1, step + 1))


@pytest.mark.parametrize("terminal", [Succeeded, Cancelled, Failed])
def test_nothing_comes_after_the_terminal_event(tmp_path: Path, terminal: type):
    report = EventLog(tmp_path / "log.jsonl")
    fault = {"kind": "error", "message": "it broke"} if terminal is Failed else {}
    report.emit(terminal, step=3, device="released", **fault)
    report.emit(Step, step=4, metrics={})
    assert [type(event) for event in read_log(tmp_path / "log.jsonl")] == [terminal]


def test_a_log_of_another_attempt_is_refused(tmp_path: Path):
    EventLog(tmp_path / "log.jsonl").emit(Step, step=1, metrics={})
    with pytest.raises(InvalidInput, match="another attempt"):
        EventLog(tmp_path / "log.jsonl")


def test_a_report_without_a_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    EventLog(None).emit(Succeeded, step=1, device="released")
    assert not list(tmp_path.iterdir())


def test_a_metric_that_is_not_finite_stays_readable(tmp_path: Path):
    EventLog(tmp_path / "log.jsonl").emit(Evaluated, step=1, metrics={"loss": float("nan")})
    assert str(read_log(tmp_path / "log.jsonl")[0].metrics["loss"]) == "nan"


def test_a_line_that_does_not_fit_leaves_nothing_and_takes_no_number(tmp_path: Path):
    """The kernel's own limit on a file's size stands for a full disk: the write is cut short."""
    report = EventLog(tmp_path / "log.jsonl")
    report.emit(Step, step=1, metrics={"loss": 1.0})
    size = (tmp_path / "log.jsonl").stat().st_size
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            report.emit(Step, step=2, metrics={"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "log.jsonl").stat().st_size == size
    report.emit(Succeeded, step=1, device="released")
    assert [event.seq for event in read_log(tmp_path / "log.jsonl")] == [1, 2]
