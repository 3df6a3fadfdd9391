"""The context that a host gives its activities: settings, store, folders, artifacts that are made once."""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar, TypeVarTuple

from temporalio import activity

from activities.heartbeats import cancellation_check, stop_if_cancelled
from activities.sandbox import calls as confined
from longshore.fields import Artifact
from shared.settings import Settings
from shared.storage.artifacts import find_artifact, manifest_of, stage, upload_files
from shared.storage.paths import HostPaths
from shared.storage.store import ObjectStore, disk_errors, open_store
from shared.storage.stored_bytes import UseRequest, unit_of

_NEW_S = 10.0  # a younger folder is not considered abandoned, as its owner may not have locked it yet
AnswerT = TypeVar("AnswerT")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, eq=False)
class HostContext:
    """An activity's view of its host: settings, store and folders. Safe to share between threads.

    `run_begins`: called when a run begins, whose worker this host may start soon. `note_use`: called before an artifact
    is looked for that several runs may share; it waits while the artifact is being deleted.
    """

    settings: Settings
    run_begins: Callable[[], object] = lambda: None
    note_use: Callable[[UseRequest], object] = lambda _: None

    @cached_property
    def store(self) -> ObjectStore:
        return open_store(self.settings.store, self.settings.s3)

    @cached_property
    def paths(self) -> HostPaths:
        return HostPaths(self.settings.root_path)

    def stage(self, artifact: Artifact, only: tuple[str, ...] = ()) -> Path:
        """Return an artifact as a local folder, with its hashes checked (shared/storage/artifacts.py)."""
        return stage(artifact, self.paths.cache, self.settings.s3, only, cancellation_check())

    def confined(
        self,
        function: Callable[[*Arguments], AnswerT],
        *arguments: *Arguments,
        kind: confined.Kind = "short",
        answer: confined.AnswerQuestion | None = None,
        reads: Sequence[Path] = (),
        writes: Sequence[Path] = (),
    ) -> AnswerT:
        """The result of one of our functions on a stranger's data, called in a sandbox (activities/sandbox/calls.py).

        `answer`: answers questions of the function, which has no credentials of the store.
        `reads`, `writes`: the files and folders that the function sees.
        """
        limits = self.settings.confined
        return confined.call(limits, function, *arguments, kind=kind, answer=answer, reads=reads, writes=writes)

    @contextmanager
    def scratch(self, purpose: str) -> Iterator[Path]:
        """A new folder on this host, removed afterwards.

        Raises DiskFull: the block ran out of disk.
        """
        with scratch_folder(self.paths.scratch, purpose) as folder, disk_errors(folder):
            yield folder

    def use(self, key: str) -> None:
        """Keep an artifact that several runs may share until the current activity's run has ended, before it is looked
        for.
        """
        unit = unit_of(key)
        info = activity.info() if unit is not None and activity.in_activity() else None
        if unit is not None and info is not None and info.workflow_id is not None:
            self.note_use(UseRequest(unit=unit, run_id=info.workflow_id))

    def keep(self, key: str, folder: Path) -> Artifact:
        """Upload a scratch folder as the artifact under `key`."""
        check = cancellation_check()
        return upload_files(self.store, key, folder, manifest_of(folder, check), check)

    def made_once(self, key: str, purpose: str, make: Callable[[Path], object], anew: bool = False) -> Artifact:
        """The artifact under a key, made in a scratch folder if the store has none. It is kept until its run ends.

        Args:
            key: derived from everything that `make` depends on.
            make: fills the folder that it is given. If it raises, nothing is kept and the error is raised.
            anew: make it even if the store has it.
        """
        self.use(key)
        if not anew and (done := find_artifact(self.store, key)):
            return done
        with self.scratch(purpose) as folder:
            make(folder)
            return self.keep(key, folder)


class OnHost:
    """Activities of a host."""

    def __init__(self, host: HostContext) -> None:
        self._host = host


@dataclass(frozen=True)
class Parts:
    """Finished parts of an activity's result, by number. They are kept in the store until the whole result is there.

    After a kill only unfinished parts are redone. `key_of`: the store key of a part, by its number.
    """

    store: ObjectStore
    key_of: Callable[[int], str]

    def known(self) -> frozenset[int]:
        """Return the numbers of the parts that are in the store."""
        folder = self.key_of(0).rpartition("/")[0]
        names = (PurePosixPath(info.key).stem for info in self.store.list(f"{folder}/"))
        return frozenset(int(name) for name in names if name.isdigit())

    def get(self, number: int) -> bytes:
        return self.store.get_bytes(self.key_of(number))

    def keep(self, number: int, data: bytes) -> None:
        self.store.put_bytes(self.key_of(number), data)

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            stop_if_cancelled()
            self.store.delete(self.key_of(number))


@contextmanager
def scratch_folder(parent: Path, purpose: str) -> Iterator[Path]:
    """Make a folder below `parent` that is removed afterwards. Those left by killed processes are removed first."""
    remove_abandoned(parent, f"{purpose}-*")
    folder = parent / f"{purpose}-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    with locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path, pattern: str, after_s: float = _NEW_S) -> None:
    """Remove folders below `parent` that nobody has locked, and that nobody has changed for `after_s` seconds."""
    for folder in parent.glob(pattern):
        with suppress(BlockingIOError, FileNotFoundError):  # in use, or just gone
            if folder.stat().st_mtime < time.time() - after_s:
                with locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a folder; yields the descriptor that holds the lock, until no process has it open any more.

    Raises BlockingIOError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)
