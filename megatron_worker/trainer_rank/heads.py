"""A head of one's own on hidden states, trained with a slot of a TrainerRank."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from megatron_worker.trainer_rank.rank import TrainerRank
from shared.errors import InvalidInput


class Head(Protocol):
    """A module, such as a torch.nn.Module, that computes named numbers from hidden states, [N, H], a row for each."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]: ...

    def scores(self, hidden_NH: Tensor) -> dict[str, Tensor]: ...


def train_head(rank: TrainerRank, name: str | None, head: Head) -> None:
    """Train a head with an adapter, or (None) with the base, once that was made. Heads are equal on all ranks.

    `optim_step` steps both, by the norm of both; `save` and `load` have both. Parameters take the engine's dtype, and
    lie in a buffer of the slot from then on. Raises InvalidInput if the slot is not trained. Collective.
    """
    with rank.agreement():
        if not (rank.trains_base if name is None else rank.adapters.get(name)):
            raise InvalidInput("what it is to be trained with is not trained", "head")
    rank.engine.train_own(rank.slot(name), dict(head.named_parameters()))
