"""A checkpoint's `weights/` and `optimizer/`: whole tensors under PEFT's or Hugging Face's names, whatever the layout.

Rank 0 writes what all ranks gather, a tensor at a time. Everybody reads its own slices.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megatron_worker.families.pieces import Piece
from megatron_worker.flat import Flat
from megatron_worker.lora import Adapter
from megatron_worker.megatron.mesh import Mesh
from megatron_worker.model_folder import write_beside_weights
from megatron_worker.optimizer import Optimizer, State
from megatron_worker.weights import (
    Entry,
    all_drawn,
    check_names,
    read_pieces,
    single_file,
    whole_tensor,
    write_model,
    write_safetensors,
)
from shared import peft_format

OPTIMIZER = "optimizer.safetensors"
STEP = "step"
_MAX_FILE_BYTES = 5 << 30


def write_adapter(folder: Path | None, adapter: Adapter, weights: Flat, mesh: Mesh) -> None:
    """PEFT's folder, in float32 whatever the engine computes in. `folder` None: only help gathering."""
    entries = [Entry(p.name, torch.float32, p.shape) for p in adapter.pieces]
    tensors = _whole(adapter.pieces, weights, mesh)
    with all_drawn(tensors):
        if folder is not None:
            peft_format.write_config(folder, adapter.lora)
        write_safetensors(folder and folder / peft_format.WEIGHTS, entries, tensors)


def read_adapter(folder: Path, adapter: Adapter, weights: Flat, mesh: Mesh) -> None:
    """Raises InvalidInput when the file is missing or damaged, or a tensor is missing, unknown or of another shape."""
    path = folder / peft_format.WEIGHTS
    with single_file(path) as files:
        check_names(files, {p.name for p in adapter.pieces}, path)
        read_pieces(files, adapter.pieces, weights.views, mesh)


def write_full(
    folder: Path | None,
    model: Path,
    pieces: Sequence[Piece],
    weights: Flat,
    mesh: Mesh,
    max_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Hugging Face's folder: weights in their dtype, config with that dtype, tokenizer and templates as they were."""
    entries = [Entry(p.name, weights.buffer.dtype, p.shape) for p in pieces]
    tensors = _whole(pieces, weights, mesh)
    with all_drawn(tensors):
        if folder is not None:
            write_beside_weights(folder, model, weights.buffer.dtype)
        write_model(folder, entries, tensors, max_bytes)


def write_optimizer(
    folder: Path | None, optimizer: Optimizer, pieces: Sequence[Piece], mesh: Mesh, master: bool
) -> None:
    """Both moments and the step count; the float32 masters too where `weights/` are not those."""
    states = _states(master)
    entries = [Entry(f"{state}.{p.name}", torch.float32, p.shape) for state in states for p in pieces]
    entries.append(Entry(STEP, torch.int64, ()))

    moments = chain.from_iterable(_whole(pieces, optimizer.gathered(state), mesh) for state in states)
    tensors = chain(moments, [torch.tensor(optimizer.step_count)])
    with all_drawn(tensors):
        write_safetensors(folder and folder / OPTIMIZER, entries, tensors)


def read_optimizer(folder: Path, optimizer: Optimizer, pieces: Sequence[Piece], mesh: Mesh, master: bool) -> None:
    """Raises InvalidInput when the file is missing, damaged, or of another model or adapter."""
    path = folder / OPTIMIZER
    states = _states(master)
    with single_file(path) as files:
        check_names(files, {f"{state}.{p.name}" for state in states for p in pieces} | {STEP}, path)
        for state in states:
            whole = optimizer.grad.like(torch.float32)
            read_pieces(files, pieces, whole.views, mesh, prefix=f"{state}.")
            optimizer.put(state, whole)
        optimizer.step_count = int(files.local(Piece(STEP, STEP, (), None, 0, 0), STEP, 0, 1))


def _states(master: bool) -> tuple[State, ...]:
    return ("exp_avg", "exp_avg_sq", "master") if master else ("exp_avg", "exp_avg_sq")


def _whole(pieces: Sequence[Piece], flat: Flat, mesh: Mesh) -> Iterator[Tensor]:
    return (whole_tensor(p, flat.views, mesh) for p in pieces)
