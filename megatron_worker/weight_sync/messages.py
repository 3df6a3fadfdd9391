"""Messages between a trainer and a sampler, each a JSON object of one of these schemas. The trainer begins.

    trainer: Announcement     sampler: Reply
    trainer: connect          sampler: Reply, when it has the buffers; or calls, until it is in the group
    trainer: bucket           sampler: Reply, when it has read it
    trainer: commit           sampler: Reply, when samples are drawn from the version

The trainer sends `bucket` messages before earlier ones are answered, as far as there are buffers. It sends `connect`
again when a group is formed anew.
"""

from typing import Annotated, Literal

from pydantic import Field

from longshore.fields import Frozen, Sha256
from longshore.training import Lora
from megatron_worker.weight_sync.buckets import MAX_BUCKET_BYTES, Bucket
from shared.jobs.weight_sync import Transport

NUM_BUFFERS = 2
HANDLE = r"^([0-9a-f]{2}){0,512}$"
VALUE = r"^([0-9a-f]{2}){0,8192}$"
ENDPOINT = r"^([0-9a-f]{2}){1,32768}$|^[0-9a-f.:\[\]]{3,64}:[0-9]{1,5}$"


class SyncBroken(Exception):
    """The other end is gone, is silent for too long, or refuses. The message says which."""


class Announcement(Frozen):
    """A sync's first message: the version that will be sent. `shapes_sha256`: of all names and shapes (buckets.py).

    `lora`: the weights are an adapter's; absent: they are the model's own. `base_digest`: changes are to this version.
    `name`: the version replaces the one served under this name, and running samples continue with it. `waits`: without
    a name, whether the sampler waits until nobody uses the version before; otherwise it refuses the sync in that case.
    """

    schema_version: Literal[2] = 2
    run_id: str = Field(max_length=256)
    version: int = Field(ge=0)
    transport: Transport = "shared_memory"
    shapes_sha256: Sha256
    lora: Lora | None = None
    base_digest: Sha256 | None = None
    name: str | None = Field(default=None, min_length=1, max_length=512)
    waits: bool = True
    buffer_bytes: int = Field(gt=0, le=MAX_BUCKET_BYTES)


class GroupPlace(Frozen):
    """A member's place in a group whose rank 0 is the trainer. `name` is drawn anew for each group."""

    rank: int = Field(ge=1, le=64)
    size: int = Field(ge=2, le=65)
    name: Sha256


class CudaHandle(Frozen):
    """A buffer on a CUDA device of this machine, as CUDA's inter-process handles describe it; bytes in hexadecimal."""

    device: int = Field(ge=0, le=63)
    handle: str = Field(pattern=HANDLE)
    storage_bytes: int = Field(ge=0, le=2 * MAX_BUCKET_BYTES)
    storage_offset_bytes: int = Field(ge=0, le=1 << 48)
    counter_handle: str = Field(pattern=HANDLE)
    counter_offset: int = Field(ge=0, le=1 << 48)
    event_handle: str = Field(pattern=HANDLE)
    needs_event: bool


class RemoteBuffers(Frozen):
    """The trainer's buffers, for an engine that reads another process's memory.

    `endpoint`: how that engine reaches the trainer's: of NIXL its metadata in hexadecimal, of Mooncake `host:port`.
    """

    endpoint: str = Field(pattern=ENDPOINT)
    addresses: tuple[Annotated[int, Field(ge=1, lt=1 << 64)], ...] = Field(
        min_length=NUM_BUFFERS, max_length=NUM_BUFFERS
    )


class Connect(Frozen):
    """What a sampler needs besides the announcement. For shared_memory, file descriptors follow with a zero byte."""

    group: GroupPlace | None = None
    handles: tuple[CudaHandle, ...] = Field(default=(), max_length=NUM_BUFFERS)
    remote: RemoteBuffers | None = None


class Commit(Frozen):
    digest: Sha256


class SyncMessage(Frozen):
    """A message of the trainer after its first: exactly one of these fields is set."""

    connect: Connect | None = None
    bucket: Bucket | None = None
    commit: Commit | None = None


class SyncCall(Frozen):
    """A sampler's call while it joins a group (transports/rendezvous.py); the last is `joined` or `failed`."""

    do: Literal["set", "get", "check", "joined", "failed"]
    key: str = Field(default="", max_length=512)
    value: str = Field(default="", pattern=VALUE)


class SyncAnswer(Frozen):
    """`value`: the result of a get, absent if nobody has set it in time. A check gives it if the key is set."""

    value: str | None = Field(default=None, pattern=VALUE)


class SyncReply(Frozen):
    """`refused`: why the sampler takes no more. `needs_all`: it does not have the version that the changes apply to.

    `waits`: the reply will follow, as samples are still drawn from the version before. `interrupted`: the group broke
    before this message's work was done. `call`: this is no reply but a call, which the trainer answers.
    """

    refused: str | None = None
    needs_all: bool = False
    waits: bool = False
    interrupted: bool = False
    call: SyncCall | None = None
