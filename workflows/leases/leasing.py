"""A run's lease of one kind of process: taken when it is needed, kept until it is given back or lost."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.lease import Lease, LeaseRequest
    from activities.sampling.lease_sampler import LeaseSampler, SamplerLeaseRequest
    from shared.errors import WorkerLost
    from shared.jobs.leases import GangLeader, LeaseGrant, SamplerKey
    from shared.jobs.weight_sync import SyncBackend
    from shared.runs.start import RunTiming
    from workflows import policies
    from workflows.leases.gang_turns import Turns
    from workflows.outcomes import RunFailed, is_final, problem_of_error, was_cancelled


RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class Lost(Exception):
    """A lease ended before its process was up, or the process was lost. A new lease may succeed.

    `kind`: the type of the error that ended it, such as `WorkerLost` (shared/errors.py), or the kind of its job's
    failure, if there was one. `host`: the queue of the host, if the error names it.
    """

    def __init__(self, message: str, kind: str | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.host = host


@dataclass
class Leasing:
    """A workflow's leases of processes from one queue, one at a time. Grants of earlier epochs are ignored.

    A worker of several machines needs a lease from each of their hosts, one activity each: all or none.

    `avoid`: queues of hosts on which a process of this workflow was lost while it started. `turns`: the lock for
    leasing workers of several machines.
    """

    queue: str
    timing: RunTiming
    epoch: int = 0
    grant: LeaseGrant | None = None
    avoid: tuple[str, ...] = ()
    turns: Turns | None = None
    _gang: LeaseRequest | None = None
    _leader: GangLeader | None = None
    _granted_at: float = 0.0
    _held_before_s: float = 0.0
    _shared_s: float | None = None
    _asked: "tuple[workflow.ActivityHandle[None], ...]" = ()

    @property
    def is_warm(self) -> bool:
        """True while a process is leased and up."""
        return self.grant is not None and not any(lease.done() for lease in self._asked)

    @property
    def is_pending(self) -> bool:
        """True while a process is asked for that is not up yet."""
        return bool(self._asked) and self.grant is None and _ended(self._asked) is None

    @property
    def has_failed(self) -> bool:
        """True if the lease that was asked for last ended before its process was up."""
        return bool(self._asked) and self.grant is None and _ended(self._asked) is not None

    @property
    def failure(self) -> Lost | None:
        """Why the lease ended, if it did so by itself."""
        ended = _ended(self._asked) if self.grant is not None else None
        error = None if ended is None or ended.cancelled() else ended.exception()
        return None if error is None else _loss(error)

    @property
    def held_s(self) -> float:
        """Seconds that a process was leased and up, over all leases so far; of a shared one, only this run's share."""
        if self.grant is None:
            return self._held_before_s
        had_s = workflow.time() - self._granted_at if self._shared_s is None else self._shared_s
        return self._held_before_s + had_s

    def lost_at_start(self, loss: Lost, granted: LeaseGrant | None = None) -> None:
        """Avoid the host of a process that was lost before it did any work. `granted`: its grant, if it was up."""
        host = loss.host or (granted.host_queue if granted is not None else None)
        if host is not None and loss.kind in (WorkerLost.__name__, "error") and host not in self.avoid:
            self.avoid += (host,)

    def note_held(self, held_s: float) -> None:
        """Note how many seconds of a shared process's time this lease has had, as its host reports."""
        if self._shared_s is not None:
            self._shared_s = held_s

    def granted(self, grant: LeaseGrant) -> None:
        """Take a host's signal that the process is up. A host may send it more than once; repeats are ignored."""
        if grant.fence.epoch == self.epoch and self._asked and self.grant is None:
            self._held_before_s, self._granted_at = self.held_s, workflow.time()
            self.grant = grant
            if self._gang is not None:
                return
            for other in self._asked[: grant.joined] + self._asked[grant.joined + 1 :]:
                _leave(other)
            self._asked = (self._asked[grant.joined],)

    def take(self, activity: Callable[[Any, RequestT], None], request: RequestT, epoch: int) -> None:
        """Start the lease activity that waits for a process. A process that is still held is given back."""
        self._begin(epoch)
        self._asked = (self._ask(activity, request, self.queue),)

    def _begin(self, epoch: int) -> None:
        self.release()
        self.epoch, self._shared_s, self._gang, self._leader = epoch, None, None, None

    def take_worker(self, request: LeaseRequest, joins: bool = True) -> None:
        """Ask for a new worker and, if the run may share one, also to join another run's: the first grant counts.

        A worker of several machines is not requested until `wait` is called.

        `joins`: False to ask only for a new worker, which others may join.
        """
        if request.key.layout.nodes > 1:
            self._begin(request.epoch)
            self._gang = request
            return
        self.take(Lease.lease, request, request.epoch)
        if request.join_queue is not None:
            self._shared_s = 0.0
        if request.join_queue is not None and joins:
            self._asked += (self._ask(Lease.join_lease, request, request.join_queue),)

    def _ask(
        self, activity: Callable[[Any, RequestT], None], request: RequestT, queue: str
    ) -> workflow.ActivityHandle[None]:
        return workflow.start_activity_method(
            activity,
            request,
            task_queue=queue,
            start_to_close_timeout=policies.LEASE_TIMEOUT,
            heartbeat_timeout=policies.heartbeat_timeout(self.timing),
            retry_policy=policies.ONCE,
        )

    def take_sampler(self, run_id: str, key: SamplerKey, epoch: int, sync_backend: SyncBackend = "auto") -> None:
        """Ask for a sampler, after giving back the one held before."""
        patience_s = policies.sampler_ready_timeout_s(key)
        request = SamplerLeaseRequest(
            run_id=run_id, epoch=epoch, key=key, ready_timeout_s=patience_s, sync_backend=sync_backend, avoid=self.avoid
        )
        self.take(LeaseSampler.lease_sampler, request, epoch)

    def gathers(self, leader: GangLeader) -> None:
        """Take the signal from the first host of a worker of several machines: the other hosts may join."""
        if leader.fence.epoch == self.epoch and self._leader is None:
            self._leader = leader

    async def _gather(self, gang: LeaseRequest, turns: Turns) -> None:
        """Lease the hosts of several machines, while holding the lock for that.

        Raises:
            ActivityError, Lost: one of the leases ended, or too few hosts were free in time.
        """
        patience_s, nodes = self.timing.gather_patience_s, gang.key.layout.nodes
        asked = gang.model_copy(update={"ready_timeout_s": gang.ready_timeout_s + patience_s})
        async with turns.turn(patience_s):
            self._asked = (self._ask(Lease.lease, asked, self.queue),)
            until = workflow.time() + patience_s

            async def there_is(what: Callable[[], object]) -> None:
                left = timedelta(seconds=max(0.0, until - workflow.time()))
                await workflow.wait_condition(lambda: bool(what()) or _ended(self._asked) is not None, timeout=left)

            try:
                await there_is(lambda: self._leader)
                if self._leader is not None:
                    others = (asked.model_copy(update={"node": n, "leader": self._leader}) for n in range(1, nodes))
                    self._asked += tuple(self._ask(Lease.lease, other, self.queue) for other in others)
                    await there_is(lambda: self.grant)
            except TimeoutError:
                self.release()
                raise Lost(
                    f"no {nodes} hosts were free together within {patience_s:g} s", policies.NOT_GATHERED
                ) from None

    async def wait(self) -> LeaseGrant:
        """Wait for the grant.

        Raises:
            ActivityError, Lost: the lease ended first.
        """
        if self._gang is not None and not self._asked:
            assert self.turns is not None
            await self._gather(self._gang, self.turns)
        asked = self._asked
        assert asked
        await workflow.wait_condition(lambda: self.grant is not None or _ended(asked) is not None)
        if self.grant is None:
            ended = _ended(asked)
            assert ended is not None
            await ended
            raise Lost("the lease ended before its process was up")
        return self.grant

    def release(self) -> None:
        """Give the process back, if there is one. This does not wait: the host learns of it at its next heartbeat."""
        if not workflow.in_workflow():  # evicted from the host's memory: the execution continues elsewhere
            return
        for lease in self._asked:
            if self.grant is None and lease.done() and not lease.cancelled() and (error := lease.exception()):
                self.lost_at_start(_loss(error))
            _leave(lease)
        self._held_before_s = self.held_s
        self.grant = None
        self._asked = ()


