"""The program of a session: a client trains a slot by commands, which arrive as files and are done one after another.

On each lease the commands are done in the order of their numbers. A checkpoint holds the state after the last command
that left no accumulated gradients. The next lease resumes from it, and repeats the commands after it.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longshore import events
from longshore.commands import (
    EFFECTS,
    CommandProblem,
    CommandResult,
    ForwardBackwardOptions,
    ForwardOptions,
    OptimStep,
    SaveState,
)
from longshore.fields import bounded
from longshore.losses import Distillation, check_head
from longshore.training import check_optimizer
from megatron_worker.engine import Outputs, Where, reported
from megatron_worker.losses import loss_function
from megatron_worker.process.ranks import Awaited, CancelledEarly, Fault, Folders, JobFailed, Staging
from megatron_worker.trained_slot import Outcome, Passes, Program, TrainedSlot
from megatron_worker.training.batches import CommandData, Role, TargetScores, pack_data
from megatron_worker.training.checkpoint import check_fits
from megatron_worker.warm_engine import WarmEngine
from shared.errors import InvalidInput
from shared.jobs.commands import (
    Gap,
    LoadStored,
    Skip,
    StoredCommand,
    check_data,
    read_command,
)
from shared.jobs.job import SessionPlan
from shared.jobs.packed import Units
from shared.storage.files import write_atomically

MOST_UNSAVED = 256
"""A checkpoint is saved after so many commands. A new lease repeats no more than these, except while gradients are
accumulated, when none can be saved."""
_DROPPED = "the gradients accumulated since the last optim_step are dropped"
_OFFLOAD = b"offload"
_NAN_BITS = 0x7FC00000
Doing = Generator[Awaited | None, None, CommandResult]


@dataclass
class SessionProgram(Program):
    """See the module's docstring.

    `last`: the last command that was done. The slot's `at` is the last one that left no gradients behind.
    """

    plan: SessionPlan
    folders: Folders
    warm: WarmEngine
    staging: Staging
    slot: TrainedSlot
    last: int = 0
    _unsaved_s: float = 0.0  # that commands since the newest checkpoint took
    _is_touched: bool = False
    _is_away: bool = False

    def run(self, by_hand: bool) -> Passes:
        """Do commands until the session is cancelled, or with `by_hand` until there are no more; then save the state.

        A command's own error is its result.
        """
        self.last = self.slot.at
        if self.slot.job.start is not None:
            self.slot.saved_at = self.slot.at
        with suppress(CancelledEarly):
            yield from self._serve(by_hand)
        self.slot.save()
        return Outcome("succeeded" if by_hand else "cancelled", self.slot.at)

    def _serve(self, by_hand: bool) -> Generator[Awaited | None, None, None]:
        """Do commands as they come. After some time without any, the slot is moved off the device."""
        idle_since = time.monotonic()
        while not self.slot.cancelled():
            order = self.slot.ranks.broadcast(self._order(idle_since) if self.slot.ranks.rank == 0 else None)
            if order == _OFFLOAD:
                self._place("host")
            elif order:
                if self._is_away:
                    self._place("device")
                yield from self._do(self.last + 1, order)
                idle_since = time.monotonic()
            elif by_hand:
                return
            yield None if by_hand else partial(self._has_order, idle_since)

    def _order(self, idle_since: float) -> bytes:
        """Return the next command's file, an order to leave the device, or nothing. Called on rank 0 alone."""
        with suppress(FileNotFoundError):
            return self._path("json").read_bytes()
        return _OFFLOAD if self._is_overdue(idle_since) else b""

    def _has_order(self, idle_since: float) -> bool:
        return self._path("json").exists() or self._is_overdue(idle_since)

    def _is_overdue(self, idle_since: float) -> bool:
        """Return True if the slot is on the device and has had no command for `offload_after_s` seconds."""
        return not self._is_away and time.monotonic() > idle_since + self.plan.offload_after_s

    def _path(self, suffix: str) -> Path:
        assert self.slot.job.commands_dir is not None
        return Path(self.slot.job.commands_dir) / f"{self.last + 1:08d}.{suffix}"

    def _place(self, where: Where) -> None:
        """Move the slot. While it is away, others may have its room; JobFailed is raised if it cannot come back."""
        if where == "device":
            self.warm.make_room(self.plan, self.folders, self.slot.ranks)
        else:
            self.warm.room.on_device.discard(self.plan.run_id)
        self.slot.dispatcher.engine.place(where, slots=[self.slot.slot])
        self._is_away = where == "host"

    # Commands.

    def _do(self, number: int, data: bytes) -> Iterator[Awaited | None]:
        """Do a command and write its result. An error becomes its result, and the session continues.

        Raises:
            JobFailed: the slot may have lost its state, so that the session must resume from a saved one.
            CancelledEarly: the session was cancelled before the command changed anything.
        """
        began, self._is_touched = time.perf_counter(), False
        asked: StoredCommand | None = None
        try:
            asked, units = read_command(data)
            result = yield from self._result(number, asked, units)
        except (_SlotLost, CancelledEarly):
            raise
        except Exception as error:
            fault = self.slot.ranks.agree_on(error).fault
            result = CommandResult(number=number, kind=asked.kind if asked else "", problem=self._problem(fault))
        seconds = time.perf_counter() - began
        if self.slot.ranks.rank == 0:
            write_atomically(self._path("result.json"), result.model_dump_json().encode(), is_durable=False)
        self.last = asked.through if isinstance(asked, Gap) else number
        if not self.slot.sums:
            self.slot.at = self.last
        self.slot.report.emit(events.Applied, command=number, kind=result.kind, failed=result.problem is not None)
        if EFFECTS.get(result.kind, "nothing") != "nothing":
            self._unsaved_s += seconds
        is_due = self._unsaved_s > self.plan.save_after_s or self.slot.at - self.slot.saved_at > MOST_UNSAVED
        if self.slot.ranks.largest([int(is_due)])[0]:
            self._save()

    def _problem(self, fault: Fault) -> CommandProblem:
        """Return an error as a command's problem. If the command may have changed the gradients, drop all of them."""
        message = fault.message
        if self._is_touched:
            self.slot.drop_gradients()
            message = f"{message}; {_DROPPED}"
        match fault.kind:
            case "invalid_input" | "not_finite":
                return CommandProblem(kind=fault.kind, message=bounded(message))
            case _:
                return CommandProblem(kind="error", message=bounded(message))

    def _result(self, number: int, asked: StoredCommand, units: Units | None) -> Doing:
        match asked:
            case Skip() | Gap():
                if isinstance(asked, Skip) and asked.drops:
                    self.slot.drop_gradients()
                return CommandResult(number=number, kind=asked.kind)
            case ForwardOptions():
                return (yield from self._forward(number, asked, self._packed(asked, units)))
            case ForwardBackwardOptions():
                return (yield from self._forward_backward(number, asked, self._packed(asked, units)))
            case OptimStep():
                return self._optim_step(number, asked)
            case SaveState():
                if not self.slot.sums:
                    self.slot.at = number
                self.slot.report.emit(events.Kept, step=self.slot.at)
                with self.slot.dispatcher.resident(self.slot.slot), self.slot.sent():
                    self._save()
                return CommandResult(number=number, kind=asked.kind, step=self.slot.at)
            case LoadStored():
                return (yield from self._load_state(number, asked))

    def _forward(self, number: int, asked: ForwardOptions, packed: CommandData) -> Doing:
        if not asked.adapter and self.slot.slot is None:
            raise InvalidInput("the base is what this session trains: there is none as it was", "adapter")
        if asked.top_k > self.slot.dispatcher.facts.vocab_size:
            raise InvalidInput(f"the vocabulary has {self.slot.dispatcher.facts.vocab_size} tokens", "top_k")
        outputs = Outputs(True, asked.entropy, False, asked.temperature, asked.top_k)
        slot, head = (self.slot.slot, self.plan.trainable.head) if asked.adapter else (None, None)
        if head is not None:
            if asked.entropy or asked.top_k:
                raise InvalidInput(f"this session trains {head}: it has values, and no tokens", "entropy or top_k")
            outputs = Outputs(logprob=False, values=True)
        found: dict[str, NDArray] = {}
        yield from self.slot.dispatcher.score([Role(slot, packed.batches, range(1), outputs, found.update, head)])
        return CommandResult(number=number, kind=asked.kind, data=packed.scores(self._of_all_ranks(found)))

    def _forward_backward(self, number: int, asked: ForwardBackwardOptions, packed: CommandData) -> Doing:
        head, loss = self.plan.trainable.head, loss_function(asked.loss, asked.temperature)
        try:
            check_head(asked.loss, head)
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        if isinstance(asked.loss, Distillation):
            if self.slot.slot is None:
                raise InvalidInput("the base is what this session trains: there is none as it was", "loss.teacher")
            self.slot.dispatcher.teachers[self.slot.slot] = None
        scores = TargetScores(packed.batches, Outputs() if head is None else loss.outputs, head)
        self._is_touched = True
        sums = yield from self.slot.forward_backward(packed.batches, 0, loss, scores)
        found = packed.scores(self._of_all_ranks(scores.found))
        return CommandResult(number=number, kind=asked.kind, metrics=_metrics(sums), data=found)

    def _optim_step(self, number: int, asked: OptimStep) -> CommandResult:
        sums = self.slot.sums
        if not sums:
            return CommandResult(number=number, kind=asked.kind, metrics={"skipped": 1.0})
        denominator = sums["weight"] if asked.denominator is None else asked.denominator
        if not denominator > 0:
            message = f"the weights since the last step come to {denominator:g}: say what to divide gradients by"
            raise InvalidInput(message, "denominator")
        try:
            check_optimizer(asked.optimizer, self.plan.engine, self.plan.layout, self.plan.trainable)
        except ValueError as error:
            raise InvalidInput(str(error), "optimizer") from None
        self._is_touched = True
        metrics = self.slot.optim_step(number, asked.optimizer, asked.learning_rate, denominator)
        del metrics["memory_bytes"]  # of this worker: a repeated command gives the same result on any worker
        return CommandResult(number=number, kind=asked.kind, metrics=_metrics(sums) | metrics)

    def _load_state(self, number: int, asked: LoadStored) -> Doing:
        """Load a state in place of the session's own, and save it at once: so a new worker need not load it again."""
        slot = self.slot
        folder = yield from self.staging.fetch_one(slot.job, number, asked.checkpoint, slot.cancelled)
        self.slot.ranks.agree(lambda: check_fits(self.plan, slot.model_sha256, folder))
        try:
            self.slot.ranks.agree(lambda: self.slot.dispatcher.load_state(slot.slot, folder, asked.optimizer))
            slot.drop_gradients()
            slot.at = number
            self._save()
        except Exception as error:
            raise _SlotLost(self.slot.ranks.agree_on(error).fault) from None
        return CommandResult(number=number, kind=asked.kind, step=number)

    def _packed(self, asked: ForwardOptions | ForwardBackwardOptions, units: Units | None) -> CommandData:
        assert units is not None
        check_data(units, self.slot.dispatcher.facts.vocab_size, self.plan.max_tokens)
        score_all = isinstance(asked, ForwardOptions) and asked.score_all
        return pack_data(units, self.plan.max_tokens, asked.share_prefixes, score_all)

    def _of_all_ranks(self, found: dict[str, NDArray]) -> dict[str, NDArray]:
        """Combine the scores of all ranks exactly: the maximum of their bits as integers; missing scores are -1."""
        if self.slot.ranks.world_size == 1:
            return found
        merged = {}
        for name, values in found.items():
            if values.dtype == np.float32:
                bits = self._largest(np.where(np.isnan(values), -1, values.view(np.uint32).astype(np.int64)))
                merged[name] = np.where(bits < 0, _NAN_BITS, bits).astype(np.uint32).view(np.float32)
            else:
                merged[name] = self._largest(values)
        return merged

    def _largest(self, values: NDArray) -> NDArray:
        return np.array(self.slot.ranks.largest(values.ravel().tolist()), dtype=np.int64).reshape(values.shape)

    def _save(self) -> None:
        if self.slot.saved_at != self.slot.at:
            self.slot.save()
            self._unsaved_s = 0.0


class _SlotLost(JobFailed):
    """An error left the slot with a part of another state."""


def _metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return means over the weights, as of a job's step. The loss is also given as a sum, as weights may cancel out."""
    named = {name: value for name, value in reported(sums).items() if name != "loss"}
    return named | {"loss_sum": sums["loss"]} | ({"loss": sums["loss"] / sums["weight"]} if sums["weight"] else {})
