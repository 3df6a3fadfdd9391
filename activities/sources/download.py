"""Download: a dataset's URI becomes an artifact of the run, decompressed, within the caps, with our own hashes."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import Field
from temporalio import activity
from temporalio.exceptions import CancelledError

from activities.host_context import HostContext, beating, host_is_leaving, locked, remove_abandoned
from activities.sources.datasets import LocalSource, Source, StoreSource, find_sources
from activities.sources.transfer import Allowance, compression_of, fetch, unpack
from shared.contract import Artifact, Frozen
from shared.errors import DiskFull, InvalidInput, StoreUnavailable
from shared.runs.requests import DatasetSource, RunId, Tenant
from shared.storage.artifacts import files_of, find
from shared.storage.paths import RunKeys, content_key, tenant_folder
from shared.storage.store import LocalStore, ObjectStore, disk_errors, uri_of
from shared.storage.stored_bytes import Room

_FORGET_AFTER_S = 3 * 3600


class DownloadRequest(Frozen):
    """The dataset of a run's split, and the tenant who may read it."""

    run_id: RunId
    tenant: Tenant
    split: str = Field(pattern=r"^(train|eval|groups-[0-9a-f]{32})$")
    source: DatasetSource


class Downloaded(Frozen):
    """The dataset's files, decompressed, under their own names without .gz and .zst."""

    dataset: Artifact
    num_files: int
    num_bytes: int


class Download:
    """Brings a run's dataset into the store. `keeps_parts`: what has arrived waits for another attempt."""

    def __init__(self, host: HostContext, *, keeps_parts: bool = True) -> None:
        self._host = host
        self._keeps_parts = keeps_parts

    @activity.defn(name="download")
    def download(self, request: DownloadRequest) -> Downloaded:
        """The dataset as an artifact. A run that has one already keeps it.

        Raises:
            InvalidInput: the URI leads nowhere, or where it may not; the data is empty, damaged, too large or changing.
            StoreUnavailable: the source or the store cannot be reached now; what has arrived is kept for the next try.
        """
        store = self._host.store
        key = RunKeys(request.run_id).dataset(request.split)
        room = Room(store, request.tenant, self._host.settings.quotas)
        with beating():
            dataset = find(store, key) or self._bring(request, store, key, room)
            _, manifest = files_of(dataset, self._host.settings.s3)
            if not room.ledger.has_brought(request.run_id, request.split):  # an attempt died before it said so
                room.ledger.bring(request.run_id, request.split, manifest.num_bytes)
        return Downloaded(dataset=dataset, num_files=len(manifest.files), num_bytes=manifest.num_bytes)

    def _bring(self, request: DownloadRequest, store: ObjectStore, key: str, room: Room) -> Artifact:
        downloads = self._host.paths.scratch / "downloads"
        # What no attempt came back for: of runs that were cancelled between two, and of hosts that died.
        remove_abandoned(downloads, "*", _FORGET_AFTER_S)
        sources = find_sources(request.source.uri, request.tenant, self._host.settings)
        keeps_parts = self._keeps_parts and not _is_last_attempt()
        with _scratch(downloads / content_key(request), keeps_parts) as scratch, disk_errors(scratch):
            folder = scratch / "dataset"
            shutil.rmtree(folder, ignore_errors=True)
            own, left = _own_bytes(sources, store, request.tenant), room.left()
            limits = Allowance(self._host.settings.download, None if left is None else left + own)
            num_bytes = max(0, _bring_files(sources, scratch, folder, limits) - own)
            with room.reserving(num_bytes, request.source.uri):
                dataset = self._host.keep(key, folder)
                room.ledger.bring(request.run_id, request.split, num_bytes)
            return dataset


def _own_bytes(sources: dict[str, Source], store: ObjectStore, tenant: str) -> int:
    """Count the bytes of sources in the tenant's own folder: they count there, and not again in each run's copy."""
    num_bytes, folder = 0, tenant_folder(tenant)
    for source in sources.values():
        match source:
            case LocalSource(path) if isinstance(store, LocalStore):
                if path.is_relative_to((store.root / folder).resolve()):
                    num_bytes += path.stat().st_size
            case StoreSource(place=place) if place.startswith(f"{uri_of(store, folder)}/"):
                info = source.store.head(source.key)
                num_bytes += info.size if info else 0
            case _:
                pass
    return num_bytes


def _bring_files(sources: dict[str, Source], scratch: Path, folder: Path, left: Allowance) -> int:
    """Returns how many bytes they are."""
    before = left.decompressed
    for name, source in sources.items():
        size = _bring_file(source, scratch / "parts" / content_key(name), folder / name, left)
        if size == 0:
            raise InvalidInput("the file is empty", source.place)
    return before - left.decompressed


def _bring_file(source: Source, parts: Path, target: Path, left: Allowance) -> int:
    match source:
        case LocalSource():
            with source.unchanged() as file:
                size = os.fstat(file.fileno()).st_size
                left.check(size, source.place)
                left.transferred -= size
                size = unpack(file, target, left, source.place)
        case _:
            size = _unpack_own(fetch(source, parts, left), target, left, source.place)
    left.decompressed -= size
    return size


def _unpack_own(path: Path, target: Path, left: Allowance, place: str) -> int:
    """Unpack a file that is ours, as `unpack` does: one that is not compressed needs no copy."""
    with path.open("rb") as file:
        if compression_of(file) or path.stat().st_size > left.decompressed:
            return unpack(file, target, left, place)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(path, target)
    return path.stat().st_size


@contextmanager
def _scratch(folder: Path, keeps_parts: bool) -> Iterator[Path]:
    """A folder that outlives only a failure that is worth another try, and belongs to one attempt at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError as error:
            raise StoreUnavailable("an earlier attempt at this download is still going on") from error
        try:
            yield folder
        except BaseException as error:
            if keeps_parts and _is_worth_resuming(error):
                os.utime(folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _is_worth_resuming(error: BaseException) -> bool:
    if isinstance(error, CancelledError):
        return host_is_leaving()
    return isinstance(error, StoreUnavailable) and not isinstance(error, DiskFull)


def _is_last_attempt() -> bool:
    """Outside an activity, as when it is called by hand, nobody counts attempts."""
    if not activity.in_activity():
        return False
    info = activity.info()
    most = info.retry_policy.maximum_attempts if info.retry_policy else 0  # 0: as many as it takes
    return 0 < most <= info.attempt
