"""How many bytes a tenant stores, and which are being written for it.

What is being written is on record in the store before it is there, so that every process, of the service or of a host,
counts the same: an entry is an empty object whose key says who writes how many bytes, and until when to believe it. It
counts until then, or until a later count of the store has found the bytes themselves. Blocking.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import BaseModel

from shared import paths
from shared.errors import InvalidInput, NotFound
from shared.settings import QuotaSettings
from shared.store import ObjectStore

_BELIEVED_S = 900.0  # an entry of a process that died
_RENEWED_S = 300.0
_FORGOTTEN_S = 3600.0
_SETTLED = "settled"


@dataclass(frozen=True)
class Standing:
    """What stood in the store in a count that began at `at`."""

    at: float
    num_bytes: int


class Ledger:
    """A tenant's account."""

    def __init__(self, store: ObjectStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    def count(self) -> Standing:
        """Uploads, what was published, and what runs have brought."""
        at = time.time()
        stored = sum(item.size for item in self._store.list(f"{paths.tenant_folder(self._tenant)}/"))
        brought = sum(int(_last(item.key)) for item in self._store.list(paths.brought(self._tenant)))
        return Standing(at, stored + brought)

    def written_since(self, at: float) -> int:
        """Bytes that are being written, or were after a count began."""
        now, total = time.time(), 0
        for item in list(self._store.list(paths.reserved(self._tenant))):
            kind, num_bytes, when = _last(item.key).split("-")
            if float(when) < now - _FORGOTTEN_S:
                self._store.delete(item.key)
            elif float(when) > (at if kind == _SETTLED else now):
                total += int(num_bytes)
        return total

    def bring(self, run_id: str, name: str, num_bytes: int) -> None:
        """Put on record what a run has brought into the store outside its tenant's folder."""
        self._store.put_bytes(f"{paths.brought(self._tenant, run_id)}{name}/{num_bytes}", b"")

    def forget(self, run_id: str) -> None:
        """What a run has brought is gone."""
        for item in list(self._store.list(paths.brought(self._tenant, run_id))):
            self._store.delete(item.key)


class Reservation:
    """Bytes that somebody is going to write: one entry of the account, which grows with what is known of them."""

    def __init__(self, store: ObjectStore, tenant: str) -> None:
        self._store = store
        self._prefix = f"{paths.reserved(tenant)}{uuid.uuid4().hex}/"
        self._key: str | None = None
        self._renew_at = 0.0
        self.num_bytes = 0

    def covers(self, num_bytes: int) -> bool:
        return num_bytes <= self.num_bytes and time.time() < self._renew_at

    def hold(self, num_bytes: int) -> None:
        now = time.time()
        self._replace(f"{self._prefix}held-{num_bytes}-{now + _BELIEVED_S:.6f}")
        self.num_bytes, self._renew_at = num_bytes, now + _RENEWED_S

    def settle(self, num_bytes: int) -> None:
        """They are written. Counts that began before do not know them."""
        self._replace(f"{self._prefix}{_SETTLED}-{num_bytes}-{time.time():.6f}")
        self._key = None

    def drop(self) -> None:
        """They were not written. Harmless after `settle`."""
        if self._key is not None:
            self._store.delete(self._key)
            self._key = None

    def _replace(self, key: str) -> None:
        """Both count for a moment: too many is safe."""
        self._store.put_bytes(key, b"")
        self.drop()
        self._key = key


class Room:
    """What a host may still write for a tenant: it has no database, and finds the quota on the tenant's record."""

    def __init__(self, store: ObjectStore, tenant: str, quotas: QuotaSettings) -> None:
        self.ledger = Ledger(store, tenant)
        self._store = store
        self._tenant = tenant
        self._most = _quotas_of(store, tenant, quotas).stored_bytes

    def left(self) -> int | None:
        """Bytes; None without a quota."""
        if self._most is None:
            return None
        standing = self.ledger.count()
        return max(0, self._most - standing.num_bytes - self.ledger.written_since(standing.at))

    @contextmanager
    def reserving(self, num_bytes: int, place: str) -> Iterator[None]:
        """Room for bytes that are written in the block.

        On record first and counted then: of two that do so at once at least one sees the other, so that both may be
        refused, but never too much is written.

        Raises:
            InvalidInput: there is none.
        """
        if self._most is None:
            yield
            return
        reservation = Reservation(self._store, self._tenant)
        try:
            reservation.hold(num_bytes)
            standing = self.ledger.count()
            used = standing.num_bytes + self.ledger.written_since(standing.at)
            if used > self._most:
                raise InvalidInput(no_room(self._tenant, used - num_bytes, self._most, num_bytes), place)
            yield
            reservation.settle(num_bytes)
        finally:
            reservation.drop()


def no_room(tenant: str, used: int, most: int, more: int) -> str:
    return f"quota stored_bytes: {tenant} stores {used:,} bytes of {most:,}: {more:,} more are not allowed"


class _Quotas(BaseModel):
    """Of a tenant's record, what is read here."""

    quotas: QuotaSettings = QuotaSettings()


def _quotas_of(store: ObjectStore, tenant: str, quotas: QuotaSettings) -> QuotaSettings:
    try:
        own = _Quotas.model_validate_json(store.get_bytes(paths.tenant_record(tenant))).quotas
    except NotFound:
        return quotas
    return quotas.model_copy(update=own.model_dump(exclude_unset=True))


def _last(key: str) -> str:
    return key.rpartition("/")[2]
