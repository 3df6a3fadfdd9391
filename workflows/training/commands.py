"""The commands of a session as its workflow knows them: those that wait, and those that may have to be done again."""

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from shared.runs.sessions import MAX_WAITING, CommandRef, CommandStatus, SessionState
    from shared.runs.status import CheckpointRef

_MOST_AT_ONCE = 32  # in one call of a host


class Commands:
    """Commands by their numbers.

    Attributes:
        next: the number of the command that is done next.
        is_closing: no more are taken.
    """

    def __init__(self, before: SessionState | None) -> None:
        self.next = before.next if before else 1
        self.is_closing = before is not None and before.closing
        self.saved = before.saved if before else (0, 0)
        self._refs = {ref.number: ref for ref in before.commands} if before else {}
        self._failed: set[int] = set()
        self._dropped: dict[int, str] = {}
        self._gap_since: float | None = None

    def known(self) -> tuple[CommandRef, ...]:
        """Those that wait, and those that are done again where a state lacks them; in order."""
        return tuple(self._refs[number] for number in sorted(self._refs))

    def done_before(self) -> tuple[CommandRef, ...]:
        """Those that have their results, and that a worker does again whose state lacks them."""
        return tuple(ref for ref in self.known() if ref.number < self.next)

    def ready(self) -> tuple[CommandRef, ...]:
        """The next ones to do, in one call: up to one whose result is more than the worker's."""
        ready: list[CommandRef] = []
        while (ref := self._refs.get(self.next + len(ready))) is not None and len(ready) < _MOST_AT_ONCE:
            ready.append(ref)
            if ref.kind == "save_state":
                break
        return tuple(ready)

    @property
    def is_ready(self) -> bool:
        return self.next in self._refs

    @property
    def num_waiting(self) -> int:
        return sum(number >= self.next for number in self._refs)

    def check(self, ref: CommandRef, has_ended: bool) -> None:
        """Refuse a command that cannot be taken. One that was taken before is no new one.

        Raises:
            ApplicationError: the number has another command, too many wait, or the session takes no more.
        """
        known = self._refs.get(ref.number)
        if known is not None and known.sha256 != ref.sha256:
            raise ApplicationError(f"command {ref.number} was sent before, and was another one", type="InvalidInput")
        if known is not None or ref.number < self.next:
            return
        if self.is_closing or has_ended:
            raise ApplicationError("the session takes no more commands: it was closed, or has ended", type="Conflict")
        if self.num_waiting >= MAX_WAITING or ref.number >= self.next + MAX_WAITING:
            rule = f"{MAX_WAITING} commands may wait, and the next one is {self.next}"
            raise ApplicationError(f"{rule}: send command {ref.number} later", type="Conflict")

    def take(self, ref: CommandRef, now: float) -> CommandStatus:
        if ref.number >= self.next:
            self._refs[ref.number] = ref
            self._dropped.pop(ref.number, None)
        self._look_for_gap(now)
        return self.status(ref.number)

    def status(self, number: int) -> CommandStatus:
        if number < self.next:
            return CommandStatus(number=number, state="failed" if number in self._failed else "done")
        if number in self._refs:
            return CommandStatus(number=number, state="waiting")
        message = self._dropped.get(number)
        return CommandStatus(number=number, state="dropped" if message else "unknown", message=message)

    def done(self, through: int, failed: tuple[int, ...], now: float) -> None:
        """Note that commands have their results in the store."""
        self.next = through + 1
        self._failed = {number for number in self._failed | set(failed) if number > through - MAX_WAITING}
        self._look_for_gap(now)

    def saved_at(self, checkpoint: CheckpointRef | None) -> None:
        """Forget what a newer state holds. The state before it may still be gone on from, should it be damaged."""
        if checkpoint is not None and checkpoint.step > self.saved[1]:
            self.saved = self.saved[1], checkpoint.step
            self._refs = {number: ref for number, ref in self._refs.items() if number > self.saved[0]}

    def gap_left_s(self, now: float, patience_s: float) -> float | None:
        """Seconds that commands still wait for those before them; None where none waits for another."""
        return None if self._gap_since is None else max(0.0, self._gap_since + patience_s - now)

    def give_up_gap(self, patience_s: float) -> None:
        """Drop the commands that waited for one that never came: they may be sent again, behind it."""
        message = f"command {self.next} did not come within {patience_s:g} s: send it, and those behind it again"
        for number in [number for number in self._refs if number >= self.next]:
            del self._refs[number]
            self._dropped[number] = message
        self._gap_since = None

    def _look_for_gap(self, now: float) -> None:
        if self.is_ready or not self.num_waiting:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = now
