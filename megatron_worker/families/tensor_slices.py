"""A rank's share of the tensors that slices describe: its part of a whole tensor, and the rows of a parameter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.families.tensor_slices import TensorSlice


def parts_of(s: TensorSlice, whole: Tensor, rank: int, size: int) -> list[Tensor]:
    """Return views of a rank's parts of the whole tensor, a section each."""
    if s.split is None:
        return [whole]
    return [whole.narrow(s.split, span.start, span.stop - span.start) for span in s.spans(rank, size)]


def local_of(s: TensorSlice, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's part of the whole tensor."""
    return join_parts(parts_of(s, whole, rank, size), s.split)


def join_parts(parts: Sequence[Tensor], split: int | None) -> Tensor:
    """Join a rank's parts of a tensor. One part alone stays a view."""
    return parts[0] if split is None or len(parts) == 1 else torch.cat(list(parts), dim=split)


def write_slice(s: TensorSlice, parameter: Tensor, local: Tensor) -> None:
    """Copy a rank's part of the tensor into its rows of the parameter."""
    target = _rows(s, parameter, s.start + local.shape[0] // s.groups)
    target.copy_(local.reshape(target.shape))


def read_slice(s: TensorSlice, parameter: Tensor, num_rows: int, rows_before: int = 0) -> Tensor:
    """Return what `write_slice` wrote: `num_rows` rows of a rank's part, after the first `rows_before`, contiguous."""
    rows = _rows(s, parameter, s.start + (rows_before + num_rows) // s.groups)[:, rows_before:]
    return rows.reshape(num_rows, *parameter.shape[1:]).contiguous()


def _rows(s: TensorSlice, parameter: Tensor, stop: int) -> Tensor:
    return parameter.view(s.groups, -1, *parameter.shape[1:])[:, s.start : stop]
