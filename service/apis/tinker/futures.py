"""Ids of requests under way. They say themselves what they are of, so that a killed service needs no memory."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from shared.errors import NotFound

FutureKind = Literal["create", "passes", "optim", "save", "sampler", "load"]
_LONGEST = 4096


@dataclass(frozen=True)
class TrainingFuture:
    """A command of a model's session under way, and what its answer needs beside the command's result.

    `detail`: of `passes` the loss as it was asked for; of `save` the checkpoint's path; of `sampler` the sampling
    session's id; of `load` the path.
    """

    model_id: str
    command: int
    kind: FutureKind
    detail: str = ""

    @property
    def request_id(self) -> str:
        detail = urlsafe_b64encode(self.detail.encode()).decode()
        return f"{self.model_id}|{self.command}|{self.kind}|{detail}"

    @classmethod
    def parse(cls, request_id: str) -> Self:
        """Raises NotFound for what is no such id."""
        missing = NotFound(f"there is no request {request_id[:120]}")
        parts = request_id.split("|")
        if len(parts) != 4 or len(request_id) > _LONGEST:
            raise missing
        model_id, command, kind, detail = parts
        if kind not in get_args(FutureKind) or not (command.isascii() and command.isdigit() and len(command) <= 8):
            raise missing
        try:
            return cls(model_id, int(command), kind, urlsafe_b64decode(detail).decode())  # type: ignore[arg-type]
        except (Base64Error, ValueError):
            raise missing from None


def loss_detail(loss_fn: str, config: Mapping[str, float | str]) -> str:
    return json.dumps([loss_fn, dict(config)], separators=(",", ":"))


def loss_of_detail(detail: str) -> tuple[str, dict[str, float | str]]:
    """Raises NotFound for what `loss_detail` has not made."""
    try:
        loss_fn, config = json.loads(detail)
        if isinstance(loss_fn, str) and isinstance(config, dict):
            return loss_fn, config
    except (ValueError, RecursionError):
        pass
    raise NotFound("there is no such request")
