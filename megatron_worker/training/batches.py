"""Packed data as batches on a device: the bins of each data-parallel rank, and their tensors.

Shape suffixes: T tokens of a bin, N targets of a bin.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longshore.training import MAX_SCALARS
from megatron_worker.engine import Batch, LossFunction, Scores
from megatron_worker.sums import combine
from megatron_worker.teachers import LikeliestIds
from shared.errors import CorruptArtifact, InvalidInput
from shared.jobs.packed import LIKELIEST_IDS, LIKELIEST_LOGPROBS, Ints, PackedBin, Plan, Units

Flags = NDArray[np.bool_]
Scored = Literal["old_logprob_N", "ref_logprob_N", "advantage_N", "weight_N"]
NO_UNITS: Ints = np.zeros(0, dtype=np.int64)  # the units of an empty batch


class Bins(Protocol):
    """The bins of each step, as the numbers of their units."""

    def bins(self, step: int) -> list[Ints]: ...
    def close(self) -> None: ...


class OneStep:
    """The bins of one step, in memory."""

    def __init__(self, bins: Sequence[Ints]) -> None:
        self._bins = list(bins)

    def bins(self, step: int) -> list[Ints]:
        return self._bins

    def close(self) -> None:
        pass


class PackedBatches:
    """Units and their plan. Leave its `with` block, or close it, to drop the maps of those that are on file."""

    def __init__(self, units: Units, plan: Bins, num_steps: int = 1) -> None:
        self.units = units
        self._plan = plan
        self._scored: dict[Scored, NDArray[np.float32]] = {}
        self._likeliest: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
        self.most_tokens: int | None = None  # of a bin, if the plan's are not taken
        self.most_step_tokens: int | None = None  # a bound on the tokens of any step, if it is known
        self._num_parts = 1
        self.num_steps = num_steps

    @classmethod
    def open(cls, units: Path, plan: Path, likeliest: Path | None = None) -> Self:
        """Map the files of two folders; of a third what a teacher has said of the targets."""
        steps = Plan(plan)
        opened = cls(Units(units), steps, steps.header.num_steps)
        if likeliest is not None:
            ids_NK, logprobs_NK = (np.load(likeliest / f, mmap_mode="r") for f in (LIKELIEST_IDS, LIKELIEST_LOGPROBS))
            if len(ids_NK) != opened.units.header.num_targets or ids_NK.shape != logprobs_NK.shape:
                raise CorruptArtifact("what the teacher said is not of these units", str(likeliest))
            opened.put_likeliest(ids_NK, logprobs_NK)
        opened.most_step_tokens = steps.most_bins * steps.header.bin_tokens
        return opened

    def bins(self, step: int) -> list[Ints]:
        """Return the units of each of a step's bins: the plan's, or those of `cut_to`."""
        bins = self._plan.bins(step)
        if self.most_tokens is None:
            return bins
        units = np.concatenate([NO_UNITS, *bins])
        tokens = self._lengths()[units]
        even_share = max(-(-int(tokens.sum()) // self._num_parts), int(tokens.max(initial=0)))
        return list(cut(units, tokens, min(self.most_tokens, even_share)))

    def cut_to(self, most_tokens: int, num_parts: int = 1) -> None:
        """Cut each step anew into bins of at most `most_tokens` tokens, the units in the plan's order.

        Args:
            num_parts: data-parallel ranks; each gets a share of a step that has enough units.

        Raises:
            InvalidInput: a unit has more tokens.
        """
        if self.longest_unit > most_tokens:
            message = f"the longest example has {self.longest_unit} tokens; passes of {most_tokens} fit the budget"
            raise InvalidInput(message, "memory_budget_bytes")
        self.most_tokens, self._num_parts = most_tokens, num_parts

    @property
    def longest_unit(self) -> int:
        """The tokens of the longest unit."""
        return int(self._lengths().max(initial=0))

    def _lengths(self) -> Ints:
        return np.diff(self.units.token_offsets).astype(np.int64)

    def bins_of_rank(self, step: int, dp_rank: int, dp_size: int) -> list[Ints]:
        """Return bins dp_rank, dp_rank + dp_size, … of a step. A rank may have fewer than another, or none."""
        return self.bins(step)[dp_rank::dp_size]

    def batch(self, units: Ints, device: torch.device) -> Batch:
        if len(units) and int(units.max()) >= self.units.header.num_units:
            raise CorruptArtifact(f"the plan names unit {int(units.max())}, the units end before it", "plan")
        batch = to_batch(self.units.read_bin(units), device)
        index_N = self.units.target_indices(units) if self._scored or self._likeliest else None
        scored: dict[str, Any] = {n: torch.from_numpy(values[index_N]).to(device) for n, values in self._scored.items()}
        if index_N is not None and self._likeliest is not None:
            scored["teacher"] = LikeliestIds(*(torch.from_numpy(v[index_N]).to(device) for v in self._likeliest))
        return dataclasses.replace(batch, **scored) if scored else batch

    def again(self) -> Self:
        """Return the same bins of the same units, whose columns can be replaced apart from these. Close one of both."""
        same = copy.copy(self)
        same._scored = dict(self._scored)
        return same

    def column(self, name: Scored) -> NDArray[np.float32]:
        """Return a column of all targets: what was put, or what is on file."""
        return self._scored[name] if name in self._scored else self.units.columns[name.removesuffix("_N")].copy()

    def put(self, name: Scored, values: NDArray[np.float32], at_N: Flags | None = None) -> None:
        """Replace a column of all later batches. `values`: one for each target on file. `at_N`: which; None: all."""
        assert len(values) == self.units.header.num_targets
        self._scored[name] = values if at_N is None else np.where(at_N, values, self._scored.get(name, values))

    def put_likeliest(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], at_N: Flags | None = None) -> None:
        """Give later batches a teacher's likeliest ids, [targets on file, K]. `at_N` as in `put`."""
        if at_N is not None and self._likeliest is not None:
            had_ids, had_logprobs = self._likeliest
            ids, logprobs = np.where(at_N[:, None], ids, had_ids), np.where(at_N[:, None], logprobs, had_logprobs)
        self._likeliest = ids, logprobs

    def batches(self, step: int, dp_rank: int, dp_size: int, device: torch.device) -> Iterator[Batch]:
        """Yield a rank's batches, as many on every rank: if a rank has one bin less, its last batch is empty."""
        bins = self.bins_of_rank(step, dp_rank, dp_size)
        num_turns = -(-len(self.bins(step)) // dp_size)
        return (self.batch(units, device) for units in [*bins, *[NO_UNITS] * (num_turns - len(bins))])

    def close(self) -> None:
        self.units.close()
        self._plan.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def cut(units: Ints, num_tokens: Ints, most_tokens: int) -> Iterator[Ints]:
    """Yield units in their order, as many at a time as stay within `most_tokens`.

    Args:
        num_tokens: of each of `units`; each at most `most_tokens`.
    """
    begin, total = 0, 0
    for place, tokens in enumerate(num_tokens.tolist()):
        if total + tokens > most_tokens:
            yield units[begin:place]
            begin, total = place, 0
        total += tokens
    if begin < len(units):
        yield units[begin:]


def to_batch(packed: PackedBin, device: torch.device) -> Batch:
    """Copy a bin to a device: indices as int64, scores as float32, routes as stored. No tensor holds a memory map."""

    def tensor(values: NDArray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64 if values.dtype.kind in "iu" else np.float32)).to(device)

    columns: dict[str, Any] = {name: tensor(values) for name, values in vars(packed).items() if name != "route_TLK"}
    route_TLK = None
    if (stored := packed.route_TLK) is not None:  # torch knows few functions of uint16
        route_TLK = torch.from_numpy(stored.astype(np.uint8 if stored.itemsize == 1 else np.int16)).to(device)
    return Batch(**columns, sampler_logprob_N=columns["old_logprob_N"], route_TLK=route_TLK)


class Sums:
    """Running sums (and maxima) over the bins of one rank, in float64 so that they do not depend on how bins were cut.

    A rank without bins has the same names as its peers: they come from the loss of an empty batch.
    """

    def __init__(self, loss: LossFunction, device: torch.device) -> None:
        self._device = device
        zeros_0 = torch.zeros(0, device=device)
        empty = Batch.empty(device)
        self.totals: dict[str, Tensor] = {}
        values = zeros_0.new_empty(0, MAX_SCALARS)
        scores = Scores(zeros_0, zeros_0, value_NL=values, divergence_N=zeros_0)
        self.add(loss.sums(scores, empty).detached(), empty)

    def add(self, sums: dict[str, Tensor], batch: Batch) -> None:
        counts = {
            "tokens": len(batch.token_id_T),
            "target_tokens": torch.count_nonzero(batch.weight_N),
            "num_bins": int(not batch.is_empty),
        }
        for name, value in {**sums, **counts}.items():
            value_64 = torch.as_tensor(value, dtype=torch.float64, device=self._device)
            self.totals[name] = combine(name, self.totals[name], value_64) if name in self.totals else value_64
