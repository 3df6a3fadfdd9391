"""A checkpoint's `weights/` and `optimizer/`: whole tensors under PEFT's or Hugging Face's names, whatever the layout.

Rank 0 writes what all ranks gather, a tensor at a time. Every rank reads its own slices.
"""

import json
import math
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from longshore.training import Lora, Optimizer, ScalarHead
from megatron_worker.engine import Batch, Norms, TensorBlock
from megatron_worker.families import read_slice, write_slice
from megatron_worker.offload import Flat
from megatron_worker.optimizers import sum_of_squares
from megatron_worker.process.ranks import SideRanks
from megatron_worker.quantized import QuantizedTensor
from megatron_worker.tensors.safetensors_files import (
    TensorFiles,
    WrittenTensor,
    all_drawn,
    check_names,
    model_files,
    single_file,
    write_model,
    write_safetensors,
)
from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice
from shared.models import peft as peft_format

OPTIMIZER = "optimizer.safetensors"
STEP = "step"
_BUFFER = "buffer."
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

    @property
    def num_replicas(self) -> int:
        """The number of ranks that compute the same after the model, and whose gradients are summed."""
        ...

    def first_holder(self, tensor_slice: TensorSlice, part: int) -> int:
        """Return the first of the ranks that hold a part of a tensor, counted along its split."""
        ...

    def splitting(self, tensor_slice: TensorSlice, /) -> Place:
        """Return the ranks that a tensor is split over."""
        ...

    def whole(self, tensor_slice: TensorSlice, parameters: Mapping[str, Tensor], dtype: torch.dtype, /) -> Tensor:
        """Gather a whole tensor, of `dtype`, on every rank from those that hold it. Collective."""
        ...


