"""Messages to a run while it goes: updates, training steps, a session's commands."""

import asyncio
import bisect
import math
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import ValidationError
from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from longshore.commands import Asked, CommandResult, LoadState, SaveState
from longshore.fields import Artifact, Frozen
from longshore.runs import RunRecord
from longshore.training import Full, Lora
from longshore.views import CommandView, RunView, StepStatus
from service.accounts import audit
from service.accounts.tenants import Quotas
from service.database.engine import Recent
from service.host_http.connections import SessionHosts
from service.runs.rows import RunRows, Uses
from service.runs.runs import Runs
from service.temporal import LOST_UPDATES, Temporal, causes_of, query, unless_unknown
from shared.errors import Conflict, InvalidInput, NotFound, QueueFull, TemporalUnavailable
from shared.jobs.commands import CommandHead, LoadStored, Skip, stored_form
from shared.models.peft import check_same
from shared.runs.events import SessionResults
from shared.runs.start import MAX_WAITING, CommandArrived
from shared.runs.status import StepRequest
from shared.storage import paths
from shared.storage.artifacts import CheckpointName, checkpoint_of_step
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import COMMANDS

# --- Sends updates to runs' workflows. An update may be sent repeatedly, and takes effect once ---

_PATIENCE = timedelta(seconds=20)
_TRIES, _PAUSE_S = 4, 0.2


async def update_run(
    runs: Runs, temporal: Temporal, record: RunRecord, name: str, *messages: Frozen, place: str = "", sure: bool = False
) -> Any:
    """Update a run's workflow. A lost update is sent again: the run may just have moved on to a new execution, or
    Temporal may have been killed. A run that was paused while its client was away is resumed for new work.

    Args:
        place: the field that a refusal is about.
        sure: the caller assumes that Temporal knows the run, so this is not checked first.

    Raises:
        InvalidInput, Conflict: the run refuses it, or has ended.
        TemporalUnavailable: no host takes it.
        QuotaExceeded: the run has to be resumed, and has no place.
    """
    run_id = record.run_id

    async def is_resumed() -> bool:
        return name != "finish" and await runs.resume_for_client(record.tenant, run_id)

    audit.touched(run_id)
    if not sure:
        await runs.make_sure(record)
    async with temporal.client() as client:
        for attempt in range(_TRIES):
            await asyncio.sleep(attempt * _PAUSE_S)
            try:
                return await client.get_workflow_handle(run_id).execute_update(
                    name, args=messages, rpc_timeout=_PATIENCE
                )
            except WorkflowUpdateRPCTimeoutOrCancelledError:
                break
            except WorkflowUpdateFailedError as error:
                refusal = _refusal(error, place)
                if refusal and not (isinstance(refusal, Conflict) and await is_resumed()):
                    raise refusal from None
            except RPCError as error:
                if error.status == RPCStatusCode.FAILED_PRECONDITION:  # its workflow task failed
                    continue
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
                if (await runs.view(record.tenant, run_id)).state != "running" and not await is_resumed():
                    raise Conflict(f"{run_id} has ended") from None
                await runs.make_sure(record)
    raise TemporalUnavailable(f"{run_id} does not answer: is a control host up?")


def _refusal(error: WorkflowUpdateFailedError, place: str) -> Exception | None:
    """Return a refused update's reason as an error of the service; None if the update was lost."""
    for cause in causes_of(error):
        match cause:
            case ApplicationError(type="InvalidInput"):
                return InvalidInput(cause.message, place)
            case ApplicationError(type="Conflict"):
                return Conflict(cause.message)
            case ApplicationError(type=kind) if kind in LOST_UPDATES:
                return None
    return error


# --- Train steps of RL runs behind the API: sent, shown, and waited for ---

# Pauses between checks of a step that is waited for; they grow, so that long steps are checked less often.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25


