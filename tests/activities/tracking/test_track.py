"""Track against the real wandb: offline runs are read back; servers that are away, dying writers change nothing."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.records import BeginRequest, RunRecords
from activities.tracking.track import NotWritten, RunLines, Track, Tracked, TrackRequest, Writer
from activities.tracking.wandb_writer import STEP, Done, History, HistoryRow, Line, WriterStart
from longshore.runs import RunRecord, Source, WandbRun
from longshore.views import RunStatus
from shared.runs.events import read_run_events
from shared.runs.start import result_sha256
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore
from tests.activities.tracking.tracked_runs import (
    FIRST,
    RL_RUN,
    RUN,
    SECOND,
    SUCCEEDED,
    WHOLE_RUN,
    end_run,
    evaluated,
    named,
    place_in_wandb,
    put_log,
    put_train_step,
    read_offline,
    started,
    step,
    track,
    track_all,
    train_step,
)
from tests.depth import drawn


def test_offline_run_holds_every_metric_of_every_step(settings: Settings, store: ObjectStore) -> None:
    place = WandbRun(project="harbour", entity="port", name="night", tags=("crane", "quay"))
    record = RunRecord(run_id="sft-1", source=Source(wandb=place), run=RUN, created_at=0)
    store.put_bytes(RunKeys("sft-1").record, record.model_dump_json().encode())
    put_log(store, "sft-1", FIRST, WHOLE_RUN)
    end_run(store, "sft-1")
    tracked = track(Track(HostContext(settings)), "sft-1")
    folder = settings.root_path / "wandb" / "sft-1"
    assert tracked == Tracked(folder=str(folder), num_events=len(WHOLE_RUN))
    config, history = read_offline(folder)
    for name, value in step(1).metrics.items():
        group = "system" if name in ("tokens_per_s", "memory_bytes") else "train"
        assert set(named(history, f"{group}/{name}")) == {1, 2, 3, 4, 5}
        assert named(history, f"{group}/{name}")[1] == pytest.approx(value)
    assert named(history, "train/loss") == {n: pytest.approx(1 / n) for n in range(1, 6)}
    assert named(history, "eval/loss") == {0: 3.0, 5: 2.5}
    assert named(history, "system/offload_host_bytes") == {5: 10}
    assert config["learning_rate"] == 0.002 and config["trainable"]["rank"] == 4
    tables = [path.read_text() for path in folder.rglob("*.table.json")]
    assert len(tables) == 2 and all("ahoy" in table for table in tables)
    assert place_in_wandb(folder) == ("port", "harbour", "night", ["crane", "quay"])


def test_train_steps_stand_beside_the_workers_numbers(settings: Settings, store: ObjectStore) -> None:
    """Two optimizer steps a train step; the third had nothing to train, the fourth was the second sent again."""
    put_train_step(store, "rl-1", train_step(1, 2), range(1, 3))
    put_train_step(store, "rl-1", train_step(2, 4), range(3, 5))
    for record in (
        train_step(3, 4, state="skipped", metrics={"zero_variance_share": 1.0}),
        train_step(4, 4, same_as=2),
        train_step(5, 4, state="failed", metrics={}),
    ):
        store.put_bytes(RunKeys("rl-1").step(record.step), record.model_dump_json().encode())
    end_run(store, "rl-1")
    track(Track(HostContext(settings)), "rl-1", RL_RUN)
    history = read_offline(settings.root_path / "wandb" / "rl-1")[1]
    assert named(history, "rollout/reward_mean") == {2: 0.1, 4: 0.2}
    assert named(history, "rollout/packing_factor") == {2: 2.5, 4: 2.5}
    assert named(history, "rollout/zero_variance_share") == {4: 1.0}
    assert [row["rollout/step"] for row in history if "rollout/step" in row] == [1, 2, 3]
    assert list(named(history, "train/loss")) == [1, 2, 3, 4]
    assert not any("rollout/loss" in row for row in history), "the worker's own numbers stand there once"
    assert [row[STEP] for row in history] == sorted(row[STEP] for row in history)


def test_a_train_step_waits_for_the_last_events_of_its_job(store: ObjectStore) -> None:
    """It comes on record after the first event was read; then more events stand there than are read at once."""
    lines = RunLines(store, TrackRequest(run_id="rl-3", run=RL_RUN), None, asyncio.Event())
    assert lines.new_steps() == []
    put_train_step(store, "rl-3", train_step(1, 2), range(1, 3))
    events, _ = read_run_events(store, "rl-3")
    assert list(lines.merged(events[:1], [], False)) == [events[0].event]
    assert list(lines.merged(events[1:2], lines.new_steps(), True)) == [events[1].event], "more of its events follow"
    last = [events[2].event, train_step(1, 2)]
    assert list(lines.merged(events[2:], lines.new_steps(), False)) == last
    assert lines.new_steps() == []


def test_run_is_followed_while_it_goes_on(settings: Settings, store: ObjectStore) -> None:
    put_log(store, "sft-2", FIRST, WHOLE_RUN[:4])

    def go_on() -> None:
        time.sleep(1.5)
        put_log(store, "sft-2", FIRST, WHOLE_RUN)
        end_run(store, "sft-2")

    thread = threading.Thread(target=go_on)
    thread.start()
    tracked = track(Track(HostContext(settings)), "sft-2")
    thread.join()
    assert tracked.num_events == len(WHOLE_RUN)
    assert set(named(read_offline(settings.root_path / "wandb" / "sft-2")[1], "train/loss")) == {1, 2, 3, 4, 5}


def test_retry_writes_everything_once(settings: Settings, store: ObjectStore) -> None:
    put_log(store, "sft-3", FIRST, WHOLE_RUN)
    end_run(store, "sft-3")
    left = settings.root_path / "wandb" / ".writer-0123" / "tmp" / "wandb-1-2"  # what a host that was killed leaves
    left.mkdir(parents=True)
    track(Track(HostContext(settings)), "sft-3")
    track(Track(HostContext(settings)), "sft-3")
    assert set(named(read_offline(settings.root_path / "wandb" / "sft-3")[1], "train/loss")) == {1, 2, 3, 4, 5}
    assert kept(settings) == ["sft-3"]


def kept(settings: Settings) -> list[str]:
    """What lies in W&B's folder."""
    return sorted(path.name for path in (settings.root_path / "wandb").iterdir())


