"""Errors that cross a boundary. Everything else is a bug or a passing fault, and propagates."""


class LongshoreError(Exception):
    """The parent of every error that Longshore raises on purpose."""


class InvalidInput(LongshoreError):
    """Something a user sent cannot be used. Never retried.

    Args:
        message: what is wrong and which rule it breaks, in a sentence a user can act on.
        place: where it is: a field, a file, `file:line`, or a URI.
    """

    def __init__(self, message: str, place: str | None = None) -> None:
        self.message = message
        self.place = place
        super().__init__(f"{place}: {message}" if place else message)


class NotFound(LongshoreError):
    """An object, a run or a checkpoint that was asked for is not there."""


class StoreUnavailable(LongshoreError):
    """The store, or a server that a user's URI names, cannot be reached or refuses us. Retried a few times."""


class SamplerUnavailable(LongshoreError):
    """A sampler cannot be reached, or does not answer as it should. Retried."""


class SamplerMismatch(LongshoreError):
    """A sampler's logprobs are not the trainer's: it serves other weights, or computes otherwise. Never retried."""


class DiskFull(StoreUnavailable):
    """No space is left for a file of ours. What was begun is removed."""


class CorruptArtifact(InvalidInput):
    """Bytes in the store or on disk differ from what their manifest says."""


class WorkerLost(LongshoreError):
    """The worker process ended, or went silent, without a terminal event."""
