"""From a torchrun process, or one alone, to its TrainerRank."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_worker.trainer_rank.rank import TrainerRank
from shared.jobs import Dtype
from shared.layout import Layout


def start(
    model: Path, layout: Layout | None = None, dtype: Dtype = "float32", memory_budget_bytes: int | None = None
) -> TrainerRank:
    """A TrainerRank around a fresh Megatron engine. Collective.

    Args:
        model: a Hugging Face folder.
        layout: by default all of torchrun's ranks are data-parallel.

    Raises:
        InvalidInput: the folder or the layout cannot be used.
    """
    from megatron_worker.megatron.engine import MegatronEngine  # slow to load

    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if num_ranks > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    engine = MegatronEngine(model, layout or Layout(dp=num_ranks), dtype)
    return TrainerRank(engine, memory_budget_bytes)
