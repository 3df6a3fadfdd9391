"""Packing: which examples make a step, and how a step's examples share bins. Pure functions of lengths and a seed.

Steps come first: they depend on the lengths, the seed and the batch, never on the bins, so what a step optimises does
not depend on packing. Legend: U units.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_WINDOW = 256  # a step of `batch_tokens` looks this far ahead for units that fill it
_SLACK = 2000  # and leaves a two-thousandth free, or else its last bin could be filled only by luck
_MAX_REPACKED_BINS = 1024  # beyond, a bin more than needed is lost in the noise
_REPACK_PASSES = 4


def epoch_order(num_units: int, seed: int, epoch: int) -> Indices:
    """A shuffle of 0..num_units-1. The same on every platform and numpy: only Philox's raw bits are used."""
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_units)
    return np.argsort(bits, kind="stable").astype(np.int64)


def steps_by_count(order_U: Indices, batch_size: int) -> Iterator[Indices]:
    """Cut an order into steps of `batch_size` units; the last is smaller when they do not divide."""
    for start in range(0, len(order_U), batch_size):
        yield order_U[start : start + batch_size]


def steps_by_tokens(order_U: Indices, tokens_U: Indices, batch_tokens: int) -> Iterator[Indices]:
    """Cut an order into steps of at most `batch_tokens`, each as full as the next units allow. The last is smaller.

    A unit may be taken up to `_WINDOW` places early, to fill a step; the one at the front always comes next.
    """
    rest = iter(order_U.tolist())
    lengths = tokens_U.tolist()
    window = deque(islice(rest, _WINDOW))
    while window:
        step: list[int] = []
        free = batch_tokens
        while window and lengths[window[0]] <= free:
            step.append(window.popleft())
            free -= lengths[step[-1]]
            window.extend(islice(rest, 1))
        assert step, "a unit is longer than batch_tokens"
        if window:
            _fill(step, free - batch_tokens // _SLACK, window, lengths)
            window.extend(islice(rest, _WINDOW - len(window)))
        yield np.array(step, dtype=np.int64)


def _fill(step: list[int], free: int, window: deque[int], lengths: list[int]) -> None:
    """End a step well: add the unit of the window that fits best, or change the last one for the two that fit best."""
    by_length = sorted((lengths[u], k) for k, u in enumerate(window))
    one = bisect_left(by_length, (free + 1, -1)) - 1
    chosen = [by_length[one][1]] if one >= 0 else []
    left = free - by_length[one][0] if one >= 0 else free
    two = _best_pair(by_length, free + lengths[step[-1]])
    if two is not None and two[0] < left:
        window.appendleft(step.pop())
        chosen = [two[1] + 1, two[2] + 1]  # one further back now
    step.extend(window[k] for k in chosen)
    for k in sorted(chosen, reverse=True):
        del window[k]


def _best_pair(by_length: list[tuple[int, int]], room: int) -> tuple[int, int, int] | None:
    """(what stays free, k, l): the two units that fill `room` best."""
    best: tuple[int, int, int] | None = None
    low, high = 0, len(by_length) - 1
    while low < high:
        free = room - by_length[low][0] - by_length[high][0]
        if free < 0:
            high -= 1
            continue
        if best is None or free < best[0]:
            best = (free, by_length[low][1], by_length[high][1])
        low += 1
    return best


def best_fit_decreasing(tokens: list[int], capacity: int) -> list[list[int]]:
    """Exact best fit decreasing: longest first, each into the fullest bin that holds it. Indices into `tokens`."""
    bins: list[list[int]] = []
    room: list[int] = []  # distinct free spaces, ascending
    by_room: dict[int, list[int]] = {}
    for item in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        size = tokens[item]
        at = bisect_left(room, size)
        if at == len(room):
            free, chosen = capacity, len(bins)
            bins.append([])
        else:
            free = room[at]
            chosen = by_room[free].pop()
            if not by_room[free]:
                del by_room[free], room[at]
        assert size <= free, f"{size} tokens do not fit a bin of {capacity}"
        bins[chosen].append(item)
        if free > size:
            if free - size not in by_room:
                insort(room, free - size)
                by_room[free - size] = []
            by_room[free - size].append(chosen)
    return bins


def pack(tokens: list[int], capacity: int) -> list[list[int]]:
    """Bins for a step: best fit decreasing, and where that takes more bins than the tokens need, an exact refilling."""
    bins = best_fit_decreasing(tokens, capacity)
    fewest = -(-sum(tokens) // capacity)
    if len(bins) <= _MAX_REPACKED_BINS:
        for num_bins in range(fewest, min(len(bins), fewest + 3)):
            if (fewer := _refill(tokens, num_bins, capacity)) is not None:
                return fewer
    return bins


def _refill(tokens: list[int], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Spread over `num_bins` bins, then let bins that are too full fill others to the brim. None if that fails."""
    bins = _spread(tokens, num_bins)
    load = [sum(tokens[i] for i in each) for each in bins]
    for _ in range(_REPACK_PASSES):
        if max(load) <= capacity:
            return bins
        before = list(load)
        for full in sorted(range(num_bins), key=lambda b: -load[b]):
            for other in sorted(range(num_bins), key=lambda b: load[b]):
                if load[full] <= capacity or load[other] >= capacity:
                    break
                _pour(tokens, bins, load, full, other, capacity)
        if load == before:
            break
    return bins if max(load) <= capacity else None


def _spread(tokens: list[int], num_bins: int) -> list[list[int]]:
    """Longest first, each into the emptiest bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for item in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        load, b = heap[0]
        bins[b].append(item)
        heapq.heapreplace(heap, (load + tokens[item], b))
    return bins


def _pour(tokens: list[int], bins: list[list[int]], load: list[int], full: int, other: int, capacity: int) -> None:
    """Share two bins' items anew: as near to `capacity` as can be in `other`, the rest in `full`."""
    items = bins[full] + bins[other]
    chosen = fullest_subset([tokens[i] for i in items], capacity)
    total = sum(tokens[items[k]] for k in chosen)
    if total > load[other]:
        bins[other] = [items[k] for k in sorted(chosen)]
        bins[full] = [item for k, item in enumerate(items) if k not in chosen]
        load[full], load[other] = load[full] + load[other] - total, total


def fullest_subset(sizes: list[int], capacity: int) -> set[int]:
    """Exact subset sum: indices of the sizes whose sum is the largest that is at most `capacity`.

    Bit s of `reachable[k]` says whether some of the first k sizes sum to s.
    """
    within = (1 << (capacity + 1)) - 1
    reachable = [1]
    for size in sizes:
        reachable.append((reachable[-1] | (reachable[-1] << size)) & within)
    total = reachable[-1].bit_length() - 1
    chosen: set[int] = set()
    for k in reversed(range(len(sizes))):
        if not (reachable[k] >> total) & 1:
            chosen.add(k)
            total -= sizes[k]
    return chosen
