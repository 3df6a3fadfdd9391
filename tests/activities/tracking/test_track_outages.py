"""Runs that cannot be written: W&B is away, a writer dies or does not answer."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from temporalio.exceptions import ApplicationError

from activities.host_context import HostContext
from activities.tracking.track import NotWritten, Track, Writer
from activities.tracking.wandb_writer import STEP, HistoryRow, WriterStart
from shared.settings import Settings
from shared.storage.store import ObjectStore
from tests.activities.tracking.tracked_runs import FIRST, WHOLE_RUN, end_run, named, put_log, read_offline, track


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else gets."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def hanging_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


@pytest.mark.deep
@pytest.mark.parametrize("port", ["dead_port", "hanging_port"])
def test_unreachable_wandb_is_a_warning_and_an_offline_run(
    port: str,
    request: pytest.FixtureRequest,
    settings: Settings,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{request.getfixturevalue(port)}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    put_log(store, "sft-6", FIRST, WHOLE_RUN)
    end_run(store, "sft-6")
    online = settings.model_copy(update={"wandb_mode": "online"})
    with caplog.at_level(logging.WARNING):
        tracked = track(Track(HostContext(online), init_timeout_s=2.0, finish_timeout_s=30.0), "sft-6")
    assert tracked.warning is not None and "online" in tracked.warning
    assert "sft-6" in caplog.text and "0" * 40 not in caplog.text
    history = read_offline(settings.root_path / "wandb" / "sft-6")[1]
    assert set(named(history, "train/loss")) == {1, 2, 3, 4, 5}
    assert not _writers(), "a writer process was left behind"


def _processes(recursive: bool = True) -> list[str]:
    """The commands of all processes below this one, or of those that it started itself."""
    found = []
    for process in psutil.Process(os.getpid()).children(recursive=recursive):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(process.cmdline()))
    return found


def _writers() -> list[str]:
    """Processes below this one that belong to W&B, once they had a moment to end."""
    deadline = time.monotonic() + 5
    while found := [command for command in _processes() if "wandb" in command]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return found


@pytest.mark.deep
def test_a_run_that_cannot_be_written_at_all_is_tried_again_later(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "not a number")  # wandb refuses its settings and ends
    put_log(store, "sft-7", FIRST, WHOLE_RUN)
    end_run(store, "sft-7")
    with pytest.raises(ApplicationError, match="could not be written offline") as raised:
        track(Track(HostContext(settings)), "sft-7")
    assert not raised.value.non_retryable and raised.value.next_retry_delay


async def test_a_writer_that_does_not_answer_is_ended_and_another_takes_its_place(tmp_path: Path) -> None:
    start = WriterStart(
        run_id="r", name="r", project="p", kind="sft", mode="offline", folder=tmp_path, init_timeout_s=5.0, config={}
    )
    before = set(psutil.Process().children())
    with pytest.raises(NotWritten, match="did not end within 1 s"):
        async with Writer.opened(tmp_path, start) as writer:
            [process] = set(psutil.Process().children()) - before
            process.suspend()
            await writer.close(1.0)
    async with Writer.opened(tmp_path, start) as writer:
        await writer.write([HistoryRow(values={STEP: n}) for n in range(1, 1000)])
        await writer.close(60.0)
        assert list(writer.folder.rglob("*.wandb"))
    assert not process.is_running() and not _writers()
    assert not _scratch(tmp_path)


def _scratch(folder: Path) -> list[Path]:
    return list(folder.glob(".writer-*"))
