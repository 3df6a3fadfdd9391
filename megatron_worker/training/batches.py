"""Batches of planned bins and of commands' data, and the scores of roles over them."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longshore.commands import TokenScores
from longshore.training import MAX_SCALARS, ScalarHead
from megatron_worker.engine import Batch, LikeliestIds, LossFunction, LossSums, Outputs, Scores, combine
from shared.errors import CorruptArtifact, InvalidInput
from shared.jobs import bins as packing
from shared.jobs.commands import joined, units_of
from shared.jobs.packed import LIKELIEST_IDS, LIKELIEST_LOGPROBS, Ints, PackedBin, Plan, Units
from shared.jobs.prefix_tree import SequenceRow, TreeUnit, split_tree

# --- Packed data as batches on a device: the bins of each data-parallel rank, and their tensors ---
#
# Shape suffixes: T tokens of a bin, N targets of a bin.

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
        more: dict[str, Any] = {n: torch.from_numpy(values[index_N]).to(device) for n, values in self._scored.items()}
        if index_N is not None and self._likeliest is not None:
            more["teacher"] = LikeliestIds(*(torch.from_numpy(v[index_N]).to(device) for v in self._likeliest))
        if self.units.header.sources:
            num_targets = np.diff(self.units.target_offsets)[units]
            more["source_N"] = torch.from_numpy(np.repeat(self.sources_of(units), num_targets)).to(device)
        return dataclasses.replace(batch, **more) if more else batch

    def sources_of(self, units: Ints) -> Ints:
        """Return the number of the source that each unit of a mixture is from, int64."""
        ends = np.cumsum([source.num_units for source in self.units.header.sources])
        return np.searchsorted(ends, units, side="right")

    def by_source(self, loss: LossFunction) -> LossFunction:
        """Return a loss that also reports `loss_NAME` of each source of a mixture. It trains the same.

        A source's is the same loss of the same scores, with a weight of 0 for all targets that are not its own.
        """
        if not (sources := self.units.header.sources):
            return loss

        def sums(scores: Scores, batch: Batch) -> LossSums:
            whole = loss.sums(scores, batch)
            metrics, means = dict(whole.metrics), dict(whole.means)
            source_N = batch.label_N if batch.source_N is None else batch.source_N  # None: nothing is in the batch
            here = set(source_N.unique().tolist())
            with torch.no_grad():
                for number, source in enumerate(sources):
                    found, weight_N = (torch.zeros_like(whole.loss),) * 2, batch.weight_N[:0]
                    if number in here:
                        weight_N = batch.weight_N.where(source_N == number, 0.0)
                        own = loss.sums(scores, dataclasses.replace(batch, weight_N=weight_N))
                        found = own.loss, own.weight
                    means[f"loss_{source.name}"] = found
                    metrics[f"target_tokens_{source.name}"] = torch.count_nonzero(weight_N)
            return dataclasses.replace(whole, metrics=metrics, means=means)

        return LossFunction(loss.outputs, sums)

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
    batch = Batch(**columns, sampler_logprob_N=columns["old_logprob_N"])
    return batch if packed.route_TLK is None else batch.with_routes(packed.route_TLK)


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


# --- Makes batches of a command's data: the sequences that a client sent, packed as in a job, but in memory ---
#
# Shape suffixes: L tokens of a sequence, N targets of all units.


@dataclass(frozen=True)
class CommandData:
    """A command's data as the batches of one step; for each datum the indices of its tokens among all targets."""

    batches: PackedBatches
    targets_of: Sequence[Ints]

    def scores(self, found: dict[str, NDArray]) -> tuple[TokenScores, ...]:
        """Return the scores of each datum, from columns over all targets, [N] or [N, K]."""
        return tuple(
            TokenScores.model_validate({name: values[places].tolist() for name, values in found.items()})
            for places in self.targets_of
        )


