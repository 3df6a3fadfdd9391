"""Errors that cross a boundary. Everything else is a bug or a passing fault, and propagates."""

import re

from longshore.fields import bounded

# The part of a place that is hidden from users: a tenant's folder in the store and, for an upload, also its hash.
_OF_TENANT = re.compile(r"/tenants/[a-z0-9-]+/(?:uploads/[0-9a-f]{64}/)?")


class LongshoreError(Exception):
    """The parent of every error that Longshore raises on purpose. Its text is bounded."""

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))


class InvalidInput(LongshoreError):
    """Something that a user sent cannot be used. Never retried.

    Args:
        message: the problem and the rule that it breaks, in a sentence that a user can act on.
        place: its location: a field, a file, `file:line`, or a URI. A key in a tenant's folder of the store is
            shortened to the part that the tenant knows: `train.jsonl:12` of an upload, `adapters/NAME/v000003` of a
            published adapter.
    """

    def __init__(self, message: str, place: str | None = None) -> None:
        if place is not None and (match := _OF_TENANT.search(place)):
            place = place[match.end() :]
        self.message = bounded(message)
        self.place = place and bounded(place)
        super().__init__(f"{self.place}: {self.message}" if place else self.message)


class NotFound(LongshoreError):
    """A requested object, run or checkpoint does not exist."""


class StoreUnavailable(LongshoreError):
    """The store, or a server that a user's URI names, cannot be reached or refuses us. Retried a few times."""


class SamplerUnavailable(LongshoreError):
    """A sampler cannot be reached, or gives an invalid answer. Retried."""


class SamplerMismatch(LongshoreError):
    """A sampler's logprobs differ from the trainer's: its weights or its computation differ. Never retried."""


class DiskFull(StoreUnavailable):
    """The disk has no space left for a file. Its incomplete part is removed."""


class CorruptArtifact(InvalidInput):
    """Bytes in the store or on disk differ from their manifest."""


class WorkerLost(LongshoreError):
    """The worker process ended, or went silent, without a terminal event."""


class LeaseLost(WorkerLost):
    """A worker's lease ended for a reason outside its process: its host was killed, or it serves another lease."""


class HostLeft(LeaseLost):
    """The host that held the lease is shutting down in good order. This does not count as a loss of the worker."""


# --- Errors of the service: service/apis/errors.py maps them to HTTP answers ---


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
