"""Models and adapters of the Hugging Face hub: the files of one revision, in the hub's own cache.

Data only: no code of a repository is fetched, let alone run. A hub id comes from a tenant, and the library makes paths
of it: ids and revisions have letters of an allow-list, and what the library answers is held against where it must lie.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import InvalidInput
from shared.storage.places import UserFolder

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
# As git's: branches, tags, refs/pr/1, commits. No part begins with a dot, and none is empty.
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,3}"
_HUB_ID = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(@(?P<revision>{_REVISION}))?")
_SMALL_BYTES = 128 << 20


@dataclass(frozen=True)
class HubId:
    """`org/name`, or `org/name@revision`."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "HubId | None":
        """None for what is no hub id."""
        match = _HUB_ID.fullmatch(text)
        if match is None or ".." in text or "--" in match["repository"]:
            return None
        return cls(match["repository"], match["revision"])

    @property
    def place(self) -> str:
        return f"hub id {self.repository}" + (f"@{self.revision}" if self.revision else "")

    @property
    def folder(self) -> str:
        """Its name in the hub's cache."""
        return f"models--{self.repository.replace('/', '--')}"


def snapshot(hub_id: HubId, patterns: tuple[str, ...], max_bytes: int) -> UserFolder:
    """A revision's files of these patterns, fetched where they are not in the cache.

    Raises:
        InvalidInput: there is no such revision, it may not be read, it is larger than `max_bytes`; or the hub cannot be
            reached and the cache does not have it.
    """
    from httpx import TransportError
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import DryRunError, OfflineModeIsEnabled

    try:
        listed = _asked(hub_id, max_bytes, revision=hub_id.revision, allow_patterns=list(patterns), dry_run=True)
    except (DryRunError, OfflineModeIsEnabled, TransportError) as error:
        found = _cached(hub_id, patterns, error)
    else:
        _check_sizes(hub_id, listed, max_bytes)
        commit = listed[0].commit_hash if listed else hub_id.revision
        found = _asked(hub_id, max_bytes, revision=commit, allow_patterns=list(patterns))
    repository = (Path(HF_HUB_CACHE).expanduser() / hub_id.folder).resolve()
    folder = Path(found).resolve()
    if folder.parent != repository / "snapshots":
        raise InvalidInput("the hub's cache has no such revision", hub_id.place)
    return UserFolder(folder, repository)


def _cached(hub_id: HubId, patterns: tuple[str, ...], away: Exception) -> str:
    """Find a snapshot in the cache, when the hub is away or refuses to answer."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            hub_id.repository, revision=hub_id.revision, allow_patterns=list(patterns), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise _refusal(away.__cause__ or error, hub_id.place) from error


def _check_sizes(hub_id: HubId, listed: list[Any], max_bytes: int) -> None:
    for file in listed:
        if not file.filename.endswith(".safetensors") and (file.file_size or 0) > _SMALL_BYTES:
            raise InvalidInput(f"{file.filename} has {file.file_size:,} bytes: more than such a file has", hub_id.place)
    missing = sum(file.file_size or 0 for file in listed if file.will_download)
    if missing > max_bytes:
        rule = f"{missing:,} bytes to transfer; the limit is {max_bytes:,}: download.max_bytes"
        raise InvalidInput(rule, hub_id.place)


def _asked(hub_id: HubId, max_bytes: int, **options: Any) -> Any:
    """Ask the hub. Raises InvalidInput in words; what stands for a hub that is away is the caller's."""
    from httpx import TransportError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, OfflineModeIsEnabled

    try:
        return snapshot_download(hub_id.repository, etag_timeout=10, tqdm_class=_counting(max_bytes), **options)
    except (DryRunError, OfflineModeIsEnabled, TransportError) as error:
        if options.get("dry_run"):
            raise
        raise _refusal(error, hub_id.place) from error
    except _TooLarge as error:
        rule = f"more than {max_bytes:,} bytes came; the limit is download.max_bytes"
        raise InvalidInput(rule, hub_id.place) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise _refusal(error, hub_id.place) from error


def _refusal(error: BaseException, place: str) -> InvalidInput:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    match error:
        case GatedRepoError():
            return InvalidInput("its owner has not granted access to this host's token", place)
        case RepositoryNotFoundError() | RevisionNotFoundError():
            return InvalidInput("there is no such repository or revision, or it is private", place)
        case _:
            # LocalEntryNotFoundError and OfflineModeIsEnabled are OSErrors; the library has tried more than once by now
            return InvalidInput(
                f"the hub cannot be reached from this host ({type(error).__name__}): "
                "give a folder or an s3:// URI, or bring it into the hub's cache first",
                place,
            )


class _TooLarge(Exception):
    """More came than may."""


def _counting(max_bytes: int) -> type:
    """A progress bar that shows nothing and ends a transfer that is larger than was said: the library has no other."""
    from huggingface_hub.utils import tqdm

    class Counting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            self._num_bytes = 0
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._num_bytes += int(n or 0) if self._counts_bytes else 0
            if self._num_bytes > max_bytes:
                raise _TooLarge
            shown: bool | None = super().update(n)
            return shown

    return Counting
