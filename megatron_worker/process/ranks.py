"""The ranks of a worker: their process group, what they agree on, faults, work in the background, staged inputs."""

import errno
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Store

from longshore.fields import Artifact, Frozen
from longshore.training import Layout
from shared.errors import CorruptArtifact, DiskFull, InvalidInput, LongshoreError
from shared.jobs.job import Job, artifacts_of
from shared.programs import INTERFACE_VARIABLE, NODE_VARIABLE, RENDEZVOUS_VARIABLE
from shared.settings import S3Settings
from shared.storage.artifacts import Manifest, stage, staged
from shared.storage.files import StageAnswer, StageRequest, write_atomically

# --- Faults: reasons why a job cannot continue, in words for its user ---

Kind = Literal["invalid_input", "corrupt_artifact", "not_finite", "disk_full", "stale_fence", "crowded", "error"]


class Fault(Frozen):
    kind: Kind
    message: str


class JobFailed(Exception):
    """A fault that all ranks know. The runner ends the job in the usual order, with a `failed` event."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)


class NotFinite(JobFailed):
    """A loss, or a gradient's norm, is not finite. No weight has changed."""

    def __init__(self, what: str, value: float) -> None:
        self.what = f"{what} is {value}"
        super().__init__(Fault(kind="not_finite", message=f"{self.what}; no weight has changed"))


class CancelledEarly(Exception):
    """The job was cancelled before its first step."""


def fault_of(error: Exception) -> Fault:
    match error:
        case JobFailed():
            return error.fault
        case CorruptArtifact():
            return Fault(kind="corrupt_artifact", message=str(error))
        case InvalidInput():
            return Fault(kind="invalid_input", message=str(error))
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            place = f" while writing {error.filename}" if error.filename else ""
            return Fault(kind="disk_full", message=f"no space is left on the worker's disk{place}")
        case DiskFull():
            return Fault(kind="disk_full", message=str(error))
        case LongshoreError():
            return Fault(kind="error", message=str(error))
        case _ if "No space left on device" in str(error):  # safetensors wraps the errno away
            return Fault(kind="disk_full", message="no space is left on the worker's disk")
        case _:
            first_line = (str(error).splitlines() or [""])[0]
            return Fault(kind="error", message=f"{type(error).__name__}: {first_line}")


# --- The process group of an engine's ranks, of the launcher or of one process; and a second group ---

_LOOPBACK, _HOST = "lo" if sys.platform == "linux" else "lo0", "127.0.0.1"
_POLL_S = 0.02
_PATIENCE = timedelta(minutes=30)
_SIDE_PATIENCE = timedelta(
    hours=6
)  # the longest that a thread may wait for its next turn; a rank that dies ends the worker


def backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def start_group(backend: str) -> Store:
    """Join the other ranks of our launcher, or of torchrun; without either, be a group of one.

    Returns the ranks' common store.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # Other launchers, of several machines, may say nothing of their ranks on this one.
    if world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        _listen_on(_LOOPBACK)
    elif NODE_VARIABLE in os.environ:
        _listen_on(os.environ.get(INTERFACE_VARIABLE, _LOOPBACK))
    store = _meeting_place(rank, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_PATIENCE)
    return store


def _listen_on(interface: str) -> None:
    """Make gloo and NCCL listen on an interface: by default they listen where the machine's name leads."""
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _meeting_place(rank: int, world_size: int) -> Store:
    if world_size == 1:
        return dist.HashStore()
    if (path := os.environ.get(RENDEZVOUS_VARIABLE)) is None:
        store: Store
        store, _, _ = next(dist.rendezvous("env://"))
        return store
    if NODE_VARIABLE in os.environ:
        return _store_of_machines(rank, Path(path))
    store = dist.FileStore(path, world_size)
    store.set_timeout(_PATIENCE)
    return store


def _store_of_machines(rank: int, port: Path) -> Store:
    """Rank 0 serves the store on loopback, and writes its port into a file. On other machines that port leads to it."""
    if rank == 0:
        listener = socket.create_server((_HOST, 0))  # the store's own would listen on every interface
        number = listener.getsockname()[1]
        store = dist.TCPStore(_HOST, number, None, True, _PATIENCE, False, master_listen_fd=listener.detach())
        write_atomically(port, str(number).encode(), is_durable=False)
        return store
    deadline = time.monotonic() + _PATIENCE.total_seconds()
    while not port.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no store of rank 0 within {_PATIENCE}")
        time.sleep(_POLL_S)
    return dist.TCPStore(_HOST, int(port.read_bytes()), timeout=_PATIENCE, wait_for_workers=False)


