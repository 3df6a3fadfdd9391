"""The context that a host gives its activities: settings, store, folders, heartbeats, artifacts that are made once."""

import contextvars
import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar, TypeVarTuple

from temporalio import activity

from activities.confined import calls as confined
from longshore.fields import Artifact
from shared.settings import Settings
from shared.storage.artifacts import find_artifact, manifest_of, stage, upload_files
from shared.storage.paths import HostPaths
from shared.storage.store import ObjectStore, disk_errors, open_store
from shared.storage.stored_bytes import BeingDeleted, unit_of, use

_NEW_S = 10.0  # a younger folder is not considered abandoned, as its owner may not have locked it yet
BEAT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.5
HOST_LEAVES = "the host is shutting down"
"""The error message of work that is given up because the host shuts down."""
_log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, eq=False)
class HostContext:
    """An activity's view of its host: settings, store and folders. Safe to share between threads."""

    settings: Settings

    @cached_property
    def store(self) -> ObjectStore:
        return open_store(self.settings.store, self.settings.s3)

    @cached_property
    def paths(self) -> HostPaths:
        return HostPaths(self.settings.root_path)

    def stage(self, artifact: Artifact, only: tuple[str, ...] = ()) -> Path:
        """Return an artifact as a local folder, with its hashes checked (shared/storage/artifacts.py)."""
        return stage(artifact, self.paths.cache, self.settings.s3, only)

    def confined(
        self,
        function: Callable[[*Arguments], AnswerT],
        *arguments: *Arguments,
        kind: confined.Kind = "short",
        answer: confined.AnswerQuestion | None = None,
    ) -> AnswerT:
        """The result of one of our functions on a stranger's data, called in a child process under limits.

        `answer`: answers questions of the function, which has no credentials of the store.
        """
        return confined.call(self.settings.confined, function, *arguments, kind=kind, answer=answer)

    @contextmanager
    def scratch(self, purpose: str) -> Iterator[Path]:
        """A new folder on this host, removed afterwards. The current activity beats until then.

        Raises DiskFull: the block ran out of disk.
        """
        with beating(), scratch_folder(self.paths.scratch, purpose) as folder, disk_errors(folder):
            yield folder

    def use(self, key: str) -> None:
        """Mark an artifact that several runs may share as used by the current activity's run, before it is looked for.

        Waits while it is being deleted, two minutes at most.
        """
        unit = unit_of(key)
        info = activity.info() if unit is not None and activity.in_activity() else None
        if unit is None or info is None or info.workflow_id is None:
            return
        with beating():
            while True:
                try:
                    use(self.store, unit, info.workflow_id, info.workflow_run_id or "")
                    break
                except BeingDeleted:
                    time.sleep(_LOOK_EVERY_S)

    def keep(self, key: str, folder: Path) -> Artifact:
        """Upload a scratch folder as the artifact under `key`."""
        return upload_files(self.store, key, folder, manifest_of(folder))

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


@contextmanager
def beating(detail: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Send the current activity's heartbeat once a second until the block ends, each with a fresh `detail()`.

    Temporal delivers cancellations with heartbeats, so an activity in this block learns of one within about a second.
    Outside an activity this does nothing.
    """
    if not activity.in_activity():
        yield
        return
    ended = threading.Event()
    context = contextvars.copy_context()  # the activity that this thread belongs to

    def beat() -> None:
        while not ended.is_set():
            try:
                activity.heartbeat(detail())
            except Exception as error:  # a busy event loop, or a server that is away: the next heartbeat may succeed
                _log.warning("a heartbeat was not sent: %r", error)
            ended.wait(BEAT_EVERY_S)

    thread = threading.Thread(target=context.run, args=(beat,), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def host_is_leaving() -> bool:
    """True when this host shuts down, so that another host must continue the work."""
    details = activity.cancellation_details()
    return activity.is_worker_shutdown() or (details is not None and details.worker_shutdown)