class SlotOptimizer(ABC):
    """The optimizer of a slot. `gathered` is collective if ranks split the state.

    `is_exact`: the model's own weights are float32 and are updated in place, so there are no masters.
    """

    step_count: int
    grad: Flat
    is_exact: bool
    _parameters: Mapping[str, Parameter]
    _hooks: Sequence[torch.utils.hooks.RemovableHandle]

    @abstractmethod
    def gathered(self, state: State) -> Mapping[str, Tensor]: ...

    @abstractmethod
    def put(self, state: State, values: Flat) -> None: ...

    @abstractmethod
    def states(self) -> list[Flat]:
        """Return all buffers that this optimizer owns but the gradients (the working weights are not its own)."""

    @property
    @abstractmethod
    def shares_masters(self) -> bool:
        """True if ranks that hold the same parameter have a share each of its masters."""

    @abstractmethod
    def masters_on(self, ranks: SideRanks) -> Callable[[str, int], Tensor | None]: ...

    @abstractmethod
    def refresh_working(self) -> None:
        """Round the masters into the weights that the model computes with, on all ranks that hold them."""

    @abstractmethod
    def reduce(self, denominator: float) -> float:
        """Sum the gradients over all ranks and divide them. Returns their norm; `apply` or `zero_grad` comes next."""

    @torch.no_grad()
    def apply(self, adam: Optimizer, learning_rate: float, norm: float) -> Norms:
        """Clip what `reduce` left, update, zero. A norm that is not finite only zeroes the gradients."""
        if not math.isfinite(norm):
            self.zero_grad()
            return Norms(norm, clipped=False)
        clipped = 0 < adam.clip_norm < norm
        if clipped:
            for grad in self._reduced():
                grad.mul_(adam.clip_norm / (norm + 1e-6))
        self.step_count += 1
        self._update(adam, learning_rate)
        self.refresh_working()
        self.zero_grad()
        return Norms(norm, clipped)

    @abstractmethod
    def _reduced(self) -> Sequence[Tensor]:
        """Return the gradients that `reduce` leaves on this rank."""

    @abstractmethod
    def _update(self, adam: Optimizer, learning_rate: float) -> None: ...

    def zero_grad(self) -> None:
        self.grad.buffer.zero_()

    def detach(self) -> None:
        """Freeze the parameters and release their gradients."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters.values():
            parameter.grad = None
            parameter.requires_grad_(False)


OptimizerT = TypeVar("OptimizerT", bound=SlotOptimizer)


@dataclass
class SlotTraining(Generic[OptimizerT]):
    """A slot that is trained: an adapter's, or (None) the base.

    Since the last step: `num_bins`, passes; `weight`, of this rank's bins.

    Args:
        parts: an optimizer with the tensors that it trains; a base with a head has two. All step as one.
        own: parameters of one's own code, which `weights/` do not have; `buffers`: its other tensors.
    """

    slot: str | None
    parts: list[tuple[OptimizerT, list[TensorSlice]]]
    own: tuple[OptimizerT, list[TensorSlice]] | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    num_bins: int = 0
    weight: Tensor | float = 0.0

    @property
    def everything(self) -> list[tuple[OptimizerT, list[TensorSlice]]]:
        return self.parts if self.own is None else [*self.parts, self.own]

    @property
    def optimizer(self) -> OptimizerT:
        return self.parts[0][0]

    @property
    def slices(self) -> list[TensorSlice]:
        return [s for _, slices in self.parts for s in slices]

    @property
    def keeps_masters(self) -> bool:
        """True if a checkpoint must hold masters: those of a full model whose weights are saved in less than float32.

        Adapters are saved in float32, and need none.
        """
        return self.slot is None and not self.optimizer.is_exact

    def weighed(self, passes: Iterable[tuple[Batch, dict[str, Tensor]]]) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        for batch, sums in passes:
            self.weight = self.weight + sums["weight"]
            yield batch, sums

    def square_of_own_gradient(self) -> Tensor:
        """Return the sum of squares of this rank's accumulated gradient, before `reduce`."""
        return torch.stack([sum_of_squares(optimizer.grad.buffer) for optimizer, _ in self.everything]).sum()

    @property
    def saved(self) -> list[tuple[State, OptimizerT, list[TensorSlice]]]:
        """The tensors in `optimizer/`: both moments, and masters of the tensors that `weights/` rounds or lacks."""
        states: tuple[State, ...] = ("exp_avg", "exp_avg_sq", *(("master",) if self.keeps_masters else ()))
        found = [(state, *part) for state in states for part in self.everything]
        return found if self.own is None or self.keeps_masters else [*found, ("master", *self.own)]

    def reduce(self, denominator: float) -> float:
        """Sum the gradients over all ranks, and divide them. Returns the norm of all."""
        return math.hypot(*(optimizer.reduce(denominator) for optimizer, _ in self.everything))

    def apply(self, adam: Optimizer, learning_rate: float, norm: float) -> Norms:
        """Clip what `reduce` left, update, zero. A norm that is not finite only zeroes the gradients."""
        self._forget_bins()
        norms = [optimizer.apply(adam, learning_rate, norm) for optimizer, _ in self.everything]
        return norms[0]

    def _forget_bins(self) -> None:
        self.num_bins, self.weight = 0, 0.0

    def zero_grad(self) -> None:
        self._forget_bins()
        for optimizer, _ in self.everything:
            optimizer.zero_grad()

    def detach(self) -> None:
        for optimizer, _ in self.everything:
            optimizer.detach()

    def refresh_working(self) -> None:
        for optimizer, _ in self.everything:
            optimizer.refresh_working()


