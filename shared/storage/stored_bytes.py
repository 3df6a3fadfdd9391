"""Counts the bytes that a tenant stores, and the bytes that are being written for it.

Writes are recorded in the store before they begin, so that all processes of the service and the hosts count the same.
An entry is an empty object whose key holds the writer, the number of bytes and an expiry time. It counts until it
expires, or until a later count of the store includes the bytes themselves.

Writers take no lock. Each puts an `asked` entry before it counts, so that of two writers at least one sees the other.
The entry becomes `held` once there is room. If only other `asked` entries are in the way, the writer with the smallest
id waits until the others are decided; these withdraw and ask again. Blocking.
"""

import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import BaseModel

from shared.errors import InvalidInput, NotFound
from shared.limits import QuotaSettings
from shared.storage import paths
from shared.storage.store import ObjectStore
from shared.storage.uses import measured_record

_BELIEVED_S = 900.0  # an entry of a process that died
_RENEWED_S = 300.0
_FORGOTTEN_S = 180.0  # counts are trusted for a minute (service/accounts/tenants.py)
_PATIENCE_S = 20.0  # while other writers ask at the same moment
_PAUSE_S = 0.02
_ASKED, _HELD, _SETTLED = "asked", "held", "settled"


@dataclass(frozen=True)
class StoredCount:
    """The bytes in the store by a count that began at `at`."""

    at: float
    num_bytes: int


class Measured(BaseModel, frozen=True):
    """A tenant's bytes by category, from a scan of the store at time `at`. The ledger does not track these.

    Shared data counts in full for every tenant that uses it.
    """

    at: float = 0.0
    num_bytes: dict[str, int] = {}


def measured(store: ObjectStore, tenant: str) -> Measured:
    """Return the last measurement (activities/retention)."""
    try:
        return Measured.model_validate_json(store.get_bytes(measured_record(tenant)))
    except NotFound:
        return Measured()


@dataclass(frozen=True)
class Ledger:
    """A tenant's account of stored bytes."""

    _store: ObjectStore
    _tenant: str

    def count(self) -> StoredCount:
        """Count uploads, published adapters and models, records, runs' downloads, and sessions' scores; for the rest
        add the last measurement.
        """
        at = time.time()
        own = (f"{paths.tenant_folder(self._tenant)}/", *paths.counted_records(self._tenant))
        stored = sum(item.size for prefix in own for item in self._store.list(prefix))
        brought = sum(_bytes_of(item.key) for item in self._store.list(paths.brought(self._tenant)))
        return StoredCount(at, stored + brought + sum(measured(self._store, self._tenant).num_bytes.values()))

    def written_since(self, at: float) -> int:
        """Bytes that are being written, or were after a count began."""
        return sum(max(num_bytes.values()) for num_bytes in self.writers_since(at).values())

    def writers_since(self, at: float) -> dict[str, dict[str, int]]:
        """Return for each writer, by its id, the bytes that it asks for, holds, or has written after a count began."""
        now, writers = time.time(), dict[str, dict[str, int]]()
        for item in list(self._store.list(paths.reserved(self._tenant))):
            writer, kind, num_bytes, when = _last(item.key).split("-")
            if float(when) < min(at, now - _FORGOTTEN_S):
                self._store.delete(item.key)
            elif float(when) > (at if kind == _SETTLED else now):
                own = writers.setdefault(writer, {})
                own[kind] = max(own.get(kind, 0), int(num_bytes))
        return writers

    def bring(self, run_id: str, name: str, num_bytes: int) -> None:
        """Record the bytes that a run has downloaded into the store outside its tenant's folder."""
        self._store.put_bytes(f"{paths.brought(self._tenant, run_id)}{name}/{num_bytes}", b"")

    def has_brought(self, run_id: str, name: str) -> bool:
        return any(True for _ in self._store.list(f"{paths.brought(self._tenant, run_id)}{name}/"))

    def bring_result(self, run_id: str, number: int, num_bytes: int) -> None:
        """Record the bytes of the result of a session's command."""
        self._store.put_bytes(self._result(run_id, number, num_bytes), b"")

    def results(self, run_id: str) -> Iterator[tuple[int, int]]:
        """Yield the numbers and bytes of the results on record, in order."""
        for item in self._store.list(f"{paths.brought(self._tenant, run_id)}results/"):
            yield int(_last(item.key).partition("-")[0]), _bytes_of(item.key)

    def forget_result(self, run_id: str, number: int, num_bytes: int) -> None:
        self._store.delete(self._result(run_id, number, num_bytes))

    def _result(self, run_id: str, number: int, num_bytes: int) -> str:
        # All in one folder: in a local store an empty one would stay.
        return f"{paths.brought(self._tenant, run_id)}results/{number:08d}-{num_bytes}"

    def forget(self, run_id: str) -> None:
        """Delete the record of the bytes that a run has downloaded, after these were deleted."""
        for item in list(self._store.list(paths.brought(self._tenant, run_id))):
            self._store.delete(item.key)