class TrainSteps:
    """Hands train steps to RL runs, and reads their status."""

    def __init__(self, runs: Runs, store: ObjectStore, temporal: Temporal) -> None:
        self._runs = runs
        self._store = store
        self._temporal = temporal

    async def train(self, tenant: str, run_id: str, request: StepRequest, wait_s: float = 0) -> StepStatus:
        """Hand a step to its run. A repeated key gives the same step.

        Args:
            wait_s: how long to wait for the step's end; the answer is its status then.

        Raises:
            InvalidInput: the key was used for other groups, or their URI points to a forbidden place.
            Conflict: the run takes no more steps, or too many wait.
        """
        await self._runs.check_access(tenant, request)
        request = await self._runs.sealed(tenant, request)
        record = await self.record(tenant, run_id)
        taken = await update_run(self._runs, self._temporal, record, "train_step", request, place="key")
        step = StepStatus.model_validate(taken)
        return await self.show(tenant, run_id, step.step, wait_s)

    async def finish(self, tenant: str, run_id: str) -> RunView:
        """Let an RL run end after the steps that wait: no more come. Raises Conflict when it has ended."""
        await update_run(self._runs, self._temporal, await self.record(tenant, run_id), "finish")
        return await self._runs.view(tenant, run_id)

    async def show(self, tenant: str, run_id: str, step: int, wait_s: float = 0) -> StepStatus:
        """Return a train step's status, or its end if that comes in time. 0: the policy before the first.

        Raises NotFound.
        """
        record = await self.record(tenant, run_id)
        end, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
        while True:
            found = await self._step(record, step)
            if found.is_final or time.monotonic() > end:
                return found
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.2 * pause_s)

    async def _step(self, record: RunRecord, number: int) -> StepStatus:
        with suppress(NotFound):
            data = await asyncio.to_thread(self._store.get_bytes, paths.RunKeys(record.run_id).step(number))
            return StepStatus.model_validate_json(data)
        async with self._temporal.client() as client:
            handle = client.get_workflow_handle(record.run_id)
            with unless_unknown():
                answer: Any = await query(handle, "step", number)
                if answer:
                    return StepStatus.model_validate(answer)
        raise NotFound(f"{record.run_id} has no step {number}")

    async def record(self, tenant: str, run_id: str) -> RunRecord:
        """The record of a run that has train steps. Raises NotFound, or Conflict for a run of another kind."""
        record = await self._runs.record(tenant, run_id)
        if record.run.kind != "rl":
            raise Conflict(f"{run_id} is no RL run: it trains from its dataset alone")
        return record


# --- Sessions behind the API: stores commands before they are acknowledged, and reads their results ---

ASK_AT_ONCE = 4  # of those who wait for results of a session
_ASK_EACH_S = 3.0  # between looks into the store for a result that no host has sent, and at the session's state
# A command without a result for this long may wait for an earlier one that never came, which the workflow has to know.
_SLOW_S = 0.25
# A session's workflow hears of a command a second time after this long, in case it was not running.
_TELL_AGAIN_S = 30.0
_MOST_TOLD = 4096
_DAY_S = 86_400.0
_COUNTED_BYTES = 64 << 10  # of a session's commands, counted ahead: else each is a transaction


@dataclass(eq=False)
class _Notice:
    """An update of a session's workflow on commands that have arrived. All their senders wait for it."""

    numbers: set[int] = field(default_factory=set)
    is_sent: bool = False
    is_refused: bool = False
    lost: TemporalUnavailable | None = None


