"""The nodes of a forest of tokens, and the calls of the CPU's attention kernel that compute it (tree_attention.py).

Tokens are in depth-first order, so that the descendants of token k are an interval. Tokens between two branchings are a
*node*. Each node attends causally to itself, and everything below a node attends densely to the node; a small tree of
many short nodes is one masked call, which is cheaper than many small ones.

Shape suffixes: T tokens of a bin, N nodes; of one call, L tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidInput

# The overhead of a kernel call, in pairs of a query and a key that it could compute in that time.
_CALL_PAIRS = 2048

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Call:
    """One call of the kernel: `num_blocks` blocks of equal length, each of queries over its own block of keys.

    `query` and `key` are ranges of the bin's tokens (`query`, of this rank's own). Calls over a block itself are causal
    or have a mask, [L, L], 0 where seen and -inf where not; the others, of descendants over an ancestor, see every key,
    or have a mask, [queries, keys].
    """

    query: slice
    key: slice
    num_blocks: int = 1
    causal: bool = False
    mask_LL: Tensor | None = None
    is_own: bool = False


@dataclass(frozen=True)
class Nodes:
    """Nodes in the order of their tokens: the begin and end of each, and the end of its last descendant. int64 [N].

    `depth_N`: ancestors of its first token.
    """

    begin_N: Ints
    end_N: Ints
    subtree_end_N: Ints
    parent_N: Ints
    depth_N: Ints

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, from a root down."""
        return int((self.depth_N + self.end_N - self.begin_N).max(initial=0))


def find_nodes(parent_T: Ints, cuts: Sequence[int] = (), longest: int | None = None) -> Nodes:
    """Cut a forest where it branches, before each token of `cuts`, and into nodes of at most `longest` tokens.

    Raises InvalidInput as `plan_forest` does.
    """
    index_T = np.arange(len(parent_T))
    if not ((parent_T >= -1) & (parent_T < index_T)).all():
        raise InvalidInput("a token's parent must come before it", "parent")
    num_children_T = np.bincount(parent_T[parent_T >= 0], minlength=len(parent_T))
    continues_T = (parent_T == index_T - 1) & (parent_T >= 0)
    continues_T[continues_T] = num_children_T[parent_T[continues_T]] == 1
    continues_T[[cut for cut in cuts if cut < len(parent_T)]] = False
    begin_N = np.flatnonzero(~continues_T)
    if longest is not None:
        offset_T = index_T - begin_N[np.cumsum(~continues_T) - 1]
        begin_N = np.flatnonzero(offset_T % longest == 0)
    end_N = np.append(begin_N[1:], len(parent_T))
    # A node ends where it branches, so that the parent of its first token is the last one of its parent.
    parent_N = np.searchsorted(begin_N, parent_T[begin_N], side="right") - 1
    size_N, subtree_end_N, depth_N = end_N - begin_N, end_N.copy(), np.zeros_like(begin_N)
    for node, above in enumerate(parent_N):
        depth_N[node] = depth_N[above] + size_N[above] if above >= 0 else 0
    for node in range(len(begin_N) - 1, -1, -1):
        if (above := parent_N[node]) >= 0:
            size_N[above] += size_N[node]
            subtree_end_N[above] = max(subtree_end_N[above], subtree_end_N[node])
    if not (subtree_end_N == begin_N + size_N).all():
        raise InvalidInput("what descends from a token must stand right behind it (depth first)", "parent")
    return Nodes(begin_N, end_N, subtree_end_N, parent_N, depth_N)


def subtree_ends(nodes: Nodes) -> Ints:
    """Return for each token the end of its last descendant: [T]. Equal for the tokens of a node."""
    return np.repeat(nodes.subtree_end_N, nodes.end_N - nodes.begin_N)


def depths(nodes: Nodes) -> Ints:
    """Return the ancestors of each token: [T]."""
    length_N = nodes.end_N - nodes.begin_N
    return np.arange(length_N.sum()) + np.repeat(nodes.depth_N - nodes.begin_N, length_N)


def plan_calls(
    nodes: Nodes,
    dtype: torch.dtype,
    call_pairs: int = _CALL_PAIRS,
    chunks: Sequence[slice] = (),
    window: int | None = None,
) -> list[Call]:
    """Return the cheapest calls for a forest, at a cost of `call_pairs` per call and 1 per pair of a query and a key.

    With chunks, only calls for their queries, which are counted from the first chunk's first. Nodes must end at the
    edges of chunks. With a window, nodes must not be longer than it; the pairs that it excludes are left out of the
    calls, but count as costs.
    """
    own: list[Call] = []
    over_ancestors: list[Call] = []
    band = functools.cache(functools.partial(_band, window=window or 0, dtype=dtype))
    wanted = list(chunks) or [slice(0, int(nodes.end_N[-1]) if len(nodes.end_N) else 0)]
    is_masked_N = _choose_masked(nodes, call_pairs, wanted)
    node = 0
    while node < len(nodes.begin_N):
        begin, end, subtree_end = (int(x[node]) for x in (nodes.begin_N, nodes.end_N, nodes.subtree_end_N))
        if is_masked_N[node]:
            own.append(_masked_call(nodes, node, dtype, window))
            node = int(np.searchsorted(nodes.begin_N, subtree_end))
            continue
        if any(chunk.start <= begin < chunk.stop for chunk in wanted):
            own.append(Call(slice(begin, end), slice(begin, end), causal=True, is_own=True))
        if window is not None:
            over_ancestors += _calls_in_window(nodes, node, band, window, wanted)
        for chunk in wanted if window is None else ():
            below = slice(max(end, chunk.start), min(subtree_end, chunk.stop))
            if below.start < below.stop:
                over_ancestors.append(Call(below, slice(begin, end)))
        node += 1
    return [_of_chunks(call, wanted) for call in (*_batched(own), *over_ancestors)]