def join(layout: Layout, device: torch.device | None) -> torch.device:
    """Return this process's device. One process alone needs no group beforehand; several do."""
    if not dist.is_initialized():
        assert layout.world_size == 1, "a layout of several ranks needs torch.distributed to be initialised"
        _listen_on(_LOOPBACK)
        dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
    if device is not None or not torch.cuda.is_available():
        return device or torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, eq=False)
class SideRanks:
    """This rank among all. One thread of each rank uses it at a time. Tensors of any device travel by the host."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor, and wait until the other rank has it."""
        if tensor.numel():
            dist.send(tensor.detach().cpu(), to, group=self.group)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what another rank sends."""
        if not tensor.numel():
            return
        here = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        dist.recv(here, source, group=self.group)
        if here is not tensor:
            tensor.copy_(here)


_made: list[tuple[dist.ProcessGroup | None, SideRanks]] = []


def join_side_ranks() -> SideRanks:
    """Take this process's place among all ranks. Collective; a group that was made before is used again."""
    everyone = dist.group.WORLD
    if not _made or _made[0][0] is not everyone:
        size = dist.get_world_size()
        group = dist.new_group(backend="gloo", timeout=_SIDE_PATIENCE) if size > 1 else None
        _made[:] = [(everyone, SideRanks(dist.get_rank(), size, group))]
    return _made[0][1]


# --- Agreement of an engine's ranks on errors: if one raises, all raise, so that none waits for another ---

_MESSAGE_BYTES = 2048
_LONG = b"+"  # begins the length of a value that takes more bytes

T = TypeVar("T")


def everyone(value: T) -> list[T]:
    """Return the values of all ranks, in order of rank: small ones, of JSON, lists in place of tuples. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    data = json.dumps(value).encode()
    texts = _gathered(data if len(data) <= _MESSAGE_BYTES else _LONG + str(len(data)).encode(), _MESSAGE_BYTES)
    if lengths := [int(text.removeprefix(_LONG)) for text in texts if text.startswith(_LONG)]:
        texts = _gathered(data, max(lengths))
    return [json.loads(text) for text in texts]


def _gathered(data: bytes, num_bytes: int) -> list[bytes]:
    """Return every rank's bytes, with spaces behind them."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    own = torch.frombuffer(bytearray(data.ljust(num_bytes)), dtype=torch.uint8).to(device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [bytes(each.cpu().numpy()) for each in found]


