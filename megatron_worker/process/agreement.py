"""Agreement of an engine's ranks on errors: if one raises, all raise, so that none waits for another."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shared.errors import CorruptArtifact, InvalidInput

_MESSAGE_BYTES = 2048

T = TypeVar("T")


def everyone(world_size: int, value: T) -> list[T]:
    """Return the values of all ranks, in order of rank. They must be small and picklable. Collective."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


@contextmanager
def agreement(world_size: int, device: torch.device) -> Iterator[None]:
    """If one rank raises in the block, all do. No collective of the block may be skipped by raising."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # every rank must hear of it before it goes on
        error = raised
    first = _first_error(error, world_size, device)
    if error is not None:
        raise error
    if first is not None:
        raise first


def _first_error(error: Exception | None, world_size: int, device: torch.device) -> Exception | None:
    if world_size == 1:
        return error
    own = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    message = _encoded(error)
    own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else own[:0]
    own = own.to(device)
    everyone = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(everyone, own)
    texts = [bytes(t.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for t in everyone]
    return next((_decoded(t) for t in texts if t), None)


def _encoded(error: Exception | None) -> bytes:
    match error:
        case None:
            return b""
        case CorruptArtifact():
            return f"corrupt\n{error.place or ''}\n{error.message}".encode()[:_MESSAGE_BYTES]
        case InvalidInput():
            return f"invalid\n{error.place or ''}\n{error.message}".encode()[:_MESSAGE_BYTES]
        case OSError():
            return f"os\n{error.errno or 0}\n{error.strerror}".encode()[:_MESSAGE_BYTES]
        case _:
            return f"other\n\n{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES]


def _decoded(text: str) -> Exception:
    kind, place, message = text.split("\n", 2)
    match kind:
        case "corrupt":
            return CorruptArtifact(message, place or None)
        case "invalid":
            return InvalidInput(message, place or None)
        case "os":
            return OSError(int(place), message)
        case _:
            return RuntimeError(f"another rank failed: {message}")
