"""A session on the worker: a client trains a slot by commands, which arrive as files and are done one after another.

On each lease the commands are done in the order of their numbers. A checkpoint holds the state after the last command
that left no accumulated gradients. The next lease goes on from it, and repeats the commands after it.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_worker.dispatch import Dispatcher, TargetScores
from megatron_worker.engine import Outputs, Where
from megatron_worker.losses import loss_function
from megatron_worker.process.background import Awaited
from megatron_worker.process.event_log import Report
from megatron_worker.process.faults import CancelledEarly, Fault, JobFailed
from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.process.staging import Staging
from megatron_worker.runner import Outcome, Passes, make_deterministic
from megatron_worker.slot_room import SlotRoom
from megatron_worker.sums import MAX, reported
from megatron_worker.training.checkpoint import (
    check_fits,
    load_checkpoint,
    load_initial_checkpoint,
    save_checkpoint,
)
from megatron_worker.training.command_data import CommandData, pack_data, read_command
from megatron_worker.training.sending import sent_meanwhile
from megatron_worker.warm_engine import WarmEngine, make_trainable, slots_of, take_engine
from shared.errors import InvalidInput
from shared.jobs.commands import (
    Command,
    CommandProblem,
    CommandResult,
    Forward,
    ForwardBackward,
    Gap,
    LoadStored,
    OptimStep,
    SaveState,
    Skip,
    check_data,
)
from shared.jobs.events import Applied, Kept, Saved, Started, Step
from shared.jobs.job import Job, SessionPlan
from shared.storage.files import write_atomically

MOST_UNSAVED = 256
"""A checkpoint is saved after so many commands. A new lease repeats no more than these, except while gradients are
accumulated, when none can be saved."""
_DROPPED = "the gradients accumulated since the last optim_step are dropped"
_OFFLOAD = b"offload"
_NAN_BITS = 0x7FC00000
Doing = Generator[Awaited | None, None, CommandResult]


def run_session(
    job: Job,
    warm: WarmEngine,
    staging: Staging,
    report: Report,
    ranks: WorkerRanks,
    cancelled: Callable[[], bool],
    by_hand: bool = False,
) -> Passes:
    """Do a session's commands until it is cancelled, or with `by_hand` until there are no more; then save its state.

    A command's own error is its result. Another fault that all ranks agree on is an outcome; all else propagates.
    """
    plan = job.plan
    assert isinstance(plan, SessionPlan)
    try:
        session = yield from _open(job, plan, warm, staging, report, ranks, cancelled)
    except JobFailed as failed:
        return Outcome("failed", plan.first_step, failed.fault)
    except CancelledEarly:
        return Outcome("cancelled", plan.first_step)
    try:
        with suppress(CancelledEarly):
            yield from session.serve(by_hand)
        session.save()
    except JobFailed as failed:
        return Outcome("failed", session.clean, failed.fault)
    return Outcome("succeeded" if by_hand else "cancelled", session.clean)


def _open(
    job: Job,
    plan: SessionPlan,
    warm: WarmEngine,
    staging: Staging,
    report: Report,
    ranks: WorkerRanks,
    cancelled: Callable[[], bool],
) -> Generator[Awaited | None, None, "Session"]:
    """Stage the inputs, make the slot or load its last state, report `started`. Raises as `runner.prepare` does."""
    make_deterministic(plan)
    folders, model_sha256 = yield from staging.fetch(job, cancelled)
    dispatcher = take_engine(warm, plan, folders, None, ranks)
    slot, _ = slots_of(plan.run_id, plan.trainable)
    load = partial(dispatcher.load_state, slot)
    reserve = partial(warm.make_room, plan, folders, ranks)
    ranks.agree(lambda: make_trainable(dispatcher, job, folders))
    if job.needs_its_beginning and plan.initial_checkpoint is not None:
        before = folders[plan.initial_checkpoint]
        ranks.agree(lambda: load_initial_checkpoint(load, plan, model_sha256, before))
    clean = plan.first_step
    if job.start is not None:
        checkpoint = folders[job.start]
        clean += ranks.agree(lambda: load_checkpoint(load, plan, model_sha256, checkpoint))
    report.emit(
        Started,
        run_id=plan.run_id,
        job_id=plan.job_id,
        fence=job.fence,
        first_step=clean,
        num_steps=clean,
        device=dispatcher.facts.device_name,
        world_size=ranks.world_size,
    )
    return Session(
        job, plan, model_sha256, dispatcher, slot, warm.room, reserve, staging, report, ranks, cancelled, clean
    )


@dataclass
class Session:
    """The slot, and how far its commands have come.

    Attributes:
        reserve: has room made on the device for the slot, as it was before the slot was away.
        clean: the last command that left no gradients behind.
        last: the last command that was done.
        saved: the command of the newest checkpoint, -1 before the first.
        unsaved_s: seconds that commands since that checkpoint took.
        sums: the loss's sums since the last optimizer step, as the dispatcher reports them; empty without gradients.
    """

    job: Job
    plan: SessionPlan
    model_sha256: str
    dispatcher: Dispatcher
    slot: str | None
    room: SlotRoom
    reserve: Callable[[], None]
    staging: Staging
    report: Report
    ranks: WorkerRanks
    cancelled: Callable[[], bool]
    clean: int
    last: int = field(init=False)
    saved: int = field(init=False)
    unsaved_s: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    _step_s: float = 0.0
    _is_touched: bool = False
    _is_away: bool = False

    def __post_init__(self) -> None:
        self.last, self.saved = self.clean, -1 if self.job.start is None else self.clean

    def serve(self, by_hand: bool) -> Generator[Awaited | None, None, None]:
        """Do commands as they come. After some time without any, the slot is moved off the device."""
        idle_since = time.monotonic()
        while not self.cancelled():
            order = self.ranks.broadcast(self._order(idle_since) if self.ranks.rank == 0 else None)
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
        assert self.job.commands_dir is not None
        return Path(self.job.commands_dir) / f"{self.last + 1:08d}.{suffix}"

    def _place(self, where: Where) -> None:
        """Move the slot. While it is away, others may have its room; JobFailed is raised if it cannot come back."""
        if where == "device":
            self.reserve()
        else:
            self.room.on_device.discard(self.plan.run_id)
        self.dispatcher.engine.place(where, slots=[self.slot])
        self._is_away = where == "host"

    # Commands.

    def _do(self, number: int, data: bytes) -> Iterator[Awaited | None]:
        """Do a command and write its result. An error of it becomes its result, and the session goes on.

        Raises:
            JobFailed: the slot may have lost its state, so that the session must go on from a saved one.
            CancelledEarly: the session was cancelled before the command changed anything.
        """
        began, self._is_touched = time.perf_counter(), False
        asked: Command | None = None
        try:
            asked = read_command(data)
            result = yield from self._result(number, asked)
        except (_SlotLost, CancelledEarly):
            raise
        except Exception as error:
            fault = self.ranks.agree_on(error).fault
            result = CommandResult(number=number, kind=asked.kind if asked else "", problem=self._problem(fault))
        seconds = time.perf_counter() - began
        if self.ranks.rank == 0:
            write_atomically(self._path("result.json"), result.model_dump_json().encode(), is_durable=False)
        self.last = asked.through if isinstance(asked, Gap) else number
        if not self.sums:
            self.clean = self.last
        self.report.emit(Applied, command=number, kind=result.kind, failed=result.problem is not None)
        if not isinstance(asked, Skip | Gap | Forward):
            self.unsaved_s += seconds
        is_due = self.unsaved_s > self.plan.save_after_s or self.clean - self.saved > MOST_UNSAVED
        if self.ranks.largest([int(is_due)])[0]:
            self.save()

    def _problem(self, fault: Fault) -> CommandProblem:
        """Return an error as a command's problem. If the command may have changed the gradients, drop all of them."""
        message = fault.message
        if self._is_touched:
            self._drop_gradients()
            message = f"{message}; {_DROPPED}"
        match fault.kind:
            case "invalid_input" | "not_finite":
                return CommandProblem(kind=fault.kind, message=message)
            case _:
                return CommandProblem(kind="error", message=message)

    def _drop_gradients(self) -> None:
        self.dispatcher.zero_grad(self.slot)
        self.sums = {}

    def _result(self, number: int, asked: Command) -> Doing:
        match asked:
            case Skip() | Gap():
                if isinstance(asked, Skip) and asked.drops:
                    self._drop_gradients()
                return CommandResult(number=number, kind=asked.kind)
            case Forward():
                return (yield from self._forward(number, asked))
            case ForwardBackward():
                return (yield from self._forward_backward(number, asked))
            case OptimStep():
                return self._optim_step(number, asked)
            case SaveState():
                if not self.sums:
                    self.clean = number
                self.report.emit(Kept, step=self.clean)
                with self.dispatcher.resident(self.slot), self._sent():
                    self.save()
                return CommandResult(number=number, kind=asked.kind, step=self.clean)
            case LoadStored():
                return (yield from self._load_state(number, asked))

    def _forward(self, number: int, asked: Forward) -> Doing:
        if not asked.adapter and self.slot is None:
            raise InvalidInput("the base is what this session trains: there is none as it was", "adapter")
        packed = self._packed(asked)
        if asked.top_k > self.dispatcher.facts.vocab_size:
            raise InvalidInput(f"the vocabulary has {self.dispatcher.facts.vocab_size} tokens", "top_k")
        outputs = Outputs(True, asked.entropy, False, asked.temperature, asked.top_k)
        scores = TargetScores(packed.batches, outputs)
        slot = self.slot if asked.adapter else None
        yield from self.dispatcher.forward(slot, packed.batches, range(1), outputs, scores)
        return CommandResult(number=number, kind=asked.kind, data=packed.scores(self._of_all_ranks(scores)))

    def _forward_backward(self, number: int, asked: ForwardBackward) -> Doing:
        packed = self._packed(asked)
        scores, loss = TargetScores(packed.batches), loss_function(asked.loss, asked.temperature)
        began, self._is_touched = time.perf_counter(), True
        sums = yield from self.dispatcher.forward_backward(self.slot, packed.batches, 0, loss, scores)
        if not math.isfinite(sums["loss"]):
            raise _not_finite("the loss", sums["loss"])
        self._step_s += time.perf_counter() - began
        names = sums.keys() | self.sums.keys()
        self.sums = {name: _both(name, self.sums.get(name, 0.0), sums.get(name, 0.0)) for name in names}
        found = packed.scores(self._of_all_ranks(scores))
        return CommandResult(number=number, kind=asked.kind, metrics=_metrics(sums), data=found)

    def _optim_step(self, number: int, asked: OptimStep) -> CommandResult:
        if not self.sums:
            return CommandResult(number=number, kind=asked.kind, metrics={"skipped": 1.0})
        denominator = self.sums["weight"] if asked.denominator is None else asked.denominator
        if not denominator > 0:
            message = f"the weights since the last step come to {denominator:g}: say what to divide gradients by"
            raise InvalidInput(message, "denominator")
        began, self._is_touched = time.perf_counter(), True
        norms = self.dispatcher.optim_step(self.slot, asked.optimizer, asked.learning_rate, denominator)
        if not math.isfinite(norms.grad_norm):
            raise _not_finite("the gradient's norm", norms.grad_norm)
        step_s = self._step_s + time.perf_counter() - began
        metrics = {
            **_metrics(self.sums),
            "learning_rate": asked.learning_rate,
            "grad_norm": norms.grad_norm,
            "clipped": float(norms.clipped),
            "step_s": step_s,
            "tokens_per_s": self.sums["tokens"] / step_s,
        }
        self.sums, self._step_s = {}, 0.0
        self.report.emit(Step, step=number, metrics=metrics)
        return CommandResult(number=number, kind=asked.kind, metrics=metrics)

    def _load_state(self, number: int, asked: LoadStored) -> Doing:
        """Load a state in place of the session's own, and save it at once: so a new worker need not load it again."""
        folder = yield from self.staging.fetch_one(self.job, number, asked.checkpoint, self.cancelled)
        self.ranks.agree(lambda: check_fits(self.plan, self.model_sha256, folder))
        try:
            self.ranks.agree(lambda: self.dispatcher.load_state(self.slot, folder, asked.optimizer))
            self.dispatcher.zero_grad(self.slot)
            self.sums, self._step_s, self.clean = {}, 0.0, number
            self.save()
        except Exception as error:
            raise _SlotLost(self.ranks.agree_on(error).fault) from None
        return CommandResult(number=number, kind=asked.kind, step=number)

    def _packed(self, asked: Forward | ForwardBackward) -> CommandData:
        check_data(asked.data, self.dispatcher.facts.vocab_size, self.plan.max_tokens)
        score_all = isinstance(asked, Forward) and asked.score_all
        return pack_data(asked.data, self.plan.max_tokens, asked.share_prefixes, score_all)

    def _of_all_ranks(self, scores: TargetScores) -> dict[str, NDArray]:
        """Combine the scores of all ranks exactly: the maximum of their bits as integers; missing scores are -1."""
        if self.ranks.world_size == 1:
            return scores.found
        merged = {}
        for name, values in scores.found.items():
            if values.dtype == np.float32:
                bits = self._largest(np.where(np.isnan(values), -1, values.view(np.uint32).astype(np.int64)))
                merged[name] = np.where(bits < 0, _NAN_BITS, bits).astype(np.uint32).view(np.float32)
            else:
                merged[name] = self._largest(values)
        return merged

    def _largest(self, values: NDArray) -> NDArray:
        return np.array(self.ranks.largest(values.ravel().tolist()), dtype=np.int64).reshape(values.shape)

    def _sent(self) -> AbstractContextManager[None]:
        """Send the weights to the sampler that answers questions during a `with` block, if they are an adapter's."""
        send = partial(self.dispatcher.send_weights, self.slot, self.plan.run_id)
        return sent_meanwhile(send, self.job, self.clean, self.report, self.ranks)

    def save(self) -> None:
        """Save a checkpoint as of command `clean`, unless there is one. The weights have not changed since then."""
        if self.saved == self.clean:
            return
        save = partial(self.dispatcher.save_state, self.slot)
        written = save_checkpoint(save, self.ranks, self.job, self.model_sha256, self.clean)
        self.saved, self.unsaved_s = self.clean, 0.0
        self.report.emit(Saved, step=self.clean, path=str(written.path), manifest_sha256=written.sha256)


class _SlotLost(JobFailed):
    """An error left the slot with a part of another state."""


def _metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return means over the weights, as of a job's step. The loss is also given as a sum, as weights may cancel out."""
    named = {name: value for name, value in reported(sums).items() if name != "loss"}
    return named | {"loss_sum": sums["loss"]} | ({"loss": sums["loss"] / sums["weight"]} if sums["weight"] else {})


def _both(name: str, one: float, other: float) -> float:
    return max(one, other) if name.endswith(MAX) else one + other


def _not_finite(what: str, value: float) -> JobFailed:
    return JobFailed(Fault(kind="not_finite", message=f"{what} is {value}; no weight has changed"))
