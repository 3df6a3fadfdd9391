"""Syncs from every rank layout to two samplers of rank 0's process, for test_layouts.py.

python -m megatron_worker.process.launcher 2 tests.megatron_worker.weight_sync.sync_ranks FOLDER MODELS
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_worker.engine import Engine
from megatron_worker.process.process_group import start_group
from megatron_worker.sampler.decoder import adapter_of
from megatron_worker.weight_sync.sender import Sent, send
from shared.jobs.layout import EngineName, Layout
from shared.jobs.weight_sync import SyncTarget
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import random_rows
from tests.megatron_worker.weight_sync.samplers import Listening, listening

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


def sync_all(engine: Engine, kind: str, samplers: list[Listening], run_id: str, rank: int, num_ranks: int) -> None:
    """Train and send three times: whole rows, and then changes of full weights."""
    slot, sent = (None if kind == "full" else "run"), Sent()
    for version in range(3):
        train(engine, [BINS], learning_rate=1e-4)
        paths = tuple(one.path for one in samplers) or ("none",)
        target = SyncTarget(sockets=paths, version=version, backend="delta", bucket_bytes=BUCKET)
        sending = send(engine.outgoing(slot), target, run_id, rank, num_ranks, sent)
        outgoing = engine.outgoing(slot)
        expected = dict(outgoing.tensors)  # gathered on every rank
        if sending is None:
            continue
        done = sending.wait()
        assert done.problems == {}, done.problems
        for one in samplers:
            if outgoing.lora is None:
                found = one.tensors()
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            else:
                one.models.name_weights(json.dumps({"name": f"{run_id}-{version}", "digest": done.digest}).encode())
                held = one.models.find(f"{run_id}-{version}").lora_weights
                for name, lora in adapter_of("", "", outgoing.lora, one.decoder, expected).lora_weights.items():
                    assert torch.equal(held[name].a_RI, lora.a_RI) and torch.equal(held[name].b_OR, lora.b_OR)


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
