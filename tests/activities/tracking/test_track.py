"""Track against the real wandb: offline runs are read back, and servers that are away or hang change nothing."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.records.run_records import BeginRequest, RunRecords
from activities.tracking.track import RunLines, Track, Tracked, TrackRequest, Tries
from activities.tracking.wandb_process import Writer, WriterLost
from activities.tracking.wandb_writer import STEP, Done, History, Line, Row, TrainStep, WriterStart
from shared.contract import Fence
from shared.jobs.events import Evaluated, Event, Offloaded, Sample, Started, Step, Succeeded
from shared.jobs.job import Lora
from shared.runs.events import read_run_events
from shared.runs.requests import DatasetSource, RLRun, RunRecord, SFTRun, Source, WandbRun
from shared.runs.start import result_sha256
from shared.runs.status import RunStatus, StepStatus
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore, open_store

RUN = SFTRun(
    model="file:///models/tiny",
    dataset=DatasetSource(uri="file:///data.jsonl"),
    trainable=Lora(rank=4),
    steps=5,
    batch_size=2,
    learning_rate=0.002,
)
FIRST = Fence(epoch=1)
SECOND = Fence(epoch=2)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path)


@pytest.fixture
def store(settings: Settings) -> ObjectStore:
    return open_store(settings.store, settings.s3)


def started(fence: Fence, first_step: int) -> Started:
    return Started(
        seq=1,
        time=1.0,
        run_id="r",
        job_id="000000",
        fence=fence,
        first_step=first_step,
        num_steps=5,
        device="cpu",
        world_size=1,
    )


def step(number: int) -> Step:
    metrics = {"loss": 1 / number, "learning_rate": 0.002, "tokens_per_s": 100.0 + number, "memory_bytes": 7e6}
    return Step(seq=number + 1, time=float(number), step=number, metrics=metrics)


def evaluated(number: int) -> Evaluated:
    samples = (Sample(prompt="ahoy?", completion=f"ahoy {number}", reference="ahoy"),)
    return Evaluated(seq=1, time=0.0, step=number, metrics={"loss": 3.0 - number / 10}, samples=samples)


OFFLOADED = Offloaded(seq=8, time=8.0, device_bytes_before=10, device_bytes_after=0, host_bytes=10, duration_s=0.5)
SUCCEEDED = Succeeded(seq=9, time=9.0, step=5, device="released")
WHOLE_RUN = [started(FIRST, 0), evaluated(0), *map(step, range(1, 6)), evaluated(5), OFFLOADED, SUCCEEDED]


def put_log(store: ObjectStore, run_id: str, fence: Fence, events: list[Event], job_id: str = "000000") -> None:
    lines = "".join(event.model_dump_json() + "\n" for event in events)
    store.put_bytes(RunKeys(run_id).log(job_id, fence), lines.encode())


def end_run(store: ObjectStore, run_id: str) -> None:
    store.put_bytes(RunKeys(run_id).result, b"{}")


def track(activity: Track, run_id: str, run: SFTRun | RLRun = RUN) -> Tracked:
    [tracked] = track_all(activity, [run_id], run)
    return tracked


def track_all(activity: Track, run_ids: list[str], run: SFTRun | RLRun = RUN) -> list[Tracked]:
    """Follow runs side by side, and end the writer then."""

    async def follow() -> list[Tracked]:
        requests = [TrackRequest(run_id=run_id, run=run) for run_id in run_ids]
        try:
            return await asyncio.gather(*(ActivityEnvironment().run(activity.track, each) for each in requests))
        finally:
            await activity.close()

    return asyncio.run(follow())


RL_RUN = RLRun(model="file:///models/tiny", trainable=Lora(rank=4))


def train_step(number: int, optimizer_step: int, **changes: object) -> StepStatus:
    """A done step, with the worker's own numbers among its own."""
    metrics = {"reward_mean": number / 10, "packing_factor": 2.5, "loss": 1 / optimizer_step, "tokens_per_s": 1.0}
    fields = {"step": number, "key": f"k{number}", "groups": "file:///g", "state": "done", "metrics": metrics}
    return StepStatus.model_validate(fields | {"optimizer_step": optimizer_step} | changes)


def put_train_step(store: ObjectStore, run_id: str, record: StepStatus, steps: range, with_record: bool = True) -> None:
    """The log of a step's job, whose optimizer steps these are, and its record."""
    job_id = f"{record.step:06d}"
    events = [started(FIRST, steps.start - 1).model_copy(update={"job_id": job_id}), *map(step, steps)]
    put_log(store, run_id, FIRST, events, job_id)
    if with_record:
        store.put_bytes(RunKeys(run_id).step(record.step), record.model_dump_json().encode())


