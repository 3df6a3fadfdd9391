"""Runs as the tracker reads them, and what W&B has written of them: its offline files, its folders, its processes."""

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path

from temporalio.testing import ActivityEnvironment

from activities.tracking.track import Track, Tracked, TrackRequest
from activities.tracking.wandb_writer import STEP
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.events import Evaluated, EvaluationSample, Event, Offloaded, Started, Step, Succeeded
from longshore.fields import Fence
from longshore.runs import RLRun
from longshore.training import Lora
from longshore.views import StepStatus
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

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
    samples = (EvaluationSample(prompt="ahoy?", completion=f"ahoy {number}", reference="ahoy"),)
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
    """Follow runs side by side."""

    async def follow() -> list[Tracked]:
        requests = [TrackRequest(run_id=run_id, run=run) for run_id in run_ids]
        try:
            return await asyncio.gather(*(ActivityEnvironment().run(activity.track, each) for each in requests))
        finally:
            activity.close()

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
