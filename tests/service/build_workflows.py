"""Workflows that say which builds of control hosts have done their parts."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import VersioningBehavior

_PATIENCE = timedelta(seconds=10)


@workflow.defn
class Run:
    """Asks which build its host is of, before and after it has been told to go on."""

    def __init__(self) -> None:
        self._goes_on = False

    @workflow.run
    async def run(self) -> list[str]:
        said = [await workflow.execute_activity("which_build", start_to_close_timeout=_PATIENCE)]
        await workflow.wait_condition(lambda: self._goes_on)
        return [*said, await workflow.execute_activity("which_build", start_to_close_timeout=_PATIENCE)]

    @workflow.signal
    async def go_on(self) -> None:
        self._goes_on = True


@workflow.defn(name="Service", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class Moving(Run):
    @workflow.run
    async def run(self) -> list[str]:
        return await Run.run(self)
