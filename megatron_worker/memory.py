"""Bytes that passes hold, the planner of micro-batches, and how many slots there is room for."""

import dataclasses
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from longshore.training import LINEARS, Full, Lora
from megatron_worker.engine import Batch, EngineInfo, LossFunction
from megatron_worker.forwards import CheckedInput, ForwardInput, HeadRequest, Ints, Pass, TopK, answers
from megatron_worker.mixers.forest_calls import mask_elements
from megatron_worker.process.ranks import everyone
from megatron_worker.tensors.slot_engine import Engine
from shared.errors import InvalidInput
from shared.jobs.packed import Units
from shared.jobs.prefix_tree import grow, shared_where_it_saves, tables

# --- Count the bytes of this process's own tensors: on CUDA by its allocator, on the CPU by a dispatch mode ---
#
# Free memory and other processes do not matter here, so that plans are reproducible.

_PLAIN = (int, float, type(None), torch.dtype, torch.device)  # common types of arguments that hold no tensors
_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of all memory, the budget if none is given


class CpuMeter(TorchDispatchMode):
    """Counts the storages that operations make from `start` to `stop`. Costs some microseconds an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {storage._cdata: storage for storage in _storages(result)}
        if not storages.keys() <= self._live.keys():  # else it is a view or the like, and the arguments need no look
            known = {storage._cdata for storage in _storages((args, kwargs))}
            for key, storage in storages.items():
                if key not in known and key not in self._live and (size := storage.nbytes()):
                    self._live[key] = weakref.ref(storage, partial(self._forget, key)), size
                    self._bytes += size
        self._peak = max(self._peak, self._bytes)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: measured passes compile nothing, and PyTorch's guard against it doubles the cost of a count."""
        return False

    def _forget(self, key: int, _: object) -> None:
        self._bytes -= self._live.pop(key)[1]

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        """Stop counting. Other modes may have been entered since, if a generator is closed late, after an error."""
        above = []
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_pop_mode())
        self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)

    def mark(self) -> int:
        """Reset the peak. Returns the bytes that live now."""
        self._peak = self._bytes
        return self._bytes

    def peak(self) -> int:
        """Return the most that lived at once since the last `mark`."""
        return self._peak


def _storages(value: Any) -> list[torch.UntypedStorage]:
    """Return the storages of operations' inputs or outputs: tensors, and tuples, lists and dictionaries of them."""
    if isinstance(value, Tensor):
        return [value.untyped_storage()]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [storage for part in value if not isinstance(part, _PLAIN) for storage in _storages(part)]


class CudaMeter:
    """Like CpuMeter, for the bytes that CUDA's caching allocator has given out since the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        self._before = torch.cuda.memory_allocated(self._device)

    def stop(self) -> None:
        pass

    def mark(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device) - self._before

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


def new_meter(device: torch.device) -> CpuMeter | CudaMeter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def default_budget(device: torch.device) -> int:
    """Return the default budget of passes: a share of all memory that this rank can use.

    It is the same whatever else runs: on CUDA 90 % of the device without what this process has allocated on it; on the
    CPU half of the machine or container, divided by the ranks on it.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(_SHARE["cuda"] * total) - torch.cuda.memory_allocated(device)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such container, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return int(_SHARE["cpu"] * total) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_bytes(device: torch.device) -> float:
    """Return how many bytes this process can still take on a device, beside other processes.

    Infinite on the CPU: what is offloaded from there takes as much memory as before.
    """
    if device.type != "cuda":
        return float("inf")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + kept)


# --- Pass costs ---
# Measure what a kind of pass holds in memory, as a function of its size, by a few small passes of that kind.
#
# At each moment of a pass the bytes are a linear function of its size (tokens of a backbone, rows of a head), so the
# peak is piecewise linear, and can be measured at a few sizes for any engine, model family, adapter, dtype or layout.
# It does not depend on what else runs on the machine.

_PROBE_SHARE = 0.75  # the share of a budget that a probe may take
_MOST_TOKENS = 1 << 40
_REPEATS = 2  # of a measurement on several ranks, where threads of collectives may hold a tensor somewhat longer


class PassBytes(NamedTuple):
    """Bytes that a pass holds. `forward`, `backward`: the peaks; `kept`: after the forward; `left`: after the backward.

    `gradient`: the gradients of its outputs, before the backward begins; they are included in `backward`.
    """

    forward: float = 0.0
    kept: float = 0.0
    backward: float = 0.0
    left: float = 0.0
    gradient: float = 0.0


