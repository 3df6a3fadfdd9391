"""A checkpoint's `weights/` and `optimizer/`: whole tensors under PEFT's or Hugging Face's names, whatever the layout.

Rank 0 writes what all ranks gather, a tensor at a time. Every rank reads its own slices.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from longshore.training import Lora
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.process.process_group import SideRanks
from megatron_worker.tensors.flat_buffer import Flat
from megatron_worker.tensors.safetensors_files import (
    TensorFiles,
    WrittenTensor,
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
_COPIED = (
    *("generation_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "LICENSE"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("tokenizer*", "vocab.*", "chat_template*", "additional_chat_templates/*.jinja"),
)

State = Literal["master", "exp_avg", "exp_avg_sq"]


class Place(Protocol):
    """A rank's number among the ranks that a tensor is split over, and the number of those ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class StateRanks(Protocol):
    """The ranks of an engine, for reading and writing its state."""

    @property
    def rank(self) -> int: ...

    @property
    def side(self) -> SideRanks: ...

    def first_holder(self, tensor_slice: TensorSlice, part: int) -> int:
        """Return the first of the ranks that hold a part of a tensor, counted along its split."""
        ...

    def splitting(self, tensor_slice: TensorSlice, /) -> Place:
        """Return the ranks that a tensor is split over."""
        ...

    def whole(self, tensor_slice: TensorSlice, parameters: Mapping[str, Tensor], dtype: torch.dtype, /) -> Tensor:
        """Gather a whole tensor, of `dtype`, on every rank from those that hold it. Collective."""
        ...

    def agreement(self) -> AbstractContextManager[None]: ...


class StatefulOptimizer(Protocol):
    """An optimizer whose state is saved. `gathered` is collective where ranks share the state out."""

    step_count: int
    grad: Flat

    def gathered(self, state: State) -> Mapping[str, Tensor]: ...

    def put(self, state: State, values: Flat) -> None: ...


class Stored(Protocol):
    """A parameter in a form of its own, made of the whole tensor."""

    def zeros(self) -> Tensor: ...

    def store(self, whole: Tensor) -> None: ...


def read_model(
    folder: Path,
    slices: Sequence[TensorSlice],
    parameters: Mapping[str, Tensor],
    ranks: StateRanks,
    carried: Sequence[str] = (),
    quantized: Mapping[str, Stored] = MappingProxyType({}),
) -> None:
    """Read a model. Raises InvalidInput for missing or damaged files, and for missing, unknown or misshapen tensors.

    `carried`: prefixes of the names of tensors that the model may have besides. `quantized`: those of this rank's
    parameters that are not held as they are read; each is whole for as long as it takes to store it.
    """
    of_stored: dict[str, list[TensorSlice]] = {name: [] for name in quantized}
    for s in slices:
        of_stored.get(s.parameter, []).append(s)
    with model_files(folder) as files:
        refuse_unknown(files, slices, folder, carried)
        _read(files, slices, parameters, ranks)
        for name, stored in quantized.items():
            whole = stored.zeros()
            _read(files, of_stored[name], {name: whole}, ranks)
            stored.store(whole)


