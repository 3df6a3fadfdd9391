"""The decoder interface of the sampler, and the choice of the decoder for a model.

Shape suffixes: B slots, H hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_worker.sampler.decoder import Decoder, computes
from megatron_worker.sampler.drawing import PromptScores
from megatron_worker.sampler.layers import FusedLinear, LoraFactors
from shared.families import read_architecture
from shared.families.architecture import Architecture


class AnyPrompt(Protocol):
    """A prompt that was read: its last token's final hidden state, its experts, and what its cache needs of it."""

    @property
    def hidden_H(self) -> Tensor: ...
    @property
    def experts(self) -> list[Tensor]: ...
    @property
    def num_bytes(self) -> int: ...


class AnyCache(Protocol):
    """The cache of a lane's slots, such as keys and values. It takes only prompts that the same decoder read."""

    @property
    def num_bytes(self) -> int: ...
    def reserve(self, num_tokens: int) -> None: ...
    def fill(self, slot: int, prompt: Any) -> None: ...


class AnyDecoder(Protocol):
    """A model, whole on one device; see `Decoder`. Its methods take only objects that it returned, no other decoder's.

    `computes_slots_alone`: no slot is computed together with others. Then slot 0 of a step at position 0 is empty.
    """

    folder: Path
    architecture: Architecture
    dtype: torch.dtype
    device: torch.device

    @property
    def computes_slots_alone(self) -> bool: ...
    @property
    def adaptable(self) -> Sequence[FusedLinear]: ...
    def named_weights(self) -> dict[str, Tensor]: ...
    def read_weights(self, folder: Path) -> None: ...
    def new_cache(self, num_slots: int) -> AnyCache: ...
    def prefill(self, token_ids: tuple[int, ...], lora_weights: Mapping[str, LoraFactors]) -> AnyPrompt: ...
    def score(self, token_ids: tuple[int, ...], prompt: Any, num_top: int = 0) -> PromptScores: ...
    def step(
        self,
        token_B: Tensor,
        position_B: Tensor,
        num_blocks: int,
        cache: Any,
        lora_weights: Mapping[str, LoraFactors],
        chosen: list[Tensor] | None = None,
    ) -> Tensor: ...
    def logits(self, hidden_BH: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor: ...


def open_decoder(folder: Path, dtype: torch.dtype, device: torch.device, by_transformers: bool = False) -> AnyDecoder:
    """Read a model folder into our own decoder if it supports the architecture, else into transformers' model.

    `by_transformers`: the latter in any case.

    Raises InvalidInput: the folder cannot be used.
    """
    if not by_transformers and computes(read_architecture(folder)):
        return Decoder(folder, dtype, device)
    # Its import takes seconds, and most samplers do without it.
    from megatron_worker.sampler.by_transformers import TransformersDecoder

    return TransformersDecoder(folder, dtype, device)