class Reservation:
    """Bytes reserved before they are written: an entry in the store, replaced when more bytes are needed."""

    def __init__(self, store: ObjectStore, tenant: str) -> None:
        self._store = store
        self._ledger = Ledger(store, tenant)
        self._id = uuid.uuid4().hex
        self._prefix = f"{paths.reserved(tenant)}{self._id}"  # no folder: in a local store an empty one would stay
        self._key: str | None = None
        self._renew_at = 0.0
        self.num_bytes = 0

    def covers(self, num_bytes: int) -> bool:
        return num_bytes <= self.num_bytes and time.time() < self._renew_at

    def admit(self, num_bytes: int, most: int, counted: StoredCount) -> int:
        """Reserve `num_bytes` in all if the tenant's total stays within `most`. Returns that total.

        If there is no room, an earlier reservation does not change.
        """
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            asked = self._put(_ASKED, num_bytes, time.time() + _BELIEVED_S)
            try:
                used = self._decide(num_bytes, most, counted, give_up_at)
                if used is not None and used <= most:
                    self.hold(num_bytes)
            finally:
                self._store.delete(asked)
            if used is not None:
                return used
            time.sleep(_PAUSE_S * (1 + random.random()))

    def _decide(self, num_bytes: int, most: int, counted: StoredCount, give_up_at: float) -> int | None:
        """Return the tenant's total in bytes; None if another writer that asks at the same time goes first."""
        while True:
            others = self._ledger.writers_since(counted.at)
            others.pop(self._id, None)
            used = counted.num_bytes + num_bytes + sum(max(other.values()) for other in others.values())
            asking = [i for i, other in others.items() if max(other.values()) > _decided(other)]
            without = counted.num_bytes + num_bytes + sum(map(_decided, others.values()))
            if used <= most or without > most or time.monotonic() > give_up_at:
                return used
            if min(asking) < self._id:
                return None
            time.sleep(_PAUSE_S)

    def hold(self, num_bytes: int) -> None:
        """Reserve `num_bytes` without checking for room."""
        now = time.time()
        self._replace(self._put(_HELD, num_bytes, now + _BELIEVED_S))
        self.num_bytes, self._renew_at = num_bytes, now + _RENEWED_S

    def settle(self, num_bytes: int) -> None:
        """Mark the bytes as written. Counts that began before do not include them."""
        self._replace(self._put(_SETTLED, num_bytes, time.time()))
        self._key = None

    def drop(self) -> None:
        """Release bytes that were not written. Harmless after `settle`."""
        if self._key is not None:
            self._store.delete(self._key)
            self._key = None

    def _put(self, kind: str, num_bytes: int, when: float) -> str:
        key = f"{self._prefix}-{kind}-{num_bytes}-{when:.6f}"
        self._store.put_bytes(key, b"")
        return key

    def _replace(self, key: str) -> None:
        """Replace the entry by another; while both are there, the larger counts."""
        if key != self._key:
            self.drop()
        self._key = key


def _decided(writer: dict[str, int]) -> int:
    """Return the bytes that a writer holds or has written, without those that it only asks for."""
    return max((num_bytes for kind, num_bytes in writer.items() if kind != _ASKED), default=0)


class Room:
    """The bytes that a host may still write for a tenant, by the quota in its record (hosts have no database)."""

    def __init__(self, store: ObjectStore, tenant: str, quotas: QuotaSettings) -> None:
        self.ledger = Ledger(store, tenant)
        self._store = store
        self._tenant = tenant
        self._most = _quotas_of(store, tenant, quotas).stored_bytes

    def left(self) -> int | None:
        """Return the bytes left; None without a quota."""
        if self._most is None:
            return None
        counted = self.ledger.count()
        return max(0, self._most - counted.num_bytes - self.ledger.written_since(counted.at))

    @contextmanager
    def reserving(self, num_bytes: int, place: str) -> Iterator[None]:
        """Reserve room for bytes that are written in the block. Raises InvalidInput: there is none."""
        if self._most is None:
            yield
            return
        reservation = Reservation(self._store, self._tenant)
        try:
            used = reservation.admit(num_bytes, self._most, self.ledger.count())
            if used > self._most:
                raise InvalidInput(no_room(self._tenant, used - num_bytes, self._most, num_bytes), place)
            yield
            reservation.settle(num_bytes)
        finally:
            reservation.drop()


def no_room(tenant: str, used: int, most: int, more: int) -> str:
    return f"quota stored_bytes: {tenant} stores {used:,} bytes of {most:,}: {more:,} more are not allowed"


class _Quotas(BaseModel):
    """The fields of a tenant's record that are read here."""

    quotas: QuotaSettings = QuotaSettings()


def _quotas_of(store: ObjectStore, tenant: str, quotas: QuotaSettings) -> QuotaSettings:
    try:
        own = _Quotas.model_validate_json(store.get_bytes(paths.tenant_record(tenant))).quotas
    except NotFound:
        return quotas
    return quotas.model_copy(update=own.model_dump(exclude_unset=True))


def _last(key: str) -> str:
    return key.rpartition("/")[2]


def _bytes_of(key: str) -> int:
    return int(_last(key).rpartition("-")[2])
