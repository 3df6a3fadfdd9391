"""A trace of some optimizer steps of a live job: files beside its log, as a cancel is a file of the worker's folder."""

from pathlib import Path

from pydantic import Field

from longshore.fields import Frozen

PROFILE_ID = r"^[0-9a-f]{16}$"
MAX_STEPS = 10


class ProfileRequest(Frozen):
    """Asks a worker for torch's trace of its next steps. The worker deletes the file when it begins.

    `profile_id`: names the trace that answers it.
    """

    profile_id: str = Field(pattern=PROFILE_ID)
    steps: int = Field(ge=1, le=MAX_STEPS)

    @staticmethod
    def path(log: str) -> Path:
        """Where the host writes it."""
        return Path(log).with_name("profile.json")

    def trace(self, log: str) -> Path:
        """Where rank 0 writes the trace, by rename: Chrome's JSON, as gzip."""
        return Path(log).with_name(f"profile-{self.profile_id}.json.gz")
