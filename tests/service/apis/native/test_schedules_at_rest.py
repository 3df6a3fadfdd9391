"""What Temporal keeps of schedules: no word of a user's, by the key that seals."""

from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from temporalio.client import ScheduleActionStartWorkflow

from service.automation.schedules import Schedules
from service.sealing import key_of, seal_keys
from service.temporal import Temporal
from tests.service.apis.native.schedule_stack import TENANT, Stack, started


@pytest.fixture(scope="module")
async def stack(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path_factory.mktemp("at-rest")) as stack:
        yield stack
        for view in await stack.schedules.of(TENANT):
            await stack.schedules.delete(TENANT, view.scheduled.name)


async def test_temporal_is_told_no_word_of_a_users(stack: Stack) -> None:
    """Ids and notes are not encrypted there."""
    words = "canary-schedule", "canary-note"
    await stack.create(words[0])
    assert (await stack.schedules.pause(TENANT, *words)).note == words[1]
    view = await stack.schedules.show(TENANT, words[0])
    async with stack.temporal.client() as client:
        handle = client.get_schedule_handle(stack.temporal_id(words[0]))
        told = (await handle.describe()).raw_description.SerializeToString()
        assert b"canary" not in told and b"binary/encrypted" in told
        await handle.pause(note="by an operator, in Temporal's page")
    assert (await stack.schedules.show(TENANT, words[0])).note == "by an operator, in Temporal's page"
    assert (await stack.schedules.resume(TENANT, words[0])).note == "resumed"
    assert view.note == words[1]


async def test_a_schedule_is_sealed_anew_when_the_key_was_rotated(stack: Stack) -> None:
    await stack.create("rotated")
    async with stack.temporal.client() as client:

        async def sealed_by() -> set[str]:
            known = await client.get_schedule_handle(stack.temporal_id("rotated")).describe()
            assert isinstance(known.schedule.action, ScheduleActionStartWorkflow)
            return {key_of(each) for each in known.schedule.action.args}

        old = seal_keys(stack.settings)[0]
        assert await sealed_by() == {old.id}
        new = "n" * 32
        settings = stack.settings.model_copy(update={"seal_key": SecretStr(f"{new} {old.secret.decode()}")})
        rotated = Schedules(settings, stack.store, Temporal(settings), stack.backend.access, stack.backend.quotas)
        await rotated.restore()
        assert await sealed_by() == {seal_keys(settings)[0].id}
        await stack.schedules.restore()  # the other way round, for those that come after
        assert await sealed_by() == {old.id}
