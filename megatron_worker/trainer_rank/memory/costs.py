"""Estimate the peak memory of one rank's micro-batch before anything of it is made.

The micro-batch is followed as it will go: slot after slot forward, each its backbone and then its heads; the user's
loss; then backward, the newest first, while what has gone backward is let go of. Backbones are measured
(backbone_costs.py), heads counted (head_costs.py). What a loss does is the user's: it is taken to keep one copy of each
output that has a gradient until it has made that gradient, and to work on one input's outputs at a time in two copies
more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_worker.trainer_rank.inputs import Request
from megatron_worker.trainer_rank.memory.backbone_costs import BackboneCost
from megatron_worker.trainer_rank.memory.head_costs import Head, HeadBytes, Question, Rows, questions
from megatron_worker.trainer_rank.packing import PackSize

_LOSS_COPIES = 1
_LOSS_WORK = 2
_BATCH_BYTES = 20  # a row of the table of targets that torch makes itself
_DEVICE_TOKEN_BYTES, _DEVICE_ROW_BYTES = 24, 8  # what of the tables comes from the host


@dataclass
class SlotLoad:
    """What one slot is to do in a micro-batch of one rank. `mask_bytes`: see `backbone_costs.mask_bytes`."""

    size: PackSize
    rows: dict[Question, Rows] = field(default_factory=dict)
    mask_bytes: float = 0.0

    def copy(self) -> "SlotLoad":
        return SlotLoad(self.size.copy(), {q: rows.copy() for q, rows in self.rows.items()}, self.mask_bytes)

    def add(self, request: Request) -> None:
        self.size.add(request.token_L)
        for question in questions(request):
            self.rows.setdefault(question, Rows()).add(request)

    @property
    def branches(self) -> bool:
        return self.size.num_shared > 0


@dataclass(frozen=True)
class _Slot:
    """Bytes of one slot. `hidden`: of all rows that heads read, `joining`: while those of several ranks are
    brought together; `table`: of tokens and targets, during the forward."""

    backbone: BackboneCost
    num_tokens: int
    mask_bytes: float
    keeps_graph: bool
    hidden: float
    hidden_is_held: bool
    joining: float
    table: float
    heads: list[tuple[float, HeadBytes]]  # with the bytes of its rows of `hidden`
    token_row: float

    @property
    def kept(self) -> float:
        """Of the backbone, until its backward."""
        return (self.backbone.kept.at(self.num_tokens) + self.mask_bytes) * self.keeps_graph


def estimate(loads: Sequence[tuple[SlotLoad, BackboneCost, bool]], head: Head, in_step: bool) -> float:
    """Bytes at the peak of a micro-batch.

    Args:
        loads: of each slot its load, its backbone's cost and whether it keeps a graph, in the order of their forwards.
        in_step: backbones go backward after the heads of all slots (in_step.py).
    """
    slots = [_slot(load, cost, keeps_graph, head) for load, cost, keeps_graph in loads]
    live = peak = 0.0
    for slot in slots:
        live, most = _forward(slot, live)
        peak = max(peak, most)
    gradients = sum(answer.gradient for slot in slots for _, answer in slot.heads)
    largest = max((answer.largest for slot in slots if slot.keeps_graph for _, answer in slot.heads), default=0.0)
    peak = max(peak, live + _LOSS_COPIES * gradients + _LOSS_WORK * largest)
    return max(peak, _backward([slot for slot in reversed(slots) if slot.keeps_graph], live + gradients, in_step))


def _slot(load: SlotLoad, cost: BackboneCost, keeps_graph: bool, head: Head) -> _Slot:
    asked = [(question, load.rows[question]) for question in sorted(load.rows, reverse=True)]  # as forward.py does
    num_rows, num_tokens = sum(rows.num for rows in load.rows.values()), load.size.num_tokens
    table = num_rows * _BATCH_BYTES
    if head.on_device:
        table += num_tokens * _DEVICE_TOKEN_BYTES + num_rows * _DEVICE_ROW_BYTES
    return _Slot(
        backbone=cost,
        num_tokens=num_tokens,
        mask_bytes=load.mask_bytes,
        keeps_graph=keeps_graph,
        hidden=num_rows * head.row,
        joining=2 * num_rows * head.row * head.is_cut,
        hidden_is_held=any(question.kind == "hidden" for question in load.rows),
        table=table,
        heads=[(rows.num * head.row, head.bytes_of(question, rows, keeps_graph)) for question, rows in asked],
        token_row=num_tokens * head.row,
    )


def _forward(slot: _Slot, live: float) -> tuple[float, float]:
    """What lives after it, and the most that did. `live`: before it."""
    gathering = slot.kept + slot.token_row + slot.hidden + slot.joining
    peak = live + slot.table + max(slot.backbone.forward.at(slot.num_tokens) + slot.mask_bytes, gathering)
    live += slot.kept + slot.hidden
    for _, answer in slot.heads:
        peak = max(peak, live + answer.forward)
        live += answer.outputs + answer.graph
    return live - (0 if slot.keeps_graph or slot.hidden_is_held else slot.hidden), peak


def _backward(slots: Sequence[_Slot], live: float, in_step: bool) -> float:
    """The most that lives. `live`: once the loss has made the gradients of all outputs; `slots`: the newest first."""
    peak = live
    for slot in slots:
        for rows, answer in reversed(slot.heads):
            peak = max(peak, live + answer.backward)
            live += rows - answer.graph - answer.gradient
        if len(slot.heads) > 1:
            peak = max(peak, live + slot.hidden)
        if not in_step:
            live, most = _backbone_backward(slot, live, 0.0)
            peak = max(peak, most)
    for slot in slots if in_step else ():
        live, most = _backbone_backward(slot, live, 2 * slot.hidden)
        peak = max(peak, most)
    return peak


def _backbone_backward(slot: _Slot, live: float, held: float) -> tuple[float, float]:
    """What lives after it, and the most that did. `held`: of hidden states and their gradient, to its end."""
    peak = live + slot.token_row + slot.joining
    live -= slot.kept + slot.hidden + (0 if slot.hidden_is_held else slot.hidden)
    return live, max(peak, live + held + slot.mask_bytes + slot.backbone.backward.at(slot.num_tokens))


def total_tokens(loads: Sequence[SlotLoad]) -> tuple[int, int]:
    """Packed tokens, and what they would be without sharing."""
    packed = sum(load.size.num_tokens for load in loads)
    return packed, packed + sum(load.size.num_shared for load in loads)
