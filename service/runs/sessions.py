"""Sessions behind the API: commands taken, put into the store before they are acknowledged, and their results."""

import asyncio
import hashlib
import time
from contextlib import suppress

from pydantic import Field

from service.accounts.tenants import Quotas
from service.errors import Conflict
from service.runs.runs import Runs
from service.runs.updates import update_run
from service.runs.views import RunView
from service.temporal import Temporal, query, unless_unknown
from shared.contract import Frozen
from shared.errors import InvalidInput, NotFound
from shared.jobs.commands import Asked, CommandResult, SaveState
from shared.runs.requests import RunRecord
from shared.runs.sessions import CommandRef, CommandStatus
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import Ledger

# Between two looks at the store for a result; between two questions whether one will come at all.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
_ASK_EACH_S = 1.0


class CommandView(Frozen):
    """Where a command is, and its result when there is one. A `dropped` one may be sent again."""

    number: int
    state: str = Field(description="waiting, done, failed or dropped")
    message: str | None = Field(default=None, description="why it was dropped")
    result: CommandResult | None = None


class TrainingSessions:
    """Hands commands to sessions, and reads their results."""

    def __init__(self, runs: Runs, store: ObjectStore, temporal: Temporal, quotas: Quotas) -> None:
        self._runs = runs
        self._store = store
        self._temporal = temporal
        self._quotas = quotas

    async def send(self, tenant: str, run_id: str, number: int, asked: Asked, wait_s: float) -> CommandView:
        """Take a command, to be done after those of lower numbers. The same one twice is the same command.

        Args:
            wait_s: how long to wait for its result.

        Raises:
            InvalidInput: the number has another command.
            Conflict: the session takes no more commands, or too many wait.
            QuotaExceeded
        """
        record = await self._record(tenant, run_id)
        data = await asyncio.to_thread(lambda: asked.model_dump_json().encode())
        ref = CommandRef(
            number=number,
            kind=asked.kind,
            sha256=hashlib.sha256(data).hexdigest(),
            publish=isinstance(asked, SaveState) and asked.publish,
        )
        status = await self._take(record, ref, data)
        if status.state in ("done", "failed") and await self._result(record, number, ref.sha256) is None:
            raise InvalidInput(f"command {number} was sent before, and was another one", "number")
        return await self._wait(record, number, ref.sha256, wait_s, status)

    async def show(self, tenant: str, run_id: str, number: int, wait_s: float = 0) -> CommandView:
        """Return a command's state, or its result if that comes in time. Raises NotFound for one that never came."""
        record = await self._record(tenant, run_id)
        if (result := await self._result(record, number, None)) is not None:
            return _view(result)
        status = await self._status(record, number)
        if status.state == "unknown":
            raise NotFound(f"{run_id} has no command {number}")
        return await self._wait(record, number, None, wait_s, status)

    async def close(self, tenant: str, run_id: str) -> RunView:
        """Take no more commands: the session ends after those that wait. Raises Conflict when it has ended."""
        await update_run(self._runs, self._temporal, await self._record(tenant, run_id), "finish")
        return await self._runs.view(tenant, run_id)

    async def _record(self, tenant: str, run_id: str) -> RunRecord:
        record = await self._runs.record(tenant, run_id)
        if record.run.kind != "session":
            raise Conflict(f"{run_id} is no session")
        return record

    async def _take(self, record: RunRecord, ref: CommandRef, data: bytes) -> CommandStatus:
        """Put a command into the store, and then have its session take it; one that is refused goes again."""
        key = RunKeys(record.run_id).command(ref.number, ref.sha256)
        async with self._quotas.reservation(record.tenant) as reserved:
            await reserved.hold(len(data))
            is_new = await asyncio.to_thread(self._store.put_if_absent, key, data)
            try:
                sure = ref.number > 1
                update = update_run(self._runs, self._temporal, record, "command", ref, place="number", sure=sure)
                status = CommandStatus.model_validate(await update)
            except (InvalidInput, Conflict):
                if is_new:
                    await asyncio.to_thread(self._store.delete, key)
                raise
            if is_new:
                ledger, name = Ledger(self._store, record.tenant), f"command-{ref.number}-{ref.sha256[:8]}"
                await asyncio.to_thread(ledger.bring, record.run_id, name, len(data))
                await reserved.settle(len(data))
        return status

    async def _wait(
        self, record: RunRecord, number: int, sha256: str | None, wait_s: float, status: CommandStatus
    ) -> CommandView:
        now = time.monotonic()
        end, ask_at, pause_s = now + wait_s, now + _ASK_EACH_S, _FIRST_PAUSE_S
        while status.state != "dropped":
            if (result := await self._result(record, number, sha256)) is not None:
                return _view(result)
            if (now := time.monotonic()) > end:
                break
            if now > ask_at:
                status, ask_at = await self._status(record, number), now + _ASK_EACH_S
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.2 * pause_s)
        state = "dropped" if status.state == "dropped" else "waiting"
        return CommandView(number=number, state=state, message=status.message)

    async def _result(self, record: RunRecord, number: int, sha256: str | None) -> CommandResult | None:
        """Read a command's result. `sha256`: of the command, where it is known."""

        def read() -> bytes | None:
            keys = RunKeys(record.run_id)
            if sha256 is not None:
                key: str | None = keys.command_result(number, sha256)
            else:
                key = next((info.key for info in self._store.list(keys.command_results(number))), None)
            with suppress(NotFound):
                return None if key is None else self._store.get_bytes(key)
            return None

        data = await asyncio.to_thread(read)
        return None if data is None else await asyncio.to_thread(CommandResult.model_validate_json, data)

    async def _status(self, record: RunRecord, number: int) -> CommandStatus:
        """Ask the session's workflow. Of one that has ended, what has no result is to be sent again."""
        view = await self._runs.view(record.tenant, record.run_id)
        if view.state == "running":
            async with self._temporal.client() as client:
                with unless_unknown():
                    handle = client.get_workflow_handle(record.run_id)
                    return await query(handle, "command_status", number, result_type=CommandStatus)
            return CommandStatus(number=number, state="waiting")
        ended = f"the session has ended ({view.state}) before this command was done"
        why = f"{ended}: {view.problem.message}" if view.problem else ended
        return CommandStatus(number=number, state="dropped", message=why)


def _view(result: CommandResult) -> CommandView:
    state = "failed" if result.problem is not None else "done"
    return CommandView.model_construct(number=result.number, state=state, message=None, result=result)