Probe = Callable[[int], Iterator[float]]
"""Does a pass of a given size. It yields three times: before its forward; before its backward, with the bytes of its
outputs' gradients; and after its backward."""


@dataclass(frozen=True)
class PassCost:
    """A piecewise linear function through measured points: constant below the first, extrapolated after the last."""

    sizes: tuple[int, ...]
    points: tuple[PassBytes, ...]

    def at(self, size: int) -> PassBytes:
        if size <= self.sizes[-1]:
            columns = zip(*self.points, strict=True)
            return PassBytes(*(float(np.interp(size, self.sizes, column)) for column in columns))
        (size0, point0), (size1, point1) = [(0, PassBytes()), *zip(self.sizes, self.points, strict=True)][-2:]
        beyond = (size - size1) / (size1 - size0)
        return PassBytes(*(v1 + max(0.0, v1 - v0) * beyond for v0, v1 in zip(point0, point1, strict=True)))

    def size_within(self, budget_bytes: float, mask_bytes: float = 0.0) -> int:
        """Return the largest size whose forward stays within the budget. `mask_bytes`: for each token, besides."""
        sizes = range(_MOST_TOKENS)
        return bisect_left(sizes, True, 1, key=lambda n: self.at(n).forward + n * mask_bytes > budget_bytes) - 1


def measure(probe: Probe, sizes: Sequence[int], device: torch.device, world_size: int, budget_bytes: float) -> PassCost:
    """Run the probe at rising sizes while the next is estimated to stay within the budget; always at the first.

    Collective: for each size the largest bytes of any rank count.
    """
    if device.type == "cuda":  # a first run: libraries allocate their workspaces
        _measured(probe, sizes[0], device)
    cost = PassCost((), ())
    for number, size in enumerate(sizes):
        if number and max(cost.at(size)) > _PROBE_SHARE * budget_bytes:
            break
        repeated = [_measured(probe, size, device) for _ in range(_REPEATS if world_size > 1 else 1)]
        least = tuple(map(min, zip(*repeated, strict=True)))
        most = map(max, zip(*everyone(least), strict=True))
        cost = PassCost((*cost.sizes, size), (*cost.points, PassBytes(*most)))
    return cost


def _measured(probe: Probe, size: int, device: torch.device) -> PassBytes:
    meter, running = new_meter(device), probe(size)
    next(running)
    meter.start()
    try:
        meter.mark()
        gradient = next(running)
        forward, kept = meter.peak(), meter.mark()
        next(running)
        return PassBytes(forward, kept, meter.peak(), meter.mark(), gradient)
    finally:
        meter.stop()


# --- Measures the passes of a micro-batch ---
# A job's with its loss, or one by one a slot's backbone, and each kind of head.
#
# The size of a job's pass and of a backbone is the tokens of the pack; a head's is the number of rows of hidden
# states. Backbones and heads have a loss of zero times the outputs, so that gradients do not change. Masks, which grow
# with the square of small trees, are subtracted from a backbone's bytes, and computed for each pack.
#
# Shape suffixes: T tokens of a pack, N targets or rows, H hidden size, V rows of the output embedding.

# Large enough that an allocator's rounding does not matter. The last two sizes of heads are larger than their chunks.
_BACKBONE_TOKENS = {"cpu": (4, 16, 64, 256), "cuda": (128, 512, 1024)}
_HEAD_ROWS = {"cpu": (16, 32, 256, 512), "cuda": (512, 1024, 4096, 8192)}
_FIRST_STEP_TOKENS = {"cpu": 8, "cuda": 512}
_STEP_TOKENS = {device: tuple(int(first * 1.5**n) for n in range(24)) for device, first in _FIRST_STEP_TOKENS.items()}
_MASK_BLOCK = 128  # tokens, on CUDA


