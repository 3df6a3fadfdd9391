"""Keeps the engine between jobs, to use it again if the next job needs an equal one."""

import gc
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from longshore.fields import Artifact
from longshore.losses import adapters_of, has_several_teachers, reference_of
from longshore.training import Dtype, EngineName, Full, Layout, Lora, OptimizerStates, Quantization
from megatron_worker.critic import CriticSlot, Scale
from megatron_worker.dispatch import Dispatcher, SlotName
from megatron_worker.memory import PASSES_SHARE, SlotNeed, SlotRoom
from megatron_worker.process.ranks import Fault, Folders, JobFailed, WorkerRanks, fault_of
from megatron_worker.process.startup import slow_imports
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.training.checkpoint import Written
from shared.errors import InvalidInput
from shared.jobs.job import Job, WorkerKey, WorkerPlan

BuildEngine = Callable[[WorkerPlan, Path], Engine]
_MAX_KEPT = 8  # runs whose state is kept between two jobs; other runs read their checkpoint


def build_engine(plan: WorkerPlan, model: Path) -> Engine:
    """Build the engine that a plan names, for a staged model folder."""
    return new_engine(plan.engine, model, plan.layout, plan.dtype, plan.quantize_base, plan.optimizer_states)


def new_engine(
    engine: EngineName,
    model: Path,
    layout: Layout,
    dtype: Dtype,
    quantize: Quantization | None = None,
    states: OptimizerStates = "float32",
) -> Engine:
    """Build an engine. Its module is imported here, as that is slow. The last two are megatron's alone."""
    match engine:
        case "megatron":
            with slow_imports():
                from megatron_worker.megatron.engine import MegatronEngine
            return MegatronEngine(model, layout, dtype, quantize=quantize, optimizer_states=states)
        case "fsdp":
            assert quantize is None and states == "float32", "plans refuse them"
            with slow_imports():
                from megatron_worker.fsdp.engine import FsdpEngine
            return FsdpEngine(model, layout, dtype)


@dataclass(frozen=True)
class WarmState:
    """The state that a job left in the engine for the next one of its run: that of its last checkpoint.

    `reference`: the adapter in the slot of the loss's reference, if the loss has one. `critic`: the critic's
    `trainable` and the unit of its values, if there is one.
    """

    trainable: Lora | Full
    checkpoint: Written
    reference: Artifact | None
    critic: tuple[Lora, Scale] | None = None

    def is_beginning_of(self, job: Job) -> bool:
        """True if the job starts from this state, so that it need not be read."""
        begins_with, reference = job.plan.initial_checkpoint, reference_of(job.plan.step_loss)
        return (
            begins_with is not None
            and begins_with.sha256 == self.checkpoint.sha256
            and job.start is None
            and not job.plan.takes_commands
            and job.plan.trainable == self.trainable
            and self.reference in (None, reference)
            and (self.critic and self.critic[0]) == (job.plan.step_critic and job.plan.step_critic.trainable)
            and not has_several_teachers(job.plan.step_loss)  # each is loaded in its turn
            # A reference needs the published base, and not one that was trained.
            and (isinstance(self.trainable, Lora) or reference is None)
        )


