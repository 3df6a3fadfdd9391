"""A run's samplers: leased like workers, or a server behind a URL. Their activities are idempotent."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.sampling.sample import Proved, SamplerActivities
    from longshore.fields import Artifact, Fence
    from longshore.views import Problem
    from shared.jobs.job import LeaseGrant
    from shared.runs.start import RLStart
    from shared.serving import LeasedSampler, SamplerPlace, ServedSampler
    from workflows import control, policies
    from workflows.leases import Leasing, Lost, lost, on_leased_host
    from workflows.outcomes import RunFailed, is_mismatch, problem_of_error
    from workflows.rollouts.requests import rollouts_of, sampler_key

RequestT = TypeVar("RequestT")
Answer = TypeVar("Answer")
# If this many samplers in a row fail the proof in one of a run's sampler slots, even with weights from the store, the
# slot stays empty: another one would fail, too.
_MAX_MISMATCHES = 2
_SHARED_AFTER = timedelta(minutes=1)  # enough for a process to start if a host is free


@dataclass
class LeasedSamplers:
    """A run's samplers and their leases: at most `rollouts.samplers`. The run works with those that are up.

    A sampler whose weights are not the trainer's, even when it has loaded them from the store, is given up like one
    that was lost: `num_mismatched` counts those. `num_reloaded` counts the proofs that succeeded only then.

    `policys`: the policy's samplers, if these are for a reward model's base (`beside`): then there is one.

    `waits` is called before the run waits for a sampler, so that it can give up an idle worker first. A sampler that
    shares its device with the trainer sleeps while a job uses the device, and is woken by the next request; `_asleep`
    has the epochs of leases whose samplers sleep.
    """

    start: RLStart
    waits: Callable[[], None]
    policys: "LeasedSamplers | None" = None
    leasings: tuple[Leasing, ...] = field(init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_reloaded: int = 0
    num_mismatched: int = 0
    _num_failed: Counter[int] = field(default_factory=Counter)
    _mismatches: Counter[int] = field(default_factory=Counter)  # in a row, by the leasing's number
    _asleep: set[int] = field(default_factory=set)
    _num_at_work: int = 0
    _is_lent: bool = False
    _beside: "dict[str, LeasedSamplers]" = field(default_factory=dict)  # by the SHA-256 of their models

    def __post_init__(self) -> None:
        queue, rollouts = policies.sampler_queue(self.start.shape), self.start.run.rollouts
        num_samplers = rollouts.samplers if rollouts and self.policys is None else 1
        self.leasings = tuple(Leasing(queue, self.start.timing) for _ in range(num_samplers))

    def beside(self, model: Artifact) -> "LeasedSamplers":
        """Return the run's sampler for a reward model whose base is not the policy's model."""
        if model.sha256 not in self._beside:
            self._beside[model.sha256] = LeasedSamplers(self.start, self.waits, self)
        return self._beside[model.sha256]

    @property
    def _of_run(self) -> tuple[Leasing, ...]:
        """The leases of the policy's samplers and of the reward models'."""
        first = self.policys or self
        return tuple(one for each in (first, *first._beside.values()) for one in each.leasings)

    @property
    def is_served(self) -> bool:
        rollouts = self.start.run.rollouts
        if self.policys is not None:
            return False
        return self.start.serves_sampler or (rollouts is not None and rollouts.sampler_url is not None)

    @property
    def uses_many_samplers(self) -> bool:
        """True if the run may have several samplers, which share a step's prompts."""
        return len(self.leasings) > 1 and not self.is_served

    @property
    def is_colocated(self) -> bool:
        """True if trainer and sampler share one device."""
        rollouts = self.start.run.rollouts
        return rollouts is not None and rollouts.colocate and not self.is_served and self.policys is None

    @property
    def samples_before_verification(self) -> bool:
        """True if samples in progress continue with new weights before these are proven."""
        rollouts = self.start.run.rollouts
        return rollouts is not None and rollouts.weight_sync.in_flight == "continue"

    def restore_after(self, problem: Problem | None) -> None:
        """Note why a resumed run had ended: a sampler that failed a proof may have left samples in the store."""
        if problem is not None and problem.kind == "sampler_mismatch" and self.samples_before_verification:
            self.num_mismatched += 1

    @property
    def is_up(self) -> bool:
        return self.is_served or any(leasing.grant is not None for leasing in self.leasings)

    @property
    def any_place(self) -> SamplerPlace:
        """A place of the samplers' kind, for the keys of requests."""
        rollouts = rollouts_of(self.start.run)
        if self.is_served:
            return ServedSampler(url=rollouts.sampler_url)
        return LeasedSampler(run_id=self.start.run_id, fence=Fence(epoch=1), worker_id="any", sampler=rollouts.sampler)

    @property
    def is_awaited(self) -> bool:
        """True while the run waits for its first sampler, or one of a reward model."""
        return any(one._lock.locked() and not one.grants for one in (self, *self._beside.values()))

    @property
    def grants(self) -> tuple[LeaseGrant, ...]:
        """The samplers that are up."""
        return tuple(one.grant for one in self.leasings if one.is_warm and one.grant is not None)

    @property
    def held_s(self) -> float:
        """Seconds that samplers were leased and up, over all leases so far."""
        return sum(leasing.held_s for leasing in self._of_run)

    def granted(self, grant: LeaseGrant) -> None:
        """Take a host's signal that a sampler is up. No two leases of a run have the same epoch."""
        for leasing in self._of_run:
            leasing.granted(grant)

    def release(self) -> None:
        """Give all samplers back, and request no more."""
        for leasing in self._of_run:
            leasing.release()

    async def do(
        self,
        activity: Callable[[Any, RequestT], Answer],
        request: Callable[[SamplerPlace], RequestT],
        model: Artifact,
        before: Callable[[LeaseGrant], Coroutine[Any, Any, object]] | None = None,
    ) -> Answer:
        """Execute an activity on a sampler of `model`, with as many leases as it takes.

        Args:
            request: makes the activity's request for a sampler's address.
            before: called first with every leased sampler that is to execute the activity.

        Raises:
            RunFailed: it cannot be done, or too many samplers in a row were lost.
            ActivityError: a served sampler could not do it.
        """
        rollouts = self.start.run.rollouts
        assert rollouts is not None
        if self.is_served:
            place = ServedSampler(url=rollouts.sampler_url)
            answer = await control.do(activity, request(place), policies.PATIENT)
            self._take_note(answer)
            return answer
        losses: list[str] = []
        while True:
            if len(losses) >= self.start.timing.max_losses:
                message = f"the sampler was lost {len(losses)} times in a row; the last time: {losses[-1]}"
                raise RunFailed(Problem(kind="worker_lost", message=message))
            if pause := policies.pause_before_lease(len(losses)):
                await workflow.sleep(pause)
            grant: LeaseGrant | None = None
            try:
                grant = await self._first(model)
                if before is not None:
                    await before(grant)
                return await self.ask(activity, request, grant)
            except Lost as loss:
                losses.append(str(loss))
            except ActivityError as error:
                if self._is_mismatched(grant, error):
                    continue
                losses.append(str(lost(error)))
            self._give_up(grant, losses[-1])

    async def on_each(self, work: Callable[[LeaseGrant, int, int], Coroutine[Any, Any, None]], model: Artifact) -> int:
        """Divide work among the samplers that are up, if there are several; request those that are missing.

        Args:
            work: does one share, given the sampler, the share's number, and the number of shares.

        Returns:
            how many samplers were lost before their share was done.

        Raises:
            RunFailed: it cannot be done. ActivityError: it was cancelled.
        """
        if not self.uses_many_samplers:
            return 0
        self._ask_for_missing(model)
        if len(grants := self.grants) < 2:
            return 0
        shares = (work(grant, number, len(grants)) for number, grant in enumerate(grants))
        ended = await asyncio.gather(*shares, return_exceptions=True)
        for grant, error in zip(grants, ended, strict=True):
            if isinstance(error, ActivityError):
                if not self._is_mismatched(grant, error):
                    self._give_up(grant, str(lost(error)))
            elif error is not None:
                raise error
        return len(ended) - ended.count(None)

    def _is_mismatched(self, grant: LeaseGrant | None, error: ActivityError) -> bool:
        """Give up a sampler that cannot get the trainer's weights. Returns False if the error is a different one.

        With `in_flight: continue` it may have sampled from its wrong weights: the caller of the proof handles that.

        Raises:
            RunFailed: no sampler is left.
        """
        if grant is None or not is_mismatch(error):
            return False
        self.num_mismatched += 1
        self._mismatches.update(number for number, one in enumerate(self.leasings) if one.grant is grant)
        problem = problem_of_error(error)
        if not self._places:
            message = f"no sampler is left: {self.num_mismatched} were given up; of the last one: {problem.message}"
            raise RunFailed(problem.model_copy(update={"message": message})) from error
        self._give_up(grant, problem.message)
        return True

    def _take_note(self, answer: object, grant: LeaseGrant | None = None) -> None:
        """Take note of a sampler's proof that it has the trainer's weights."""
        if isinstance(answer, Proved):
            self.num_reloaded += answer.was_reloaded
            for number in [number for number, one in enumerate(self.leasings) if one.grant is grant]:
                del self._mismatches[number]

    @property
    def _places(self) -> dict[int, Leasing]:
        """The leases in use, by number: all except those whose samplers fail the proof again and again."""
        return {n: leasing for n, leasing in enumerate(self.leasings) if self._mismatches[n] < _MAX_MISMATCHES}

    def _give_up(self, grant: LeaseGrant | None, why: str) -> None:
        """Give back a lost sampler, so that another is requested; without a grant, all those that never started."""
        for leasing in self.leasings:
            # Otherwise another activity, which lost the same sampler, has taken a new lease.
            if leasing.grant is grant and not leasing.is_pending:
                workflow.logger.warning("sampler lease %d came to nothing: %s", leasing.epoch, why)
                leasing.release()

    def _ask_for_missing(self, model: Artifact) -> None:
        """Request all samplers that are not up, without waiting. One that fails again and again is left out."""
        key, grants = sampler_key(self.start, model, is_policys=self.policys is None), self.grants
        for number, leasing in self._places.items():
            if leasing.is_warm or leasing.is_pending:
                continue
            self._num_failed[number] += leasing.has_failed
            if not grants or self._num_failed[number] < self.start.timing.max_losses:
                epoch = 1 + max(one.epoch for one in self._of_run)
                backend = rollouts_of(self.start.run).weight_sync.backend if self.policys is None else "auto"
                leasing.take_sampler(self.start.run_id, key, epoch, backend)

    async def _first(self, model: Artifact) -> LeaseGrant:
        """Return a sampler that is up; if there is none, wait for the first to start.

        Raises:
            ActivityError, Lost: none started.
        """
        if self._is_lent:
            await workflow.wait_condition(lambda: not self._is_lent)
        async with self._lock:
            if not self.grants:
                self.waits()
                self._ask_for_missing(model)
            await self._share()
            if len(self.leasings) == 1:
                return await self.leasings[0].wait()
            await workflow.wait_condition(lambda: bool(self.grants) or not any(one.is_pending for one in self.leasings))
            return self.grants[0] if self.grants else await next(iter(self._places.values())).wait()

    async def _share(self) -> None:
        """Give back the run's samplers of other models if those of this one do not start.

        Else two runs could each hold the host that the other waits for; and with one sampler host a run would wait for
        itself.
        """
        others = [one for one in self._of_run if one not in self.leasings]

        def is_over() -> bool:
            return bool(self.grants) or not any(one.is_pending for one in self.leasings)

        while others and not is_over():
            try:
                await workflow.wait_condition(is_over, timeout=_SHARED_AFTER)
            except TimeoutError:
                for one in others:
                    if one.is_warm:
                        one.release()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Have a sampler release the device that it shares, within a `with` block. Requests wait until it ends."""
        if not self.is_colocated:
            yield
            return
        await workflow.wait_condition(lambda: not self._num_at_work)
        self._is_lent = True
        try:
            for grant in self.grants:
                self._asleep.add(grant.fence.epoch)
                try:
                    await self._execute(SamplerActivities.sleep_sampler, self._place(grant), grant)
                except ActivityError as error:
                    self._give_up(grant, str(lost(error)))
            yield
        finally:
            self._is_lent = False

    async def ask(
        self,
        activity: Callable[[Any, RequestT], Answer],
        request: Callable[[SamplerPlace], RequestT],
        grant: LeaseGrant,
    ) -> Answer:
        """Execute an activity on one sampler, which is woken first if it sleeps. Raises ActivityError."""
        if self._is_lent:
            await workflow.wait_condition(lambda: not self._is_lent)
        self._num_at_work += 1
        try:
            if grant.fence.epoch in self._asleep:
                await self._execute(SamplerActivities.wake_sampler, self._place(grant), grant)
                self._asleep.discard(grant.fence.epoch)
            answer = await self._execute(activity, request(self._place(grant)), grant)
            self._take_note(answer, grant)
            return answer
        finally:
            self._num_at_work -= 1

    async def _execute(
        self, activity: Callable[[Any, RequestT], Answer], request: RequestT, grant: LeaseGrant
    ) -> Answer:
        within = policies.DATA_TIMEOUT
        return await on_leased_host(activity, request, grant, self.start.timing, policies.ONCE, within=within)

    def _place(self, grant: LeaseGrant) -> LeasedSampler:
        rollouts = self.start.run.rollouts
        assert rollouts is not None
        return LeasedSampler(
            run_id=self.start.run_id,
            fence=grant.fence,
            worker_id=grant.worker_id,
            sampler=rollouts.sampler if self.policys is None else "own",
        )
