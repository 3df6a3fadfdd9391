"""Syncs from every rank layout to two samplers of rank 0's process, for test_layouts.py. What each whole sync took of
memory is a line of `memory-RANK.jsonl`.

python -m megatron_worker.process.launcher 2 tests.megatron_worker.weight_sync.sync_ranks FOLDER MODELS
"""

import gc
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from longshore.events import Synced
from longshore.training import EngineName, Layout
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import Outgoing, TensorBlock
from megatron_worker.memory import CpuMeter
from megatron_worker.process.job_queue import EventLog
from megatron_worker.process.ranks import WorkerRanks, start_group
from megatron_worker.sampler.adapters import adapter_of
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.trained_slot import sent_meanwhile
from megatron_worker.weight_sync.buckets import all_bytes
from megatron_worker.weight_sync.sender import DeltaBase, Sending, send
from shared.jobs.job import Job, SyncAccess
from shared.models.peft import WEIGHTS
from tests.depth import drawn
from tests.megatron_worker.driving import accumulate, train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.weight_sync.samplers import Listening, access_of, listening, target_of
from tests.megatron_worker.weight_sync.test_sync import At, Killed, die


@dataclass
class Taken:
    """Most bytes at once. `mapped`: of the buffers that processes share, at all ends of a sync in this process."""

    sent: int = 0
    received: int = 0
    mapped: int = 0
    buffer: int = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """As a sync's phases: at the commit both ends still have their buffers."""
        if name == "commit":
            self.mapped = _mapped_bytes()
        yield

    def end(self, *_: object) -> None:
        pass


class SyncMemory:
    """Counts what operations make in all threads that begin from now on."""

    def __init__(self) -> None:
        self._meters: list[tuple[str, CpuMeter]] = []
        threading.setprofile(self._begin)

    def _begin(self, *_: object) -> None:
        """Meter a thread: called at the first event in each."""
        sys.setprofile(None)
        self._meters.append((threading.current_thread().name, CpuMeter()))
        self._meters[-1][1].start()

    @contextmanager
    def taken(self) -> Iterator[Taken]:
        """Count in a `with` block in which a sync begins and ends. Storages of before do not count."""
        marks, found = [meter.mark() for _, meter in self._meters], Taken()
        try:
            yield found
        finally:
            marks += [0] * (len(self._meters) - len(marks))
            for (name, meter), before in zip(self._meters, marks, strict=True):
                if name == "background":  # as BackgroundCall names the thread of a rank
                    found.sent += meter.peak() - before
                else:
                    found.received += meter.peak() - before


def _mapped_bytes() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if "/memfd:longshore-weights" in line)
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


# By model: what has two ranks. Ranks draw as the test does, by the same seed.
_MEGATRON = [Layout(dp=2), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)]
_FSDP = [Layout(dp=2), Layout(tp=2)]
LAYOUTS: dict[str, list[tuple[EngineName, Layout]]] = {
    "dense": [*(("megatron", layout) for layout in drawn(_MEGATRON, 1)), *(("fsdp", one) for one in drawn(_FSDP, 1))],
    **dict(
        drawn(
            [
                ("experts", drawn([("megatron", Layout(dp=2, ep=2)), ("fsdp", Layout(dp=2))], 1)),
                ("hybrid", [("megatron", Layout(tp=2))]),
            ],
            1,
        )
    ),
}
BUCKET = 1 << 14
NUM_SAMPLERS = 2
BINS = [[row] for row in random_rows([40, 17])]


WAYS = ("shared_memory", "delta by shared_memory", "tcp", "delta by tcp")


