"""The blocks of whole tensors that ranks hold, and how a rank reads its own out of its parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from megatron_worker.engine import TensorBlock
from megatron_worker.families.tensor_slices import read_slice
from megatron_worker.tensors.state_files import StateRanks
from shared.families.tensor_slices import TensorSlice

Held = Callable[[str, int], Tensor | None]
"""Returns this rank's parameter of a name, if this is the rank of that number; None otherwise."""


def only_here(parameters: Mapping[str, Tensor], own_rank: int) -> Held:
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