async def on_leased_host(
    activity: Callable[[Any, RequestT], ResultT],
    request: RequestT,
    grant: LeaseGrant,
    timing: RunTiming,
    retry: RetryPolicy,
    cancellation: workflow.ActivityCancellationType = workflow.ActivityCancellationType.TRY_CANCEL,
) -> ResultT:
    """Execute an activity on the host that holds a lease, for as long as it takes. Raises ActivityError."""
    answer: ResultT = await workflow.execute_activity_method(
        activity,
        request,
        task_queue=grant.host_queue,
        schedule_to_start_timeout=policies.pickup_timeout(timing),
        start_to_close_timeout=policies.LEASE_TIMEOUT,
        heartbeat_timeout=policies.heartbeat_timeout(timing),
        retry_policy=retry,
        cancellation_type=cancellation,
    )
    return answer


def _ended(asked: "tuple[workflow.ActivityHandle[None], ...]") -> workflow.ActivityHandle[None] | None:
    """Return the activity whose end means that no grant will come: one that failed, or the last when all have ended.

    If one of two lease activities got the run its worker, the other returns without an error.
    """
    ended = [lease for lease in asked if lease.done()]
    failed = [lease for lease in ended if lease.cancelled() or lease.exception() is not None]
    return failed[0] if failed else ended[-1] if len(ended) == len(asked) else None


def _leave(lease: workflow.ActivityHandle[None]) -> None:
    lease.add_done_callback(_take_note)
    if not lease.done():
        lease.cancel()


def _take_note(lease: "asyncio.Task[None]") -> None:
    """Retrieve the exception of a lease that nobody awaits, so that asyncio does not log a warning."""
    if not lease.cancelled():
        lease.exception()


def lost(error: ActivityError) -> Lost:
    """Convert the error of an activity into `Lost`, if a new lease may succeed.

    Raises:
        ActivityError: it was cancelled.
        RunFailed: a new lease would fail in the same way.
    """
    if was_cancelled(error):
        raise error
    if is_final(error):
        raise RunFailed(problem_of_error(error)) from error
    return _loss(error)


def _loss(error: BaseException) -> Lost:
    cause = error.cause if isinstance(error, ActivityError) else None
    if not isinstance(cause, ApplicationError):
        return Lost(problem_of_error(error).message)
    host = cause.details[0] if cause.details and isinstance(cause.details[0], str) else None
    return Lost(problem_of_error(error).message, cause.type, host)