def write_model_folder(
    folder: Path | None,
    model: Path,
    slices: Sequence[TensorSlice],
    parameters: Mapping[str, Tensor],
    ranks: StateRanks,
    carried: Sequence[str] = (),
    max_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write Hugging Face's folder: weights and config in the weights' dtype, tokenizer and templates as in `model`.

    Args:
        folder: None on ranks that only help gathering; below too.
        carried: prefixes of the names of tensors that are written as they are in `model`.
    """
    dtype = next(iter(parameters.values())).dtype
    with model_files(model) as files:
        unchanged = files.entries(carried) if carried else []
        tensors = chain(_whole(slices, parameters, ranks, dtype), map(files.whole, (e.name for e in unchanged)))
        with all_drawn(tensors):
            if folder is not None:
                _write_beside_weights(folder, model, dtype)
            entries = [*(WrittenTensor(s.name, dtype, s.shape) for s in slices), *unchanged]
            write_model(folder, entries, tensors, max_bytes)


def _write_beside_weights(folder: Path, model: Path, dtype: torch.dtype) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_bytes())
    for settings in (config, config.get("text_config")):  # of a model that reads images, the decoder's too
        if isinstance(settings, dict):
            settings.pop("torch_dtype", None)
            settings.pop("quantization_config", None)
            settings["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for source in sorted({path for pattern in _COPIED for path in model.glob(pattern)}):
        target = folder / source.relative_to(model)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)


def read_adapter(
    folder: Path, slices: Sequence[TensorSlice], parameters: Mapping[str, Tensor], ranks: StateRanks, model: Path
) -> None:
    """Read an adapter of a model's folder. Raises InvalidInput as `read_model`."""
    path = folder / peft_format.WEIGHTS
    with single_file(path) as files:
        check_adapter_names(files, {s.name for s in slices}, path, model)
        _read(files, slices, parameters, ranks)


def check_adapter_names(files: TensorFiles, expected: set[str], path: Path, model: Path) -> None:
    """Raise InvalidInput unless the expected tensors are there, and at most copies of output layer and embeddings."""
    copies = {name for name in files.names if name.endswith(peft_format.COPIES)}
    check_names(files, expected | copies, path)
    if copies:
        with model_files(model) as base:
            tied = {name for name in base.names if name.endswith(f".{peft_format.EMBEDDING}.weight")}
            for name in copies:
                own = base.names & {"lm_head.weight"} if name == peft_format.COPIES[0] else tied
                base.beside(files).check_equal(name, next(iter(own or tied)))


def write_adapter(
    folder: Path | None, lora: Lora, slices: Sequence[TensorSlice], parameters: Mapping[str, Tensor], ranks: StateRanks
) -> None:
    """Write PEFT's folder, in float32 whatever the engine computes in."""
    tensors = _whole(slices, parameters, ranks, torch.float32)
    with all_drawn(tensors):
        if folder is not None:
            peft_format.write_config(folder, lora, (s.name for s in slices))
        entries = [WrittenTensor(s.name, torch.float32, s.shape) for s in slices]
        write_safetensors(folder and folder / peft_format.WEIGHTS, entries, tensors)


def read_optimizer(
    folder: Path, optimizer: StatefulOptimizer, slices: Sequence[TensorSlice], ranks: StateRanks, master: bool
) -> None:
    """Read moments and step count. Raises InvalidInput when the file is missing, damaged, or of another model."""
    path = folder / OPTIMIZER
    states = _states(master)
    with single_file(path) as files:
        check_names(files, {f"{state}.{s.name}" for state in states for s in slices} | {STEP}, path)
        for state in states:
            values = optimizer.grad.like(torch.float32)
            _read(files, slices, values.views, ranks, prefix=f"{state}.")
            optimizer.put(state, values)
        optimizer.step_count = files.number(STEP)


def write_optimizer(
    folder: Path | None, optimizer: StatefulOptimizer, slices: Sequence[TensorSlice], ranks: StateRanks, master: bool
) -> None:
    """Write both moments and the step count; the float32 masters too where `weights/` are not those."""
    states = _states(master)
    entries = [WrittenTensor(f"{state}.{s.name}", torch.float32, s.shape) for state in states for s in slices]
    entries.append(WrittenTensor(STEP, torch.int64, ()))
    moments = chain.from_iterable(_whole(slices, optimizer.gathered(state), ranks, torch.float32) for state in states)
    tensors = chain(moments, [torch.tensor(optimizer.step_count)])
    with all_drawn(tensors):
        write_safetensors(folder and folder / OPTIMIZER, entries, tensors)


def _states(master: bool) -> tuple[State, ...]:
    return ("exp_avg", "exp_avg_sq", "master") if master else ("exp_avg", "exp_avg_sq")


def _whole(
    slices: Sequence[TensorSlice], parameters: Mapping[str, Tensor], ranks: StateRanks, dtype: torch.dtype
) -> Iterator[Tensor]:
    return (ranks.whole(s, parameters, dtype) for s in slices)


def _read(
    files: TensorFiles,
    slices: Iterable[TensorSlice],
    parameters: Mapping[str, Tensor],
    ranks: StateRanks,
    prefix: str = "",
) -> None:
    """Fill this rank's parameters from whole tensors named `prefix + name`; other ranks' tensors are left out."""
    for s in slices:
        if s.parameter in parameters:
            place = ranks.splitting(s)
            s.write(
                parameters[s.parameter], files.local(s, prefix + s.name, place.rank, place.size, is_weight=not prefix)
            )