@pytest.mark.parametrize("victim", drawn(["activities.tracking.wandb_writer", "wandb-core"], 1))
def test_what_a_killed_writer_had_in_hand_is_written_again(victim: str, settings: Settings, store: ObjectStore) -> None:
    """Each time that runs are open, until a part of them is written: no step is lost, or there twice.

    Few processes write many runs.
    """
    run_ids = [f"sft-killed{n}" for n in range(12)]
    for run_id in run_ids:
        put_log(store, run_id, FIRST, WHOLE_RUN)
        end_run(store, run_id)
    kills = most = 0

    def kill() -> None:
        nonlocal kills, most
        while not done.wait(0.02):
            # Not those below: what a writer starts shows the writer's command until it has its own.
            own = _processes(recursive=False)
            most = max(most, len([each for each in own if "activities.tracking.wandb_writer" in each]))
            if kills < 2 and list((settings.root_path / "wandb").glob(".writer-*/run/wandb/offline-run-*")):
                for process in psutil.Process(os.getpid()).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if victim in " ".join(process.cmdline()):
                            process.kill()
                            kills += 1
                time.sleep(1.0)

    done = threading.Event()
    killing = threading.Thread(target=kill)
    killing.start()
    try:
        # A run has three tries: no slow machine may take one of them.
        found = track_all(Track(HostContext(settings), init_timeout_s=300, finish_timeout_s=300), run_ids)
    finally:
        done.set()
        killing.join()
    assert kills and 1 <= most <= 8, (kills, most)
    assert all(one.warning is None and one.folder for one in found), found
    for run_id in run_ids:
        history = read_offline(settings.root_path / "wandb" / run_id)[1]
        assert list(named(history, "train/loss")) == [1, 2, 3, 4, 5]
    put_log(store, "sft-last", FIRST, WHOLE_RUN)
    end_run(store, "sft-last")
    track_all(Track(HostContext(settings), init_timeout_s=300, finish_timeout_s=300), ["sft-last"])
    # The next writer removes the folder of one that was killed behind its last run.
    assert kept(settings) == sorted([*run_ids, "sft-last"]), "no half-written folder is left"
    assert not _writers()


