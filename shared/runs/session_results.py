"""The results of a session's commands in the store. Old scores are deleted; the results stay."""

from collections import deque
from contextlib import suppress

from longshore.commands import CommandResult
from shared.errors import NotFound
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import Ledger

# A session's newest results keep their scores: this many, and this many bytes. That is more than the results of all
# commands that may wait (`MAX_WAITING`), so a client that reads results as they come loses none.
MOST_SCORED, MOST_SCORED_BYTES = 4096, 5 << 30
_SMALL_BYTES = 2048  # smaller results are not rewritten: that saves too little


class SessionResults:
    """Stores the results of a session's commands. Results with scores count as stored bytes of the tenant. Blocking."""

    def __init__(
        self, store: ObjectStore, tenant: str, run_id: str, most: int = MOST_SCORED, most_bytes: int = MOST_SCORED_BYTES
    ) -> None:
        """`most`, `most_bytes`: the newest results that keep their scores."""
        self._store = store
        self._keys = RunKeys(run_id)
        self._run_id = run_id
        self._ledger = Ledger(store, tenant)
        self._most, self._most_bytes = most, most_bytes
        self._scored: deque[tuple[int, int]] | None = None  # numbers and bytes, the oldest first

    def has(self, number: int) -> bool:
        return self._store.head(self._keys.command_result(number)) is not None

    def put(self, number: int, data: bytes) -> None:
        """Store a result, which tells its client that the command is done. Then delete the scores of old ones, if the
        session has too many.
        """
        is_small = len(data) <= _SMALL_BYTES
        if not is_small:
            self._ledger.bring_result(self._run_id, number, len(data))
        self._store.put_bytes(self._keys.command_result(number), data)
        if not is_small:
            self._bound(number, len(data))

    def _bound(self, number: int, num_bytes: int) -> None:
        if self._scored is None:
            self._scored = deque(self._ledger.results(self._run_id))
        else:
            self._scored.append((number, num_bytes))
        while len(self._scored) > self._most or sum(size for _, size in self._scored) > self._most_bytes:
            old, size = self._scored.popleft()
            self._delete_scores(self._keys.command_result(old))
            self._ledger.forget_result(self._run_id, old, size)

    def delete_scores(self) -> None:
        """Delete the scores of all results. The results themselves stay, since they record which commands were done."""
        for info in self._store.list(self._keys.command_result()):
            if info.size > _SMALL_BYTES:
                self._delete_scores(info.key)
        for number, num_bytes in list(self._ledger.results(self._run_id)):
            self._ledger.forget_result(self._run_id, number, num_bytes)

    def _delete_scores(self, key: str) -> None:
        with suppress(NotFound):
            result = CommandResult.model_validate_json(self._store.get_bytes(key))
            if result.data is not None:
                left = result.model_copy(update={"data": None, "expired": True})
                self._store.put_bytes(key, left.model_dump_json().encode())
