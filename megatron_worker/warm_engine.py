"""The engine between jobs: kept warm, and used again when the next job wants the same one."""

import atexit
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_worker.engine import Engine
from shared.jobs.job import JobPlan
from shared.jobs.leases import WorkerKey

BuildEngine = Callable[[JobPlan, Path], Engine]


def build_engine(plan: JobPlan, model: Path) -> Engine:
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


class WarmEngine:
    """At most one engine.

    Attributes:
        on_device: its weights hold the accelerator's memory now.
        in_use: a job has taken it and not put it back.
    """

    def __init__(self, build: BuildEngine) -> None:
        self._build = build
        self._key: WorkerKey | None = None
        self.engine: Engine | None = None
        self.on_device = False
        self.in_use = False

    def take(self, plan: JobPlan, model: Path) -> Engine:
        """The engine for a plan, on the device: the one at hand if it is the same, else a new one."""
        key = WorkerKey.of(plan)
        if self.engine is not None and self._key == key:
            if not self.on_device:
                self.engine.reload()
        else:
            self.discard()
            self.engine = self._build(plan, model)
        self._key, self.on_device, self.in_use = key, True, True
        return self.engine

    def offload(self) -> None:
        if self.engine is not None and self.on_device:
            self.engine.offload()
        self.on_device = False

    def put_back(self) -> None:
        """The job is done with it."""
        self.in_use = False

    def discard(self) -> None:
        if self.engine is not None:
            self.engine = None
            collect_garbage()
        self._key, self.on_device, self.in_use = None, False, False


def collect_garbage() -> None:
    """Free what nothing refers to, cycles too, and give the accelerator's cached memory back."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
