"""The end of a run, on record in the store: what is known of it when Temporal has forgotten it."""

from temporalio import activity

from shared.models import Frozen
from shared.paths import RunKeys
from shared.runs import RunId, RunStatus
from shared.settings import Settings
from shared.store import open_store


class Recorded(Frozen):
    """The result's URI."""

    uri: str


class ReopenRequest(Frozen):
    """Which run goes on."""

    run_id: RunId


class RecordResult:
    """Writes `result.json`, and takes it away when a run goes on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @activity.defn(name="record_result")
    def record_result(self, status: RunStatus) -> Recorded:
        store = open_store(self._settings.store, self._settings.s3)
        key = RunKeys(status.run_id).result
        store.put_bytes(key, status.model_dump_json(indent=1).encode())
        return Recorded(uri=f"{store.uri}/{key}")

    @activity.defn(name="reopen")
    def reopen(self, request: ReopenRequest) -> None:
        """A resumed run has no result until it ends again."""
        open_store(self._settings.store, self._settings.s3).delete(RunKeys(request.run_id).result)
