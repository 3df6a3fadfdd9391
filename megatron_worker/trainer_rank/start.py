"""Starts a TrainerRank in a process that a launcher started as a rank, or in a single process."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from longshore.layout import EngineName, Layout
from longshore.training import Dtype
from megatron_worker.process.process_group import backend, start_group
from megatron_worker.trainer_rank.rank import TrainerRank
from megatron_worker.warm_engine import new_engine


def start(
    model: Path,
    layout: Layout | None = None,
    dtype: Dtype = "float32",
    memory_budget_bytes: int | None = None,
    engine: EngineName = "megatron",
) -> TrainerRank:
    """A TrainerRank around a fresh engine. Collective.

    Args:
        model: a Hugging Face folder.
        layout: by default all ranks are data-parallel.

    Raises:
        InvalidInput: the folder or the layout cannot be used.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if num_ranks > 1 and not dist.is_initialized():
        start_group(backend())
    return TrainerRank(new_engine(engine, model, layout or Layout(dp=num_ranks), dtype), memory_budget_bytes)
