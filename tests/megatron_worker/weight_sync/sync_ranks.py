"""Syncs from every rank layout to two samplers of rank 0's process, for test_layouts.py. What each whole sync took of
memory is a line of `memory-RANK.jsonl`.

python -m megatron_worker.process.launcher 2 tests.megatron_worker.weight_sync.sync_ranks FOLDER MODELS
"""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_worker.engine import Engine, Outgoing
from megatron_worker.process.process_group import start_group
from megatron_worker.sampler.decoder import adapter_of
from megatron_worker.tensors.slot_engine import SlotEngine
from megatron_worker.weight_sync.sender import Sent, send
from shared.jobs.layout import EngineName, Layout
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.weight_sync.samplers import Listening, access_of, listening, target_of
from tests.megatron_worker.weight_sync.sync_memory import SyncMemory, Taken

# By model: what has two ranks.
LAYOUTS: dict[str, list[tuple[EngineName, Layout]]] = {
    "dense": [
        ("megatron", Layout(dp=2)),
        ("megatron", Layout(tp=2)),
        ("megatron", Layout(tp=2, sp=True)),
        ("megatron", Layout(pp=2)),
        ("megatron", Layout(cp=2)),
        ("fsdp", Layout(dp=2)),
    ],
    "experts": [("megatron", Layout(dp=2, ep=2))],
}
BUCKET = 1 << 14
NUM_SAMPLERS = 2
BINS = [[row] for row in random_rows([40, 17])]


WAYS = ("shared_memory", "delta by shared_memory", "collective", "delta by collective")


def sync_all(
    engine: Engine, kind: str, samplers: list[Listening], run_id: str, rank: int, num_ranks: int, memory: SyncMemory
) -> Iterator[dict[str, object]]:
    """Train and send in every way. The first delta, alone, has nothing to go on from.

    Yields what each sync took of memory, but for those with `delta`, which compute with 80 bytes an element.
    """
    slot, sent = (None if kind == "full" else "run"), Sent()
    for version, way in enumerate(("delta by shared_memory", *WAYS)):
        train(engine, [BINS], learning_rate=1e-4)
        target = target_of(samplers, version, way, BUCKET)
        with nullcontext(Taken()) if way.startswith("delta") else memory.taken() as taken:
            outgoing = engine.outgoing(slot)
            sending = send(outgoing, target, run_id, rank, num_ranks, sent, access_of(run_id), taken)
        sizes = [math.prod(shape) * outgoing.dtype.itemsize for shape in outgoing.shapes.values()]
        gathered = max(sizes) + (0 if slot is None else _largest_master(engine, slot))
        found = {"way": way, "largest": max(sizes), "gathered": gathered, "weights": sum(sizes), **asdict(taken)}
        outgoing = engine.outgoing(slot)
        expected = dict(outgoing.tensors)  # gathered on every rank
        is_counted = not way.startswith("delta")
        if sending is None:
            yield from [found] * is_counted
            continue
        done = sending.wait()
        assert done.problems == {}, done.problems
        assert done.transport == way.removeprefix("delta by ")
        for one in samplers:
            version_sizes = check(one, outgoing, expected, f"{run_id}-{version}", done.digest)
        if is_counted:
            yield found | {"kept": sum(version_sizes), "hashed": max(version_sizes or sizes)}


def _largest_master(engine: Engine, slot: str) -> int:
    """Bytes of a slot's largest parameter, in float32."""
    assert isinstance(engine, SlotEngine)
    return 4 * max(view.numel() for view in engine._slots.adapters[slot].flat.views.values())


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


def main() -> None:
    folder, models = Path(sys.argv[1]), json.loads(sys.argv[2])
    start_group("gloo")
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
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
                    label = f"{engine}-{layout.label}"
                    for found in sync_all(driven, kind, samplers, label, rank, num_ranks, memory):
                        taken.write(json.dumps({"layout": label, "kind": kind, "rank": rank, **found}) + "\n")
                        taken.flush()
                    if rank == 0:
                        (folder / f"{label}-{kind}").touch()


if __name__ == "__main__":
    main()
