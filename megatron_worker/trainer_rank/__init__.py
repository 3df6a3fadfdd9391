"""Custom training code on a rank: typed forwards, adapters by name, micro-batches that fit memory."""

from megatron_worker.forwards.inputs import ACTIVE, ForwardInput, ForwardOutput, TopK
from megatron_worker.trainer_rank.heads import Head, train_head
from megatron_worker.trainer_rank.micro_batches import MicroBatch, Planning
from megatron_worker.trainer_rank.rank import TrainerRank
from megatron_worker.trainer_rank.snapshot import Snapshot
from megatron_worker.trainer_rank.start import start

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
