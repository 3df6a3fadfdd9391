"""A run's lease of one kind of process: taken when it is needed, kept until it is given back or lost."""

import asyncio
from dataclasses import dataclass

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from shared.contract import Frozen
    from shared.jobs.leases import LeaseGrant
    from shared.runs.start import RunTiming
    from workflows import policies
    from workflows.outcomes import RunFailed, is_final, problem_of, was_cancelled


class Lost(Exception):
    """This lease came to nothing; another may do better."""


@dataclass
class Leasing:
    """What a workflow knows of its leases of one queue, one at a time. Grants of an earlier epoch change nothing."""

    activity: str
    queue: str
    timing: RunTiming
    epoch: int = 0
    grant: LeaseGrant | None = None
    _granted_at: float = 0.0
    _held_before_s: float = 0.0
    _lease: workflow.ActivityHandle[None] | None = None

    @property
    def is_warm(self) -> bool:
        """Whether a process stands by."""
        return self.grant is not None and self._lease is not None and not self._lease.done()

    @property
    def held_s(self) -> float:
        """Seconds that a process stood by, over all leases so far."""
        return self._held_before_s + (workflow.time() - self._granted_at if self.grant is not None else 0.0)

    def granted(self, grant: LeaseGrant) -> None:
        """A host has the process up."""
        if grant.fence.epoch == self.epoch and self._lease is not None:
            self._held_before_s, self._granted_at = self.held_s, workflow.time()
            self.grant = grant

    def take(self, request: Frozen, epoch: int) -> None:
        """Ask for a process. What was held before is given back."""
        self.release()
        self.epoch = epoch
        self._lease = workflow.start_activity(
            self.activity,
            request,
            task_queue=self.queue,
            start_to_close_timeout=policies.LEASE_TIMEOUT,
            heartbeat_timeout=policies.heartbeat_timeout(self.timing),
            retry_policy=policies.ONCE,
        )

    async def wait(self) -> LeaseGrant:
        """The grant, when it is there.

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
        """Give the process back, if there is one. Its host hears of it with its next beat; nothing waits for that."""
        if self._lease is not None:
            _release(self._lease)
        self._held_before_s = self.held_s
        self.grant = self._lease = None


def _release(lease: workflow.ActivityHandle[None]) -> None:
    lease.add_done_callback(_take_note)
    if not lease.done():
        lease.cancel()


def _take_note(lease: "asyncio.Task[None]") -> None:
    """Or asyncio complains that nobody asked how it ended."""
    if not lease.cancelled():
        lease.exception()


def lost(error: ActivityError) -> Lost:
    """What an activity's error means to its lease, where another lease may do better.

    Raises:
        ActivityError: it was cancelled.
        RunFailed: doing it again would only fail again.
    """
    if was_cancelled(error):
        raise error
    if is_final(error):
        raise RunFailed(problem_of(error)) from error
    return Lost(problem_of(error).message)
