"""Who may ask: bearer keys, of which the service keeps SHA-256 hashes alone."""

import hashlib
import hmac
import json
import secrets
from pathlib import Path

from shared.paths import write_atomically


class ApiKeys:
    """The hashes of the keys that a service accepts, compared in constant time."""

    def __init__(self, path: Path, extra_key: str | None = None) -> None:
        """
        Args:
            path: a JSON list of hashes; a missing file is an empty list.
            extra_key: a key from the service's own settings, accepted beside those.
        """
        self._path = path
        self._hashes = _read(path)
        if extra_key:
            self._hashes.append(hash_key(extra_key))

    @property
    def is_empty(self) -> bool:
        return not self._hashes

    def accepts(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries one of our keys."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            return False
        given = hash_key(key.strip())
        return any(hmac.compare_digest(given, known) for known in self._hashes)


def new_key() -> str:
    """A fresh key: 256 random bits."""
    return f"ls-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def remember_key(path: Path, key: str) -> None:
    """Add a key's hash to the file that services read at their start."""
    hashes = _read(path)
    if hash_key(key) not in hashes:
        write_atomically(path, json.dumps([*hashes, hash_key(key)], indent=1).encode())


def keys_path(root: Path) -> Path:
    """Where a service of this root keeps the hashes."""
    return root / "service" / "api_keys.json"


def _read(path: Path) -> list[str]:
    return json.loads(path.read_bytes()) if path.exists() else []
