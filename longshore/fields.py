"""The base class of all models exchanged between processes, and their common types."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

PATTERN_WORDS: dict[str, str] = {}
"""By pattern, what is said of text that does not match it."""


def pattern(expression: str, words: str, **rules: Any) -> Any:
    """Return `Field(pattern=expression, **rules)`, and register `words` as the text of errors about the pattern."""
    PATTERN_WORDS[expression] = words
    return Field(pattern=expression, **rules)


def added(default: Any, **rules: Any) -> Any:
    """Return `Field(default, **rules)` for a field that the last release does not have (CONTRIBUTING.md).

    It is left out of JSON if it has its default. So hosts of the last release, which refuse names that they do not
    know, continue runs that do not use it, and refuse runs that do. A release later it may be a `Field` like any other.
    """
    return Field(default, exclude_if=lambda value: value == default, **rules)


MOST_CHARACTERS = 4_000
"""Of an error's words, which may quote what a user sent: Temporal's payloads have little room."""


def bounded(text: str, most: int = MOST_CHARACTERS) -> str:
    """Cut a long text in its middle; characters that UTF-8 cannot hold become `?`."""
    if (left_out := len(text) - most) > 0:
        text = f"{text[: most * 3 // 4]} [... {left_out:,} characters ...] {text[-(most // 4) :]}"
    return text.encode(errors="replace").decode()


NO_NUL = r"^[^\x00]*$"


def only(*allowed: object, words: str) -> BeforeValidator:
    """Return a validator that refuses, with the message `words`, every value except None and those in `allowed`.

    For fields that clients send although they have no effect here. It runs before pydantic checks types and bounds,
    since pydantic's message would be unhelpful (for `ge=0, le=0`: "Input should be less than or equal to 0").
    """

    def check(value: object) -> object:
        if value is not None and (isinstance(value, bool) or value not in allowed):
            raise PydanticCustomError("not_applied", words)
        return value

    return BeforeValidator(check)


Reason = Annotated[str, AfterValidator(bounded)]
"""Why something failed, in words: bounded, as those of errors are."""
Remark = Annotated[str, AfterValidator(lambda text: bounded(text, 500))]
"""The same of one row of many."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[
    str,
    pattern(
        r"^[a-z0-9][a-z0-9._-]{0,62}$",
        "a name has at most 63 lower-case letters, digits, dots, dashes and underscores, a letter or digit first",
    ),
]


class Frozen(BaseModel):
    """Immutable, and strict about names: a field that nobody reads is an error, not a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Artifact(Frozen):
    """A folder in a store, whose `manifest.json` lists its files; `sha256` is that manifest's."""

    uri: str
    sha256: Sha256


class Fence(Frozen):
    """Identifies one scheduling of a run's work. A worker refuses work with an older fence than its lease's.

    The workflow increments `epoch` at every new lease; `attempt` is Temporal's attempt within an epoch.
    """

    epoch: int = Field(ge=1)
    attempt: int = Field(default=1, ge=1)

    @property
    def label(self) -> str:
        """A path segment that sorts like the fences: `e000003-a01`."""
        return f"e{self.epoch:06d}-a{self.attempt:02d}"

    @classmethod
    def from_label(cls, label: str) -> "Fence":
        """Parse a fence from a path segment. Raises ValueError for any other segment."""
        epoch, attempt = label.split("-")
        fence = cls(epoch=int(epoch.removeprefix("e")), attempt=int(attempt.removeprefix("a")))
        if fence.label != label:
            raise ValueError(f"not a fence: {label}")
        return fence

    def is_older_than(self, other: "Fence") -> bool:
        return (self.epoch, self.attempt) < (other.epoch, other.attempt)
