"""Leases of workers and samplers: for runs, for gangs of machines, and for users' questions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.lease import Lease, LeaseRequest
    from activities.sampling.samplers import LeaseSampler, SamplerLeaseRequest
    from longshore.fields import Frozen
    from longshore.training import SyncBackend
    from longshore.views import Problem
    from shared.jobs.job import GangLeader, LeaseGrant, SamplerKey
    from shared.runs.start import RunTiming
    from shared.serving import ServeRequest, ServingStart
    from workflows import policies
    from workflows.outcomes import RunFailed, is_final, problem_of_error, was_cancelled


# --- A lock for leases of several hosts: one run at a time gathers its hosts, so that no two runs deadlock ---

_SLACK_S = 60.0  # beyond a turn's time, for a run that was terminated in it
# A waiting run asks again at this interval: if somebody terminates the workflow below, its queue of runs is lost.
_ASK_AGAIN_S = 600.0


class Turn(Frozen):
    """A run's request for the lock. `turn_id` is unique. `patience_s`: the most seconds that it holds the lock."""

    workflow_id: str
    turn_id: str
    patience_s: float


@workflow.defn(versioning_behavior=policies.MOVES)
class GangTurnsWorkflow:
    """Gives runs the lock, first come first served, and ends when none waits. There is one for each queue of hosts."""

    @workflow.init
    def __init__(self, waiting: tuple[Turn, ...]) -> None:
        self._waiting = list(waiting)
        self._current: Turn | None = None

    @workflow.run
    async def run(self, waiting: tuple[Turn, ...]) -> None:
        while self._waiting:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(tuple(self._waiting))
            turn = self._current = self._waiting.pop(0)
            with suppress(ApplicationError):  # the run has ended
                await workflow.get_external_workflow_handle(turn.workflow_id).signal("gang_turn", turn)
                with suppress(TimeoutError):
                    await workflow.wait_condition(
                        lambda: self._current is None, timeout=timedelta(seconds=turn.patience_s + _SLACK_S)
                    )
            self._current = None

    @workflow.signal
    def ask(self, turn: Turn) -> None:
        """Ask for the lock."""
        if turn not in self._waiting and turn != self._current:
            self._waiting.append(turn)

    @workflow.signal
    def leave(self, turn: Turn) -> None:
        """Release the lock, or withdraw the request for it."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        if turn == self._current:
            self._current = None


class Turns:
    """One run's turns for a queue of hosts."""

    def __init__(self, queue: str) -> None:
        self._id = f"gangs-{queue}"
        self._wanted: Turn | None = None
        self._has_turn = False

    async def given(self, turn: Turn) -> None:
        """Take the signal that this run has the lock. If it no longer waits for it, release the lock at once."""
        if turn == self._wanted:
            self._has_turn = True
        else:
            await self._leave(turn)

    @asynccontextmanager
    async def turn(self, patience_s: float) -> AsyncIterator[None]:
        """Hold the lock within a `with` block, after waiting for it."""
        turn_id = str(workflow.uuid4())
        turn = Turn(workflow_id=workflow.info().workflow_id, turn_id=turn_id, patience_s=patience_s)
        self._wanted, self._has_turn = turn, False
        try:
            while not self._has_turn:
                await self._ask(turn)
                with suppress(TimeoutError):
                    await workflow.wait_condition(lambda: self._has_turn, timeout=timedelta(seconds=_ASK_AGAIN_S))
            yield
        finally:
            self._wanted = None
            if workflow.in_workflow():  # else it was evicted from the host's memory
                await self._leave(turn)

    async def _leave(self, turn: Turn) -> None:
        with suppress(ApplicationError):  # the workflow has ended: no run waits for the lock or has it
            await workflow.get_external_workflow_handle(self._id).signal(GangTurnsWorkflow.leave, turn)

    async def _ask(self, turn: Turn) -> None:
        while True:
            try:
                await workflow.start_child_workflow(
                    GangTurnsWorkflow.run,
                    (turn,),
                    id=self._id,
                    # All runs share it: neither this run's end nor its cancellation may end it.
                    cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                    parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                )
                return
            except WorkflowAlreadyStartedError:
                with suppress(ApplicationError):  # it has just ended
                    await workflow.get_external_workflow_handle(self._id).signal(GangTurnsWorkflow.ask, turn)
                    return


