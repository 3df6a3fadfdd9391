"""A checkpoint's `weights/` and `optimizer/`: whole tensors under PEFT's or Hugging Face's names, whatever the layout.

Rank 0 writes what all ranks gather, a tensor at a time. Everybody reads its own slices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megatron_worker.families.pieces import Piece
from megatron_worker.megatron.lora import Adapter
from megatron_worker.megatron.optimizer import Optimizer, State
from megatron_worker.megatron.parallel.mesh import Mesh
from megatron_worker.tensors.flat_buffer import Flat
from megatron_worker.tensors.model_folder import write_beside_weights
from megatron_worker.tensors.safetensors_files import (
    Entry,
    TensorFiles,
    all_drawn,
    check_names,
    single_file,
    write_model,
    write_safetensors,
)
from shared.models import peft as peft_format

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


def read_pieces(
    files: TensorFiles, pieces: Iterable[Piece], parameters: Mapping[str, Tensor], mesh: Mesh, prefix: str = ""
) -> None:
    """Fill this rank's parameters from whole tensors named `prefix + piece.name`; other ranks' pieces are left out."""
    for piece in pieces:
        if piece.parameter in parameters:
            group = mesh.splitting(piece.expert)
            piece.write(parameters[piece.parameter], files.local(piece, prefix + piece.name, group.rank, group.size))


def whole_tensor(piece: Piece, parameters: Mapping[str, Tensor], mesh: Mesh) -> Tensor:
    """A whole tensor on every rank, gathered from those that hold it. Collective. `parameters`: all of one dtype."""
    if piece.parameter in parameters:
        whole = _gathered(piece, parameters[piece.parameter].detach(), mesh)
    else:
        whole = next(iter(parameters.values())).new_empty(piece.shape)
    if piece.expert is not None and piece.stage == mesh.pp.rank:
        mesh.ep.broadcast(whole, piece.ep_rank)
    mesh.pp.broadcast(whole, piece.stage)
    return whole


def _gathered(piece: Piece, parameter: Tensor, mesh: Mesh) -> Tensor:
    group = mesh.splitting(piece.expert)
    share = piece.shape[0] if piece.split != 0 else -(-piece.shape[0] // group.size)
    local = piece.read(parameter, share)
    if piece.split is None:
        return local
    return torch.cat(group.gather(local), dim=piece.split).narrow(piece.split, 0, piece.shape[piece.split])