def read_offline(folder: Path) -> tuple[dict, list[dict]]:
    """The config and the history of the one offline run below a folder."""
    from wandb.proto import wandb_internal_pb2

    [file] = folder.rglob("*.wandb")
    config: dict = {}
    history = []
    for data in read_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            assert record.run.run_id == folder.name
            assert record.run.job_type == folder.name.partition("-")[0], "the objective is named"
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.WhichOneof("record_type") == "history":
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            history.append(items)
    return config, history


def read_records(data: bytes) -> Iterator[bytes]:
    """Records of a `.wandb` file: LevelDB's log format (blocks of 32 KiB, pieces with checksum, length and type) behind
    a header of 7 bytes. wandb itself reads it in Go alone.
    """
    assert data[:4] == b":W&B"
    offset, parts = 7, []
    while offset < len(data):
        if (1 << 15) - offset % (1 << 15) < 7:  # what is left of a block holds no piece
            offset += (1 << 15) - offset % (1 << 15)
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        parts.append(data[offset + 7 : offset + 7 + length])
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield b"".join(parts)
            parts = []


def named(history: list[dict], name: str) -> dict[int, float]:
    """One metric by step. A step that was written twice fails."""
    found = [(int(row[STEP]), row[name]) for row in history if name in row]
    assert len(dict(found)) == len(found), f"{name} was written twice for a step"
    return dict(found)


def place_in_wandb(folder: Path) -> tuple[str, str, str, list[str]]:
    """Entity, project, name and tags of the one offline run below a folder."""
    from wandb.proto import wandb_internal_pb2

    [file] = folder.rglob("*.wandb")
    for data in read_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            return record.run.entity, record.run.project, record.run.display_name, list(record.run.tags)
    raise AssertionError("no run was written")


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


def test_train_steps_are_followed_while_a_run_goes_on(settings: Settings, store: ObjectStore) -> None:
    """Each comes behind its own job's events, also when it comes on record after they were read."""
    put_train_step(store, "rl-2", train_step(1, 2), range(1, 3), with_record=False)

    def go_on() -> None:
        time.sleep(1.5)
        put_train_step(store, "rl-2", train_step(1, 2), range(1, 3))
        put_train_step(store, "rl-2", train_step(2, 4), range(3, 5), with_record=False)
        time.sleep(2.5)
        put_train_step(store, "rl-2", train_step(2, 4), range(3, 5))
        end_run(store, "rl-2")

    thread = threading.Thread(target=go_on)
    thread.start()
    track(Track(HostContext(settings)), "rl-2", RL_RUN)
    thread.join()
    history = read_offline(settings.root_path / "wandb" / "rl-2")[1]
    assert [row[STEP] for row in history] == [1, 2, 2, 3, 4, 4]
    assert [row.get("rollout/reward_mean") for row in history] == [None, None, 0.1, None, None, 0.2]


def test_a_train_step_waits_for_the_last_events_of_its_job(store: ObjectStore) -> None:
    """It comes on record after the first event was read; then more events stand there than are read at once."""
    lines = RunLines(store, TrackRequest(run_id="rl-3", run=RL_RUN), None, asyncio.Event())
    assert lines.new_steps() == []
    put_train_step(store, "rl-3", train_step(1, 2), range(1, 3))
    events, _ = read_run_events(store, "rl-3")
    assert list(lines.merged(events[:1], [], False)) == [events[0].event]
    assert list(lines.merged(events[1:2], lines.new_steps(), True)) == [events[1].event], "more of its events follow"
    last = [events[2].event, TrainStep(record=train_step(1, 2))]
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


def test_one_process_writes_more_runs_than_it_has_open_at_a_time(settings: Settings, store: ObjectStore) -> None:
    run_ids = [f"sft-many{n}" for n in range(24)]
    for run_id in run_ids:
        put_log(store, run_id, FIRST, WHOLE_RUN)
        end_run(store, run_id)
    most = 0

    def count() -> None:
        nonlocal most
        while not done.wait(0.05):
            # Not those below: what a writer starts shows the writer's command until it has its own.
            own = _processes(recursive=False)
            most = max(most, len([p for p in own if "activities.tracking.wandb_writer" in p]))

    done = threading.Event()
    watching = threading.Thread(target=count)
    watching.start()
    try:
        assert all(found.warning is None for found in track_all(Track(HostContext(settings)), run_ids))
    finally:
        done.set()
        watching.join()
    assert most == 1
    assert kept(settings) == sorted(run_ids)
    for run_id in run_ids:
        assert set(named(read_offline(settings.root_path / "wandb" / run_id)[1], "train/loss")) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("victim", ["activities.tracking.wandb_writer", "wandb-core"])
