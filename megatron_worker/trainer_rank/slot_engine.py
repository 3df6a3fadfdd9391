"""The engine that TrainerRank needs: the Engine Protocol, the backbone alone, and slots trained side by side."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from megatron_worker.engine import Batch, Engine, Norms
from megatron_worker.head.logprobs import VocabShard
from shared.jobs.job import Adam


class SlotEngine(Engine, Protocol):
    """Any number of slots may be trainable at once; calls of a step go to the active one."""

    @property
    def in_step(self) -> bool:
        """Whether ranks of other data must do the same forwards and backwards, in the same order, if of empty batches.

        Then `output_head` is collective, too.
        """
        ...

    def hidden_states(self, batch: Batch) -> Tensor:
        """After the final norm, of the batch's targets: [N, H], the same on all ranks that share a vocabulary.

        Heads on it must give it a gradient that is complete on each of them.
        """
        ...

    @property
    def output_head(self) -> tuple[Tensor, VocabShard]:
        """This rank's rows of the output embedding, [V, H]."""
        ...

    def adapter_weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """PEFT's names and full float32 tensors of a slot, one at a time, on every rank. Collective."""
        ...

    def reduce_gradients(self, denominator: float) -> float:
        """Add the active slot's gradients up over all ranks, and divide them. Returns their norm over all ranks."""
        ...

    def apply_gradients(self, adam: Adam, learning_rate: float, norm: float) -> Norms:
        """Clip what `reduce_gradients` left, step, zero. A norm that is not finite changes no weight."""
        ...