def pack_data(data: Units, max_tokens: int, share_prefixes: bool, score_all: bool = False) -> CommandData:
    """Pack a command's data into bins: a unit is a sequence or, with `share_prefixes`, a tree of them.

    `score_all`: what has a weight of 0 is scored, too.
    """
    units = data if score_all else data.of_targets(data.columns["weight"] != 0)
    ends = units.target_offsets
    targets_of = [np.arange(*each) for each in itertools.pairwise(ends)]
    if share_prefixes:
        trees = split_tree([_row(units, number) for number in range(len(targets_of))], max_tokens)
        units, targets_of = units_of(joined([tree.columns() for tree in trees])), _places(trees, len(targets_of))
    sizes = np.diff(units.token_offsets).tolist()
    bins = [np.array(each, dtype=np.int64) for each in packing.pack_bins(sizes, max_tokens)]
    return CommandData(PackedBatches(units, OneStep(bins)), targets_of)


def _row(units: Units, number: int) -> SequenceRow:
    """Return a unit whose targets are its own tokens as a sequence, which gives each target's columns to its token."""
    packed = units.read_bin(np.array([number]))
    target_N = packed.hidden_index_N + 1

    def column(values_N: NDArray) -> NDArray:
        values_L = np.zeros(packed.num_tokens, dtype=values_N.dtype)
        values_L[target_N] = values_N
        return values_L

    return SequenceRow(
        token_ids=packed.token_id_T,
        target_mask=column(np.ones(len(target_N), dtype=bool)),
        weight=column(packed.weight_N),
        advantage=column(packed.advantage_N),
        old_logprob=column(packed.old_logprob_N),
        ref_logprob=column(packed.ref_logprob_N),
    )


def _places(trees: Sequence[TreeUnit], num_data: int) -> list[Ints]:
    """Return for each datum the indices of its targets among those of all units."""
    places: list[Ints] = [np.zeros(0, dtype=np.int64)] * num_data
    first = 0
    for tree in trees:
        for sequence, number in enumerate(tree.members):
            places[number] = first + np.flatnonzero(tree.sequence_N == sequence)
        first += tree.num_targets
    return places


# --- Scores data before steps with weights that do not change ---
# The policy's, a reference's, a teacher's or a critic's.
#
# A unit is scored once, in the first bin of this rank that holds it, however often it is trained on. A job that
# resumes from a checkpoint is scored by its initial weights in the same bins, so that the scores are equal to the bit.


@dataclass(frozen=True)
class Role:
    """A slot that scores data, and the destination of its scores.

    Attributes:
        slot: its name; None: the base.
        steps: those whose examples are scored. They end with the last step that is computed at all.
        take: is given what `TargetScores.found` has of this rank's share.
        head: that of the slot, if `outputs` asks for its values.
    """

    slot: str | None
    data: PackedBatches
    steps: range
    outputs: Outputs
    take: Callable[[dict[str, NDArray]], object]
    head: ScalarHead | None = None


def logprobs_role(
    slot: str | None,
    data: PackedBatches,
    steps: range,
    temperature: float = 1.0,
    *,
    column: Scored,
    at_N: Flags | None = None,
) -> Role:
    """Return a role whose log-probabilities, in nats, fill a column of the data.

    Args:
        temperature: what logits are divided by.
        at_N: the targets whose column is filled, bool; None: all.
    """
    outputs = Outputs(temperature=temperature)
    return Role(slot, data, steps, outputs, lambda found: data.put(column, found["logprobs"], at_N))


def likeliest_role(
    slot: str | None,
    data: PackedBatches,
    steps: range,
    temperature: float = 1.0,
    *,
    top_k: int,
    at_N: Flags | None = None,
) -> Role:
    """Return a role whose `top_k` likeliest ids and their log-probabilities become the data's; see `logprobs_role`.

    `top_k`: 0 for the row's own token. The last column has the log-probability of all other ids (`Outputs.rest`).
    """

    def take(found: dict[str, NDArray]) -> None:
        data.put_likeliest(found["top_ids"].astype(np.int32), found["top_logprobs"], at_N)

    return Role(slot, data, steps, Outputs(logprob=False, temperature=temperature, top_k=top_k, rest=True), take)