def sync_all(
    engine: Engine, kind: str, samplers: list[Listening], run_id: str, memory: SyncMemory
) -> Iterator[dict[str, object]]:
    """Train and send in every way, while passes go on. The first delta, alone, has nothing to go on from.

    Yields what each sync took of memory, but for those with `delta`, which compute with 80 bytes an element.
    """
    slot, sent, passed = (None if kind == "full" else "run"), DeltaBase(), threading.Event()
    for version, way in enumerate(("delta by shared_memory", *WAYS)):
        train(engine, [BINS], learning_rate=1e-4)
        target, outgoing = target_of(samplers, version, way, BUCKET), engine.outgoing(slot)
        with nullcontext(Taken()) if way.startswith("delta") else memory.taken() as taken:
            # The first begins only when all ranks have made their passes: `send` has waited for nothing of it.
            phases = taken if version else At("prepare", lambda: _must_be_set(passed))
            sending = send(outgoing, target, run_id, sent, access_of(run_id), phases)
            taken.buffer = min(BUCKET, all_bytes(outgoing))
            accumulate(engine, BINS)
            passed.set()
            done = sending.result() if sending is not None else None
        engine.zero_grad()
        sizes = [math.prod(shape) * outgoing.dtype.itemsize for shape in outgoing.shapes.values()]
        gathered = max(sizes) + (0 if slot is None else _largest_master(engine, slot))
        found = {"way": way, "largest": max(sizes), "gathered": gathered, "weights": sum(sizes), **asdict(taken)}
        expected = dict(engine.named_weights() if slot is None else engine.adapter_weights(slot))
        is_counted = not way.startswith("delta")
        if done is None:
            yield from [found] * is_counted
            continue
        assert done.problems == {}, done.problems
        assert done.transport == way.removeprefix("delta by ")
        for one in samplers:
            version_sizes = check(one, outgoing, expected, f"{run_id}-{version}", done.digest)
            with one.models._syncing:  # what it computes of an adapter after its last answer is not the next sync's
                pass
        if is_counted:
            yield found | {"kept": sum(version_sizes), "hashed": max(version_sizes or sizes)}
    check_copies(outgoing, sent)


def _must_be_set(event: threading.Event) -> None:
    assert event.wait(60), "nobody goes on while weights are sent"


def check_copies(outgoing: Outgoing, sent: DeltaBase) -> None:
    """Changes are found against a copy of what this rank holds, and of no more; none is kept of an adapter."""
    own = [block for block in outgoing.blocks if block.rank == outgoing.ranks.rank and outgoing.lora is None]
    assert list(sent._copies) == own
    elements = sum(math.prod(block.shape_of(outgoing.shapes[block.name])) for block in own)
    assert sum(copy.numel() for copy in sent._copies.values()) == elements


def break_and_mend(engine: Engine, samplers: list[Listening], run_id: str) -> None:
    """What breaks on one rank ends the sync on all of them; the next one brings every tensor to the bit."""
    sent, elsewhere = DeltaBase(), [block for block in engine.outgoing(None).blocks if block.rank]
    breaks = ["", "only changes", "rank 0 dies", "", "a sampler is lost", ""]
    for version, broken in enumerate(breaks + ["a rank cannot read", ""] * bool(elsewhere), start=10):
        train(engine, [BINS], learning_rate=1e-7)  # which changes one of an element's two words
        target, outgoing = target_of(samplers, version, "delta by shared_memory", BUCKET), engine.outgoing(None)
        phases, begun, done = At("", die), list[Sending](), None
        match broken:
            case "rank 0 dies":
                phases = At("fill 2", die)
            case "a sampler is lost":
                phases = At("fill 2", partial(_cut_the_first, begun))
            case "a rank cannot read":
                outgoing = replace(outgoing, held=partial(_held_unless, elsewhere[-1], outgoing.held))
        sending = send(outgoing, target, run_id, sent, access_of(run_id), phases)
        begun += [sending] * isinstance(sending, Sending)
        with suppress(Killed) if broken == "rank 0 dies" else nullcontext():
            done = sending.result() if sending is not None else None
        expected = dict(engine.named_weights())
        assert (done is None) == (not samplers or broken == "rank 0 dies")
        if done is None:
            continue
        if broken == "a rank cannot read":
            [why] = set(done.problems.values())
            assert why == f"rank 1 could not read its part of {elsewhere[-1].name}: its output says why"
            continue
        lost = samplers[: broken == "a sampler is lost"]
        assert list(done.problems) == [one.path for one in lost]
        assert (done.num_bytes < done.weight_bytes) == (broken in ("only changes", "a sampler is lost"))
        for one in samplers[len(lost) :]:
            check(one, outgoing, expected, "", None)


def _cut_the_first(begun: list[Sending]) -> None:
    begun[0].outbound.living[0].connection.shut()


def _held_unless(
    lost: TensorBlock, held: Callable[[TensorBlock], torch.Tensor | None], block: TensorBlock
) -> torch.Tensor | None:
    if block == lost and torch.distributed.get_rank() == lost.rank:
        raise OSError("the device is gone")
    return held(block)


def _largest_master(engine: Engine, slot: str) -> int:
    """Bytes of a slot's largest parameter, in float32."""
    return 4 * max(view.numel() for view in engine.adapters[slot].flat.views.values())


