"""The records of a session's commands in the store: for clients that ask, and for a session that is gone on with."""

from temporalio import activity

from activities.host_context import HostContext, beating
from activities.records.checkpoints import stored_checkpoints
from shared.contract import Frozen
from shared.jobs.commands import CommandResult
from shared.runs.requests import RunId
from shared.runs.sessions import CommandRef
from shared.storage.artifacts import read_record
from shared.storage.paths import RunKeys


class CommandRecordRequest(Frozen):
    """What came of a command that a control host has finished."""

    run_id: RunId
    command: CommandRef
    result: CommandResult


class RecoverCommandsRequest(Frozen):
    run_id: RunId


class RecoveredCommands(Frozen):
    """The commands that were done since the older of the last two checkpoints. `next`: the number behind all of them.

    `saved`: the commands of those checkpoints, the older one first.
    """

    next: int = 1
    commands: tuple[CommandRef, ...] = ()
    saved: tuple[int, int] = (0, 0)


class CommandRecords:
    """Reads and writes records of commands. A cancellation, which heartbeats bring, cuts none in two."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="record_command", no_thread_cancel_exception=True)
    def record_command(self, request: CommandRecordRequest) -> None:
        """Write a command's result, which tells its client that it is done."""
        key = RunKeys(request.run_id).command_result(request.command.number, request.command.sha256)
        with beating():
            self._host.store.put_bytes(key, request.result.model_dump_json().encode())

    @activity.defn(name="recover_commands")
    def recover_commands(self, request: RecoverCommandsRequest) -> RecoveredCommands:
        """Find what a session had done when it ended: commands with a result. The others are to be sent again."""
        keys, store = RunKeys(request.run_id), self._host.store
        with beating():
            older, newest = (0, 0, *(each.step for each in stored_checkpoints(store, request.run_id)))[-2:]
            refs = {}
            for info in store.list(keys.command_results()):
                number, sha256 = info.key.rsplit("/", 1)[-1].removesuffix(".json").split("-")
                if int(number) > older:
                    kind = read_record(store, info.key, CommandResult).kind
                    refs[int(number)] = CommandRef.model_validate({"number": number, "sha256": sha256, "kind": kind})
            following = max([newest, *refs]) + 1
            commands = tuple(refs[number] for number in sorted(refs))
            return RecoveredCommands(next=following, commands=commands, saved=(older, newest))
