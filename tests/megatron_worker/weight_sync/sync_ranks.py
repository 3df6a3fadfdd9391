"""Syncs from every rank layout to two samplers of rank 0's process, for test_layouts.py.

python -m megatron_worker.process.launcher 2 tests.megatron_worker.weight_sync.sync_ranks FOLDER MODELS
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_worker.engine import Engine, Outgoing
from megatron_worker.process.process_group import start_group
from megatron_worker.sampler.decoder import adapter_of
from megatron_worker.weight_sync.sender import Sent, send
from shared.jobs.layout import EngineName, Layout
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.weight_sync.samplers import Listening, access_of, listening, target_of

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
BINS = [[row] for row in random_rows([40, 17])]


WAYS = ("shared_memory", "delta by shared_memory", "collective", "delta by collective")


def sync_all(engine: Engine, kind: str, samplers: list[Listening], run_id: str, rank: int, num_ranks: int) -> None:
    """Train and send in every way. The first delta, alone, has nothing to go on from."""
    slot, sent = (None if kind == "full" else "run"), Sent()
    for version, way in enumerate(("delta by shared_memory", *WAYS)):
        train(engine, [BINS], learning_rate=1e-4)
        target = target_of(samplers, version, way, BUCKET)
        sending = send(engine.outgoing(slot), target, run_id, rank, num_ranks, sent, access_of(run_id))
        outgoing = engine.outgoing(slot)
        expected = dict(outgoing.tensors)  # gathered on every rank
        if sending is None:
            continue
        done = sending.wait()
        assert done.problems == {}, done.problems
        assert done.transport == way.removeprefix("delta by ")
        for one in samplers:
            check(one, outgoing, expected, f"{run_id}-{version}", done.digest)


def check(one: Listening, outgoing: Outgoing, expected: dict[str, torch.Tensor], name: str, digest: str | None) -> None:
    """Every tensor is there to the bit, by its Hugging Face or PEFT name."""
    if outgoing.lora is None:
        found = one.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
        return
    one.models.name_weights(json.dumps({"name": name, "digest": digest}).encode())
    held = one.models.find(name).lora_weights
    for key, lora in adapter_of("", "", outgoing.lora, one.decoder, expected).lora_weights.items():
        assert torch.equal(held[key].a_RI, lora.a_RI) and torch.equal(held[key].b_OR, lora.b_OR)


def main() -> None:
    folder, models = Path(sys.argv[1]), json.loads(sys.argv[2])
    start_group("gloo")
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name, layouts in LAYOUTS.items():
        for engine, layout in layouts:
            for kind in ("full", "lora"):
                with ExitStack() as stack:
                    samplers: list[Listening] = []
                    if rank == 0:
                        samplers = stack.enter_context(listening(Path(models[name]), folder, 2))
                    driven = start(engine, Path(models[name]), kind, layout=layout)
                    sync_all(driven, kind, samplers, f"{engine}-{layout.label}", rank, num_ranks)
                    if rank == 0:
                        (folder / f"{name}-{engine}-{layout.label}-{kind}").touch()


if __name__ == "__main__":
    main()