def measure_step(
    engine: Engine, loss: LossFunction, branches: bool, budget_bytes: float, most_tokens: int | None = None
) -> PassCost:
    """Measure the memory of forward_backward by tokens, up to `most_tokens`; all tokens are targets.

    The active slot must hold no gradients: those of the measuring passes are dropped. Collective.
    """
    device, world_size = engine.facts.device, engine.facts.layout.world_size
    if (divergence := loss.outputs.divergence) is not None:  # of a whole distribution: no other takes more
        outputs = dataclasses.replace(loss.outputs, divergence=dataclasses.replace(divergence, tokens="all"))
        loss = dataclasses.replace(loss, outputs=outputs)

    def probe(num_tokens: int) -> Iterator[float]:
        batch = _two_sequences(num_tokens, branches, device, num_targets=num_tokens)
        yield 0
        if divergence is not None:
            with torch.no_grad():
                batch = dataclasses.replace(batch, teacher=engine.teacher_states(batch))
        engine.forward_backward(batch, loss)
        yield 0
        yield 0

    rising = _STEP_TOKENS[device.type]
    sizes = rising[:1] + tuple(size for size in rising[1:] if most_tokens is None or size <= most_tokens)
    cost = measure(probe, sizes, device, world_size, budget_bytes)
    engine.zero_grad()
    return cost


def measure_backbone(engine: Engine, keeps_graph: bool, branches: bool, budget_bytes: float) -> PassCost:
    """Measure the backbone with the slot that is active. Collective."""
    facts, device = engine.facts, engine.facts.device

    def probe(num_tokens: int) -> Iterator[float]:
        yield 0
        with torch.set_grad_enabled(keeps_graph):
            hidden_NH, weight_VH = engine.hidden_states(_two_sequences(num_tokens, branches, device))
        yield 0
        if hidden_NH.requires_grad:
            (hidden_NH * 0).sum().backward()
        del hidden_NH, weight_VH
        yield 0

    def without_masks(size: int, point: PassBytes) -> PassBytes:
        masks = mask_bytes(_two_sequences(size, branches, device).parent_T.cpu().numpy(), facts)
        return PassBytes(*(max(0.0, value - masks) for value in point))

    cost = measure(probe, _BACKBONE_TOKENS[device.type], device, facts.layout.world_size, budget_bytes)
    return PassCost(cost.sizes, tuple(map(without_masks, cost.sizes, cost.points)))


def measure_head(
    engine: Engine, question: HeadRequest, num_labels: int, keeps_graph: bool, budget_bytes: float
) -> PassCost:
    """Measure a head on hidden states of zeros, whose memory counts as the head's. Collective."""
    device = engine.facts.device
    dtype, hidden_size = getattr(torch, engine.facts.dtype), engine.facts.hidden_size

    def probe(num_rows: int) -> Iterator[float]:
        request = _request(question, num_labels, num_rows)
        with torch.set_grad_enabled(keeps_graph):
            weight_VH = engine.hidden_states(_two_sequences(1, False, device))[1]
        weight_VH = weight_VH.detach().requires_grad_(weight_VH.requires_grad)
        if weight_VH.requires_grad and not engine.needs_lockstep:  # in step, it is kept until the backbone's backward
            weight_VH.register_post_accumulate_grad_hook(_drop_gradient)
        yield 0
        with torch.set_grad_enabled(keeps_graph):
            rows_NH = torch.zeros(num_rows, hidden_size, dtype=dtype, device=device, requires_grad=keeps_graph)
            (answer,) = answers(question, rows_NH, [request], weight_VH, engine.vocab_shard)
        outputs = [value.logprob_PK if isinstance(value, TopK) else value for value in answer.values()]
        graded = [tensor for tensor in outputs if tensor.requires_grad]
        yield sum(tensor.nbytes for tensor in graded)
        if graded:
            torch.stack([(tensor * 0).sum() for tensor in graded]).sum().backward()
        if not engine.needs_lockstep:  # in step, its gradient is kept until the backbone's backward
            del rows_NH
        yield 0

    return measure(probe, _HEAD_ROWS[device.type], device, engine.facts.layout.world_size, budget_bytes)


def _drop_gradient(weight_VH: Tensor) -> None:
    weight_VH.grad = None


def _request(question: HeadRequest, num_labels: int, num_rows: int) -> CheckedInput:
    token_L, label_PK = np.zeros(num_rows + 1, np.int64), np.zeros((num_rows, num_labels), np.int64)
    asked = ForwardInput(
        token_L,
        target_logprobs=question.kind == "scores",
        entropy=question.entropy,
        labels=label_PK if num_labels else None,
        top_k=question.top_k,
        logits=question.kind == "logits",
        hidden=question.kind == "hidden",
    )
    return CheckedInput(token_L, np.arange(num_rows), label_PK, asked, None)