def test_a_run_that_never_trained_leaves_nothing(settings: Settings, store: ObjectStore) -> None:
    end_run(store, "sft-9")
    assert track(Track(HostContext(settings)), "sft-9") == Tracked()
    assert not (settings.root_path / "wandb").exists()


def test_steps_that_a_second_worker_repeats_count_once(settings: Settings, store: ObjectStore) -> None:
    put_log(store, "sft-4", FIRST, [started(FIRST, 0), evaluated(0), *map(step, range(1, 5))])
    put_log(store, "sft-4", SECOND, [started(SECOND, 2), *map(step, range(3, 6)), evaluated(5), SUCCEEDED])
    end_run(store, "sft-4")
    track(Track(HostContext(settings)), "sft-4")
    history = read_offline(settings.root_path / "wandb" / "sft-4")[1]
    assert list(named(history, "train/loss")) == [1, 2, 3, 4, 5]


def rows(lines: list[Line], done: Done) -> list[HistoryRow]:
    """What is added, whatever pieces the lines come in."""
    [whole, *others] = [
        [row for n in range(0, len(lines), size) for row in history.rows(lines[n : n + size])]
        for size, history in ((len(lines), History(done)), (1, History(done)), (3, History(done)))
    ]
    assert others == [whole, whole]
    return whole


def test_rows_that_stand_in_wandb_are_not_sent_again() -> None:
    assert [row.values[STEP] for row in rows(WHOLE_RUN, Done(step=3, evaluation=0))] == [4, 5, 5, 5]
    assert [row.values[STEP] for row in rows(WHOLE_RUN, Done(step=5, evaluation=0))] == [5]
    assert not rows(WHOLE_RUN, Done(step=5, evaluation=5))
    steps = [*WHOLE_RUN, train_step(1, 3), train_step(2, 5)]
    assert [row.values[STEP] for row in rows(steps, Done(step=5, evaluation=5, train_step=1))] == [5]


def test_disabled_writes_nothing(settings: Settings, store: ObjectStore) -> None:
    end_run(store, "sft-5")
    assert track(Track(HostContext(settings.model_copy(update={"wandb_mode": "disabled"}))), "sft-5") == Tracked()
    assert not (settings.root_path / "wandb").exists()


def test_who_followed_a_run_ends_when_it_was_resumed_before_its_result_was_seen(
    settings: Settings, store: ObjectStore
) -> None:
    """The resumed run is followed by another one: two would write its steps twice."""
    put_log(store, "sft-13", FIRST, WHOLE_RUN)
    activity, record = Track(HostContext(settings)), RunRecords(HostContext(settings))

    async def follow() -> Tracked:
        try:
            request = TrackRequest(run_id="sft-13", run=RUN)
            following = asyncio.ensure_future(ActivityEnvironment().run(activity.track, request))
            await asyncio.sleep(0.5)
            ended = RunStatus(run_id="sft-13", kind="sft", name="n", started_at=0.0)
            store.put_bytes(RunKeys("sft-13").result, ended.model_dump_json().encode())
            asked = BeginRequest(
                run_id="sft-13",
                start_id="again",
                execution="second",
                resumed=True,
                goes_on_from=result_sha256(store, "sft-13"),
            )
            assert ActivityEnvironment().run(record.begin, asked).status == ended
            return await asyncio.wait_for(following, 300)
        finally:
            activity.close()

    assert asyncio.run(follow()).num_events == len(WHOLE_RUN)


def test_cancelled_activity_writes_what_is_there(settings: Settings, store: ObjectStore) -> None:
    put_log(store, "sft-8", FIRST, WHOLE_RUN)  # no result: the run's end never comes
    environment, activity = ActivityEnvironment(), Track(HostContext(settings))

    async def follow() -> None:
        following = asyncio.ensure_future(environment.run(activity.track, TrackRequest(run_id="sft-8", run=RUN)))
        await asyncio.sleep(0.5)
        environment.cancel()
        try:
            await following
        finally:
            activity.close()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follow())
    assert set(named(read_offline(settings.root_path / "wandb" / "sft-8")[1], "train/loss")) == {1, 2, 3, 4, 5}


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
