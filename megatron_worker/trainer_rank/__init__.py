"""Custom training code on a rank: typed forwards, adapters by name, micro-batches that fit memory."""

from megatron_worker.forwards import ACTIVE, ForwardInput, ForwardOutput, TopK
from megatron_worker.trainer_rank.micro_batches import MicroBatch, Planning
from megatron_worker.trainer_rank.rank import Head, Snapshot, TrainerRank, start, train_head

__all__ = [
    "ACTIVE",
    "ForwardInput",
    "ForwardOutput",
    "Head",
    "MicroBatch",
    "Planning",
    "Snapshot",
    "TopK",
    "TrainerRank",
    "start",
    "train_head",
]