def read_model(
    folder: Path,
    slices: Sequence[TensorSlice],
    parameters: Mapping[str, Tensor],
    ranks: StateRanks,
    carried: Sequence[str] = (),
    quantized: Mapping[str, QuantizedTensor] = MappingProxyType({}),
) -> None:
    """Read a model. Raises InvalidInput for missing or damaged files, and for missing, unknown or misshapen tensors.

    `carried`: name prefixes of further tensors that the files may have. `quantized`: those of this rank's parameters
    that are stored in another format; each is held whole only while it is converted.
    """
    of_stored: dict[str, list[TensorSlice]] = {name: [] for name in quantized}
    for s in slices:
        of_stored.get(s.parameter, []).append(s)
    with model_files(folder) as files:
        files.assign(slices, folder, carried)
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
    head: ScalarHead | None = None,
    max_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write Hugging Face's folder: weights and config in the weights' dtype, tokenizer and templates as in `model`.

    Experts are stacked if they are in `model`.

    Args:
        folder: None on ranks that only help gathering; below too.
        carried: prefixes of the names of tensors that are written as they are in `model`.
        head: in the output layer's place: the folder is that of transformers' classifier.
    """
    dtype = next(iter(parameters.values())).dtype
    with model_files(model) as files:
        unchanged = files.entries(carried) if carried else []
        trained = files.as_stored(slices, dtype)
        wholes = _whole(chain.from_iterable(trained.values()), parameters, ranks, dtype)
        tensors = chain(wholes, map(files.whole, (e.name for e in unchanged)))
        with all_drawn(tensors):
            if folder is not None:
                _write_beside_weights(folder, model, dtype, head)
            write_model(folder, [*trained, *unchanged], tensors, max_bytes)


def _write_beside_weights(folder: Path, model: Path, dtype: torch.dtype, head: ScalarHead | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_bytes())
    for settings in (config, config.get("text_config")):  # of a model that reads images, the decoder's too
        if isinstance(settings, dict):
            settings.pop("torch_dtype", None)
            settings.pop("quantization_config", None)
            settings["dtype"] = str(dtype).removeprefix("torch.")
    if head is not None:
        ours = f"For{head.per.capitalize()}Classification"
        config["architectures"] = [re.sub(r"For[A-Z]\w+$", ours, name) for name in config.get("architectures") or ()]
        config["id2label"] = {str(number): name for number, name in enumerate(head.names)}
        config["label2id"] = {name: number for number, name in enumerate(head.names)}
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
                own = {n for n in base.names if n.endswith("lm_head.weight")} if name == peft_format.COPIES[0] else tied
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
        write_safetensors(folder and folder / peft_format.WEIGHTS, entries, tensors, peft_format.metadata_of(lora))


def copied_state(lora: Lora, training: SlotTraining[OptimizerT], ranks: StateRanks) -> Callable[[Path], None] | None:
    """Copy an adapter's state to the host. Returns, on rank 0, what writes `weights/` and `optimizer/` of the copy."""
    exact, slices = training.optimizer.gathered("master"), training.slices
    entries, moments = optimizer_tensors(training, ranks)
    copies: list[list[Tensor]] = [[], []]
    for copied, tensors in zip(copies, (_whole(slices, exact, ranks, torch.float32), moments), strict=True):
        for tensor in tensors:  # every rank draws all
            if ranks.rank == 0:
                copied.append(tensor.detach().to("cpu", copy=True))

    def write(folder: Path) -> None:
        weights, of_weights = folder / "weights", [WrittenTensor(s.name, torch.float32, s.shape) for s in slices]
        peft_format.write_config(weights, lora, (s.name for s in slices))
        metadata = peft_format.metadata_of(lora)
        write_safetensors(weights / peft_format.WEIGHTS, of_weights, iter(copies[0]), metadata)
        write_safetensors(folder / "optimizer" / OPTIMIZER, entries, iter(copies[1]))

    return write if ranks.rank == 0 else None


def read_optimizer(folder: Path, training: SlotTraining[OptimizerT], ranks: StateRanks) -> None:
    """Read moments and step count. Raises InvalidInput when the file is missing, damaged, or of another model."""
    path = folder / OPTIMIZER
    with single_file(path) as files:
        known = {f"{state}.{s.name}" for state, _, slices in training.saved for s in slices}
        check_names(files, known | {STEP} | {_BUFFER + name for name in training.buffers}, path)
        for name, buffer in training.buffers.items():
            if files.shape(_BUFFER + name) != buffer.shape:
                message = f"{name!r} has shape {files.shape(_BUFFER + name)}, expected {tuple(buffer.shape)}"
                raise InvalidInput(message, str(path))
            buffer.copy_(files.whole(_BUFFER + name))
        for state, optimizer, slices in training.saved:
            values = optimizer.grad.like(torch.float32)
            _read(files, slices, values.views, ranks, prefix=f"{state}.")
            optimizer.put(state, values)
            optimizer.step_count = files.number(STEP)


