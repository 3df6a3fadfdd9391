"""Exit codes, and the errors that end a command with one or two plain lines."""

DONE = 0
USAGE = 2
FAILED = 100
NOT_FINISHED = 101
NOT_FOUND = 102
CANCELLED = 103
INTERRUPTED = 130

OF_STATE = {
    "running": NOT_FINISHED,
    "paused": NOT_FINISHED,
    "succeeded": DONE,
    "failed": FAILED,
    "cancelled": CANCELLED,
}


class Stop(Exception):
    """End the command.

    Args:
        message: what is wrong, with its place and rule.
        code: the exit code.
        advice: what to do next.
    """

    def __init__(self, message: str, code: int = FAILED, advice: str | None = None) -> None:
        self.message = message
        self.code = code
        self.advice = advice
        super().__init__(message)

    def document(self) -> dict[str, dict[str, str | int | None]]:
        """Return the error's JSON document for `--json`."""
        return {"error": {"message": self.message, "advice": self.advice, "exit_code": self.code}}


class ServiceRefused(Stop):
    """The service refused a request. `place`: the field, if it named one; `rule`: the rule that it breaks."""

    def __init__(self, rule: str, place: str | None) -> None:
        self.rule = rule
        self.place = place
        super().__init__(f"{place}: {rule}" if place else rule)

    def document(self) -> dict[str, dict[str, str | int | None]]:
        found = super().document()
        return {"error": {**found["error"], "place": self.place, "rule": self.rule}}


class Unreachable(Stop):
    """The service does not answer, or is temporarily unavailable. The call may be retried."""
