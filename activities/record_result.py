"""The end of a run, on record in the store: what is known of it when Temporal has forgotten it."""

from contextlib import suppress

from temporalio import activity

from activities.heartbeat import beating
from shared.artifacts import read_record
from shared.errors import NotFound
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


class Reopened(Frozen):
    """How the run had ended; None for one that had not."""

    status: RunStatus | None = None


class RecordResult:
    """Writes `result.json`, and takes it away when a run goes on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @activity.defn(name="record_result", no_thread_cancel_exception=True)
    def record_result(self, status: RunStatus) -> Recorded:
        store = open_store(self._settings.store, self._settings.s3)
        key = RunKeys(status.run_id).result
        with beating():
            store.put_bytes(key, status.model_dump_json(indent=1).encode())
        return Recorded(uri=f"{store.uri}/{key}")

    @activity.defn(name="reopen", no_thread_cancel_exception=True)
    def reopen(self, request: ReopenRequest) -> Reopened:
        """A resumed run has no result until it ends again; the one that it had is kept beside."""
        store, keys = open_store(self._settings.store, self._settings.s3), RunKeys(request.run_id)
        with beating():
            with suppress(NotFound):  # it was moved before, or never was
                store.put_bytes(keys.previous_result, store.get_bytes(keys.result))
                store.delete(keys.result)
            try:
                return Reopened(status=read_record(store, keys.previous_result, RunStatus))
            except NotFound:
                return Reopened()
