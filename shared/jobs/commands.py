"""Commands as the store has them: those that a client sends (longshore/commands.py), and what the service puts beside
or in place of them.

Each command and each result is a file beside the session's job. Repeating a command from the same state has a result
that is equal to the bit, on any worker.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from longshore.commands import Datum, Forward, ForwardBackward, LoadState, OptimStep, SaveState
from longshore.fields import Artifact, Frozen
from shared.errors import InvalidInput


class LoadStored(LoadState):
    """A `load_state` as the service stores it: with the checkpoint that its name stood for when it was accepted."""

    checkpoint: Artifact


class Skip(Frozen):
    """Replaces a command that a new worker must not repeat, as it changes no state or its error might not come again.

    Its result is stored. `drops`: it has dropped the gradients accumulated so far.
    """

    kind: Literal["skip"] = "skip"
    drops: bool = False


class Gap(Frozen):
    """Replaces a command that never arrived. Its number and the following ones up to `through` are dropped."""

    kind: Literal["gap"] = "gap"
    through: int
    message: str


class CommandHead(Frozen):
    """The fields of a stored command that a host reads to pass it on to a worker; all others are ignored."""

    model_config = ConfigDict(extra="ignore")

    kind: str
    publish: bool = False
    through: int = 0
    checkpoint: Artifact | None = None


Command = Annotated[
    Forward | ForwardBackward | OptimStep | SaveState | LoadStored | Skip | Gap, Field(discriminator="kind")
]
command: TypeAdapter[Command] = TypeAdapter(Command)


def check_data(data: Sequence[Datum], vocab_size: int, max_tokens: int) -> None:
    """Raises InvalidInput for a token outside the vocabulary, or a sequence that no bin holds."""
    for number, datum in enumerate(data):
        if len(datum.tokens) > max_tokens:
            place = f"data[{number}].tokens"
            raise InvalidInput(f"{len(datum.tokens)} tokens; this session's max_tokens is {max_tokens}", place)
        if (largest := max(datum.tokens)) >= vocab_size:
            place = f"data[{number}].tokens[{datum.tokens.index(largest)}]"
            raise InvalidInput(f"token {largest} is outside the vocabulary of {vocab_size}", place)
        for index, labels in enumerate(datum.labels or ()):
            if labels and (largest := max(labels)) >= vocab_size:
                place = f"data[{number}].labels[{index}][{labels.index(largest)}]"
                raise InvalidInput(f"label {largest} is outside the vocabulary of {vocab_size}", place)
