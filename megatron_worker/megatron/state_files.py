"""A checkpoint's `weights/` and `optimizer/`: whole tensors under PEFT's or Hugging Face's names, whatever the layout.

Rank 0 writes; all ranks of its tensor-parallel group gather. Everybody reads its own slices.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_worker import peft_format
from megatron_worker.families.pieces import Piece
from megatron_worker.flat import Flat
from megatron_worker.lora import Adapter
from megatron_worker.megatron.mesh import Mesh
from megatron_worker.optimizer import Optimizer
from megatron_worker.weights import (
    Entry,
    TensorFiles,
    read_pieces,
    single_file,
    whole_tensor,
    write_model,
    write_safetensors,
)
from shared.errors import InvalidInput

OPTIMIZER = "optimizer.safetensors"
STEP = "step"
_MAX_FILE_BYTES = 5 << 30
_COPIED = ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "LICENSE")
_COPIED_PATTERNS = ("tokenizer*", "vocab.*", "chat_template*")


def write_adapter(folder: Path | None, adapter: Adapter, weights: Flat, mesh: Mesh) -> None:
    """PEFT's folder, in float32 whatever the engine computes in. `folder` None: only help gathering."""
    entries = [Entry(p.name, torch.float32, p.shape) for p in adapter.pieces]
    if folder is not None:
        peft_format.write_config(folder, adapter.lora)
    write_safetensors(folder and folder / peft_format.WEIGHTS, entries, _whole(adapter.pieces, weights, mesh))


def read_adapter(folder: Path, adapter: Adapter, weights: Flat, mesh: Mesh) -> None:
    """Raises InvalidInput when the file is missing or damaged, or a tensor is missing, unknown or of another shape."""
    path = folder / peft_format.WEIGHTS
    files = single_file(path)
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
    dtype = weights.buffer.dtype
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((model / "config.json").read_bytes())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for source in sorted({p for pattern in (*_COPIED, *_COPIED_PATTERNS) for p in model.glob(pattern)}):
            shutil.copyfile(source, folder / source.name)
    entries = [Entry(p.name, dtype, p.shape) for p in pieces]
    write_model(folder, entries, _whole(pieces, weights, mesh), max_bytes)


def write_optimizer(
    folder: Path | None, optimizer: Optimizer, pieces: Sequence[Piece], mesh: Mesh, master: bool
) -> None:
    """Both moments and the step count; the float32 masters too where `weights/` are not those."""
    flats = _flats(optimizer, master)
    entries = [Entry(f"{kind}.{p.name}", torch.float32, p.shape) for kind in flats for p in pieces]
    entries.append(Entry(STEP, torch.int64, ()))

    def tensors() -> Iterator[Tensor]:
        for flat in flats.values():
            yield from _whole(pieces, flat, mesh)
        yield torch.tensor(optimizer.step_count)

    write_safetensors(folder and folder / OPTIMIZER, entries, tensors())


def read_optimizer(folder: Path, optimizer: Optimizer, pieces: Sequence[Piece], mesh: Mesh, master: bool) -> None:
    """Raises InvalidInput when the file is missing, damaged, or of another model or adapter."""
    path = folder / OPTIMIZER
    files = single_file(path)
    flats = _flats(optimizer, master)
    check_names(files, {f"{kind}.{p.name}" for kind in flats for p in pieces} | {STEP}, path)
    for kind, flat in flats.items():
        read_pieces(files, pieces, flat.views, mesh, prefix=f"{kind}.")
    step = files.local(Piece(STEP, STEP, (), None, 0, 0), STEP, 0, 1)
    optimizer.step_count = int(step)


def check_names(files: TensorFiles, expected: set[str], place: Path) -> None:
    """Raises InvalidInput unless exactly the expected tensors are there."""
    missing, unknown = sorted(expected - files.names), sorted(files.names - expected)
    if missing:
        raise InvalidInput(f"{len(missing)} tensors are missing, the first is {missing[0]!r}", str(place))
    if unknown:
        raise InvalidInput(f"{len(unknown)} tensors do not belong here, the first is {unknown[0]!r}", str(place))


def _flats(optimizer: Optimizer, master: bool) -> dict[str, Flat]:
    masters = {"master": optimizer.master} if master else {}
    return {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq, **masters}


def _whole(pieces: Sequence[Piece], flat: Flat, mesh: Mesh) -> Iterator[Tensor]:
    return (whole_tensor(p, flat.views, mesh) for p in pieces)