def write_optimizer(folder: Path | None, training: SlotTraining[OptimizerT], ranks: StateRanks) -> None:
    """Write both moments and the step count; the float32 masters too if `weights/` are not those."""
    entries, tensors = optimizer_tensors(training, ranks)
    with all_drawn(tensors):
        write_safetensors(folder and folder / OPTIMIZER, entries, tensors)


def optimizer_tensors(
    training: SlotTraining[OptimizerT], ranks: StateRanks
) -> tuple[list[WrittenTensor], Iterator[Tensor]]:
    """Return what `optimizer/` has of a slot. Every rank draws all tensors, which are gathered one at a time."""
    entries = [
        WrittenTensor(f"{state}.{s.name}", torch.float32, s.shape) for state, _, own in training.saved for s in own
    ]
    entries.append(WrittenTensor(STEP, torch.int64, ()))
    entries += [WrittenTensor(_BUFFER + name, b.dtype, tuple(b.shape)) for name, b in training.buffers.items()]
    found = (_whole(slices, each.gathered(state), ranks, torch.float32) for state, each, slices in training.saved)
    step_count = torch.tensor(training.optimizer.step_count)
    buffers = (b.detach().cpu() for b in training.buffers.values())
    return entries, chain(chain.from_iterable(found), [step_count], buffers)


def _whole(
    slices: Iterable[TensorSlice], parameters: Mapping[str, Tensor], ranks: StateRanks, dtype: torch.dtype
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
            local = files.local(s, prefix + s.name, place.rank, place.size, is_weight=not prefix)
            write_slice(s, parameters[s.parameter], local)


# --- The blocks of whole tensors that ranks hold, and how a rank reads its own out of its parameters ---

Held = Callable[[str, int], Tensor | None]
"""Returns this rank's parameter of a name, if this is the rank of that number; None otherwise."""


def local_only(parameters: Mapping[str, Tensor], own_rank: int) -> Held:
    return lambda name, rank: parameters[name] if rank == own_rank else None


def blocks_of(s: TensorSlice, ranks: StateRanks) -> Iterator[TensorBlock]:
    """Yield the blocks of a tensor, in their order. They are the same on every rank."""
    num_rows = s.shape[0] if s.shape else 1
    if s.split is None:
        yield TensorBlock(s.name, ranks.first_holder(s, 0), 0, num_rows)
        return
    size = ranks.splitting(s).size
    held = [s.spans(part, size) for part in range(size)]
    for section in range(len(held[0])):  # by rows: receivers take a tensor's blocks in their order
        for part, spans in enumerate(held):
            span, rank = spans[section], ranks.first_holder(s, part)
            if span.start < span.stop and s.split == 0:
                skipped = sum(before.stop - before.start for before in spans[:section])
                yield TensorBlock(s.name, rank, span.start, span.stop - span.start, rows_before=skipped)
            elif span.start < span.stop:
                yield TensorBlock(s.name, rank, 0, num_rows, span.start, span.stop - span.start)


def block_reader(slices: Sequence[TensorSlice], held: Held) -> Callable[[TensorBlock], Tensor | None]:
    """Return the function that reads a block on the rank that holds it (`Outgoing.held`)."""
    by_name = {s.name: s for s in slices}

    def read(block: TensorBlock) -> Tensor | None:
        s = by_name[block.name]
        parameter = held(s.parameter, block.rank)
        return None if parameter is None else read_slice(s, parameter.detach(), block.num_rows, block.rows_before)

    return read