# --- A run's lease of one kind of process: taken when it is needed, kept until it is given back or lost ---

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class Lost(Exception):
    """A lease ended before its process was up, or the process was lost. A new lease may succeed.

    `kind`: the type of the error that ended it, such as `WorkerLost` (shared/errors.py), or the kind of its job's
    failure, if there was one.
    """

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Leasing:
    """A workflow's leases of processes from one queue, one at a time. Grants of earlier epochs are ignored.

    A worker of several machines needs a lease from each of their hosts, one activity each: all or none.

    `turns`: the lock for leasing workers of several machines.
    """

    queue: str
    timing: RunTiming
    epoch: int = 0
    grant: LeaseGrant | None = None
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
        is_vllm = key.sampler == "vllm"
        patience_s = policies.VLLM_READY_TIMEOUT_S if is_vllm else policies.WORKER_READY_TIMEOUT_S
        request = SamplerLeaseRequest(
            run_id=run_id, epoch=epoch, key=key, ready_timeout_s=patience_s, sync_backend=sync_backend
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
    within: timedelta = policies.LEASE_TIMEOUT,
) -> ResultT:
    """Execute an activity on the host that holds a lease. Raises ActivityError."""
    answer: ResultT = await workflow.execute_activity_method(
        activity,
        request,
        task_queue=grant.host_queue,
        schedule_to_start_timeout=policies.pickup_timeout(timing),
        start_to_close_timeout=within,
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
    return Lost(problem_of_error(error).message, cause.type)


# --- Serve users' questions to one model ---
# Lease a sampler when a question comes, give it back after an idle time.

# Temporal allows 2,000 updates per execution. After half of them this one ends, and the next question starts another.
_MAX_ASKED = 1000
_ROOM_S = 15.0  # longer than a service uses a lease without asking this workflow again
_MAX_LOSSES = 3  # samplers that may fail before a waiting question is refused


@workflow.defn(versioning_behavior=policies.MOVES)
class ServingWorkflow:
    """Leases a sampler of one model while questions come, one lease at a time.

    When a sampler is lost, the questions that it was answering fail, and the service asks them again.
    """

    @workflow.init
    def __init__(self, start: ServingStart) -> None:
        self._start = start
        self._leasing = Leasing(policies.sampler_queue(start.shape), start.timing)
        self._num_asked = 0
        self._num_waiting = 0
        self._num_lost = 0
        self._num_lost_in_a_row = 0
        self._problem: Problem | None = None  # why the last sampler failed
        self._is_hopeless = False  # another sampler would fail in the same way
        self._is_over = False
        self._idle_s = start.idle_s
        self._leased_at = 0.0
        self._due_at: float | None = None  # when this sampler is given back, even if there are questions

    @workflow.run
    async def run(self, start: ServingStart) -> None:
        while await self._is_wanted():
            try:
                await self._lease_once()
            except RunFailed as failure:
                self._note(failure.problem, is_hopeless=True)
            except Lost as loss:
                self._note(Problem(kind="worker_lost", message=str(loss)))
            finally:
                self._leasing.release()
                self._due_at = None  # it was for the sampler that has been given back
        await workflow.wait_condition(workflow.all_handlers_finished)

    @workflow.update
    async def serve(self, request: ServeRequest) -> LeaseGrant:
        """Return the sampler's grant as soon as one is up; fail with the type of the problem otherwise."""
        self._num_asked += 1
        self._num_waiting += 1
        try:
            return await asyncio.wait_for(self._grant(self._num_lost), request.patience_s)
        except TimeoutError:
            why = f"; the last one: {self._problem.message}" if self._problem else ""
            text = f"no sampler host of shape {self._start.shape} had one up within {request.patience_s:g} s{why}"
            raise ApplicationError(text, type="sampler_unavailable") from None
        finally:
            self._num_waiting -= 1

    @workflow.signal
    def make_room(self) -> None:
        """Give the sampler back soon: a run or another model waits for one.

        If no question waits, that is after a shortened idle time; else when this model's share of the time is over.
        Later questions wait for the next sampler.
        """
        self._idle_s = min(_ROOM_S, self._start.idle_s / 6)
        if self._leasing.is_warm and self._due_at is None:
            self._due_at = max(workflow.time(), self._leased_at + self._start.share_s)

    @workflow.query
    def samplers(self) -> list[LeaseGrant]:
        """Return the sampler, if one is up."""
        grant = self._leasing.grant
        return [grant] if self._leasing.is_warm and grant is not None else []

    @workflow.signal
    def sampler_leased(self, grant: LeaseGrant) -> None:
        """Take a host's signal that the sampler is up."""
        self._leasing.granted(grant)

    async def _grant(self, lost_before: int) -> LeaseGrant:
        while True:
            await workflow.wait_condition(lambda: self._leasing.is_warm or self._is_given_up(lost_before))
            if self._leasing.is_warm and self._leasing.grant is not None:  # it may have been given back since
                return self._leasing.grant
            if self._is_given_up(lost_before) and self._problem is not None:
                raise ApplicationError(self._problem.message, type=self._problem.kind)

    async def _is_wanted(self) -> bool:
        """Wait until a question needs a sampler. Returns False if none comes within the idle time."""
        if pause := policies.pause_before_lease(self._num_lost_in_a_row):
            await workflow.sleep(pause)
        if self._is_over and not self._num_waiting:
            return False
        return await self._until(lambda: self._num_waiting > 0)

    async def _lease_once(self) -> None:
        """Hold a lease of one sampler until no more questions come, or this execution's history has become long.

        Raises Lost: it did not start, or was lost. RunFailed: another sampler would fail in the same way.
        """
        self._leasing.take_sampler(self._start.serving_id, self._start.key, self._leasing.epoch + 1)
        up = asyncio.create_task(self._leasing.wait())
        try:
            if not await self._until(up.done):
                up.cancel()
                self._is_over = True
                return
            await up
        except ActivityError as error:
            raise lost(error) from error
        self._num_lost_in_a_row = 0
        self._leased_at = workflow.time()
        await self._until(lambda: not self._leasing.is_warm or self._is_long or self._is_due)
        if not self._leasing.is_warm:
            raise Lost("the sampler was lost")
        self._is_over = True

    @property
    def _is_due(self) -> bool:
        return self._due_at is not None and workflow.time() >= self._due_at

    @property
    def _is_long(self) -> bool:
        return self._num_asked >= _MAX_ASKED and not self._num_waiting

    async def _until(self, happens: Callable[[], bool]) -> bool:
        """Wait until `happens()` is true. Returns False if no question waited for the whole idle time before that."""
        while not happens():
            before = self._num_asked, self._idle_s, self._due_at
            due_s = self._due_at - workflow.time() if self._due_at is not None else 0.0
            # A wait with a timeout of 0 would not yield. `happens` also checks whether the share is over, so no timer.
            left_s = min(self._idle_s, due_s) if due_s > 0 else self._idle_s
            try:
                await workflow.wait_condition(
                    lambda before=before: (  # type: ignore[misc]
                        happens() or (self._num_asked, self._idle_s, self._due_at) != before
                    ),
                    timeout=timedelta(seconds=left_s),
                )
            except TimeoutError:
                if self._num_asked == before[0] and not self._num_waiting:
                    return False
        return True

    def _note(self, problem: Problem, is_hopeless: bool = False) -> None:
        workflow.logger.warning("sampler lease %d came to nothing: %s", self._leasing.epoch, problem.message)
        self._num_lost_in_a_row += 1
        self._problem, self._is_hopeless = problem, is_hopeless
        self._num_lost += 1

    def _is_given_up(self, lost_before: int) -> bool:
        num_lost = self._num_lost - lost_before
        return num_lost >= _MAX_LOSSES or (num_lost > 0 and self._is_hopeless)
