"""Errors of the service that callers distinguish; apis/errors.py maps them to HTTP answers."""

from shared.errors import LongshoreError


class Conflict(LongshoreError):
    """The run's state forbids the request."""


class QueueFull(Conflict):
    """As many commands of a session wait as may. The command can be sent again when some are done."""


class TemporalUnavailable(LongshoreError):
    """The Temporal server, or a worker behind it, does not answer."""


class WrongSealKey(TemporalUnavailable):
    """This process lacks a key that other processes seal with. Their payloads wait for a process that has it."""


class Forbidden(LongshoreError):
    """The key lacks a scope that the request needs."""


class Busy(LongshoreError):
    """A tenant does as much at once as it may. The request can be repeated when something has ended."""


class QuotaExceeded(LongshoreError):
    """A tenant's quota would be broken. Asking again does not help until something ends or is deleted.

    Args:
        quota: its name: a field of QuotaSettings.
        message: the usage and its limit.
    """

    def __init__(self, quota: str, message: str) -> None:
        self.quota = quota
        super().__init__(f"quota {quota}: {message}")


class DatabaseUnavailable(LongshoreError):
    """The database cannot be reached, or is locked for too long. The store and Temporal do not need it."""


class DevError(LongshoreError):
    """The stack cannot start, in words for its user."""