def _two_sequences(num_tokens: int, branches: bool, device: torch.device, num_targets: int = 1) -> Batch:
    """Make a pack of two chains, or of two branches after a prefix of two tokens; its last tokens are targets.

    Every loss has a value for them. All tokens are at position 0: models may be limited in positions.
    """
    index_T = torch.arange(num_tokens, device=device)
    zero_T, parent_T = torch.zeros_like(index_T), index_T - 1
    root = 2 if branches else 0
    second = root + (num_tokens - root) // 2
    parent_T[second] = root - 1
    index_N = index_T[num_tokens - num_targets :]
    sequence_N = (index_N >= second).long()
    batch = Batch.to_score(zero_T, zero_T, parent_T, index_N, torch.zeros_like(index_N))
    advantage_N = 1.0 - 2.0 * sequence_N
    return dataclasses.replace(
        batch, weight_N=torch.ones_like(advantage_N), advantage_N=advantage_N, sequence_N=sequence_N
    )


def mask_bytes(parent_T: Ints, facts: EngineInfo) -> float:
    """Return the bytes of the attention masks of a pack, which all layers of one window share.

    On the CPU [L, L] for each small tree with many branches, and what a window cuts off. On CUDA a block mask: four
    lists of int32, of partial and full blocks by rows and columns. Sequences without branches or windows have none.
    """
    element_bytes: int = getattr(torch, facts.dtype).itemsize
    is_chain = bool(((parent_T == -1) | (parent_T == np.arange(len(parent_T)) - 1)).all())
    windows = [window for window in facts.windows if window is not None or not is_chain]
    if facts.device.type == "cuda":
        return len(windows) * 4 * 4 * (-(-len(parent_T) // _MASK_BLOCK)) ** 2
    return element_bytes * sum(mask_elements(parent_T, window) for window in windows)


# --- The planner ---
# How many tokens a job's micro-batch has, and which items TrainerRank's has. Equal on every rank.
#
# A job's micro-batch is one pass, forward and backward, which is measured whole.
#
# For TrainerRank the memory of a micro-batch is simulated: the forwards slot by slot, each of the backbone and then of
# its heads; the user's loss; then the backwards, the newest first, each freeing its memory. The memory of each pass is
# measured. The user's loss is assumed to keep one copy of each output that has a gradient until it has
# made that gradient, and to need two more copies of one input's outputs at a time.

_MARGIN = 0.02  # added to an estimate, as a fraction
_STEP_MARGIN = 0.08  # to a job's: many short sequences take somewhat more memory than a probe's two
_LOSS_WORK = 2  # copies of one input's outputs that a loss is assumed to make


class PlannedSlot(NamedTuple):
    inputs: Pass
    lora: Lora | None
    keeps_graph: bool
    least_saved_tokens: int
    recomputes: bool = False


class SlotLoad:
    """The work of one slot in one rank's micro-batch: the nodes of its pack, and who asks each question."""

    def __init__(self, slot: PlannedSlot, requests: Sequence[CheckedInput]) -> None:
        self.nodes = shared_where_it_saves(grow([r.token_L for r in requests])[1], slot.least_saved_tokens)
        self.num_tokens = sum(node.end - node.begin for node in self.nodes)
        self.num_logical_tokens = sum(len(r.token_L) for r in requests)
        self.asking: dict[HeadRequest, list[CheckedInput]] = {}
        for request in requests:
            for question in request.questions:
                self.asking.setdefault(question, []).append(request)

    @property
    def has_branches(self) -> bool:
        return self.num_tokens < self.num_logical_tokens


@dataclass(frozen=True)
class RankShare:
    """One rank's share of a micro-batch: the indices of its items, its work, and the estimated bytes.

    `num_logical_tokens`: if prefixes were not shared. `kind`: the kinds of questions that are asked.
    """

    items: tuple[int, ...] = ()
    num_tokens: int = 0
    num_logical_tokens: int = 0
    kind: frozenset[str] = frozenset()
    planned_bytes: float = 0.0


class Planner:
    """Plans micro-batches for the data-parallel ranks of an engine. Its state is the same on all of them.

    Every cost is measured when it is first needed. `_excess`: for each set of request kinds, the factor by which a
    micro-batch that exceeded its budget took more than its estimate.
    """

    def __init__(self, facts: EngineInfo) -> None:
        self._facts = facts
        self._backbones: dict[tuple[Lora | None, bool, bool, bool], PassCost] = {}
        self._heads: dict[tuple[HeadRequest, int, bool], PassCost] = {}
        self._excess: dict[frozenset[str], float] = {}

    def step_tokens(
        self, engine: Engine, loss: LossFunction, units: Units, budget_bytes: float, most_tokens: int | None
    ) -> int:
        """Return how many tokens of a job's units fit the budget, by passes of `most_tokens` at most. Collective.

        The slot that is active must hold no gradients.
        """
        trees = _trees(units)
        most_masks = max((mask_bytes(parent_T, self._facts) / len(parent_T) for parent_T in trees), default=0.0)
        cost = measure_step(engine, loss, len(trees) > 0, budget_bytes, most_tokens)
        return cost.size_within(budget_bytes / (1 + _STEP_MARGIN), most_masks)

    def measure(self, engine: Engine, slot: PlannedSlot, requests: Sequence[CheckedInput], budget_bytes: float) -> None:
        """Measure the costs of these requests of the active slot that are not known yet. Collective."""
        for branches in (False, True)[: 1 + SlotLoad(slot, requests).has_branches]:
            backbone = slot.lora, slot.keeps_graph, slot.recomputes, branches
            if backbone not in self._backbones:
                self._backbones[backbone] = measure_backbone(engine, slot.keeps_graph, branches, budget_bytes)
        for head in sorted(
            {_head_key(q, r.label_PK.shape[1], slot.keeps_graph) for r in requests for q in r.questions}
        ):
            if head not in self._heads:
                self._heads[head] = measure_head(engine, *head, budget_bytes)

    def next_shares(
        self,
        items: Sequence[Sequence[CheckedInput]],
        first: int,
        slots: Sequence[PlannedSlot],
        in_step: bool,
        budget_bytes: float,
        held_bytes: float = 0.0,
        most: int | None = None,
    ) -> list[RankShare]:
        """Divide as many items as fit, from `first` on in order, over the ranks: each goes to the least loaded one.

        Args:
            slots: in the order of their forwards.
            in_step: ranks run the backbones of all slots, if need be with an empty pack, and all heads go backward
                before them.
            budget_bytes: the rest of the budget, without `held_bytes`.
            most: the most items to take.

        Raises:
            InvalidInput: even the first item alone does not fit.
        """

        def divided(num: int) -> list[RankShare]:
            dealt, tokens = [list[int]() for _ in range(self._facts.dp_size)], [0] * self._facts.dp_size
            for item in range(first, first + num):
                least = tokens.index(min(tokens))
                dealt[least].append(item)
                tokens[least] += sum(len(request.token_L) for request in items[item])
            return [self._share(items, own, slots, in_step) for own in dealt]

        def is_too_much(num: int) -> bool:
            return max(share.planned_bytes for share in divided(num)) > budget_bytes

        limit, above = len(items) - first if most is None else most, 1
        while above <= limit and not is_too_much(above):
            above *= 2
        known = range(limit + 1)
        num = bisect_left(known, True, above // 2 + 1, min(above, limit + 1), key=is_too_much) - 1
        if not num:
            needed, left = int(divided(1)[0].planned_bytes), int(budget_bytes)
            message = f"it alone needs about {needed:,} bytes, backward included; the budget leaves {left:,}"
            if held_bytes:
                message += f" beside {int(held_bytes):,} that are held of micro-batches before"
            raise InvalidInput(message, f"items[{first}]")
        return divided(num)

    def exceeded(self, kind: frozenset[str], times: float) -> None:
        """Record that a micro-batch with these kinds of requests took `times` its estimate."""
        self._excess[kind] = self._excess.get(kind, 1.0) * times

    def _share(
        self,
        items: Sequence[Sequence[CheckedInput]],
        own: Sequence[int],
        slots: Sequence[PlannedSlot],
        in_step: bool,
    ) -> RankShare:
        """Return the share of a rank that gets some items."""
        if not own:
            return RankShare()
        loads = {}
        for slot in slots:
            found = (request for item in own for request in items[item] if request.goes_in == slot.inputs)
            requests = [request for request in found if not request.is_empty]
            if requests or in_step:
                loads[slot] = SlotLoad(slot, requests)
        kind = frozenset(question.kind for load in loads.values() for question in load.asking)
        planned_bytes = self._estimate(loads, in_step) * (1 + _MARGIN) * self._excess.get(kind, 1.0)
        num_tokens = sum(load.num_tokens for load in loads.values())
        num_logical_tokens = sum(load.num_logical_tokens for load in loads.values())
        return RankShare(tuple(own), num_tokens, num_logical_tokens, kind, planned_bytes)

    def _estimate(self, loads: dict[PlannedSlot, SlotLoad], in_step: bool) -> float:
        """Return the bytes at the peak of a micro-batch."""
        live = peak = gradients = largest = 0.0
        passes: list[tuple[list[PassBytes], list[tuple[PassBytes, float]]]] = []
        for slot, load in loads.items():
            branches = load.has_branches
            has_masks = branches or any(self._facts.windows)
            masks = mask_bytes(tables(load.nodes)[1], self._facts) if has_masks else 0.0
            backbone = self._backbones[slot.lora, slot.keeps_graph, slot.recomputes, branches].at(load.num_tokens)
            peak = max(peak, live + backbone.forward + masks)
            live += (backbone.kept + masks) * slot.keeps_graph
            heads = []
            for question, requests in sorted(load.asking.items(), reverse=True):  # as rank.py does
                rows = [len(request.position_P) for request in requests]
                num_labels = max(request.label_PK.shape[1] for request in requests)
                head = self._heads[_head_key(question, num_labels, slot.keeps_graph)].at(sum(rows))
                heads.append(head)
                peak = max(peak, live + head.forward)
                live += head.kept
                gradients += head.gradient
                largest = max(largest, head.gradient * max(rows) / sum(rows))
            if slot.keeps_graph:
                passes.append((heads, [(backbone, masks)]))
        live += gradients
        peak = max(peak, live + _LOSS_WORK * largest)
        passes.reverse()
        if in_step:  # the heads of all slots go before their backbones (rank.py)
            passes = [([head for heads, _ in passes for head in heads], [b for _, bs in passes for b in bs])]
        for heads, backbones in passes:
            for head in reversed(heads):
                live -= head.kept + head.gradient
                peak = max(peak, live + head.backward)
                live += head.left
            for backbone, masks in backbones:
                live -= backbone.kept + masks
                peak = max(peak, live + backbone.backward + masks)
        return peak


def _trees(units: Units) -> list[Ints]:
    """Return the parents, [T], of the units that branch."""
    parent_T = units.columns.get("parent")
    if parent_T is None:
        return []
    begin_U, end_U = units.token_offsets[:-1].astype(np.int64), units.token_offsets[1:].astype(np.int64)
    index_T = np.arange(len(parent_T)) - np.repeat(begin_U, end_U - begin_U)
    branching_U = np.unique(np.searchsorted(begin_U, np.flatnonzero(parent_T != index_T - 1), side="right") - 1)
    return [parent_T[begin_U[unit] : end_U[unit]].astype(np.int64) for unit in branching_U]


def _head_key(question: HeadRequest, num_labels: int, keeps_graph: bool) -> tuple[HeadRequest, int, bool]:
    """Return the key of a head's cost: settings that do not change its memory are left out, labels are rounded up."""
    rounded = 1 << (num_labels - 1).bit_length() if num_labels and question.kind == "ranks" else 0
    return replace(question, temperature=1.0), rounded, keeps_graph


# --- Counts the bytes that slots hold on a device, against the bytes that there are for them ---

PASSES_SHARE = 10
"""By default a tenth of a CUDA device's memory is left to passes; the base and slots have the rest."""


@dataclass(frozen=True)
class SlotNeed:
    """Bytes of a slot that is trained, by part, each on the rank with the most.

    `weights` are also those of the adapter that is its loss's reference.
    """

    trainable: Lora | Full
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        match self.trainable:
            case Lora(rank=rank, targets=targets):
                beside = "every linear" if targets == LINEARS else ", ".join(targets)
                what = f"a slot of rank {rank} beside {beside}"
            case Full():
                what = "a slot of all weights"
        parts = f"weights {self.weights:,}, gradients {self.gradients:,}, optimizer state {self.optimizer:,}"
        return f"{what} takes {self.total:,} bytes on a rank ({parts})"


@dataclass
class SlotRoom:
    """The slots of a rank's device. Every rank has the same numbers, those of the fullest one.

    Attributes:
        limit: bytes for slots; None: no limit.
        needs: what the slots of runs in hand take, and those that are kept, by run.
        on_device: the runs whose slots are on the device, or will be as soon as they are made.
    """

    limit: int | None = None
    needs: dict[str, SlotNeed] = field(default_factory=dict)
    on_device: set[str] = field(default_factory=set)

    def total(self, run_ids: Iterable[str]) -> int:
        """Return the bytes of some runs' slots, wherever they are."""
        return sum(self.needs[run_id].total for run_id in run_ids)
