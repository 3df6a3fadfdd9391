"""A checkpoint's `weights/` and `optimizer/` of an FSDP engine: the same files, under the same names, as any engine's.

Rank 0 writes; all ranks gather. Everybody reads its own shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megatron_worker.families.pieces import Piece
from megatron_worker.fsdp.adapter import Adapter
from megatron_worker.fsdp.optimizer import Optimizer
from megatron_worker.fsdp.ranks import Ranks
from megatron_worker.tensors.model_folder import write_beside_weights
from megatron_worker.tensors.safetensors_files import (
    Entry,
    TensorFiles,
    all_drawn,
    check_names,
    model_files,
    refuse_unknown,
    single_file,
    write_model,
    write_safetensors,
)
from shared.models import peft as peft_format

OPTIMIZER = "optimizer.safetensors"
STEP = "step"
_MAX_FILE_BYTES = 5 << 30


def read_model(folder: Path, pieces: Sequence[Piece], shards: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raises InvalidInput when a file is missing or damaged, or a tensor is missing, unknown or of another shape."""
    with model_files(folder) as files:
        refuse_unknown(files, pieces, folder)
        _read(files, pieces, shards, ranks)


def write_model_folder(
    folder: Path | None, model: Path, pieces: Sequence[Piece], shards: Mapping[str, Tensor], ranks: Ranks
) -> None:
    """Hugging Face's folder. `folder` None: only help gathering."""
    dtype = shards[pieces[0].name].dtype
    tensors = _whole(pieces, shards, ranks)
    with all_drawn(tensors):
        if folder is not None:
            write_beside_weights(folder, model, dtype)
        write_model(folder, [Entry(p.name, dtype, p.shape) for p in pieces], tensors, _MAX_FILE_BYTES)


def read_adapter(folder: Path, adapter: Adapter, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raises InvalidInput as `read_model`."""
    path = folder / peft_format.WEIGHTS
    with single_file(path) as files:
        check_names(files, {p.name for p in adapter.pieces}, path)
        _read(files, adapter.pieces, weights, ranks)


def write_adapter(folder: Path | None, adapter: Adapter, weights: Mapping[str, Tensor]) -> None:
    """PEFT's folder, in float32 whatever the engine computes in. Every rank has it whole."""
    if folder is not None:
        peft_format.write_config(folder, adapter.lora)
        entries = [Entry(p.name, torch.float32, p.shape) for p in adapter.pieces]
        write_safetensors(folder / peft_format.WEIGHTS, entries, iter([weights[p.name] for p in adapter.pieces]))


def read_optimizer(folder: Path, optimizer: Optimizer, pieces: Sequence[Piece], ranks: Ranks, master: bool) -> None:
    """Raises InvalidInput when the file is missing, damaged, or of another model or adapter."""
    path = folder / OPTIMIZER
    states = _states(optimizer, master)
    with single_file(path) as files:
        check_names(files, {f"{kind}.{p.name}" for kind in states for p in pieces} | {STEP}, path)
        for kind, tensors in states.items():
            _read(files, pieces, tensors, ranks, prefix=f"{kind}.")
        optimizer.step_count = int(files.local(Piece(STEP, STEP, (), None, 0, 0), STEP, 0, 1))


def write_optimizer(
    folder: Path | None, optimizer: Optimizer, pieces: Sequence[Piece], ranks: Ranks, master: bool
) -> None:
    """Both moments and the step count; the float32 masters too where `weights/` are not those."""
    states = _states(optimizer, master)
    entries = [Entry(f"{kind}.{p.name}", torch.float32, p.shape) for kind in states for p in pieces]
    entries.append(Entry(STEP, torch.int64, ()))
    moments = chain.from_iterable(_whole(pieces, tensors, ranks) for tensors in states.values())
    everything = chain(moments, [torch.tensor(optimizer.step_count)])
    with all_drawn(everything):
        write_safetensors(folder and folder / OPTIMIZER, entries, everything)


def _states(optimizer: Optimizer, master: bool) -> dict[str, Mapping[str, Tensor]]:
    masters = {"master": optimizer.master} if master else {}
    return {"exp_avg": optimizer.exp_avg.views, "exp_avg_sq": optimizer.exp_avg_sq.views, **masters}


def _read(
    files: TensorFiles, pieces: Sequence[Piece], tensors: Mapping[str, Tensor], ranks: Ranks, prefix: str = ""
) -> None:
    for piece in pieces:
        tensors[piece.name].copy_(files.local(piece, prefix + piece.name, ranks.rank, ranks.size))


def _whole(pieces: Sequence[Piece], tensors: Mapping[str, Tensor], ranks: Ranks) -> Iterator[Tensor]:
    return (ranks.whole(piece, tensors[piece.name]) for piece in pieces)