@contextmanager
def agreement() -> Iterator[None]:
    """If one rank raises in the block, all do. No collective of the block may be skipped by raising."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # every rank must learn of it before it continues
        error = raised
    told = everyone(_told(error))
    if error is not None:
        raise error
    if first := next((each for each in told if each is not None), None):
        raise _error_of(*first)


def _told(error: Exception | None) -> tuple[str, str | int | None, str] | None:
    """Return an error as other ranks receive it: its kind, its place or number, and its message."""
    match error:
        case None:
            return None
        case CorruptArtifact():
            return "corrupt", error.place, error.message
        case InvalidInput():
            return "invalid", error.place, error.message
        case OSError():
            return "os", error.errno or 0, str(error.strerror)
        case _:
            return "other", None, f"another rank failed: {type(error).__name__}: {error}"


def _error_of(kind: str, place: Any, message: str) -> Exception:
    match kind:
        case "corrupt":
            return CorruptArtifact(message, place)
        case "invalid":
            return InvalidInput(message, place)
        case "os":
            return OSError(place, message)
        case _:
            return RuntimeError(message)


# --- Messages between the ranks of a worker about its work, never tensors ---
# Broadcasts, barriers, agreement on faults.

# A rank that dies ends the worker (launcher.py, startup.py). These timeouts are for a rank that lives but is stuck.
SETUP_PATIENCE = timedelta(hours=6)
STEP_PATIENCE = timedelta(seconds=30)


class AbsentRank(Exception):
    """A rank did not come to an exchange in time, or ended."""


class WorkerRanks:
    """One per process. With one rank, every method is local and free."""

    def __init__(self, store: Store, rank: int, local_rank: int, world_size: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self._store = store
        self._round = 0
        self._group: ProcessGroup | None = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=SETUP_PATIENCE)

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank."""
        if self.world_size == 1:
            assert data is not None
            return data
        # Sent as a tensor of bytes: torch's broadcast of objects would unpickle what it receives.
        length = torch.tensor([len(data or b"")])
        dist.broadcast(length, 0, self._group)
        if not int(length):
            return b""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(length)).byte()
        dist.broadcast(content, 0, self._group)
        return content.numpy().tobytes()

    def total(self, values: list[int]) -> list[int]:
        return self._reduce(values, ReduceOp.SUM)

    def largest(self, values: list[int]) -> list[int]:
        return self._reduce(values, ReduceOp.MAX)

    def barrier(self) -> None:
        self.total([0])

    def exchange(self, text: str, patience: timedelta) -> list[str]:
        """Return every rank's text. It is sent through the store, so that a missing rank is noticed by a timeout.

        Raises AbsentRank: a rank did not come in time.
        """
        if self.world_size == 1:
            return [text]
        self._round += 1
        keys = [f"exchange/{self._round}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], text)
        try:
            self._store.wait(keys, patience)
        except RuntimeError as error:  # each kind of store has its own
            raise AbsentRank(str(error)) from error
        texts = [self._store.get(key).decode() for key in keys]
        # All ranks have completed the last round by now, so the texts of the round before it can be deleted.
        self._store.delete_key(f"exchange/{self._round - 2}/{self.rank}")
        return texts

    def agree(self, action: Callable[[], T]) -> T:
        """Call `action` on every rank; a fault of one rank is raised on all.

        Raises JobFailed: the fault of the lowest rank that has one.
        """
        try:
            result, fault = action(), None
        except Exception as error:
            result, fault = None, _fault_of(error)
        self.raise_common_fault(fault, SETUP_PATIENCE)
        return result  # type: ignore[return-value]

    def agree_on(self, error: Exception, patience: timedelta = STEP_PATIENCE) -> JobFailed:
        """Agree with the other ranks on an error of this one. Returns it as a JobFailed that all ranks have.

        If a rank is missing, the error itself is raised, and ends this process.
        """
        try:
            self.raise_common_fault(_fault_of(error), patience)
        except JobFailed as failed:
            return failed
        except AbsentRank:
            raise error from None
        raise AssertionError("a fault was settled as none")

    def raise_common_fault(self, fault: Fault | None, patience: timedelta) -> None:
        """Raise JobFailed on all ranks if any of them has a fault."""
        for text in self.exchange(fault.model_dump_json() if fault else "-", patience):
            if text != "-":
                raise JobFailed(Fault.model_validate_json(text))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:  # with an error, peers may never come to the end
            dist.destroy_process_group()

    def _reduce(self, values: list[int], op: ReduceOp.RedOpType) -> list[int]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op, self._group)
        return tensor.tolist()


def _fault_of(error: Exception) -> Fault:
    """Print the trace to the worker's output, and return the fault for the user."""
    traceback.print_exception(error)
    return fault_of(error)


def connect_ranks() -> WorkerRanks:
    """Join the ranks that were started with this one; alone, be a group of one."""
    rank, local_rank, world_size = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    store = start_group(backend())
    return WorkerRanks(dist.PrefixStore("longshore", store), rank, local_rank, max(world_size, 1))


# --- Background ---
# Calls in a thread, for work that waits for a store, a disk or a network while passes of other jobs are done.

Check = Callable[[], None]
"""Raises Abandoned if nobody waits for the result of the call any more; a call checks this now and then."""
Awaited = Callable[[], bool]
"""Returns True on rank 0 once the thing that a job waits for is there. It does not block."""
_PATIENCE_S = 0.02  # a step whose inputs are cached needs less, and so does not yield


class Abandoned(Exception):
    """Nobody waits for the result of this call any more."""


class BackgroundCall(Generic[T]):
    """A call in a separate daemon thread."""

    def __init__(self, call: Callable[[Check], T], name: str = "background") -> None:
        self._is_abandoned = threading.Event()
        self._future: Future[T] = Future()
        self.result = self._future.result
        threading.Thread(target=self._do, args=(call,), name=name, daemon=True).start()

    def is_done(self, patience_s: float = 0.0) -> bool:
        """Return True if the call has ended, or ends within `patience_s` seconds."""
        return bool(wait([self._future], patience_s).done)

    def abandon(self) -> None:
        """Make the call's next check raise. This does not wait for the thread."""
        self._is_abandoned.set()

    def _do(self, call: Callable[[Check], T]) -> None:
        try:
            self._future.set_result(call(self._check))
        except BaseException as error:
            self._future.set_exception(error)

    def _check(self) -> None:
        if self._is_abandoned.is_set():
            raise Abandoned


