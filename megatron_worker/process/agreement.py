"""Agreement of an engine's ranks on errors: if one raises, all raise, so that none waits for another."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from shared.errors import CorruptArtifact, InvalidInput

_MESSAGE_BYTES = 2048

T = TypeVar("T")


def everyone(world_size: int, value: T) -> list[T]:
    """Return the values of all ranks, in order of rank: small ones, of JSON, lists in place of tuples. Collective."""
    if world_size == 1:
        return [value]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    data = json.dumps(value).encode()
    lengths = _gathered(torch.tensor([len(data)], device=device), world_size)
    own = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device=device)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    texts = zip(_gathered(own, world_size), lengths, strict=True)
    return [json.loads(bytes(text[: int(length)].cpu().numpy())) for text, length in texts]


def _gathered(own: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(found, own)
    return found


@contextmanager
def agreement(world_size: int, device: torch.device) -> Iterator[None]:
    """If one rank raises in the block, all do. No collective of the block may be skipped by raising."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # every rank must learn of it before it continues
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
    texts = [bytes(t.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for t in _gathered(own, world_size)]
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
