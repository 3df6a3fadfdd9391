"""A run's sampler: leased like a worker, or a server behind a URL. Its activities are idempotent."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from shared.contract import Artifact
    from shared.jobs.leases import LeaseGrant
    from shared.runs.serving import LeasedSampler, SamplerPlace, ServedSampler
    from shared.runs.start import RLStart
    from shared.runs.status import Problem
    from workflows import control, policies
    from workflows.leases.leasing import Leasing, Lost, lost
    from workflows.outcomes import RunFailed
    from workflows.rollouts.requests import sampler_key

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass
class Sampling:
    """A run's sampler and its leases. Two activities may use it at a time.

    `waits` is called before the run waits for a sampler, so that it can give up an idle worker first.
    """

    start: RLStart
    waits: Callable[[], None]
    leasing: Leasing = field(init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        queue = policies.sampler_queue(self.start.shape)
        self.leasing = Leasing(queue, self.start.timing)

    @property
    def is_served(self) -> bool:
        rollouts = self.start.run.rollouts
        return self.start.serves_sampler or (rollouts is not None and rollouts.sampler_url is not None)

    @property
    def is_up(self) -> bool:
        return self.is_served or self.leasing.grant is not None

    @property
    def is_awaited(self) -> bool:
        """True while the run waits for a sampler."""
        return self._lock.locked() and not self.leasing.is_warm

    async def do(
        self, activity: Callable[[Any, Request], Answer], request: Callable[[SamplerPlace], Request], model: Artifact
    ) -> Answer:
        """Execute an activity on the sampler of `model`, over as many leases as it takes.

        Args:
            request: makes the activity's request, given where the sampler is.

        Raises:
            RunFailed: it cannot be done, or too many samplers in a row were lost at it.
            ActivityError: a served sampler could not do it.
        """
        rollouts = self.start.run.rollouts
        assert rollouts is not None
        if self.is_served:
            place = ServedSampler(url=rollouts.sampler_url)
            return await control.do(activity, request(place), policies.PATIENT)
        losses: list[str] = []
        while True:
            if len(losses) >= self.start.timing.max_losses:
                message = f"the sampler was lost {len(losses)} times in a row; the last time: {losses[-1]}"
                raise RunFailed(Problem(kind="worker_lost", message=message))
            if pause := policies.pause_before_lease(len(losses)):
                await workflow.sleep(pause)
            grant: LeaseGrant | None = None
            try:
                grant = await self._leased(model)
                return await self._ask(activity, request, grant)
            except Lost as loss:
                losses.append(str(loss))
            except ActivityError as error:
                losses.append(str(lost(error)))
            workflow.logger.warning("sampler lease %d came to nothing: %s", self.leasing.epoch, losses[-1])
            if grant is None or self.leasing.grant is grant:  # else the other activity has taken a new lease
                self.leasing.release()

    async def _leased(self, model: Artifact) -> LeaseGrant:
        """Return the sampler that is up, or lease a new one."""
        async with self._lock:
            if not self.leasing.is_warm:
                self.waits()
                self.leasing.take_sampler(self.start.run_id, sampler_key(self.start, model))
            return await self.leasing.wait()

    async def _ask(
        self,
        activity: Callable[[Any, Request], Answer],
        request: Callable[[SamplerPlace], Request],
        grant: LeaseGrant,
    ) -> Answer:
        place = LeasedSampler(run_id=self.start.run_id, fence=grant.fence, worker_id=grant.worker_id)
        result: Answer = await workflow.execute_activity_method(
            activity,
            request(place),
            task_queue=grant.host_queue,
            schedule_to_start_timeout=policies.pickup_timeout(self.start.timing),
            start_to_close_timeout=policies.DATA_TIMEOUT,
            heartbeat_timeout=policies.heartbeat_timeout(self.start.timing),
            retry_policy=policies.ONCE,
        )
        return result