def _calls_in_window(
    nodes: Nodes, node: int, band: Callable[[int, int, int], Tensor], window: int, chunks: Sequence[slice]
) -> list[Call]:
    """Return the calls over a node for those of its descendants that see some of it. Bands of one shape are shared."""
    calls: list[Call] = []
    begin, end, depth, subtree_end = (
        int(x[node]) for x in (nodes.begin_N, nodes.end_N, nodes.depth_N, nodes.subtree_end_N)
    )
    key = slice(begin, end)
    for below in range(node + 1, int(np.searchsorted(nodes.begin_N, subtree_end))):
        first, shift = int(nodes.begin_N[below]), int(nodes.depth_N[below]) - depth
        num_seeing = min(int(nodes.end_N[below]) - first, end - begin + window - 1 - shift)
        if num_seeing <= 0 or not any(chunk.start <= first < chunk.stop for chunk in chunks):
            continue
        query = slice(first, first + num_seeing)
        if shift + num_seeing > window:
            calls.append(Call(query, key, mask_LL=band(num_seeing, end - begin, shift)))
        elif calls and calls[-1].mask_LL is None and calls[-1].query.stop == first:
            calls[-1] = Call(slice(calls[-1].query.start, query.stop), key)
        else:
            calls.append(Call(query, key))
    return calls


def _band(num_queries: int, num_keys: int, shift: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of queries that begin `shift` tokens after the first key: [queries, keys]."""
    distance = torch.arange(num_queries)[:, None] + shift - torch.arange(num_keys)
    return torch.zeros(distance.shape, dtype=dtype).masked_fill_(distance >= window, -torch.inf)


def _of_chunks(call: Call, chunks: Sequence[slice]) -> Call:
    """Return the call with its queries counted from the first chunk's first."""
    before = 0
    for chunk in chunks:
        if chunk.start <= call.query.start < chunk.stop:
            shift = before - chunk.start
            return dataclasses.replace(call, query=slice(call.query.start + shift, call.query.stop + shift))
        before += chunk.stop - chunk.start
    raise AssertionError(call)


def _choose_masked(nodes: Nodes, call_pairs: int, chunks: Sequence[slice]) -> list[bool]:
    """Return for each node True if one masked call for its subtree is cheaper than the best calls for its parts."""
    length_N, size_N = nodes.end_N - nodes.begin_N, nodes.subtree_end_N - nodes.begin_N
    is_whole_N = np.zeros(len(length_N), dtype=bool)  # the subtree lies in one chunk
    for chunk in chunks:
        is_whole_N |= (nodes.begin_N >= chunk.start) & (nodes.subtree_end_N <= chunk.stop)
    below_N, is_masked_N = [0] * len(length_N), [False] * len(length_N)
    for node in range(len(length_N) - 1, -1, -1):
        length, below = int(length_N[node]), int(size_N[node] - length_N[node])
        split = call_pairs + length * length // 2 + below_N[node]
        split += call_pairs + below * length if below else 0
        masked = call_pairs + int(size_N[node]) ** 2
        is_masked_N[node] = masked < split and bool(is_whole_N[node])
        if (above := nodes.parent_N[node]) >= 0:
            below_N[above] += masked if is_masked_N[node] else split
    return is_masked_N


def mask_elements(parent_T: Ints, window: int | None = None) -> int:
    """Count the elements of the masks of a forest that is not cut into chunks."""
    calls = plan_calls(find_nodes(parent_T, longest=window), torch.float32, window=window)
    masks = {id(call.mask_LL): call.mask_LL.numel() for call in calls if call.mask_LL is not None}
    return sum(masks.values())


def _masked_call(nodes: Nodes, node: int, dtype: torch.dtype, window: int | None) -> Call:
    begin, subtree_end = int(nodes.begin_N[node]), int(nodes.subtree_end_N[node])
    index_L = torch.arange(begin, subtree_end)
    end_L = torch.from_numpy(subtree_ends(nodes)[begin:subtree_end])
    seen_LL = (index_L <= index_L[:, None]) & (index_L[:, None] < end_L)
    if window is not None:
        depth_L = torch.from_numpy(depths(nodes)[begin:subtree_end])
        seen_LL &= depth_L[:, None] - depth_L < window
    mask_LL = torch.zeros(seen_LL.shape, dtype=dtype).masked_fill_(~seen_LL, -torch.inf)
    return Call(slice(begin, subtree_end), slice(begin, subtree_end), mask_LL=mask_LL, is_own=True)


def _batched(calls: list[Call]) -> list[Call]:
    """Merge neighbouring causal calls of one length into one call."""
    merged: list[Call] = []
    for call in calls:
        before = merged[-1] if merged else None
        length = call.query.stop - call.query.start
        if (
            before
            and before.causal
            and call.causal
            and before.query.stop == call.query.start
            and before.query.stop - before.query.start == (length * before.num_blocks)
        ):
            both = slice(before.query.start, call.query.stop)
            merged[-1] = Call(both, both, before.num_blocks + 1, causal=True, is_own=True)
        else:
            merged.append(call)
    return merged
