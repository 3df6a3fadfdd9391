"""Starts a TrainerRank in a process that a launcher started as a rank, or in a single process."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from longshore.layout import EngineName, Layout
from longshore.training import Dtype, OptimizerStates, Quantization, Recompute, held_otherwise
from megatron_worker.process.process_group import backend, start_group
from megatron_worker.trainer_rank.rank import TrainerRank
from megatron_worker.warm_engine import new_engine
from shared.errors import InvalidInput


def start(
    model: Path,
    layout: Layout | None = None,
    dtype: Dtype = "float32",
    memory_budget_bytes: int | None = None,
    engine: EngineName = "megatron",
    quantize_base: Quantization | None = None,
    optimizer_states: OptimizerStates = "float32",
    recompute: Recompute = "auto",
) -> TrainerRank:
    """A TrainerRank around a fresh engine. Collective.

    Args:
        model: a Hugging Face folder.
        layout: by default all ranks are data-parallel.
        quantize_base: hold the base's linears so; then adapters alone are trained.
        optimizer_states: how both moments of AdamW are held.
        recompute: see TrainerRank.

    Raises:
        InvalidInput: the folder or the layout cannot be used, or the engine does not hold weights or moments so.
    """
    if rule := held_otherwise(engine, quantize_base, optimizer_states):
        raise InvalidInput(rule, "start")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if num_ranks > 1 and not dist.is_initialized():
        start_group(backend())
    made = new_engine(engine, model, layout or Layout(dp=num_ranks), dtype, quantize_base, optimizer_states)
    return TrainerRank(made, memory_budget_bytes, recompute=recompute)
