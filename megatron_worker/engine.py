"""The Engine: model and optimizer on a parallel mesh, behind one interface.

Its callers decide what to optimise (losses, normalisation, schedules, when to step); the engine decides how
(parallelism, sharding, precision, offload). Every method is collective: all ranks call it, in the same order, with
equal arguments, except that `forward` and `forward_backward` take this data-parallel rank's bins. A rank whose bins are
used up while its peers still have some gives empty ones: weights, or experts, may be spread over all of them.

Shape suffixes: T tokens of a bin, N targets of a bin, K ids kept of each, L scalars of a head. In routes: L layers with
experts, K experts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longshore.losses import DivergenceKind, DivergenceTokens
from longshore.training import Dtype, Layout, Lora
from megatron_worker.process.ranks import SideRanks
from shared.jobs.packed import RouteShape

# --- Combines reported values over bins and ranks ---
# By their maximum if the name ends in `:max`, else by their sum.
#
# `x:sum` and `x:count` are numerator and denominator of a mean, which is computed at the end. Means named `x:part…`
# are reported as x, the sum of their absolute values.

SUM, COUNT, MAX, PART = ":sum", ":count", ":max", ":part"


@dataclass(frozen=True)
class LossSums:
    """Sums over a bin's targets: `loss` to differentiate, `weight` to normalise by, the rest to report.

    `means` are pairs of sums, reported as their quotient. `maxima`, of values that are never negative, are reported as
    the greatest of all bins.
    """

    loss: Tensor
    weight: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def detached(self) -> dict[str, Tensor]:
        """Return all values, detached, under names that say how to combine them over bins."""
        named = {"loss": self.loss, "weight": self.weight, **self.metrics}
        named |= {name + SUM: value for name, (value, _) in self.means.items()}
        named |= {name + COUNT: count for name, (_, count) in self.means.items()}
        named |= {name + MAX: value for name, value in self.maxima.items()}
        return {name: value.detach() for name, value in named.items()}


def combine(name: str, one: Tensor, other: Tensor) -> Tensor:
    """Return the sum, or the maximum, of two values of one name."""
    return torch.maximum(one, other) if name.endswith(MAX) else one + other


def over_ranks(
    sums: dict[str, Tensor], rank: int, num_ranks: int, add_over_ranks: Callable[[Tensor], None]
) -> dict[str, float]:
    """Combine the values of all ranks in one reduction, a sum: each rank has a separate column for its maxima.

    Args:
        sums: scalars of this rank, the same names on every rank, all on one device.
        add_over_ranks: adds a float64 vector up over the ranks, in place.
    """
    added = sorted(name for name in sums if not name.endswith(MAX))
    maxima = sorted(name for name in sums if name.endswith(MAX))
    values = torch.stack([sums[name].detach().double() for name in added])
    columns = values.new_zeros(len(maxima), num_ranks)
    for row, name in enumerate(maxima):
        columns[row, rank] = sums[name].detach()
    both = torch.cat([values, columns.flatten()])
    add_over_ranks(both)
    greatest = both[len(added) :].view(len(maxima), num_ranks).tolist()
    return dict(zip(added, both.tolist(), strict=False)) | {
        name: max(row) for name, row in zip(maxima, greatest, strict=True)
    }


def reported(reduced: dict[str, float]) -> dict[str, float]:
    """Return metrics under their own names, sums divided by counts. A mean of no values is left out."""
    means = {
        name.removesuffix(SUM): value / reduced[name.removesuffix(SUM) + COUNT]
        for name, value in reduced.items()
        if name.endswith(SUM) and reduced[name.removesuffix(SUM) + COUNT]
    }
    for name in [name for name in means if PART in name]:
        whole = name.partition(PART)[0]
        means[whole] = means.get(whole, 0.0) + abs(means.pop(name))
    plain = {name: value for name, value in reduced.items() if not name.endswith((SUM, COUNT, MAX))}
    return plain | means | {name.removesuffix(MAX): v for name, v in reduced.items() if name.endswith(MAX)}


# --- A loss's request for a teacher's distributions, and a teacher's outputs for a bin ---


@dataclass(frozen=True)
class Divergence:
    """A divergence from a teacher's distributions (head/distributions.py), and what is known of them."""

    kind: DivergenceKind
    skew: float
    tokens: DivergenceTokens


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states of the targets of a bin that this rank scores, [N, H], after the final norm.

    `low_NR` and `b_VR`: the output layer's adapter computes its part of the logits from them (head/scalar.py).
    """

    hidden_NH: Tensor
    low_NR: Tensor | None = None
    b_VR: Tensor | None = None


@dataclass(frozen=True)
class LikeliestIds:
    """Ids that a teacher names for each target of a bin, integers [N, K], and their log-probabilities, float32.

    A last id of -1 means all other ids: the sum of their probabilities. A teacher behind a URL does not give it.
    """

    id_NK: Tensor
    logprob_NK: Tensor


@dataclass(frozen=True)
class Batch:
    """One bin on the engine's device: the two tables of shared/jobs/packed.py. Indices int64, scores float32.

    `sampler_logprob_N` is the column `old_logprob`. The loss compares with `old_logprob_N` and `ref_logprob_N`: the
    columns of those names, or values that were computed at the start of the job. `teacher`: a teacher's outputs.
    `route_TLK`, one or two bytes an expert: the experts that every forward of the bin takes; None: the router's choice.
    `source_N`: the number of the source that a target is from, int64, if the data is a mixture.
    """

    token_id_T: Tensor
    position_T: Tensor
    parent_T: Tensor
    hidden_index_N: Tensor
    label_N: Tensor
    weight_N: Tensor
    advantage_N: Tensor
    old_logprob_N: Tensor
    ref_logprob_N: Tensor
    sampler_logprob_N: Tensor
    sequence_N: Tensor
    route_TLK: Tensor | None = None
    teacher: TeacherStates | LikeliestIds | None = None
    source_N: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return len(self.token_id_T) == 0

    def with_routes(self, stored_TLK: NDArray[np.integer]) -> "Batch":
        """Return the bin with routes as they are stored. torch knows few functions of uint16, so that has a sign."""
        narrow = np.uint8 if stored_TLK.itemsize == 1 else np.int16
        return replace(self, route_TLK=torch.from_numpy(stored_TLK.astype(narrow)).to(self.token_id_T.device))

    @staticmethod
    def to_score(
        token_id_T: Tensor, position_T: Tensor, parent_T: Tensor, hidden_index_N: Tensor, label_N: Tensor
    ) -> "Batch":
        """Make a bin whose targets are only scored: they weigh nothing and are all of sequence 0."""
        zeros_N = torch.zeros(len(label_N), device=label_N.device)
        return Batch(
            token_id_T=token_id_T,
            position_T=position_T,
            parent_T=parent_T,
            hidden_index_N=hidden_index_N,
            label_N=label_N,
            weight_N=zeros_N,
            advantage_N=zeros_N,
            old_logprob_N=zeros_N,
            ref_logprob_N=zeros_N,
            sampler_logprob_N=zeros_N,
            sequence_N=torch.zeros_like(label_N),
        )

    @staticmethod
    def of_sequences(sequences: Sequence[Sequence[int]], device: torch.device) -> "Batch":
        """Make a bin of whole sequences with one target each, the token after the last one; its label is 0."""
        lengths = torch.tensor([len(s) for s in sequences])
        position_T = torch.cat([torch.arange(len(s)) for s in sequences])
        parent_T = torch.where(position_T == 0, -1, torch.arange(len(position_T)) - 1)
        return Batch.to_score(
            torch.tensor([t for s in sequences for t in s], device=device),
            position_T.to(device),
            parent_T.to(device),
            (lengths.cumsum(0) - 1).to(device),
            torch.zeros(len(sequences), dtype=torch.int64, device=device),
        )

    @staticmethod
    def chain(token_ids: Sequence[int], device: torch.device) -> "Batch":
        """Make a bin of one sequence, every token but the first a target."""
        token_id_T = torch.tensor(token_ids, device=device)
        position_T = torch.arange(len(token_ids), device=device)
        return Batch.to_score(token_id_T, position_T, position_T - 1, position_T[:-1], token_id_T[1:])

    @staticmethod
    def empty(device: torch.device) -> "Batch":
        """Make a bin of no token and no target."""
        nothing_0 = torch.zeros(0, dtype=torch.int64, device=device)
        return Batch.to_score(nothing_0, nothing_0, nothing_0, nothing_0, nothing_0)


@dataclass(frozen=True)
class Outputs:
    """The outputs that a forward computes. Entropy has a gradient only with `entropy_gradient`.

    Scores are of the distribution whose logits are divided by `temperature`. `top_k`: the number of most likely ids to
    return, with their log-probabilities. `values`: those of the slot's scalar head, without any other output.
    `rest`: a last column, of id -1, has the log-probability of all ids that are not named, exact even if it is tiny.
    With a `top_k` of 0 the label is named. `rest` excludes all other outputs.
    With `divergence`, only log-probabilities are computed besides, as constants.
    """

    logprob: bool = True
    entropy: bool = False
    entropy_gradient: bool = False
    temperature: float = 1.0
    top_k: int = 0
    values: bool = False
    divergence: Divergence | None = None
    rest: bool = False

    @property
    def num_named(self) -> int:
        """The columns of ids that come back."""
        return (self.top_k or 1) + 1 if self.rest else self.top_k


@dataclass(frozen=True)
class Scores:
    """Log-probability, entropy, likeliest ids, divergence of each of a batch's targets: float32, nats; None: not asked.
    Or the scalars of the slot's head, float32.

    The k most likely ids (int64, of the whole vocabulary) come with the likeliest first, and are constants.
    """

    logprob_N: Tensor | None = None
    entropy_N: Tensor | None = None
    top_logprob_NK: Tensor | None = None
    top_id_NK: Tensor | None = None
    value_NL: Tensor | None = None
    divergence_N: Tensor | None = None


@dataclass(frozen=True)
class LossFunction:
    """A loss over a bin: the outputs that it needs of the forward, and the function that sums them.

    `baseline`: sums over all bins and ranks of the step, computed without gradients in a pass before; and the function
    that makes the loss of the step's pass from these sums.
    """

    outputs: Outputs
    sums: Callable[[Scores, Batch], LossSums]
    baseline: "tuple[LossFunction, Callable[[Mapping[str, float]], LossFunction]] | None" = None


@dataclass(frozen=True)
class Norms:
    """The gradient norm over all ranks, after normalisation and before clipping; `clipped`: it was above the bound.

    `noise`: metrics of the gradient noise scale, if it was requested.
    """

    grad_norm: float
    clipped: bool
    noise: Mapping[str, float] = field(default_factory=dict)


Part = Literal["weights", "gradients", "optimizer"]
Where = Literal["device", "host", "dropped"]


class PartPlaces(TypedDict, total=False):
    """Where to move parts of slots; parts that are not named stay where they are."""

    weights: Where
    gradients: Where
    optimizer: Where


@dataclass(frozen=True)
class PartBytes:
    """Bytes of one part over all slots: on the device, and in declared host buffers."""

    device: int = 0
    host: int = 0

    def __add__(self, other: "PartBytes") -> "PartBytes":
        return PartBytes(self.device + other.device, self.host + other.host)


@dataclass(frozen=True)
class Memory:
    """Bytes of storages on the device, and of declared host buffers that outlive a job; both in total and by part.

    On CUDA `device_bytes` counts all that is allocated there, activations included.
    """

    device_bytes: int
    host_bytes: int
    parts: Mapping[Part, PartBytes] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineInfo:
    """Properties of an engine that do not change.

    Attributes:
        windows: of its attention layers (None: of layers without a window).
        routes: of its model's experts, if it can take a bin's routes.
        trains_base: its weights can be trained; quantized ones are frozen.
        weights_s: seconds that reading its weights took.
    """

    layout: Layout
    dtype: Dtype
    device: torch.device
    rank: int
    dp_rank: int
    dp_size: int
    vocab_size: int
    hidden_size: int
    windows: frozenset[int | None] = frozenset({None})
    routes: RouteShape | None = None
    trains_base: bool = True
    weights_s: float = 0.0

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


@dataclass(frozen=True)
class TensorBlock:
    """Rows of a whole tensor, and of each some columns (None: all), that rank `rank` holds.

    Where several ranks hold the same, `rank` is the first of them. A tensor without a dimension is one row.
    `rows_before`: rows of the tensor that the rank holds in front of these.
    """

    name: str
    rank: int
    first_row: int
    num_rows: int
    first_column: int = 0
    num_columns: int | None = None
    rows_before: int = 0

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the block's shape. `whole`: the tensor's."""
        return (
            () if not whole else (self.num_rows, *([self.num_columns] if self.num_columns else whole[1:2]), *whole[2:])
        )


@dataclass(frozen=True)
class Outgoing:
    """A slot's weights to send to samplers: names and shapes of whole tensors, and the blocks that ranks hold of them.

    `lora` is an adapter's; its names are PEFT's and its tensors are float32. The base has Hugging Face's names. Shapes
    and blocks are the same on every rank, the blocks of a tensor one after another.

    Args:
        held: returns a block, contiguous, on the rank that holds it, and None on others. `members` call it for every
            block, in their order, as some may hold parts of another one's block.
        ranks: for communication between members during the passes.
    """

    lora: Lora | None
    dtype: torch.dtype
    device: torch.device
    shapes: Mapping[str, tuple[int, ...]]
    blocks: Sequence[TensorBlock]
    held: Callable[[TensorBlock], Tensor | None]
    ranks: SideRanks
    members: Collection[int]
