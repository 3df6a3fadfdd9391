"""Custom training code on a rank: typed forwards, adapters by name, micro-batches that fit memory."""

from megatron_worker.forwards import ACTIVE, ForwardInput, ForwardOutput, TopK
from megatron_worker.trainer_rank.rank import (
    Head,
    MemoryFigures,
    MicroBatch,
    Planning,
    Snapshot,
    TrainerRank,
    prefetch,
    start,
    train_head,
)

__all__ = [
    "ACTIVE",
    "ForwardInput",
    "ForwardOutput",
    "Head",
    "MemoryFigures",
    "MicroBatch",
    "Planning",
    "Snapshot",
    "TopK",
    "TrainerRank",
    "prefetch",
    "start",
    "train_head",
]
