"""The context that a host gives its activities: settings, store, folders, and artifacts that are made only once."""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from activities.confined import calls as confined
from activities.heartbeat import beating
from shared.contract import Artifact
from shared.settings import Settings
from shared.storage.artifacts import find, seal, stage, upload
from shared.storage.paths import HostPaths
from shared.storage.store import ObjectStore, disk_errors, open_store

_NEW_S = 10.0  # between its making and its lock, a folder looks abandoned
AnswerT = TypeVar("AnswerT")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, eq=False)
class HostContext:
    """Safe to share between threads."""

    settings: Settings

    @cached_property
    def store(self) -> ObjectStore:
        return open_store(self.settings.store, self.settings.s3)

    @cached_property
    def paths(self) -> HostPaths:
        return HostPaths(self.settings.root_path)

    def stage(self, artifact: Artifact, only: tuple[str, ...] = ()) -> Path:
        """An artifact as a local folder (shared/storage/artifacts.py)."""
        return stage(artifact, self.paths.cache, self.settings.s3, only)

    def confined(
        self,
        function: Callable[[*Arguments], AnswerT],
        *arguments: *Arguments,
        kind: confined.Kind = "short",
    ) -> AnswerT:
        """The result of one of our functions on a stranger's data, called in a child process under limits."""
        return confined.call(self.settings.confined, function, *arguments, kind=kind)

    @contextmanager
    def scratch(self, purpose: str) -> Iterator[Path]:
        """A new folder on this host, removed afterwards. The current activity beats until then.

        Raises:
            DiskFull: the block ran out of disk.
        """
        with beating(), scratch_folder(self.paths.scratch, purpose) as folder, disk_errors(folder):
            yield folder

    def keep(self, key: str, folder: Path) -> Artifact:
        """Seal a folder and upload it as the artifact under `key`."""
        seal(folder)
        return upload(self.store, key, folder)

    def made_once(self, key: str, purpose: str, make: Callable[[Path], object]) -> Artifact:
        """The artifact under a key, made in a scratch folder where the store has none.

        Args:
            key: derived from everything that `make` depends on.
            make: fills the folder that it is given. What it raises is raised, and nothing is kept.
        """
        if done := find(self.store, key):
            return done
        with self.scratch(purpose) as folder:
            make(folder)
            return self.keep(key, folder)


@contextmanager
def scratch_folder(parent: Path, purpose: str) -> Iterator[Path]:
    """A new folder below `parent`, gone afterwards, and so are those whose processes were killed."""
    _remove_abandoned(parent, purpose)
    folder = parent / f"{purpose}-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, purpose: str) -> None:
    for folder in parent.glob(f"{purpose}-*"):
        with suppress(BlockingIOError, FileNotFoundError):  # in use, or just gone
            if folder.stat().st_mtime < time.time() - _NEW_S:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The kernel lets go of the lock when the process dies. Raises BlockingIOError while another holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