def test_what_a_killed_writer_had_in_hand_is_written_again(victim: str, settings: Settings, store: ObjectStore) -> None:
    """Each time that the writer has opened runs, until a third of them is written: no step is lost, or there twice."""
    run_ids = [f"sft-killed{n}" for n in range(12)]
    for run_id in run_ids:
        put_log(store, run_id, FIRST, WHOLE_RUN)
        end_run(store, run_id)
    kills = 0

    def kill() -> None:
        nonlocal kills
        while not done.wait(0.02) and kills < 2:
            if list((settings.root_path / "wandb").glob(".writer-*/runs/*/wandb/offline-run-*")):
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
    assert kills, "nothing was killed"
    assert all(one.warning is None and one.folder for one in found), found
    for run_id in run_ids:
        history = read_offline(settings.root_path / "wandb" / run_id)[1]
        assert list(named(history, "train/loss")) == [1, 2, 3, 4, 5]
    assert kept(settings) == sorted(run_ids), "no half-written folder is left"
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


def rows(lines: list[Line], done: Done) -> list[Row]:
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
    steps = [*WHOLE_RUN, TrainStep(record=train_step(1, 3)), TrainStep(record=train_step(2, 5))]
    assert [row.values[STEP] for row in rows(steps, Done(step=5, evaluation=5, train_step=1))] == [5]


def test_disabled_writes_nothing(settings: Settings, store: ObjectStore) -> None:
    end_run(store, "sft-5")
    assert track(Track(HostContext(settings.model_copy(update={"wandb_mode": "disabled"}))), "sft-5") == Tracked()
    assert not (settings.root_path / "wandb").exists()


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
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracked = track(Track(HostContext(online), init_timeout_s=2.0, finish_timeout_s=30.0), "sft-6")
    assert time.monotonic() - begun < 90, "W&B would try for hours"
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


def test_a_run_that_cannot_be_written_at_all_is_tried_again_later(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "not a number")  # wandb refuses its settings and ends
    put_log(store, "sft-7", FIRST, WHOLE_RUN)
    end_run(store, "sft-7")
    with pytest.raises(ApplicationError, match="could not be written offline") as raised:
        track(Track(HostContext(settings)), "sft-7")
    assert not raised.value.non_retryable and raised.value.next_retry_delay


def test_a_run_is_written_however_often_others_of_its_writer_get_no_answer(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.tracking.track.POLL_S", 0.01)
    put_log(store, "sft-12", FIRST, WHOLE_RUN)
    end_run(store, "sft-12")
    activity = Track(HostContext(settings))

    async def follow() -> Tracked:
        following = None
        try:
            for _ in range(4):
                async with (await activity._writer._running()).used() as hanging:
                    writer = psutil.Process(hanging._process._process.pid)
                    writer.suspend()
                    following = following or asyncio.ensure_future(
                        ActivityEnvironment().run(activity.track, TrackRequest(run_id="sft-12", run=RUN))
                    )
                    while len(list(hanging.folder.parent.iterdir())) < 2:  # noqa: ASYNC110 - the other has no event
                        await asyncio.sleep(0.01)
                    with pytest.raises(WriterLost, match="did not close"):
                        await hanging.close(0.05)
                    await asyncio.to_thread(writer.wait)
            return await following
        finally:
            await activity.close()

    assert asyncio.run(follow()).warning is None
    assert set(named(read_offline(settings.root_path / "wandb" / "sft-12")[1], "train/loss")) == {1, 2, 3, 4, 5}


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
            return await asyncio.wait_for(following, 60)
        finally:
            await activity.close()

    assert asyncio.run(follow()).num_events == len(WHOLE_RUN)


def test_only_tries_in_a_row_that_bring_nothing_new_are_counted() -> None:
    tries = Tries()
    for step in (1, 2, 3):
        tries.opened(Done(step=step))
        tries.failed(WriterLost("it did not write in time"))
        assert tries.num_vain == 1
    tries.opened(Done(step=3))
    tries.failed(WriterLost("it did not write in time"))
    assert tries.num_vain == 2


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
            await activity.close()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follow())
    assert set(named(read_offline(settings.root_path / "wandb" / "sft-8")[1], "train/loss")) == {1, 2, 3, 4, 5}


async def test_a_writer_that_does_not_answer_is_ended_and_another_takes_its_place(tmp_path: Path) -> None:
    start = WriterStart(
        run_id="r",
        name="r",
        project="p",
        kind="sft",
        mode="offline",
        folder=tmp_path,
        init_timeout_s=5.0,
        config={},
    )
    writer = Writer(tmp_path)
    before = set(psutil.Process().children())
    async with writer.opened(start) as run:
        [process] = set(psutil.Process().children()) - before
        process.suspend()
        with pytest.raises(WriterLost, match="did not close within 1 s"):
            await run.close(1.0)
    async with writer.opened(start) as run:
        await run.write([Row(values={STEP: n}) for n in range(1, 1000)])
        await run.close(60.0)
    await writer.close()
    assert not process.is_running() and not _writers()
    assert not _scratch(tmp_path)


def _scratch(folder: Path) -> list[Path]:
    return list(folder.glob(".writer-*"))