class WarmEngine:
    """Holds at most one engine, with the slots of jobs in progress and of runs whose next job is expected.

    Args:
        slot_bytes: bytes for slots on each rank's device; None: on CUDA what base and passes leave, else no limit.

    Attributes:
        on_device: the engine's weights are in the accelerator's memory.
        in_hand: the runs whose job has taken the engine and not given it back.
        room: bytes of the slots, and whose are on the device.
    """

    def __init__(self, build: BuildEngine, slot_bytes: int | None = None) -> None:
        self._build = build
        self._slot_bytes = slot_bytes
        self._key: WorkerKey | None = None
        self._kept: dict[str, WarmState] = {}
        self.dispatcher: Dispatcher | None = None
        self.on_device = False
        self.in_hand: set[str] = set()
        self.room = SlotRoom()

    def kept_for(self, job: Job) -> WarmState | None:
        """Return the state that the run's last job left in the engine, if this job begins with it."""
        kept = self._kept.get(job.plan.run_id) if self._key == WorkerKey.of(job.plan) else None
        return kept if kept is not None and kept.is_beginning_of(job) else None

    def take(self, plan: WorkerPlan, model: Path, kept: WarmState | None) -> Dispatcher:
        """Return the engine for a plan, with its weights on the device; build a new one if the plan needs another.

        `kept`: the state that the plan starts from. Any other state that was kept for its run is dropped.
        """
        key = WorkerKey.of(plan)
        if self.dispatcher is None or self._key != key:
            assert not self.in_hand, "an engine that others use is not replaced"
            self.discard()
            self.dispatcher = Dispatcher(self._build(plan, model))
            self._key = key
            limit, engine, device = self._slot_bytes, self.dispatcher.engine, self.dispatcher.facts.device
            if limit is None and device.type == "cuda":
                total = torch.cuda.get_device_properties(device).total_memory
                limit = max(0, total - total // PASSES_SHARE - engine.memory().parts["weights"].device)
            self.room = SlotRoom(limit)
        elif kept is None:
            self._forget([plan.run_id] if isinstance(plan.trainable, Lora) else list(self._kept))
        if isinstance(plan.trainable, Lora):
            self._forget([run_id for run_id, other in self._kept.items() if isinstance(other.trainable, Full)])
        self._kept.pop(plan.run_id, None)
        self.dispatcher.engine.place(weights="device", slots=[None])
        self.on_device = True
        self.in_hand.add(plan.run_id)
        return self.dispatcher

    def make_room(self, plan: WorkerPlan, folders: Folders, ranks: WorkerRanks) -> None:
        """Reserve the device's memory for a run's slots, before they are made or brought back. Collective.

        WarmState slots that no job uses are offloaded for that, those first that were used least recently.

        Raises JobFailed: they do not fit, alone (`invalid_input`) or with those in use (`crowded`).
        """
        assert self.dispatcher is not None
        room = self.room
        if room.limit is None:
            return
        limit = room.limit = -ranks.largest([-room.limit])[0]  # of the rank that has least
        need = room.needs.get(plan.run_id) or self._need(plan, folders, ranks)
        if need.total > limit:
            message = f"trainable: {need}, and there are {limit:,} for slots: none of its kind fits"
            raise JobFailed(Fault(kind="invalid_input", message=message))
        unused = [run_id for run_id in self._kept if run_id in room.on_device]
        while need.total > limit - (others := room.total(room.on_device - {plan.run_id})):
            if not unused:
                fitting = f"{limit // need.total} of its kind fit at once"
                message = f"{need}; of {limit:,} for slots other runs have {others:,}: {fitting}"
                raise JobFailed(Fault(kind="crowded", message=message))
            run_id = unused.pop(0)
            self._move_away([run_id], slots_of(run_id, self._kept[run_id].trainable))
        room.needs[plan.run_id] = need
        room.on_device.add(plan.run_id)

    def _need(self, plan: WorkerPlan, folders: Folders, ranks: WorkerRanks) -> SlotNeed:
        """Return the bytes of a plan's slots on the rank with the most, by part."""
        dispatcher = self.dispatcher
        assert dispatcher is not None
        frozen: list[Path | None] = [folders[adapter] for adapter in adapters_of(plan.step_loss)]
        frozen = frozen or [None]  # of several one at a time
        each = ranks.agree(lambda: [dispatcher.slot_bytes(plan.trainable, folder) for folder in frozen])
        weights, *others = map(max, *each, each[0])
        if (critic := plan.step_critic) is not None:  # gradients and moments of only one slot are on the device
            more, *beside = ranks.agree(lambda: dispatcher.slot_bytes(critic.trainable, None))
            weights, others = weights + more, [max(pair) for pair in zip(others, beside, strict=True)]
        return SlotNeed(plan.trainable, *ranks.largest([weights, *others]))

    def refuse(self, plan: WorkerPlan) -> None:
        """Give up taking an engine, because some rank could not: drop it on all, unless other jobs use it."""
        self.in_hand.discard(plan.run_id)
        if not self.in_hand:
            self.discard()

    def give_back(self, plan: WorkerPlan, kept: WarmState | None) -> None:
        """Give the engine back after a job. Its slots are dropped, unless `kept` says to keep them for the next job.

        All that are kept, wherever they are, have as many bytes as there are for slots: the oldest are dropped.
        """
        assert self.dispatcher is not None
        self.in_hand.remove(plan.run_id)
        if kept is None:
            self._drop(plan.run_id, plan.trainable)
        else:
            self._kept[plan.run_id] = kept
            self._forget(list(self._kept)[:-_MAX_KEPT])
            while self.room.limit is not None and self.room.total(self._kept) > self.room.limit:
                self._forget([next(iter(self._kept))])

    def offload(self, plan: WorkerPlan) -> None:
        """Take the run's slots off the device, and the base when no other job is in hand."""
        if self.dispatcher is None or not self.on_device:
            return
        if self.in_hand:
            self._move_away([plan.run_id], slots_of(plan.run_id, plan.trainable))
        else:
            self.offload_all()

    def offload_all(self) -> None:
        """Take everything off the device, while no job is in hand."""
        assert not self.in_hand
        self._move_away(list(self.room.on_device), None)
        self.on_device = False

    def _move_away(self, run_ids: Iterable[str], slots: Collection[SlotName] | None) -> None:
        """Take slots of runs without a job off the device; None: all slots, and the base."""
        assert self.dispatcher is not None
        self.dispatcher.engine.place(gradients="dropped", slots=slots)  # they are zero between jobs
        self.dispatcher.engine.place("host", slots=slots)
        self.room.on_device.difference_update(run_ids)

    def discard(self) -> None:
        if self.dispatcher is not None:
            self.dispatcher = None
            collect_garbage()
        self._key, self.on_device, self.room = None, False, SlotRoom()
        self._kept.clear()

    def _forget(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            if (kept := self._kept.pop(run_id, None)) is not None:
                self._drop(run_id, kept.trainable)

    def _drop(self, run_id: str, trainable: Lora | Full) -> None:
        assert self.dispatcher is not None
        self.room.needs.pop(run_id, None)
        self.room.on_device.discard(run_id)
        for slot in slots_of(run_id, trainable):
            self.dispatcher.drop_slot(slot)


def take_engine(
    warm: WarmEngine, plan: WorkerPlan, folders: Folders, kept: WarmState | None, ranks: WorkerRanks
) -> Dispatcher:
    """Return the engine for a plan, with room for its slots.

    Raises JobFailed: some rank cannot build it, the number of ranks is wrong, or the slots do not fit.
    """
    if plan.layout.world_size != ranks.world_size:
        place, message = "layout", f"it has {plan.layout.world_size} ranks, this worker {ranks.world_size}"
        raise JobFailed(fault_of(InvalidInput(message, place)))
    try:
        dispatcher = ranks.agree(lambda: warm.take(plan, folders[plan.model], kept))
    except JobFailed:
        warm.refuse(plan)
        raise
    warm.make_room(plan, folders, ranks)
    return dispatcher


def make_trainable(dispatcher: Dispatcher, job: Job, folders: Folders) -> None:
    """Make the weights to train, fresh or from an adapter. A checkpoint to resume from is loaded into them later."""
    plan = job.plan
    begins_here = job.needs_its_beginning and plan.initial_checkpoint is None
    starts_from = plan.initial_adapter if begins_here or isinstance(plan.trainable, Full) else None
    adapter = None if starts_from is None else folders[starts_from]
    slot = slots_of(plan.run_id, plan.trainable).trained
    if (critic := critic_of(dispatcher, plan)) is not None:
        critic.make(plan.seed)
    dispatcher.create_slot(slot, plan.trainable, plan.seed, adapter)
    dispatcher.set_recompute(slot, plan.recompute == "on")
    # Setting up may have drawn random numbers: the steps begin at the seed again.
    torch.manual_seed(plan.seed)


def fits_beside(plan: WorkerPlan, others: Collection[WorkerPlan]) -> bool:
    """True if a job may begin: there are no others, or all train adapters of different runs on equal engines."""
    are_alike = all(isinstance(each.trainable, Lora) and WorkerKey.of(each) == WorkerKey.of(plan) for each in others)
    is_another = plan.run_id not in {other.run_id for other in others}
    return not others or (isinstance(plan.trainable, Lora) and are_alike and is_another)


class RunSlots(NamedTuple):
    """The slots of a run: the one that it trains; those of its reference and of its critic, if it has them."""

    trained: SlotName
    reference: str
    critic: str


def slots_of(run_id: str, trainable: Lora | Full) -> RunSlots:
    return RunSlots(run_id if isinstance(trainable, Lora) else None, f"{run_id}/reference", f"{run_id}/critic")


def critic_of(dispatcher: Dispatcher, plan: WorkerPlan, scale: Scale | None = None) -> CriticSlot | None:
    """Return the critic of a plan, if it has one; its slot may be yet to be made."""
    slots = slots_of(plan.run_id, plan.trainable)
    if plan.step_critic is None or slots.trained is None:
        return None
    return CriticSlot(plan.step_critic, slots.critic, slots.trained, dispatcher, scale or Scale())


def collect_garbage() -> None:
    """Free unreachable objects, also in cycles, and the accelerator's cached memory."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
