"""Errors that cross a boundary. Everything else is a bug or a passing fault, and propagates."""

import re

from longshore.fields import bounded

# The part of a place that is hidden from users: a tenant's folder in the store and, of an upload, also its hash.
_OF_TENANT = re.compile(r"/tenants/[a-z0-9-]+/(?:uploads/[0-9a-f]{64}/)?")


class LongshoreError(Exception):
    """The parent of every error that Longshore raises on purpose. Its text is bounded."""

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))


class InvalidInput(LongshoreError):
    """Something a user sent cannot be used. Never retried.

    Args:
        message: what is wrong and which rule it breaks, in a sentence a user can act on.
        place: where it is: a field, a file, `file:line`, or a URI. Of a place in a tenant's folder of the store,
            what the tenant knows it by: `train.jsonl:12` of an upload, `adapters/NAME/v000003` of what was published.
    """

    def __init__(self, message: str, place: str | None = None) -> None:
        if place is not None and (match := _OF_TENANT.search(place)):
            place = place[match.end() :]
        self.message = bounded(message)
        self.place = place and bounded(place)
        super().__init__(f"{self.place}: {self.message}" if place else self.message)


class NotFound(LongshoreError):
    """An object, a run or a checkpoint that was asked for is not there."""


class StoreUnavailable(LongshoreError):
    """The store, or a server that a user's URI names, cannot be reached or refuses us. Retried a few times."""


class SamplerUnavailable(LongshoreError):
    """A sampler cannot be reached, or does not answer as it should. Retried."""


class SamplerMismatch(LongshoreError):
    """A sampler's logprobs are not the trainer's: it serves other weights, or computes otherwise. Never retried."""


class DiskFull(StoreUnavailable):
    """The disk has no space left for a file of ours. Its incomplete part is removed."""


class CorruptArtifact(InvalidInput):
    """Bytes in the store or on disk differ from what their manifest says."""


class WorkerLost(LongshoreError):
    """The worker process ended, or went silent, without a terminal event."""


class LeaseLost(WorkerLost):
    """A worker's lease ended for a reason outside its process: its host was killed, or it serves another lease."""


class HostLeft(LeaseLost):
    """The host that held the lease is shutting down in good order. This does not count as a loss of the worker."""


UNFIT, AVOIDED = "HostUnfit", "HostAvoided"
"""Types of the errors with which a host refuses a lease: it lacks something; the run has lost a worker there, and other
hosts take leases. Neither counts as a loss of the worker by that host."""
