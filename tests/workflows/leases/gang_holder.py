"""A workflow that leases a worker of several machines, has it for a while, and gives it back."""

from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.lease import LeaseRequest
    from longshore.fields import Frozen
    from shared.jobs.job import GangLeader, LeaseGrant, WorkerKey
    from shared.runs.start import RunTiming
    from workflows import policies
    from workflows.leases import Leasing, Lost, Turn, Turns


class Holding(Frozen):
    """`seconds`: for which the worker is to be whole, without a break."""

    run_id: str
    shape: str
    key: WorkerKey
    timing: RunTiming
    seconds: float


@workflow.defn
class GangHolder:
    @workflow.init
    def __init__(self, holding: Holding) -> None:
        queue = policies.lease_queue(holding.shape)
        self._leasing = Leasing(queue, holding.timing, turns=Turns(queue))

    @workflow.run
    async def run(self, holding: Holding) -> int:
        """Returns how many leases it took."""
        epoch = 0
        while True:
            epoch += 1
            request = LeaseRequest(run_id=holding.run_id, epoch=epoch, key=holding.key, ready_timeout_s=60)
            self._leasing.take_worker(request)
            try:
                await self._leasing.wait()
                if not await self._is_lost_within(holding.seconds):
                    return epoch
            except (ActivityError, Lost) as error:
                workflow.logger.info("lost: %r", error)
            finally:
                self._leasing.release()

    async def _is_lost_within(self, seconds: float) -> bool:
        try:
            await workflow.wait_condition(lambda: not self._leasing.is_warm, timeout=timedelta(seconds=seconds))
        except TimeoutError:
            return False
        return True

    @workflow.signal
    def leased(self, grant: LeaseGrant) -> None:
        self._leasing.granted(grant)

    @workflow.signal
    def gathers(self, leader: GangLeader) -> None:
        self._leasing.gathers(leader)

    @workflow.signal
    async def gang_turn(self, turn: Turn) -> None:
        assert self._leasing.turns is not None
        await self._leasing.turns.given(turn)
