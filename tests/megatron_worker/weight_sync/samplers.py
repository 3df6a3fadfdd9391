"""Samplers in this process that trainers can send weights to: their weights, a socket and the thread that generates."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from longshore.training import Transport
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Generator
from megatron_worker.sampler.models import Models
from megatron_worker.weight_sync.connections import accept_locally, accept_remotely
from megatron_worker.weight_sync.transports.table import ends_of
from shared.jobs.job import SyncAccess, SyncTarget, secret_of_run

WAYS = [name for name in get_args(Transport) if name != "external" and "cpu" in ends_of(name).devices]
WITHOUT_GROUP = [name for name in WAYS if name != "collective"]
NAME = "tiny"
KEY = b"k" * 32


@dataclass
class Listening:
    models: Models
    decoder: Decoder
    generator: Generator
    path: str
    address: str

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.decoder.named_weights()


def target_of(samplers: list[Listening], version: int, way: str, bucket_bytes: int) -> SyncTarget:
    """`way`: one of WAYS; or `delta` by one of them, which is tcp without sockets' paths."""
    backend, _, transport = way.partition(" by ")
    paths = tuple(one.path + ("-elsewhere" if transport == "tcp" else "") for one in samplers)
    addresses = tuple(one.address for one in samplers)
    return SyncTarget(
        sockets=paths or ("none",), addresses=addresses, version=version, backend=backend, bucket_bytes=bucket_bytes
    )


def access_of(run_id: str) -> SyncAccess:
    return SyncAccess(secret=secret_of_run(KEY, run_id).hex())


@contextmanager
def listening(model: Path, folder: Path, num: int, dtype: torch.dtype = torch.float32) -> Iterator[list[Listening]]:
    found = []
    for number in range(num):
        decoder = Decoder(model, dtype, torch.device("cpu"))
        generator = Generator(decoder, 4)
        models = Models(NAME, model, decoder, generator, 256)
        path = folder / ("a-long-name-" * 8) / f"{number}.sock"
        path.parent.mkdir(exist_ok=True)
        accept_locally(path, models.receive)
        address = accept_remotely("127.0.0.1", KEY, models.receive)
        threading.Thread(target=generator.run, daemon=True).start()
        found.append(Listening(models, decoder, generator, str(path), address))
    try:
        yield found
    finally:
        for one in found:
            one.generator.stop()
