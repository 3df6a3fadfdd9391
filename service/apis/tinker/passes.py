"""Batches of Tinker's clients as commands of sessions, and their scores: what a child process does for a large one.

What is handed to it and what it makes lie in files.
"""

from pathlib import Path

from pydantic import TypeAdapter

from service.apis.tinker.door import loss_detail, loss_of_detail
from service.apis.tinker.translation import command_of, told
from service.apis.tinker.wire import SentRequest, head_of_body, output_bytes, plain_body, plain_bytes
from service.decoding import SMALL_BYTES, Received
from shared.contract import Frozen
from shared.errors import InvalidInput
from shared.jobs.commands import CommandResult, Forward, ForwardBackward

MAX_COMMAND_BYTES = 32 << 20
"""Of a command as it is stored, in JSON: some times as many as were sent."""
_SMALL_PLAIN_BYTES = 4 * SMALL_BYTES
_passes: TypeAdapter[Forward | ForwardBackward] = TypeAdapter(Forward | ForwardBackward)


class Head(Frozen):
    """Whose request it is: a model's, by its number."""

    model_id: str
    seq_id: int


def is_small(body: Received, encoding: str) -> bool:
    """True for a batch that is read faster than a child begins."""
    return body.is_small and plain_bytes(body.path.read_bytes(), encoding) <= _SMALL_PLAIN_BYTES


def head_of(body: str, encoding: str) -> Head:
    """Read whose request lies in a file. Raises InvalidInput for what is no request."""
    sent = head_of_body(Path(body).read_bytes(), encoding)
    return Head(model_id=sent.model_id, seq_id=sent.seq_id)


def make_command(body: str, encoding: str, made: str) -> str:
    """Write a request's command into a file. Returns what its future tells of its loss. Raises InvalidInput."""
    batch = SentRequest(plain_body(Path(body).read_bytes(), encoding)).batch()
    data = command_of(batch).model_dump_json().encode()
    if len(data) > MAX_COMMAND_BYTES:
        rule = f"as a command it has {len(data):,} bytes, and {MAX_COMMAND_BYTES:,} are taken: send less at once"
        raise InvalidInput(rule, "data")
    Path(made).write_bytes(data)
    return loss_detail(batch.loss_fn, batch.config)


def write_scores(command: str, detail: str, result: CommandResult, made: str) -> None:
    """Write the answer to a command that lies in a file."""
    asked = _passes.validate_json(Path(command).read_bytes())
    loss_fn, config = loss_of_detail(detail)
    Path(made).write_bytes(output_bytes(*told(asked, loss_fn, config, result)))