class TargetScores:
    """Collects scores of a data set's targets, a bin at a time. Targets of other ranks' bins have NaN (ids: -1).

    Attributes:
        found: `logprobs` [N] float32 in nats, and if they were requested `entropies` [N], `top_ids` [N, K] int64,
            `top_logprobs` [N, K]; or the `values` [N, L] of the slot's head.
    """

    def __init__(self, data: PackedBatches, outputs: Outputs, head: ScalarHead | None = None) -> None:
        """Columns are made here, for all outputs: a rank that has no bin must have them, too.

        `head`: that of the slot, if its values are asked for.
        """
        self._data = data
        widths: dict[str, tuple[int, ...]] = {"logprobs": ()} if outputs.logprob else {}
        if outputs.values and head is not None:
            widths["values"] = (len(head.names),)
        if outputs.entropy:
            widths["entropies"] = ()
        if outputs.num_named:
            widths |= {"top_ids": (outputs.num_named,), "top_logprobs": (outputs.num_named,)}
        shapes = {name: (data.units.header.num_targets, *width) for name, width in widths.items()}
        self.found: dict[str, NDArray] = {
            name: np.full(shape, -1) if name == "top_ids" else np.full(shape, np.nan, dtype=np.float32)
            for name, shape in shapes.items()
        }

    def put(self, units: Ints, scores: Scores) -> None:
        """Store the scores of a bin's targets."""
        columns = {
            "logprobs": scores.logprob_N,
            "entropies": scores.entropy_N,
            "top_ids": scores.top_id_NK,
            "top_logprobs": scores.top_logprob_NK,
            "values": scores.value_NL,
        }
        places = self._data.units.target_indices(units)
        for name, column in self.found.items():
            tensor = columns[name]
            assert tensor is not None, name
            column[places] = (tensor if name == "top_ids" else tensor.detach().float()).cpu().numpy()

    def recorded(self, loss: LossFunction, bins: list[Ints]) -> LossFunction:
        """Return a loss that also stores the scores of each bin here, given in the order of `bins`."""
        left = iter(bins)

        def sums(scores: Scores, batch: Batch) -> LossSums:
            if not batch.is_empty:
                self.put(next(left), scores)
            return loss.sums(scores, batch)

        return LossFunction(loss.outputs, sums)


def bins_to_score(data: PackedBatches, first_step: int, num_steps: int, dp_rank: int, dp_size: int) -> list[Ints]:
    """Return the units that this rank scores, a bin at a time: each unit in the first bin that holds it.

    Bins are left out if no step from `first_step` on trains on their units; the others are not changed. Every rank gets
    the same number of bins; the last one may be empty.
    """
    everyone = [_turns_of_rank(data, first_step, num_steps, rank, dp_size) for rank in range(dp_size)]
    longest = max(len(own) for own in everyone)
    return everyone[dp_rank] + [NO_UNITS] * (longest - len(everyone[dp_rank]))


def share_of_rank(data: PackedBatches, num_steps: int, dp_rank: int, dp_size: int) -> NDArray[np.float64]:
    """Return for each unit 1 / (number of ranks that score it), or 0 if this rank does not: [U]."""
    held_RU = np.zeros((dp_size, data.units.header.num_units))
    for rank in range(dp_size):
        for units in _bins(data, range(num_steps), rank, dp_size):
            held_RU[rank, units] = 1
    share_U: NDArray[np.float64] = held_RU[dp_rank] / np.maximum(held_RU.sum(axis=0), 1)
    return share_U


def _turns_of_rank(data: PackedBatches, first_step: int, num_steps: int, dp_rank: int, dp_size: int) -> list[Ints]:
    met: set[int] = set()
    fresh: list[Ints] = []
    for units in _bins(data, range(num_steps), dp_rank, dp_size):
        fresh.append(np.array([unit for unit in units if int(unit) not in met], dtype=np.int64))
        met.update(units.tolist())
    ahead = {int(unit) for units in _bins(data, range(first_step, num_steps), dp_rank, dp_size) for unit in units}
    return [units for units in fresh if any(int(unit) in ahead for unit in units)]


def _bins(data: PackedBatches, steps: range, dp_rank: int, dp_size: int) -> Iterator[Ints]:
    return (units for step in steps for units in data.bins_of_rank(step, dp_rank, dp_size))