@dataclass(eq=False)
class _Notices:
    """A session's notices, sent one after another: Temporal has at most ten updates of a workflow in progress.

    Hundreds of commands may arrive at once, and each that comes during an update is in the next one.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    next: _Notice = field(default_factory=_Notice)


@dataclass(eq=False)
class ResultLine:
    """Requests that wait for results of a session, by their commands' numbers.

    A session does its commands in order, so there is no result for those behind. If all of hundreds asked its host,
    each again every few seconds, this process would do little else.
    """

    places: list[tuple[int, int, asyncio.Future[None]]] = field(default_factory=list)
    num_came: int = 0

    @asynccontextmanager
    async def place(self, number: int, wait_s: float) -> AsyncIterator[bool]:
        """Wait in line for a `with` block. Yields True as soon as only `ASK_AT_ONCE` are at the front, else False."""
        self.num_came += 1
        place = number, self.num_came, asyncio.get_running_loop().create_future()
        bisect.insort(self.places, place, key=lambda each: each[:2])
        self._call()
        try:
            if not place[2].done():
                await asyncio.wait([place[2]], timeout=wait_s)
            yield place[2].done()
        finally:
            self.places.remove(place)
            self._call()

    def _call(self) -> None:
        for _, _, is_at_front in self.places[:ASK_AT_ONCE]:
            if not is_at_front.done():
                is_at_front.set_result(None)


@dataclass(eq=False)
class Sessions:
    """Hands commands to sessions, and reads their results."""

    _runs: Runs
    _rows: RunRows
    _store: ObjectStore
    _temporal: Temporal
    _quotas: Quotas
    _uses: Uses
    _hosts: SessionHosts
    _results_days: float
    _pruned_until: float = 0.0
    _told: dict[tuple[str, int], float] = field(default_factory=dict)  # when a workflow heard of a command
    _notices: weakref.WeakValueDictionary[str, _Notices] = field(default_factory=weakref.WeakValueDictionary)
    _recent: Recent[RunRecord] = field(default_factory=Recent)
    _lines: weakref.WeakValueDictionary[str, ResultLine] = field(default_factory=weakref.WeakValueDictionary)

    async def send(self, tenant: str, run_id: str, number: int, asked: Asked | bytes, wait_s: float) -> CommandView:
        """Accept a command, to be done after those of lower numbers. Sending it again has no further effect.

        Args:
            wait_s: how long to wait for its result.

        Raises:
            InvalidInput: another command has this number, or a state to load is of another shape.
            NotFound: there is no such session, or no such state to load.
            Conflict: the session takes no more commands, or too many wait.
            QuotaExceeded
        """
        record = await self._record(tenant, run_id)
        data = await self._put(record, number, await self._stored_form(record, number, asked))
        return await self._wait(record, number, wait_s, data)

    async def accept(self, tenant: str, run_id: str, number: int, asked: Asked | Skip | bytes) -> None:
        """Accept a command as `send` does, and raise as it does, without waiting. `show` returns what came of it."""
        record = await self._record(tenant, run_id)
        data = await self._put(record, number, await self._stored_form(record, number, asked))
        if not (await self._hosts.ask(run_id, number, 0, data)).is_served:
            await self._tell(record, number, data)

    async def show(self, tenant: str, run_id: str, number: int, wait_s: float = 0) -> CommandView:
        """Return a command's state, or its result if that comes in time. Raises NotFound for one that never came."""
        record, keys = await self._record(tenant, run_id), RunKeys(run_id)
        if (data := await asyncio.to_thread(self._read, keys.command_result(number))) is not None:
            return await asyncio.to_thread(_view, data)
        if await asyncio.to_thread(self._store.head, keys.command(number)) is None:
            raise NotFound(f"{run_id} has no command {number}")
        return await self._wait(record, number, wait_s)

    async def close(self, tenant: str, run_id: str) -> RunView:
        """Take no more commands: the session ends after those that wait. Raises Conflict when it has ended."""
        await update_run(self._runs, self._temporal, await self._record(tenant, run_id), "finish")
        # The host of the session's worker checks this when no command is left.
        await asyncio.to_thread(self._store.put_bytes, RunKeys(run_id).is_closed, b"")
        await self._hosts.ask(run_id, 0, 0)
        return await self._runs.view(tenant, run_id)

    async def prune(self) -> None:
        """Delete the scores in results of sessions that ended `results_days` ago."""
        before = time.time() - self._results_days * _DAY_S
        # A day again: an end may come late into the index.
        for run_id, tenant in await self._rows.ended_sessions(self._pruned_until - _DAY_S, before):
            if await asyncio.to_thread(SessionResults(self._store, run_id).delete_scores):
                await self._quotas.measure(tenant, run_id)
        self._pruned_until = before

    async def _tell(self, record: RunRecord, number: int, data: bytes | None) -> None:
        """Tell the session's workflow of a command, so that it leases a worker, or drops those after a missing one.

        Raises Conflict if it takes no more commands. Then `data`, the command, is deleted from the store.
        """
        told, now = (record.run_id, number), time.monotonic()
        if now - self._told.get(told, -math.inf) < _TELL_AGAIN_S:
            return
        try:
            await self._notify(record, number)
        except Conflict:
            keys = RunKeys(record.run_id)
            if await asyncio.to_thread(self._store.head, keys.command_result(number)) is None:
                if data is not None:
                    await asyncio.to_thread(self._take_back, keys.command(number), data)
                raise
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told[told] = now

    async def _notify(self, record: RunRecord, number: int) -> None:
        """Update the workflow, with all commands of the session that wait for that. Raises as `update_run` does."""
        notices = self._notices.setdefault(record.run_id, _Notices())
        notice = notices.next
        notice.numbers.add(number)
        async with notices.turn:
            if notices.next is notice:
                notices.next = _Notice()
            if notice.lost is not None:
                raise notice.lost
            while not notice.is_sent:
                # One that the workflow refuses may not stop the others.
                numbers = {number} if notice.is_refused else notice.numbers
                sent = CommandArrived(number=number, also=tuple(sorted(numbers - {number})))
                sure = 1 not in numbers
                try:
                    await update_run(self._runs, self._temporal, record, "command", sent, place="number", sure=sure)
                except Conflict:
                    if notice.is_refused or len(numbers) == 1:
                        raise
                    notice.is_refused = True
                    continue
                except TemporalUnavailable as error:
                    notice.lost = error
                    raise
                if notice.is_refused:
                    return
                notice.is_sent = True

    async def _record(self, tenant: str, run_id: str) -> RunRecord:
        record = await self._recent.of(tenant, run_id, find=partial(self._runs.record, tenant, run_id))
        assert record is not None
        if record.run.kind != "session":
            raise Conflict(f"{run_id} is no session")
        return record

    async def _stored_form(self, record: RunRecord, number: int, asked: Asked | Skip | bytes) -> bytes:
        """Return a command's stored form; bytes already have it. The state of a `load_state` is looked up once."""
        if not isinstance(asked, SaveState | LoadState):
            audit.steps(record.run_id)
        if isinstance(asked, bytes):
            return asked
        if not isinstance(asked, LoadState):
            return await asyncio.to_thread(stored_form, asked)
        before = await asyncio.to_thread(self._read, RunKeys(record.run_id).command(number))
        if before is not None and _asks_for(before, asked):
            return before
        checkpoint = await self._checkpoint(record, asked.state)
        return stored_form(LoadStored(state=asked.state, optimizer=asked.optimizer, checkpoint=checkpoint))

    async def _checkpoint(self, record: RunRecord, state: str) -> Artifact:
        """Find the state of a run of the same tenant, which trains the same shape."""
        name = CheckpointName.parse(state)
        assert name is not None
        source = await self._runs.record(record.tenant, name.run_id)
        match source.run.trainable, record.run.trainable:
            case Lora() as theirs, Lora() as ours:
                check_same(theirs, ours, "state", in_order=True)
            case Full() as full, Full() if source.run.dtype == record.run.dtype and full == record.run.trainable:
                pass
            case theirs, ours:
                message = f"{state} is of a {theirs.kind} training in {source.run.dtype}, this session is"
                raise InvalidInput(f"{message} a {ours.kind} training in {record.run.dtype}", "state")
        # It stays from here on, as this session may have to load it again on another worker.
        await self._uses.note(RunKeys(name.run_id).prefix, record.run_id)
        found = await asyncio.to_thread(checkpoint_of_step, self._store, name)
        if found is None:
            raise NotFound(f"there is no saved state {state}: the `step` of a save_state's result names one")
        return found[1]

    async def _put(self, record: RunRecord, number: int, data: bytes) -> bytes:
        """Put a command into the store, unless there is one with its number. Returns the stored one."""
        keys, stored = RunKeys(record.run_id), data

        def put() -> bool:
            nonlocal stored
            before = number - MAX_WAITING
            if before > 0 and self._store.head(keys.command_result(before)) is None:
                message = f"{MAX_WAITING} commands may wait, and command {before} has no result yet"
                raise QueueFull(f"{message}: send command {number} later")
            if self._store.put_if_absent(keys.command(number), data):
                return True
            stored = self._store.get_bytes(keys.command(number))
            if stored != data and _is_asked(stored):
                raise InvalidInput(f"command {number} was sent before, and was another one", "number")
            return False

        put_command = partial(asyncio.to_thread, put)
        await self._quotas.put_noted(record.tenant, record.run_id, COMMANDS, len(data), put_command, _COUNTED_BYTES)
        return stored

    def _take_back(self, key: str, data: bytes) -> None:
        """Delete a command that the session does not take, unless a Gap lies under its number."""
        if self._read(key) == data and _is_asked(data):
            self._store.delete(key)

    async def _wait(self, record: RunRecord, number: int, wait_s: float, command: bytes | None = None) -> CommandView:
        """Wait for a result. If the session has ended without one, the command was not done.

        `command`: one that was just accepted. Raises Conflict if its session takes no more commands.
        """
        run_id, end, look_at = record.run_id, time.monotonic() + wait_s, 0.0
        key, line = RunKeys(run_id).command_result(number), self._lines.setdefault(record.run_id, ResultLine())
        if command is not None and len(line.places) >= ASK_AT_ONCE:
            await self._hosts.ask(run_id, number, 0, command)
        while True:
            async with line.place(number, max(0.0, end - time.monotonic())) as is_at_front:
                if not is_at_front:
                    return CommandView(number=number, state="waiting")
                ask_s = max(0.0, min(_ASK_EACH_S, end - time.monotonic()))
                reply = await self._hosts.ask(run_id, number, ask_s, command or b"")
            if (data := reply.result or await asyncio.to_thread(self._read, key)) is not None:
                return await asyncio.to_thread(_view, data)
            if not reply.is_served or ask_s >= _SLOW_S:
                try:
                    await self._tell(record, number, command)
                except Conflict:
                    if command is not None:
                        raise
                except TemporalUnavailable:
                    if not reply.is_served:
                        raise
            if not reply.is_served and time.monotonic() >= look_at:
                look_at = time.monotonic() + _ASK_EACH_S
                view = await self._runs.view(record.tenant, run_id)
                if view.state != "running" and await asyncio.to_thread(self._store.head, key) is None:
                    message = f"the session has ended ({view.state}) before this command was done"
                    message += f": {view.problem.message}" if view.problem else ""
                    return CommandView(number=number, state="dropped", message=message)
            if (left_s := end - time.monotonic()) <= 0:
                return CommandView(number=number, state="waiting")
            if not reply.is_served:
                await asyncio.sleep(min(self._hosts.pause_s(run_id), left_s))

    def _read(self, key: str) -> bytes | None:
        with suppress(NotFound):
            return self._store.get_bytes(key)
        return None


def _asks_for(data: bytes, asked: LoadState) -> bool:
    """Return True if a stored command is this `load_state`, whatever checkpoint was found for it."""
    try:
        stored = LoadStored.model_validate_json(data)
    except ValidationError:
        return False
    return (stored.state, stored.optimizer) == (asked.state, asked.optimizer)


def _is_asked(data: bytes) -> bool:
    """Return True for a command that a client sent, False for a Gap in the place of one that never arrived."""
    return CommandHead.of(data).kind != "gap"


def _view(data: bytes) -> CommandView:
    result = CommandResult.model_validate_json(data)
    state = "done" if result.problem is None else "dropped" if result.problem.kind == "dropped" else "failed"
    return CommandView.model_construct(number=result.number, state=state, message=None, result=result)
