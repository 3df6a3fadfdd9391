"""The engine between jobs: kept warm, and used again when the next job wants the same one."""

import atexit
import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_worker.dispatch import Dispatcher, Slot
from megatron_worker.engine import Engine
from megatron_worker.training.checkpoint import Written
from shared.contract import Artifact
from shared.jobs.job import Full, Job, JobPlan, Lora, WorkerPlan, reference_of
from shared.jobs.leases import WorkerKey

BuildEngine = Callable[[WorkerPlan, Path], Engine]
_MAX_KEPT = 8  # runs between two jobs; of a run that is forgotten the next job reads its checkpoint


def build_engine(plan: WorkerPlan, model: Path) -> Engine:
    """The engine that a plan names, around a staged model folder. Imports it only now: each is slow to load."""
    match plan.engine:
        case "megatron":
            from megatron_worker.megatron.engine import MegatronEngine

            # The modules' objects stay, so the collection at each job's end need not look at them: 0.2 s.
            gc.freeze()
            atexit.register(gc.unfreeze)
            return MegatronEngine(model, plan.layout, plan.dtype)
        case "fsdp":
            from megatron_worker.fsdp.engine import FsdpEngine

            return FsdpEngine(model, plan.layout, plan.dtype)


@dataclass(frozen=True)
class Kept:
    """What a job left in the engine for the next one of its run: all that its last checkpoint holds.

    `reference`: the adapter in the slot of the loss's reference, if the loss has one.
    """

    trainable: Lora | Full
    checkpoint: Written
    reference: Artifact | None

    def is_beginning_of(self, job: Job) -> bool:
        """Whether the job begins with this very state, so that nothing of it has to be read."""
        if not isinstance(job.plan, JobPlan):
            return False
        begins_with, reference = job.plan.initial_checkpoint, reference_of(job.plan.loss)
        return (
            begins_with is not None
            and begins_with.sha256 == self.checkpoint.sha256
            and job.start is None
            and job.plan.trainable == self.trainable
            and self.reference in (None, reference)
            # The reference is the base as it was published, or beside that: a base that was trained is neither.
            and (isinstance(self.trainable, Lora) or reference is None)
        )


class WarmEngine:
    """At most one engine, with the slots of jobs in hand and of runs whose next job is expected.

    Attributes:
        on_device: its weights hold the accelerator's memory now.
        in_hand: the runs whose job has taken it and not given it back.
    """

    def __init__(self, build: BuildEngine) -> None:
        self._build = build
        self._key: WorkerKey | None = None
        self._kept: dict[str, Kept] = {}
        self.dispatcher: Dispatcher | None = None
        self.on_device = False
        self.in_hand: set[str] = set()

    def kept_for(self, job: Job) -> Kept | None:
        """Return what the run's last job left, if this job begins with it."""
        kept = self._kept.get(job.plan.run_id) if self._key == WorkerKey.of(job.plan) else None
        return kept if kept is not None and kept.is_beginning_of(job) else None

    def take(self, plan: WorkerPlan, model: Path, kept: Kept | None) -> Dispatcher:
        """The engine for a plan, its weights on the device: the one at hand if it is the same, else a new one.

        Args:
            kept: what the plan begins with. Anything else that was kept for its run goes.
        """
        key = WorkerKey.of(plan)
        if self.dispatcher is None or self._key != key:
            assert not self.in_hand, "an engine that others use is not replaced"
            self.discard()
            self.dispatcher = Dispatcher(self._build(plan, model))
            self._key = key
        elif kept is None:
            self._forget([plan.run_id] if isinstance(plan.trainable, Lora) else list(self._kept))
        if isinstance(plan.trainable, Lora):
            self._forget([run_id for run_id, other in self._kept.items() if isinstance(other.trainable, Full)])
        self._kept.pop(plan.run_id, None)
        self.dispatcher.engine.place(weights="device", slots=[None])
        self.on_device = True
        self.in_hand.add(plan.run_id)
        return self.dispatcher

    def refuse(self, plan: WorkerPlan) -> None:
        """Some rank could not take it: an engine that some have and others lack is of no use to the next job."""
        self.in_hand.discard(plan.run_id)
        if not self.in_hand:
            self.discard()

    def give_back(self, plan: WorkerPlan, kept: Kept | None) -> None:
        """The job is done with it: its slots go, unless they are kept for the run's next one."""
        assert self.dispatcher is not None
        self.in_hand.remove(plan.run_id)
        if kept is None:
            self._drop(plan.run_id, plan.trainable)
        else:
            self._kept[plan.run_id] = kept
            self._forget(list(self._kept)[:-_MAX_KEPT])

    def offload(self, plan: WorkerPlan) -> None:
        """Take the run's slots off the device, and the base when no other job is in hand."""
        if self.dispatcher is None or not self.on_device:
            return
        slots = None if not self.in_hand else slots_of(plan.run_id, plan.trainable)
        self.dispatcher.engine.place(gradients="dropped", slots=slots)  # zero, between a job's last step and the next
        self.dispatcher.engine.place("host", slots=slots)
        self.on_device = bool(self.in_hand)

    def discard(self) -> None:
        if self.dispatcher is not None:
            self.dispatcher = None
            collect_garbage()
        self._key, self.on_device = None, False
        self._kept.clear()

    def _forget(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            if (kept := self._kept.pop(run_id, None)) is not None:
                self._drop(run_id, kept.trainable)

    def _drop(self, run_id: str, trainable: Lora | Full) -> None:
        assert self.dispatcher is not None
        for slot in slots_of(run_id, trainable):
            self.dispatcher.drop_slot(slot)


def fits_beside(plan: WorkerPlan, others: Collection[WorkerPlan]) -> bool:
    """Whether a job may begin: alone, or with an adapter of its own beside other runs' on an equal engine."""
    are_alike = all(isinstance(each.trainable, Lora) and WorkerKey.of(each) == WorkerKey.of(plan) for each in others)
    is_another = plan.run_id not in {other.run_id for other in others}
    return not others or (isinstance(plan.trainable, Lora) and are_alike and is_another)


def slots_of(run_id: str, trainable: Lora | Full) -> tuple[Slot, str]:
    """The slots of a run: of what it trains, and of the adapter that its loss's reference may be."""
    return run_id if isinstance(trainable, Lora) else None, f"{run_id}/reference"


def collect_garbage() -> None:
    """Free what nothing refers to, cycles too, and give the accelerator's cached memory back."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
