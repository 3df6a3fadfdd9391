"""The end of a run, on record in the store: what is known of it when Temporal has forgotten it, and its beginning."""

from contextlib import suppress

from temporalio import activity

from activities.host_context import HostContext, beating
from shared.contract import Frozen
from shared.errors import NotFound
from shared.runs.requests import RunId
from shared.runs.start import result_sha256
from shared.runs.status import RunStatus
from shared.storage.artifacts import read_record
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore


class Recorded(Frozen):
    """The result's URI."""

    uri: str


class BeginRequest(Frozen):
    """The start of a workflow. `execution`: the first execution of those that continue as new ones."""

    run_id: RunId
    start_id: str
    execution: str
    resumed: bool
    goes_on_from: str | None


class Begun(Frozen):
    """`refusal`: why there is nothing to do. `status`: how a resumed run had ended; None for one that had not."""

    refusal: str | None = None
    status: RunStatus | None = None


class _Start(Frozen):
    """The workflow execution that used a start."""

    execution: str


class RecordResult:
    """Lets runs begin, and records how they end."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="record_result", no_thread_cancel_exception=True)
    def record_result(self, status: RunStatus) -> Recorded:
        store = self._host.store
        key = RunKeys(status.run_id).result
        with beating():
            store.put_bytes(key, status.model_dump_json(indent=1).encode())
        return Recorded(uri=f"{store.uri}/{key}")

    @activity.defn(name="begin", no_thread_cancel_exception=True)
    def begin(self, request: BeginRequest) -> Begun:
        """Before anything else of a workflow is done: a start that was used before is refused, and so is one of a run
        that has ended otherwise than the start says. Temporal lets anybody use a start again.

        A resumed run has no result until it ends again; the one that it had is kept beside.
        """
        store, keys = self._host.store, RunKeys(request.run_id)
        with beating():
            mine, place = _Start(execution=request.execution), keys.start(request.start_id)
            is_new = store.put_if_absent(place, mine.model_dump_json().encode())
            if not is_new and read_record(store, place, _Start) != mine:
                return Begun(refusal="this start was used before, and the service starts a run anew")
            ended = result_sha256(store, request.run_id)
            if ended is not None and not (request.resumed and ended == request.goes_on_from):
                return Begun(refusal="the run has ended, and the service has not resumed it")
            return Begun(status=_reopened(store, keys)) if request.resumed else Begun()


def _reopened(store: ObjectStore, keys: RunKeys) -> RunStatus | None:
    """Take a run's result away. Returns how it had ended."""
    with suppress(NotFound):  # it was moved before, or never was
        store.put_bytes(keys.previous_result, store.get_bytes(keys.result))
        store.delete(keys.result)
    try:
        return read_record(store, keys.previous_result, RunStatus)
    except NotFound:
        return None
