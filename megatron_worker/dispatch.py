"""The dispatcher: commands on the slots of one engine. It decides where tensors are, and which rank computes what.

It divides data over the data-parallel ranks, so that its callers need not deal with ranks, bins, or what is on the
device. Every method is collective: all ranks call it, in the same order, with equal arguments.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from longshore.training import Full, Lora, Recompute
from megatron_worker.engine import Batch, EngineInfo, LossFunction, Outputs
from megatron_worker.memory import Planner, free_bytes
from megatron_worker.process.ranks import BackgroundCall, everyone
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.training.batches import PackedBatches, Role, Sums, TargetScores, bins_to_score
from megatron_worker.training.checkpoint import random_state, set_random_state
from megatron_worker.weight_sync.buckets import device_bytes
from megatron_worker.weight_sync.sender import DeltaBase, Sending, SyncProfile, send
from shared.errors import InvalidInput
from shared.jobs.job import SyncAccess, SyncTarget
from shared.models.peft import read_config

T = TypeVar("T")
BINS_A_PASS = 8
WAYS: dict[Recompute, tuple[bool, ...]] = {"off": (False,), "on": (True,), "auto": (False, True)}
SlotName = str | None
"""The name of an adapter with its gradients and optimizer state; None: the base model, trained itself or frozen."""


class Dispatcher:
    """See the module's docstring. Each command makes its slot the active one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.planner = Planner(engine.facts)
        self.slots: set[SlotName] = set()
        self.recomputing: set[SlotName] = set()  # whose passes compute their layers again
        self.teachers: dict[SlotName, SlotName] = {}  # whose whole distributions a slot's losses compare with
        self._sent: dict[SlotName, DeltaBase] = {}
        self.free_bytes = free_bytes  # of a device

    @property
    def facts(self) -> EngineInfo:
        return self.engine.facts

    # Slots.

    def create_slot(self, slot: SlotName, trainable: Lora | Full, seed: int, adapter: Path | None = None) -> None:
        """Begin to train: a fresh adapter, a PEFT adapter from a folder, or every weight of the base.

        Raises:
            InvalidInput: the adapter is missing, damaged or not of `trainable`'s shape, or the base is to be trained
                from one, or is quantized.
        """
        self.slots.add(slot)  # before it is made: what an error left of it on some rank is dropped on all
        match trainable:
            case Lora() if adapter is not None:
                assert slot is not None
                self.engine.load_adapter(slot, adapter, trainable, trainable=True, seed=seed)
            case Lora():
                assert slot is not None
                self.engine.add_adapter(slot, trainable, seed)
            case Full() if adapter is not None:
                raise InvalidInput("full training does not start from an adapter", "initial_adapter")
            case Full() if not self.facts.trains_base:
                raise InvalidInput("quantized weights are frozen: train an adapter, or drop quantize_base", "the base")
            case Full():
                self.engine.train_full(trainable, seed)
                self.planner = Planner(self.facts)  # passes hold other bytes from now on

    def load_frozen(self, slot: str, adapter: Path) -> None:
        """Load a PEFT adapter that is only computed with. Raises InvalidInput as `create_slot` does."""
        self.slots.add(slot)
        self.engine.load_adapter(slot, adapter, None, trainable=False)

    def drop_slot(self, slot: SlotName) -> None:
        """Forget a slot, with its gradients and optimizer state; a base that was trained is as published again."""
        if slot not in self.slots:
            return
        self.slots.remove(slot)
        self.recomputing.discard(slot)
        self.teachers.pop(slot, None)
        self._sent.pop(slot, None)
        self.engine.drop_slot(slot)
        if slot is None:
            self.planner = Planner(self.facts)

    def slot_bytes(self, trainable: Lora | Full, frozen: Path | None) -> tuple[int, int, int]:
        """Count the bytes of a slot on this rank's device, without making it: weights, gradients, optimizer state.

        `frozen`: a PEFT folder of an adapter that the loss uses, too: its weights also count. Raises InvalidInput if
        the folder has none.
        """
        parts = self.engine.slot_bytes(trainable)
        weights = parts["weights"]
        if frozen is not None:
            weights += self.engine.slot_bytes(read_config(frozen, may_have_head=True))["weights"]
        return weights, parts["gradients"], parts["optimizer"]

    def load_state(self, slot: SlotName, folder: Path, optimizer: bool = True) -> None:
        """Resume from what `Engine.save` wrote, under any layout. Raises InvalidInput if it does not fit.

        `optimizer`: False to begin with moments and a step count of zero.
        """
        with self.resident(slot) as engine:
            engine.load(folder)
            if not optimizer:
                engine.reset_moments()

    def send_weights(
        self, slot: SlotName, run_id: str, target: SyncTarget, access: SyncAccess | None = None
    ) -> Sending | BackgroundCall[None] | None:
        """Begin to send a slot's weights to a target's samplers; they must not change before its `result`.

        The slot must be on the device until then (`resident`). Returns and raises as weight_sync.sender.send does.

        If the device of some rank is short of memory for it, the base's optimizer state leaves the devices first, and
        this waits for the sync's end: a save beside it would bring the state back.
        """
        outgoing, access = self.engine.outgoing(slot), access or SyncAccess()
        sent = self._sent.setdefault(slot, DeltaBase()) if target.backend == "delta" else None
        # An adapter's sync reads the masters that its optimizer holds, and its buffers are as small as the adapter.
        is_short = slot is None and self.free_bytes(self.facts.device) < device_bytes(outgoing, target.bucket_bytes)
        if not any(everyone(is_short)):
            return send(outgoing, target, run_id, sent, access)
        phases = SyncProfile(access.profile, self.facts.rank)
        with phases("offload"):
            self.engine.place(optimizer="host", slots=[slot])
        sending = send(outgoing, target, run_id, sent, access, phases, made_room=True)
        if sending is not None:
            sending.result()
        return sending

    @contextmanager
    def resident(self, slot: SlotName) -> Iterator[Engine]:
        """Return the engine with a slot active, and all that trains it on the device, for the length of the block."""
        self.engine.set_adapter(slot)
        self.engine.recompute = slot in self.recomputing
        with self.engine.training():
            yield self.engine

    def set_recompute(self, slot: SlotName, recompute: bool) -> None:
        """Let the slot's passes compute their layers again in the backward, or not."""
        (self.recomputing.add if recompute else self.recomputing.discard)(slot)

    def form_micro_batches(
        self,
        slot: SlotName,
        data: PackedBatches,
        loss: LossFunction,
        budget_bytes: int,
        most_tokens: int | None = None,
        recompute: Recompute = "auto",
        recorded: tuple[int, bool] | None = None,
    ) -> None:
        """Cut the data's steps into bins whose passes stay within a memory budget.

        The number of tokens that fit is measured by passes of the slot, which must have no gradients, and has none
        afterwards; random numbers are drawn as if there were no such passes.

        Args:
            most_tokens: of a bin, whatever the budget has room for.
            recompute: layers are recomputed in the backward; "auto": if the longest example does not fit otherwise.
            recorded: the number, and whether they do, that a checkpoint records. It is taken if it holds the longest
                example and `recompute` allows it.

        Raises:
            InvalidInput: an example does not fit.
        """
        ways = WAYS[recompute]
        if recorded is not None and recorded[0] >= data.longest_unit and recorded[1] in ways:
            tokens, recomputes = recorded
            self.set_recompute(slot, recomputes)
        else:
            drawn, limits = random_state(), (budget_bytes, data.most_step_tokens)
            for recomputes in ways:
                self.set_recompute(slot, recomputes)
                with self.resident(slot):
                    tokens = self.planner.step_tokens(self.engine, loss, data.units, *limits)
                if tokens >= data.longest_unit:
                    break
            set_random_state(drawn)
        data.cut_to(min(tokens, most_tokens or tokens), self.facts.layout.dp)

    # Passes over packed data.

    def forward_backward(
        self, slot: SlotName, data: PackedBatches, step: int, loss: LossFunction, scores: TargetScores | None = None
    ) -> Generator[None, None, dict[str, float]]:
        """Add the gradients of a step's examples to what the slot has accumulated.

        Yields between its passes, so that commands of other slots can be done there. A pipeline has a single pass, of
        all bins of the step. A loss with a baseline has its passes first.

        Args:
            scores: takes the log-probabilities of this rank's share.

        Returns:
            the loss's sums over all of them, and `tokens`, `target_tokens` and `num_bins` (engine.py), on every rank.
        """
        facts = self.facts
        loss = data.by_source((yield from self._with_baseline(slot, data, loss, lambda: False, step)) or loss)
        sums = Sums(loss, facts.device)
        batches = data.batches(step, facts.dp_rank, facts.dp_size, facts.device)
        if scores is not None:
            loss = scores.recorded(loss, data.bins_of_rank(step, facts.dp_rank, facts.dp_size))
        for number, some in enumerate(_in_passes(batches, BINS_A_PASS if facts.layout.pp == 1 else None)):
            if number:
                yield
            with self.resident(slot):
                for batch, found in self.engine.forward_backward_all(
                    self._with_teacher_outputs(slot, some, loss), loss
                ):
                    sums.add(found, batch)
        return self.engine.reduce(sums.totals)

    def evaluate(
        self, slot: SlotName, data: PackedBatches, loss: LossFunction, cancelled: Callable[[], bool], step: int = 0
    ) -> Generator[None, None, dict[str, float] | None]:
        """Return the loss's sums over a step of the data, as `forward_backward` does; None if it was cancelled.

        Yields between its passes, so that commands of other slots can be done there.
        """
        facts, known = self.facts, (yield from self._with_baseline(slot, data, loss, cancelled, step))
        if known is None:
            return None
        loss = known
        sums = Sums(loss, facts.device)
        batches = data.batches(step, facts.dp_rank, facts.dp_size, facts.device)
        for some in _in_passes(batches, BINS_A_PASS):
            if cancelled():
                return None
            with self._scoring(slot):
                for batch in self._with_teacher_outputs(slot, some, loss):
                    sums.add(loss.sums(self.engine.forward(batch, loss.outputs), batch).detached(), batch)
            yield
        return self.engine.reduce(sums.totals)

    def _with_baseline(
        self, slot: SlotName, data: PackedBatches, loss: LossFunction, cancelled: Callable[[], bool], step: int
    ) -> Generator[None, None, LossFunction | None]:
        """Return the loss of a step once its baseline, if it has one, is known; None if it was cancelled."""
        if loss.baseline is None:
            return loss
        scored, loss_of = loss.baseline
        sums = yield from self.evaluate(slot, data, scored, cancelled, step)
        return None if sums is None else loss_of(sums)

    def _with_teacher_outputs(self, slot: SlotName, batches: Iterable[Batch], loss: LossFunction) -> Iterator[Batch]:
        """Yield bins with what the slot's teacher computes of them, if the loss compares with that."""
        divergence = loss.outputs.divergence
        for batch in batches:
            if divergence is None or divergence.tokens != "all":
                yield batch
                continue
            self.engine.set_adapter(self.teachers[slot])
            with torch.no_grad(), self.engine.training():
                teacher = self.engine.teacher_states(batch)
            self.engine.set_adapter(slot)
            yield dataclasses.replace(batch, teacher=teacher)

    def num_scoring_passes(self, data: PackedBatches) -> int:
        """Return the passes of `evaluate` between which it yields."""
        return math.ceil(len(data.bins(0)) / self.facts.dp_size / BINS_A_PASS)

    def score(self, roles: Iterable[Role]) -> Iterator[None]:
        """Have each role score its data with its current weights. Yields between its passes, as `evaluate` does.

        Roles come one after another: only one at a time has its weights on the device, with the base, and none its
        optimizer state. The next one is taken from `roles` when the one before it is done.
        """
        facts = self.facts
        for role in roles:
            scores = TargetScores(role.data, role.outputs, role.head)
            bins = bins_to_score(role.data, role.steps.start, role.steps.stop, facts.dp_rank, facts.dp_size)
            for some in _in_passes(iter(bins), BINS_A_PASS):
                with self._scoring(role.slot):
                    for units in some:
                        scores.put(units, self.engine.forward(role.data.batch(units, facts.device), role.outputs))
                yield
            role.take(scores.found)

    # Passes that every rank makes with the same data.

    def probe(self, slot: SlotName, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of token_ids[1:] by the weights as they are, in nats, at temperature 1."""
        with self._scoring(slot):
            logprob_N = self.engine.forward(Batch.chain(token_ids, self.facts.device), Outputs()).logprob_N
        assert logprob_N is not None
        return tuple(logprob_N.tolist())

    def greedy(
        self, slot: SlotName, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]
    ) -> list[list[int]]:
        """Greedy continuations of token ids, the stop id left out."""
        with self._scoring(slot):
            return self.engine.greedy(prompts, max_tokens, stop_ids)

    @contextmanager
    def _scoring(self, slot: SlotName) -> Iterator[None]:
        self.engine.set_adapter(slot)
        with torch.no_grad(), self.engine.scoring():
            yield


def _in_passes(bins: Iterator[T], num_bins: int | None) -> Iterator[list[T]]:
    """Yield the bins in lists of `num_bins`; None: all in one list."""
    while some := list(islice(bins, num_bins)):
        yield some
