"""The engine that TrainerRank needs: the Engine Protocol, the backbone alone, and slots trained side by side."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from longshore.training import Optimizer
from megatron_worker.engine import Batch, Engine, Norms
from megatron_worker.head.logprobs import VocabShard


class ForwardEngine(Engine, Protocol):
    """An engine with any number of trainable slots. Forwards, backwards and steps use the active one."""

    @property
    def needs_lockstep(self) -> bool:
        """True if all ranks must do the same forwards and backwards in the same order, if need be of empty batches."""
        ...

    def hidden_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the targets' hidden states after the final norm, [N, H], and the output embedding for their heads.

        The embedding has only this rank's rows, [V, H]. Hidden states are equal on all ranks that share a
        vocabulary, and heads must give them the complete gradient on each.
        """
        ...

    @property
    def vocab_shard(self) -> VocabShard:
        """The rows of the output embedding that this rank's heads have."""
        ...

    def train_own(self, slot: str | None, parameters: Mapping[str, Parameter]) -> None:
        """Train parameters of the user's code with a slot: they step together, and `save` and `load` handle both.

        They are whole and equal on every rank. Ranks that share data must compute the same with them.
        """
        ...

    def write_base(self, folder: Path) -> None:
        """Write the base as Hugging Face's folder; rank 0 writes. Collective."""
        ...

    def adapter_weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """PEFT's names and full float32 tensors of a slot, one at a time, on every rank. Collective."""
        ...

    def reduce_gradients(self, denominator: float) -> float:
        """Add the active slot's gradients up over all ranks, and divide them. Returns their norm over all ranks."""
        ...

    def apply_gradients(self, adam: Optimizer, learning_rate: float, norm: float) -> Norms:
        """Clip what `reduce_gradients` left, step, zero. A norm that is not finite changes no weight."""
        ...
