"""Packing: which examples make a step, and how a step's examples share bins. Pure functions of lengths and a seed.

Steps are made first: they depend on the lengths, the seed and the batch, never on the bins, so a step's objective does
not depend on packing. Legend: U units.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_WINDOW = 64  # a step of `batch_tokens` looks this far ahead for units that fill it
_PART_UNITS = 2  # a part of a step holds two units of the usual length, or more
_MAX_REPACKED_BINS = 1024  # with more bins than this, saving one of them is not worth the time
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

    A step is filled in parts of equal size, one after another, so that it can be packed evenly. A unit may be taken up
    to `_WINDOW` places early to fill a part; the unit at the front always comes next.
    """
    rest = iter(order_U.tolist())
    lengths = tokens_U.tolist()
    parts = _parts(tokens_U, batch_tokens)
    window = deque(islice(rest, _WINDOW))
    while window:
        step: list[int] = []
        for part in parts:
            step += _take(window, rest, lengths, part)
        yield np.array(step, dtype=np.int64)


def _parts(tokens_U: Indices, batch_tokens: int) -> list[int]:
    """Divide a batch into equal parts, near a power of two that holds the longest unit or two average units."""
    longest, usual = int(tokens_U.max(initial=1)), float(tokens_U.mean()) if len(tokens_U) else 1.0
    assert longest <= batch_tokens, f"a unit has {longest} tokens, batch_tokens is {batch_tokens}"
    enough = max(longest, math.ceil(_PART_UNITS * usual))
    num_parts = -(-batch_tokens // (1 << (enough - 1).bit_length()))
    if batch_tokens // num_parts < longest:
        num_parts = batch_tokens // longest
    return [batch_tokens // num_parts] * num_parts


def _take(window: deque[int], rest: Iterator[int], lengths: list[int], room: int) -> list[int]:
    """Take units from the window, in order and then as they fit, until nothing fits. Refills the window."""
    part: list[int] = []
    while window and lengths[window[0]] <= room:
        part.append(window.popleft())
        room -= lengths[part[-1]]
        window.extend(islice(rest, 1))
    if window and part:
        _fill(part, room, window, lengths)
        window.extend(islice(rest, max(0, _WINDOW - len(window))))
    return part


def _fill(part: list[int], free: int, window: deque[int], lengths: list[int]) -> None:
    """Fill the rest of a part: add the one or two units of the window that leave the least room. They may replace up to
    two units that were taken last.

    The part's first unit is never replaced, since it might then be postponed forever.
    """
    by_length = sorted((lengths[u], k) for k, u in enumerate(window))
    left, num_back, chosen = free, 0, list[int]()
    for back in range(min(3, len(part))):
        room = free + sum(lengths[u] for u in part[len(part) - back :])
        for found in (_best_one(by_length, room), _best_pair(by_length, room)):
            if found is not None and found[0] < left:
                left, num_back, chosen = found[0], back, found[1]
    taken = [window[k] for k in chosen]
    for k in sorted(chosen, reverse=True):
        del window[k]
    for _ in range(num_back):
        window.appendleft(part.pop())
    part.extend(taken)


def _best_one(by_length: list[tuple[int, int]], room: int) -> tuple[int, list[int]] | None:
    """Find the unit that fills `room` best. Returns (tokens that stay free, [k])."""
    at = bisect_left(by_length, (room + 1, -1)) - 1
    return (room - by_length[at][0], [by_length[at][1]]) if at >= 0 else None


def _best_pair(by_length: list[tuple[int, int]], room: int) -> tuple[int, list[int]] | None:
    """Find the two units that fill `room` best. Returns (tokens that stay free, [k, l])."""
    best: tuple[int, list[int]] | None = None
    low, high = 0, len(by_length) - 1
    while low < high:
        free = room - by_length[low][0] - by_length[high][0]
        if free < 0:
            high -= 1
            continue
        if best is None or free < best[0]:
            best = (free, [by_length[low][1], by_length[high][1]])
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


def pack_bins(tokens: list[int], capacity: int) -> list[list[int]]:
    """Pack a step's units into bins by best fit decreasing, or by another method if that needs fewer bins.

    The others are next fit, which works well for steps cut by tokens, since their parts are equal; and refilling a
    smaller number of bins by exact subset sums.
    """
    bins = best_fit_decreasing(tokens, capacity)
    fewest = -(-sum(tokens) // capacity)
    if len(bins) > fewest:
        bins = min(bins, next_fit(tokens, capacity), key=len)
    if len(bins) <= _MAX_REPACKED_BINS:
        for num_bins in range(fewest, min(len(bins), fewest + 3)):
            if (fewer := _refill(tokens, num_bins, capacity)) is not None:
                return fewer
    return bins


def next_fit(tokens: list[int], capacity: int) -> list[list[int]]:
    """Put each item, in order, into the last bin, or into a new one when that is full."""
    bins: list[list[int]] = [[]]
    free = capacity
    for item, size in enumerate(tokens):
        if size > free:
            bins.append([])
            free = capacity
        bins[-1].append(item)
        free -= size
    return bins


def _refill(tokens: list[int], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Spread items over `num_bins` bins, then move items from overfull bins into others. Returns None if that fails."""
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
    """Put items, longest first, each into the emptiest bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for item in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        load, b = heap[0]
        bins[b].append(item)
        heapq.heapreplace(heap, (load + tokens[item], b))
    return bins


def _pour(tokens: list[int], bins: list[list[int]], load: list[int], full: int, other: int, capacity: int) -> None:
    """Redistribute two bins' items: those that fill `capacity` best go into `other`, the rest into `full`."""
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
