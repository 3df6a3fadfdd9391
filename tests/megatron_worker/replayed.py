"""Bins with routes, and samples that tell theirs.

Shape suffixes: T tokens, L layers with experts, E experts, K experts of a token.
"""

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from megatron_worker.engine import Batch, Outputs
from megatron_worker.layers import Experts
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.adapters import LoadedAdapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Ending, Generator, RequestGroup
from megatron_worker.sampler.generation import Sequence as Drawn
from shared.chat.completions import Sampling
from tests.megatron_worker.rows import Row


def experts_of(engine: MegatronEngine) -> list[Experts]:
    return [layer.mlp for layer in engine._model.layers if isinstance(layer.mlp, Experts)]


@contextmanager
def noted_routes(engine: MegatronEngine) -> Iterator[list[Tensor]]:
    """What the routers of one rank choose meanwhile, a layer after another: [T, K] each."""
    found: list[Tensor] = []

    def noting(router: Any) -> Any:
        def route(*args: Any) -> Any:
            weight_TK, expert_TK = router(*args)
            found.append(expert_TK.detach())
            return weight_TK, expert_TK

        return route

    routers = [(each, each.router) for each in experts_of(engine)]
    for each, router in routers:
        each.router = noting(router)
    try:
        yield found
    finally:
        for each, router in routers:
            each.router = router


def with_own_routes(engine: MegatronEngine, batch: Batch) -> Batch:
    """The bin with the routes that the engine itself gives it."""
    with torch.no_grad(), noted_routes(engine) as found:
        engine.forward(dataclasses.replace(batch, route_TLK=None), Outputs())
    return dataclasses.replace(batch, route_TLK=torch.stack(found, dim=1).to(torch.uint8))


def drawn(
    decoder: Decoder, model: Path, prompts: Sequence[Sequence[int]], num: int, length: int, tells: bool = True
) -> list[Drawn]:
    """Samples of prompts, of `length` tokens each."""
    how, tokenizer = Sampling(max_tokens=length, ignore_eos=True), Tokenizer.from_file(str(model / "tokenizer.json"))
    sequences = [
        Drawn(tuple(prompt), how, 100 * place + j, Ending(how, frozenset(), tokenizer), tells_routes=tells)
        for place, prompt in enumerate(prompts)
        for j in range(num)
    ]
    generator, ticket = Generator(decoder, 8), RequestGroup(LoadedAdapter("base", "", {}), sequences)
    generator.submit(ticket)
    thread = threading.Thread(target=generator.run)
    thread.start()
    ticket.done.wait()
    generator.stop()
    thread.join()
    return sequences


def routes_of(sequence: Drawn) -> Tensor:
    """Of a sample's tokens, the last one's as the one's before it: [T, L, K]."""
    route_TLK = torch.from_numpy(np.concatenate(sequence.routes)).to(torch.uint8)
    return torch.cat([route_TLK, route_TLK[-1:]])


def as_rows(sequences: Sequence[Drawn]) -> list[Row]:
    """What was drawn has the weight 1."""
    return [Row([*s.prompt, *s.token_ids], [0.0] * len(s.prompt) + [1.0] * len(s.token_ids)) for s in sequences]


def with_noise(decoder: Decoder, share: float, seed: int = 0) -> Decoder:
    """Add noise to the routers' weights, of a share of their own size."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in decoder.named_weights().items():
        if name.endswith("mlp.gate.weight"):
            weight += share * weight.std() * torch.randn(weight.shape, generator=generator).to(weight)
    return decoder