def in_background(
    call: Callable[[Check], T], ranks: WorkerRanks, cancelled: Callable[[], bool]
) -> Generator[Awaited, None, T]:
    """Make a call on every rank, in a thread. Yields as long as some rank's has not ended, and returns the result.

    Args:
        call: it is given a check, to be called as often as it can end early. It may use no collective.

    Raises:
        JobFailed: the call failed on some rank.
        CancelledEarly: the job was cancelled first. The thread ends at its next check.
    """
    background = BackgroundCall(call)
    try:
        while ranks.largest([int(not background.is_done(_PATIENCE_S))])[0]:
            if cancelled():
                raise CancelledEarly
            yield background.is_done
        return ranks.agree(background.result)
    finally:
        background.abandon()


# --- Finds a job's inputs as local folders, with all hashes checked ---
# One rank of each machine, before the others.

_STAGING_POLL_S = 0.005
Folders = dict[Artifact, Path]
_Found = dict[Artifact, tuple[Path, Manifest]]


class Inputs(NamedTuple):
    """A job's artifacts as folders, and the SHA-256 of the base model's files, wherever they lie."""

    folders: Folders
    model_sha256: str


@dataclass(frozen=True)
class Staging:
    """Where artifacts are kept on this machine, and how those come there that are not on it.

    `s3`: how to reach a store there, of a job that is done by hand; None: the worker's host stages them.
    """

    cache: Path
    s3: S3Settings | None
    ranks: WorkerRanks

    def fetch(
        self, job: Job, cancelled: Callable[[], bool], at_hand: Collection[Artifact | None] = ()
    ) -> Generator[Awaited, None, Inputs]:
        """Return every input of the job but those in `at_hand`. Yields while it waits for a store.

        Raises:
            JobFailed: on all ranks, if one of them cannot get an input.
            CancelledEarly: the job was cancelled. The transfer ends soon, and leaves nothing in the cache.
        """
        wanted = StageRequest(artifacts=tuple(artifact for artifact in artifacts_of(job) if artifact not in at_hand))
        found = yield from self._fetch(job, wanted, cancelled)
        folders = {artifact: folder for artifact, (folder, _) in found.items()}
        return Inputs(folders, found[job.plan.model][1].contents_sha256)

    def fetch_one(
        self, job: Job, command: int, artifact: Artifact, cancelled: Callable[[], bool]
    ) -> Generator[Awaited, None, Path]:
        """Return the artifact that a session's command names as a folder. Yields and raises as `fetch`."""
        found = yield from self._fetch(job, StageRequest(artifacts=(artifact,), command=command), cancelled)
        return found[artifact][0]

    def _fetch(self, job: Job, wanted: StageRequest, cancelled: Callable[[], bool]) -> Generator[Awaited, None, _Found]:
        def find(check: Check) -> _Found:
            return self._found(job, wanted, check)

        if self.ranks.world_size > 1:
            is_first = self.ranks.local_rank == 0
            yield from in_background(lambda check: find(check) if is_first else None, self.ranks, cancelled)
        return (yield from in_background(find, self.ranks, cancelled))

    def _found(self, job: Job, wanted: StageRequest, check: Check) -> _Found:
        missing = tuple(each for each in wanted.artifacts if staged(each, self.cache, check) is None)
        if missing and self.s3 is not None:
            for artifact in missing:
                stage(artifact, self.cache, self.s3, check=check)
        elif missing and self.ranks.local_rank == 0:
            _have_staged(job, wanted.model_copy(update={"artifacts": missing}), check)
        return {artifact: self._here(artifact, check) for artifact in wanted.artifacts}

    def _here(self, artifact: Artifact, check: Check) -> tuple[Path, Manifest]:
        if (found := staged(artifact, self.cache, check)) is None:
            raise JobFailed(Fault(kind="error", message=f"{artifact.uri} is no longer in the cache, {self.cache}"))
        return found


def _have_staged(job: Job, request: StageRequest, check: Check) -> None:
    """Have the host stage artifacts, and wait for that. Raises JobFailed if it cannot."""
    path = StageAnswer.path(job.log_path)
    path.unlink(missing_ok=True)
    write_atomically(StageRequest.path(job.log_path), request.model_dump_json().encode(), is_durable=False)
    while not path.exists():
        check()
        time.sleep(_STAGING_POLL_S)
    answer = StageAnswer.model_validate_json(path.read_bytes())
    if answer.kind is not None:
        raise JobFailed(Fault(kind=answer.kind, message=answer.message))
