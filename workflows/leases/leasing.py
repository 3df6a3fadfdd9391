"""A run's lease of one kind of process: taken when it is needed, kept until it is given back or lost."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.sampling.lease_sampler import LeaseSampler, SamplerLeaseRequest
    from shared.jobs.leases import LeaseGrant, SamplerKey
    from shared.runs.start import RunTiming
    from workflows import policies
    from workflows.outcomes import RunFailed, is_final, problem_of, was_cancelled


Request = TypeVar("Request")


class Lost(Exception):
    """A lease ended without its process, or lost it; another lease may do better."""


@dataclass
class Leasing:
    """A workflow's leases of processes from one queue, one at a time. Grants of an earlier epoch change nothing."""

    queue: str
    timing: RunTiming
    epoch: int = 0
    grant: LeaseGrant | None = None
    _granted_at: float = 0.0
    _held_before_s: float = 0.0
    _lease: workflow.ActivityHandle[None] | None = None

    @property
    def is_warm(self) -> bool:
        """True while a process is leased and up."""
        return self.grant is not None and self._lease is not None and not self._lease.done()

    @property
    def held_s(self) -> float:
        """Seconds that a process was leased and up, over all leases so far."""
        return self._held_before_s + (workflow.time() - self._granted_at if self.grant is not None else 0.0)

    def granted(self, grant: LeaseGrant) -> None:
        """Take a host's signal that the process is up."""
        if grant.fence.epoch == self.epoch and self._lease is not None:
            self._held_before_s, self._granted_at = self.held_s, workflow.time()
            self.grant = grant

    def take(self, activity: Callable[[Any, Request], None], request: Request, epoch: int) -> None:
        """Ask for a process, by the lease activity of its kind. A process that was held before is given back."""
        self.release()
        self.epoch = epoch
        self._lease = workflow.start_activity_method(
            activity,
            request,
            task_queue=self.queue,
            start_to_close_timeout=policies.LEASE_TIMEOUT,
            heartbeat_timeout=policies.heartbeat_timeout(self.timing),
            retry_policy=policies.ONCE,
        )

    def take_sampler(self, run_id: str, key: SamplerKey) -> None:
        """Ask for a sampler, with the next epoch. The one that was held before is given back."""
        epoch, patience_s = self.epoch + 1, policies.WORKER_READY_TIMEOUT_S
        request = SamplerLeaseRequest(run_id=run_id, epoch=epoch, key=key, ready_timeout_s=patience_s)
        self.take(LeaseSampler.lease_sampler, request, epoch)

    async def wait(self) -> LeaseGrant:
        """Wait for the grant.

        Raises:
            ActivityError, Lost: the lease ended first.
        """
        lease = self._lease
        assert lease is not None
        await workflow.wait_condition(lambda: self.grant is not None or lease.done())
        if self.grant is None:
            await lease
            raise Lost("the lease ended before its process was up")
        return self.grant

    def release(self) -> None:
        """Give the process back, if there is one. Its host is told with its next heartbeat; nothing waits for that."""
        if (lease := self._lease) is not None:
            lease.add_done_callback(_take_note)
            if not lease.done():
                lease.cancel()
        self._held_before_s = self.held_s
        self.grant = self._lease = None


def _take_note(lease: "asyncio.Task[None]") -> None:
    """Retrieve the lease's exception, or asyncio warns that nobody did."""
    if not lease.cancelled():
        lease.exception()


def lost(error: ActivityError) -> Lost:
    """Turn an activity's error into the loss of its lease, where another lease may do better.

    Raises:
        ActivityError: it was cancelled.
        RunFailed: doing it again would only fail again.
    """
    if was_cancelled(error):
        raise error
    if is_final(error):
        raise RunFailed(problem_of(error)) from error
    return Lost(problem_of(error).message)
