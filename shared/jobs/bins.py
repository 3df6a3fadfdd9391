"""Bins of units, balanced by work, and the steps of a run over them."""

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

from longshore.views import Cut, RunLength, SourceShare
from shared.errors import InvalidInput

# --- Packing ---
# Which examples make a step, and how a step's examples share bins. Pure functions of lengths and a seed.
#
# Steps are made first: they depend on the lengths, the seed and the batch, never on the bins, so a step's objective
# does not depend on packing. Legend: U units.

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


# --- Decides which units make each step of a run, and counts passes, steps and tokens ---
#
# Pure functions of lengths and a seed. Legend: U units.

MOST_STEPS_OF_EPOCHS = 50_000
_MOST_COUNTED = 1_000_000  # units whose steps of `batch_tokens` are counted one by one: seconds


def steps_of(tokens_U: Indices, cut: Cut) -> Iterator[Indices]:
    """Cut units into steps, one epoch after another. A fraction of an epoch is the first part of its order."""
    return islice(_endless(tokens_U, cut), cut.steps)


def _endless(tokens_U: Indices, cut: Cut) -> Iterator[Indices]:
    for epoch, order_U in enumerate(_orders(len(tokens_U), cut)):
        if cut.epochs is not None:
            order_U = order_U[: _units_of_epoch(len(order_U), cut.epochs, epoch)]
        if not len(order_U):
            return
        if cut.batch_size is not None:
            yield from steps_by_count(order_U, cut.batch_size)
        elif cut.batch_tokens is not None:
            yield from steps_by_tokens(order_U, tokens_U, cut.batch_tokens)


def _orders(num_units: int, cut: Cut) -> Iterator[Indices]:
    """Yield the order of the units of each epoch: a shuffle of all; of a mixture, each source's own shuffles in turn.

    A source continues after the last row of the epoch before. It is shuffled again whenever all of its units were
    drawn.
    """
    if not cut.sources:
        yield from (epoch_order(num_units, cut.seed, epoch) for epoch in count())
        return
    assert sum(source.num_units for source in cut.sources) == num_units, (cut.sources, num_units)
    shares, num_draws = shares_of(cut.sources)
    turns, drawn = _turns(shares, num_draws), [0] * len(shares)
    while True:
        yield _units_drawn(next(turns), cut.sources, cut.seed, drawn)


def mixture_draws(sources: Sequence[SourceShare], seed: int, first: int, number: int) -> Indices:
    """Return the draws `first`, `first` + 1, ... of the epochs of a mixture, one after another, as `steps_of` has them.

    Sources' turns repeat after `sum(shares)` draws, so only those since the last repetition are found one by one.
    """
    shares, _ = shares_of(sources)
    repetitions, skipped = divmod(first, sum(shares))
    source_D = np.fromiter(interleaved(shares), dtype=np.int64, count=skipped + number)
    counts = np.bincount(source_D[:skipped], minlength=len(shares)).tolist()
    drawn = [repetitions * share + count for share, count in zip(shares, counts, strict=True)]
    return _units_drawn(source_D[skipped:], sources, seed, drawn)