def check(
    one: Listening, outgoing: Outgoing, expected: dict[str, torch.Tensor], name: str, digest: str | None
) -> list[int]:
    """Every tensor is there to the bit, by its Hugging Face or PEFT name. Returns the sizes of what is kept anew."""
    if outgoing.lora is None:
        found = one.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
        return []
    one.models.name_weights(json.dumps({"name": name, "digest": digest}).encode())
    held, sizes = one.models.find(name).lora_weights, list[int]()
    for key, lora in adapter_of("", "", outgoing.lora, one.decoder, expected).lora_weights.items():
        assert torch.equal(held[key].a_RI, lora.a_RI) and torch.equal(held[key].b_OR, lora.b_OR)
        sizes += [lora.a_RI.nbytes, lora.b_OR.nbytes]
    return sizes


def save_in_background(
    engine: Engine, samplers: list[Listening], run_id: str, folder: Path, ranks: WorkerRanks
) -> None:
    """As a job's last step: the checkpoint, for which ranks gather what travels, is written while the adapter does.
    Each rank that sends has a trace of its own.
    """
    dispatcher, log = Dispatcher(engine), folder / run_id / "events.jsonl"
    report = EventLog(log if ranks.rank == 0 else None)
    begin, target = partial(dispatcher.send_weights, "run", run_id), target_of(samplers, 20, "shared_memory", BUCKET)
    target = target.model_copy(update={"profile_path": "trace.json"})
    job, trace = Job.model_construct(log_path=str(log)), folder / run_id / "trace.json"
    if ranks.rank == 0:
        trace.parent.mkdir(exist_ok=True)
        SyncAccess.path(str(log)).write_text(SyncAccess(profile=str(trace)).model_dump_json())
    with dispatcher.resident("run"), sent_meanwhile(begin, job, 3, report, ranks, target):
        dispatcher.engine.save(folder / run_id / "saved")
    for line in log.read_text().splitlines() if samplers else ():
        outcome = Synced.model_validate_json(line).outcome
        assert outcome.problems == {}
        saved = load_file(folder / run_id / "saved" / "weights" / WEIGHTS)
        for one in samplers:
            check(one, engine.outgoing("run"), saved, f"{run_id}-saved", outcome.digest)
        (folder / f"{run_id}-saved").touch()
    mine = trace.with_name(f"trace.rank{ranks.rank}.json") if ranks.rank else trace
    assert mine.exists() == (ranks.rank in engine.outgoing("run").members)
    if mine.exists():
        events = json.loads(mine.read_text().rstrip(",\n") + "]")
        own = {"wait", "give"} if ranks.rank else {"connect", "settle", "fill", "send", "commit"}
        assert own <= {event["name"] for event in events}
        assert {(event["args"]["version"], event["args"]["rank"]) for event in events} == {(20, ranks.rank)}


def main() -> None:
    folder, models = Path(sys.argv[1]), json.loads(sys.argv[2])
    store = start_group("gloo")
    rank = torch.distributed.get_rank()
    ranks = WorkerRanks(store, rank, rank, torch.distributed.get_world_size())
    memory, taken = SyncMemory(), (folder / f"memory-{rank}.jsonl").open("a")
    for name, layouts in LAYOUTS.items():
        for engine, layout in layouts:
            for kind in ("full", "lora"):
                with ExitStack() as stack:
                    samplers: list[Listening] = []
                    if rank == 0:
                        samplers = stack.enter_context(listening(Path(models[name]), folder, NUM_SAMPLERS))
                    # An adapter is sent in float32, whatever the trainer computes in.
                    dtype = "float32" if kind == "full" else "bfloat16"
                    driven = start(engine, Path(models[name]), kind, dtype, layout)
                    assert isinstance(driven, Engine)
                    label = f"{name}-{engine}-{layout.label}"
                    for found in sync_all(driven, kind, samplers, label, memory):
                        taken.write(json.dumps({"layout": label, "kind": kind, "rank": rank, **found}) + "\n")
                        taken.flush()
                    if kind == "full":
                        break_and_mend(driven, samplers, label)
                        gc.collect()  # what errors still refer to would count as mapped
                    else:
                        save_in_background(driven, samplers, label, folder, ranks)
                    if rank == 0:
                        (folder / f"{label}-{kind}").touch()


if __name__ == "__main__":
    main()
