"""The records of a session's commands in the store, as control hosts read and write them."""

from itertools import count

from temporalio import activity

from activities.host_context import HostContext, beating
from longshore.commands import CommandProblem, CommandResult
from longshore.fields import Frozen
from shared.jobs.commands import Gap
from shared.runs.requests import RunId
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

_ENDED = "the session ended before this command was done"


class CommandRecordRequest(Frozen):
    """The result of a command that a control host has finished (the publication of a saved state)."""

    run_id: RunId
    result: CommandResult


class FindCommandsRequest(Frozen):
    run_id: RunId


class FoundCommands(Frozen):
    """`next`: the first number without a result. `waiting`: the commands without one, in order. `last`: the greatest
    number with one.
    """

    next: int = 1
    waiting: tuple[int, ...] = ()
    last: int = 0
    closing: bool = False


class FillGapRequest(Frozen):
    """A command that did not come within `patience_s`, and the last one that waits for it."""

    run_id: RunId
    number: int
    through: int
    patience_s: float


class CommandRecords:
    """Reads and writes records of commands. A cancellation of these activities does not interrupt them."""

    def __init__(self, host: HostContext) -> None:
        self._store = host.store

    @activity.defn(name="record_command", no_thread_cancel_exception=True)
    def record_command(self, request: CommandRecordRequest) -> None:
        """Write a command's result, which tells its client that it is done."""
        with beating():
            key = RunKeys(request.run_id).command_result(request.result.number)
            self._store.put_bytes(key, request.result.model_dump_json().encode())

    @activity.defn(name="find_commands", no_thread_cancel_exception=True)
    def find_commands(self, request: FindCommandsRequest) -> FoundCommands:
        """Find which commands a session has done, and which wait."""
        with beating():
            return self._find(RunKeys(request.run_id))

    @activity.defn(name="drop_commands", no_thread_cancel_exception=True)
    def drop_commands(self, request: FindCommandsRequest) -> None:
        """Drop the commands that wait at a session's end. They are not done even if the session is resumed."""
        keys = RunKeys(request.run_id)
        with beating():
            found = self._find(keys)
            for number in found.waiting:
                if number < found.last:  # it should save a state, and later commands are done
                    self._say_dropped(keys, number, Gap(through=number, message=_ENDED))
            if found.waiting and found.waiting[-1] > found.last:
                gap = Gap(through=found.waiting[-1], message=_ENDED)
                self._store.put_bytes(keys.command(found.last + 1), gap.model_dump_json().encode())
                self._say_dropped(keys, found.last + 1, gap)

    @activity.defn(name="pass_over", no_thread_cancel_exception=True)
    def fill_gap(self, request: FillGapRequest) -> bool:
        """Drop the commands that wait for a missing one. Returns False if that one has arrived after all."""
        keys, number = RunKeys(request.run_id), request.number
        message = f"command {number} did not come within {request.patience_s:g} s: send it, and those behind it again"
        gap = Gap(through=request.through, message=message)
        key, data = keys.command(number), gap.model_dump_json().encode()
        with beating():
            if not self._store.put_if_absent(key, data) and self._store.get_bytes(key) != data:
                return False
            self._say_dropped(keys, number, gap)
            return True

    def _find(self, keys: RunKeys) -> FoundCommands:
        done = _numbers(self._store, keys.command_result())
        return FoundCommands(
            next=next(number for number in count(1) if number not in done),
            waiting=tuple(sorted(_numbers(self._store, keys.command()) - done)),
            last=max(done, default=0),
            closing=self._store.head(keys.is_closed) is not None,
        )

    def _say_dropped(self, keys: RunKeys, first: int, gap: Gap) -> None:
        problem = CommandProblem(kind="dropped", message=gap.message)
        for number in reversed(range(first, gap.through + 1)):  # if the first one has its result, all have
            result = CommandResult(number=number, kind=gap.kind, problem=problem)
            self._store.put_bytes(keys.command_result(number), result.model_dump_json().encode())


def _numbers(store: ObjectStore, prefix: str) -> set[int]:
    return {int(info.key.removeprefix(prefix).removesuffix(".json")) for info in store.list(prefix)}