def _units_drawn(source_D: Indices, sources: Sequence[SourceShare], seed: int, drawn: list[int]) -> Indices:
    """Return the units of draws from these sources. `drawn`: of each source before; the draws are added to it."""
    unit_D, begin = np.empty(len(source_D), dtype=np.int64), 0
    for number, source in enumerate(sources):
        place_N, first, size = np.flatnonzero(source_D == number), drawn[number], source.num_units
        # A source's units come in one shuffle after another. Those of the first are the epochs of a dataset alone.
        passes = range(first // size, -(-(first + len(place_N)) // size))
        orders = [epoch_order(size, seed, (number << 40) + one) for one in passes]
        own_N = np.concatenate([np.zeros(0, dtype=np.int64), *orders])[first % size :]
        unit_D[place_N] = begin + own_N[: len(place_N)]
        drawn[number] += len(place_N)
        begin += source.num_units
    return unit_D


def shares_of(sources: Sequence[SourceShare]) -> tuple[list[int], int]:
    """Return whole numbers that are to each other as the sources' shares, and the units that an epoch draws of all.

    By weights, an epoch draws as many units as there are. Else it passes over each source `epochs` times, or once.
    A weight is read as its decimal digits say: 0.1 is a tenth.
    """
    if any(source.weight is not None for source in sources):
        weights = [Fraction(repr(1.0 if source.weight is None else source.weight)) for source in sources]
        scale = math.lcm(*(weight.denominator for weight in weights))
        shares = [int(weight * scale) for weight in weights]
        num_draws = sum(source.num_units for source in sources)
    else:
        shares = [max(1, round((source.epochs or 1) * source.num_units)) for source in sources]
        num_draws = sum(shares)
    return [share // math.gcd(*shares) for share in shares], num_draws


def interleaved(shares: Sequence[int]) -> Iterator[int]:
    """Yield sources, endlessly, such that each has floor or ceil of its share of the first k draws, for every k.

    Draw j of a source with the part p of all has its turn in [floor(j / p), ceil((j + 1) / p)). Of those that may be
    drawn the one is taken whose last turn comes first; so none misses it (Baruah et al. 1996, Proportionate progress).
    """
    total = sum(shares)
    waiting = [(0, source) for source, share in enumerate(shares) if share]
    ready: list[tuple[int, int]] = []
    drawn = [0] * len(shares)
    for turn in count():
        while waiting and waiting[0][0] <= turn:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(drawn[source] + 1) * total // shares[source]), source))
        source = heapq.heappop(ready)[1]
        drawn[source] += 1
        heapq.heappush(waiting, (drawn[source] * total // shares[source], source))
        yield source


def _turns(shares: list[int], num_draws: int) -> Iterator[Indices]:
    """Yield the sources of each epoch's draws. They repeat after `sum(shares)` draws, which are kept if that is few."""
    period, sources = sum(shares), interleaved(shares)
    if period > max(num_draws, _WINDOW):
        while True:
            yield np.fromiter(sources, dtype=np.int64, count=num_draws)
    whole = np.fromiter(sources, dtype=np.int64, count=period)
    for epoch in count():
        yield np.resize(np.roll(whole, -(epoch * num_draws % period)), num_draws)


def _units_of_epoch(num_units: int, epochs: float, epoch: int) -> int:
    """Return how many of `num_units` an epoch trains: in the first one at least 1."""
    units = round(min(1.0, max(0.0, epochs - epoch)) * num_units)
    return min(num_units, max(units, 1)) if epoch == 0 else units


def check_epochs(tokens_U: Indices, cut: Cut) -> None:
    """Raise InvalidInput if `epochs` means more than MOST_STEPS_OF_EPOCHS steps, since that is likely a mistake."""
    if cut.epochs is None:
        return
    tokens, num_draws = _mean_epoch(tokens_U, cut)
    size, batch = (tokens, cut.batch_tokens) if cut.batch_size is None else (num_draws, cut.batch_size)
    num_steps = round(cut.epochs * size / (batch or 1))
    if num_steps > MOST_STEPS_OF_EPOCHS:
        found = f"{cut.epochs:g} epochs of {num_draws:,} examples are {num_steps:,} steps"
        advice = "give fewer epochs or a larger batch (or, if you mean it, the number of steps)"
        raise InvalidInput(f"{found}, {MOST_STEPS_OF_EPOCHS:,} at most: {advice}", "epochs")


def _mean_epoch(tokens_U: Indices, cut: Cut) -> tuple[float, int]:
    """Return the tokens of an epoch, of a mixture on average, and the number of its examples."""
    if not cut.sources:
        return int(tokens_U.sum()), len(tokens_U)
    sizes = [source.num_units for source in cut.sources]
    parts = np.split(tokens_U, np.cumsum(sizes)[:-1])
    return mean_epoch([float(part.mean()) for part in parts], cut.sources)


def mean_epoch(mean_tokens: Sequence[float], sources: Sequence[SourceShare]) -> tuple[float, int]:
    """Return the tokens that an epoch of a mixture has on average, and the number of its examples.

    Args:
        mean_tokens: the tokens of a source's unit on average.
    """
    shares, num_draws = shares_of(sources)
    parts = [float(Fraction(share, sum(shares))) for share in shares]  # shares may be too large for a float
    return num_draws * float(np.dot(mean_tokens, parts)), num_draws


def length_of_mixture(mean_tokens: Sequence[float], cut: Cut, are_prompts: bool = False) -> RunLength:
    """Estimate the length of a run on a mixture, from the tokens of each source's unit on average.

    Steps of `batch_tokens` are taken to be full; those of rollouts, whose units are prompts, are.
    """
    tokens, num_draws = mean_epoch(mean_tokens, cut.sources)
    batch = tokens / num_draws * cut.batch_size if cut.batch_size is not None else float(cut.batch_tokens or 1)
    epochs = cut.epochs if cut.epochs is not None else (cut.steps or 1) * batch / tokens
    if are_prompts and cut.epochs is not None and cut.batch_size is not None:
        steps = max(1, math.floor(cut.epochs * num_draws / cut.batch_size))
        epochs = steps * cut.batch_size / num_draws
    else:
        steps = cut.steps or max(1, math.ceil(epochs * tokens / batch))
    return RunLength(epochs=epochs, steps=steps, tokens=round(epochs * tokens), is_exact=False)


def length_of(tokens_U: Indices, cut: Cut) -> RunLength:
    """Count the passes, steps and tokens that `steps_of` makes. Steps of `batch_tokens` beyond a million units are
    assumed to be as large as those before.
    """
    num_units = len(tokens_U)
    if not num_units:
        return RunLength(epochs=0.0, steps=0, tokens=0)
    if cut.epochs is not None:
        whole, rest = int(cut.epochs), _units_of_epoch(num_units, cut.epochs, int(cut.epochs))
        planned = whole * num_units + rest
        steps, is_exact = _count_steps(tokens_U, cut, planned)
        tokens = _tokens_of_first(planned, tokens_U, cut.seed)
        return RunLength(epochs=planned / num_units, steps=steps, tokens=tokens, is_exact=is_exact)
    assert cut.steps is not None
    planned, tokens, is_exact = _count_units(tokens_U, cut, cut.steps)
    return RunLength(epochs=planned / num_units, steps=cut.steps, tokens=tokens, is_exact=is_exact)


def length_of_draws(tokens_U: Indices, cut: Cut) -> RunLength:
    """Count rollouts' passes, steps and tokens. Every step has `batch_size` prompts, even if a pass ends within it."""
    num_units, batch_size = len(tokens_U), cut.batch_size
    assert batch_size is not None
    if not num_units:
        return RunLength(epochs=0.0, steps=cut.steps or 1, tokens=0)
    steps = cut.steps or max(1, math.floor((cut.epochs or 0) * num_units / batch_size))
    drawn = steps * batch_size
    return RunLength(epochs=drawn / num_units, steps=steps, tokens=_tokens_of_first(drawn, tokens_U, cut.seed))


def _tokens_of_first(num_drawn: int, tokens_U: Indices, seed: int) -> int:
    """Return the tokens of the first units in the order of their epochs."""
    whole, rest = divmod(num_drawn, len(tokens_U))
    tokens = whole * int(tokens_U.sum())
    if rest:
        tokens += int(tokens_U[epoch_order(len(tokens_U), seed, whole)[:rest]].sum())
    return tokens


def _count_steps(tokens_U: Indices, cut: Cut, planned: int) -> tuple[int, bool]:
    """Return how many steps `planned` units take, and whether that is exact."""
    if cut.batch_size is not None:
        whole, rest = divmod(planned, len(tokens_U))
        return whole * math.ceil(len(tokens_U) / cut.batch_size) + math.ceil(rest / cut.batch_size), True
    steps = counted = 0
    for step in steps_of(tokens_U, cut):
        if counted > _MOST_COUNTED:
            return round(steps * planned / counted), False
        steps, counted = steps + 1, counted + len(step)
    return steps, True


def _count_units(tokens_U: Indices, cut: Cut, steps: int) -> tuple[int, int, bool]:
    """Return the units and tokens of this many steps, and whether they are exact."""
    if cut.batch_size is not None:
        whole, left = divmod(steps, math.ceil(len(tokens_U) / cut.batch_size))
        planned = whole * len(tokens_U) + min(len(tokens_U), left * cut.batch_size)
        return planned, _tokens_of_first(planned, tokens_U, cut.seed), True
    counted = tokens = 0
    for number, step in enumerate(steps_of(tokens_U, cut)):
        if counted > _MOST_COUNTED:
            return round(counted * steps / number), round(tokens * steps / number), False
        counted, tokens = counted + len(step), tokens + int(tokens_U[step].sum())
    return counted, tokens, True
