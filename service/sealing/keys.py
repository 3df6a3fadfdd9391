"""The keys of an installation, which authenticate service and hosts to each other. The first one seals, all open.

The store lists the ids of all keys that have sealed anything, in the order of their first use. So a process notices
that its own key is wrong, and can tell a payload under a key that it lacks from a forged one under an unlisted key.
"""

import hmac
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from service.errors import WrongSealKey
from shared.errors import InvalidInput, NotFound
from shared.settings import Settings
from shared.storage.files import private_folder
from shared.storage.paths import SEAL_KEYS
from shared.storage.store import ObjectStore, open_store

_KEY_FILE = "seal.key"


@dataclass(frozen=True)
class SealKey:
    secret: bytes = field(repr=False)

    @cached_property
    def id(self) -> str:
        """The key's name in payloads, in the store and in messages: 16 hex digits that do not reveal the key."""
        return self.derived(b"key id")[:8].hex()

    def derived(self, purpose: bytes) -> bytes:
        """Return a key of 32 bytes for one purpose."""
        return hmac.digest(self.secret, purpose, "sha256")


@dataclass(frozen=True)
class SealKeys:
    """The keys of one process, the one that seals first, and the store that lists the installation's."""

    keys: tuple[SealKey, ...]
    store: ObjectStore = field(repr=False)

    @classmethod
    def of(cls, settings: Settings) -> "SealKeys":
        """Return the keys of the settings, or else of a file in the root, which is made if missing."""
        return cls(seal_keys(settings), open_store(settings.store, settings.s3))

    @property
    def current(self) -> SealKey:
        return self.keys[0]

    def admit(self) -> None:
        """Put the key that seals on the store's list. Blocking. Raises as `check`."""
        if not (listed := self.check()):
            self.store.put_if_absent(SEAL_KEYS, json.dumps([self.current.id]).encode())
            listed = self.check()
        if self.current.id not in listed:
            self.store.put_bytes(SEAL_KEYS, json.dumps([*listed, self.current.id]).encode())

    def check(self) -> list[str]:
        """Return the store's list. Blocking. Raises WrongSealKey: the last key, which seals, is not one of these."""
        listed = self.listed()
        if listed and found_key(self.keys, listed[-1]) is None:
            own = ", ".join(key.id for key in self.keys)
            raise WrongSealKey(f"this installation seals with the key {listed[-1]}, and not with {own}: {MEND}")
        return listed

    def listed(self) -> list[str]:
        """Return the ids of the store's list. Blocking."""
        try:
            found: list[str] = json.loads(self.store.get_bytes(SEAL_KEYS))
        except NotFound:
            return []
        return found


MEND = "set LONGSHORE_SEAL_KEY as elsewhere (docs/hardening.md#keys-and-their-rotation)"


def seal_keys(settings: Settings) -> tuple[SealKey, ...]:
    """Return this process's keys, without checking the store's list. Raises InvalidInput: the root's file has none."""
    if settings.seal_key is not None:
        given = settings.seal_key.get_secret_value()
    else:
        private_folder(settings.root_path)
        path = settings.root_path / _KEY_FILE
        if not path.exists():
            _make_key(path)
        given = path.read_text()
    if not (keys := tuple(SealKey(part.encode()) for part in given.split())):
        raise InvalidInput("there is no key in this file", str(settings.root_path / _KEY_FILE))
    return keys


def found_key(keys: Sequence[SealKey], key_id: str) -> SealKey | None:
    return next((key for key in keys if key.id == key_id), None)


def has_seal_key(settings: Settings) -> bool:
    """Return True if this process is given a key, or its root has one: none has to be made."""
    return settings.seal_key is not None or (settings.root_path / _KEY_FILE).exists()


def sync_key(settings: Settings) -> bytes:
    """Return the key that authenticates the installation's trainers to samplers. It never goes through Temporal."""
    return seal_keys(settings)[0].derived(b"weight sync")


def _make_key(path: Path) -> None:
    """Write a new key, readable by its owner alone from the start; of several processes at once, one wins."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()
