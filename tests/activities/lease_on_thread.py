"""A lease held in a thread, as a host's poller would hold it, for the tests of leases and jobs."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.hosts.lease import Lease, LeaseRequest, ProcessLease
from activities.hosts.workers import WorkerCommand, WorkerPool, processes_of
from activities.sampling.samplers import LeaseSampler, SamplerLeaseRequest
from longshore.fields import Frozen
from longshore.training import SyncBackend
from shared.jobs.job import JobPlan, LeaseGrant, SamplerKey, WorkerKey
from shared.settings import Settings
from shared.storage.host_states import HostAddress
from shared.storage.paths import HostPaths
from shared.storage.store import LocalStore, ObjectStore
from tests.waiting import wait_until
from tests.workflows.stand_in import REPOSITORY, Notebook, StandInCommand


class Host:
    """A host's folders, store and pool, without Temporal."""

    def __init__(
        self,
        root: Path,
        step_s: float = 0.01,
        idle_s: float = 30.0,
        command: WorkerCommand | None = None,
        warm_bytes: int = 0,
    ) -> None:
        self.paths = self.paths_below(root)
        self.store: ObjectStore = LocalStore(root / "store")
        command = command or StandInCommand(step_s)
        environment = {"PYTHONPATH": str(REPOSITORY)}
        self.pool = WorkerPool(self.paths, command, environment, idle_s, warm_bytes=warm_bytes)

    @staticmethod
    def paths_below(root: Path) -> HostPaths:
        return HostPaths(root / "host")

    def worker_ids(self) -> list[str]:
        """Of workers with a folder."""
        return [folder.name for folder in self.paths.workers.glob("*")]

    def num_processes(self, worker_id: str) -> int:
        return len(processes_of(worker_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.pool.close()


class Held:
    """A lease's activity in a thread; `grant` once it is given, `error` once it failed."""

    patience_s = 150.0

    def __init__(self, notebook: Notebook, signal: str, lease: Callable[[Any], None], request: Frozen) -> None:
        self.environment = ActivityEnvironment()
        self.error: BaseException | None = None
        self.notebook = notebook
        self.signal = signal

        def hold() -> None:
            try:
                self.environment.run(lease, request)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=hold, daemon=True)
        self.thread.start()

    @property
    def grant(self) -> LeaseGrant:
        grants = wait_until(
            lambda: self.notebook.of(self.signal) or (["failed"] if self.error else None),
            "a grant",
            timeout_s=self.patience_s,
        )
        assert isinstance(grants[0], LeaseGrant), self.error
        return grants[0]

    def release(self) -> None:
        self.environment.cancel()
        self.ended()

    def ended(self) -> BaseException | None:
        """Wait for the end; what it ended with."""
        self.thread.join(300)
        assert not self.thread.is_alive()
        return self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.release()


class HeldLease(Held):
    """A worker's."""

    def __init__(
        self,
        host: Host,
        plan: JobPlan,
        epoch: int,
        ready_timeout_s: float = 30.0,
        sync_backend: SyncBackend = "auto",
        joins: bool = False,
    ) -> None:
        notebook = Notebook()
        lease = Lease(ProcessLease(host.pool, notebook, "host-queue", "leased"), host.store)
        key = WorkerKey.of(plan)
        request = LeaseRequest(
            run_id=plan.run_id,
            epoch=epoch,
            key=key,
            ready_timeout_s=ready_timeout_s,
            sync_backend=sync_backend,
            join_queue="others" if joins else None,
        )
        super().__init__(notebook, "leased", lease.join_lease if joins else lease.lease, request)


class HeldSampler(Held):
    """A sampler's."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        key: SamplerKey,
        epoch: int,
        patience_s: float = 150.0,
        sync_backend: SyncBackend = "auto",
    ) -> None:
        self.patience_s = patience_s
        notebook = Notebook()
        process = ProcessLease(host.pool, notebook, "host-queue", "sampler_leased")
        lease = LeaseSampler(process, HostContext(settings), HostAddress(socket="unasked"))
        request = SamplerLeaseRequest(
            run_id="r1", epoch=epoch, key=key, ready_timeout_s=patience_s, sync_backend=sync_backend
        )
        super().__init__(notebook, "sampler_leased", lease.lease_sampler, request)
