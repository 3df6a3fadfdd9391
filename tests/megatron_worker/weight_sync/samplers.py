"""Samplers in this process that trainers can send weights to: their weights, a socket and the thread that generates."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Generator
from megatron_worker.sampler.models import Models, accept_weights

NAME = "tiny"


@dataclass
class Listening:
    models: Models
    decoder: Decoder
    generator: Generator
    path: str

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.decoder.named_weights()


@contextmanager
def listening(model: Path, folder: Path, num: int, dtype: torch.dtype = torch.float32) -> Iterator[list[Listening]]:
    found = []
    for number in range(num):
        decoder = Decoder(model, dtype, torch.device("cpu"))
        generator = Generator(decoder, 4)
        models = Models(NAME, model, decoder, generator, 256)
        path = folder / ("a-long-name-" * 8) / f"{number}.sock"
        path.parent.mkdir(exist_ok=True)
        accept_weights(path, models)
        threading.Thread(target=generator.run, daemon=True).start()
        found.append(Listening(models, decoder, generator, str(path)))
    try:
        yield found
    finally:
        for one in found:
            one.generator.stop()
