"""Results of tokenizing: the report of a whole dataset, and a preview of its first rows."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from longshore.accounts import Room
from longshore.dataset_runs import Format, MixedSource, RowsSource
from longshore.fields import Frozen, Reason, Remark, added
from longshore.runs import Tenant
from longshore.training import MAX_SCALARS


class SourceShare(Frozen):
    """A source of a mixture: its units, and how many of those that are trained it gives (dataset_runs.MixedSource)."""

    num_units: int = Field(ge=1)
    weight: float | None = Field(default=None, ge=0)
    epochs: float | None = Field(default=None, gt=0)


def shares(sources: Sequence[MixedSource], num_units: Sequence[int]) -> tuple[SourceShare, ...]:
    """Return the shares of a mixture's sources, given the units of each."""
    both = zip(sources, num_units, strict=True)
    return tuple(SourceShare(num_units=n, weight=source.weight, epochs=source.epochs) for source, n in both)


class Cut(Frozen):
    """How units are cut into steps: `epochs` or `steps`, and `batch_size` or `batch_tokens`.

    An epoch's last step may be smaller. With `steps` the data is repeated for as many epochs as needed.
    """

    seed: int = Field(ge=0, lt=2**63)
    epochs: float | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    batch_tokens: int | None = Field(default=None, ge=1)
    sources: tuple[SourceShare, ...] = added((), description="of a mixture: its units are those of each, in order")

    @property
    def _is_cut(self) -> bool:
        return True

    @model_validator(mode="after")
    def _one_length_one_batch(self) -> Self:
        if self._is_cut and ((self.epochs is None) == (self.steps is None)):
            raise ValueError("give exactly one of epochs and steps")
        if self._is_cut and ((self.batch_size is None) == (self.batch_tokens is None)):
            raise ValueError("give exactly one of batch_size and batch_tokens")
        return self


class RunLength(Frozen):
    """The passes, steps and tokens of a run. `is_exact`: equal to those of its plan."""

    epochs: float
    steps: int
    tokens: int
    is_exact: bool = True


class LengthCount(Frozen):
    """The number of rows with more than half of `up_to_tokens` tokens, and at most that."""

    up_to_tokens: int
    num_rows: int


class LostRow(Frozen):
    """A row that is not trained on, and why."""

    place: str
    reason: Remark


class SourceReport(Frozen):
    """What became of the rows of a source of a mixture."""

    name: str
    format: Format
    num_rows: int
    num_kept: int
    num_tokens: int
    num_lost: int


class Report(Frozen):
    """`report.json`. Lengths are from before truncation; tokens and targets are those trained on."""

    schema_version: int = 1
    format: Format
    num_rows: int
    num_kept: int
    num_tokens: int
    num_targets: int
    trained_fraction: float
    max_tokens: int
    longest_tokens: int
    num_truncated: int
    num_too_long: int
    num_fully_masked: int
    num_refused: int = Field(default=0, description="rows for which the chat template raises an error")
    lengths: tuple[LengthCount, ...]
    lost: tuple[LostRow, ...]
    num_control_tokens: int = Field(default=0, description="rows whose messages hold the text of a control token")
    warnings: tuple[Reason, ...] = ()
    notices: tuple[Reason, ...] = Field(default=(), description="the warnings that a run on these rows also shows")
    sources: tuple[SourceReport, ...] = added((), description="of a mixture; its format is auto if theirs differ")

    @property
    def num_lost(self) -> int:
        return self.num_too_long + self.num_fully_masked + self.num_refused


class PreviewRequest(Frozen):
    """A dataset and a model as a user names them. The report covers the first `max_rows` rows."""

    source: RowsSource
    model_uri: str = Field(min_length=1, max_length=2048)
    max_tokens: int = Field(default=2048, ge=2)
    too_long: Literal["drop", "truncate"] = "drop"
    max_lost_fraction: float = Field(default=0.1, ge=0, le=1)
    num_rows: int = Field(default=4, ge=0, le=100, description="rows to show")
    max_rows: int = Field(default=100_000, ge=1, description="rows to count")
    max_seconds: float = Field(
        default=120.0, gt=0, le=200, description="seconds to count rows in; at least one row is counted"
    )
    are_prompts: bool = Field(default=False, description="rows are prompts of RL: only the model's input counts")
    labels: bool = Field(default=False, description="rows are for kto: they are counted, and none is shown")
    numbers: tuple[str, ...] = Field(
        default=(), max_length=MAX_SCALARS, description="fields that a reward model learns; as with labels"
    )


class PreviewStart(Frozen):
    """A preview's request, and its tenant. `cut`: how a run would cut the rows into steps, to compute its length."""

    tenant: Tenant
    request: PreviewRequest
    cut: Cut | None = None
    room: Room = Room()


class Span(Frozen):
    """Neighbouring tokens as text; `trained`: whether they are targets."""

    text: str
    trained: bool


class PreviewRow(Frozen):
    """A row as the model sees it. `fate`: how a run would treat it; `is_cut`: the text is shown in part.

    For a pair, `spans` are the prompt and the chosen answer, and `rejected` is the other answer.
    """

    place: str
    fate: Literal["kept", "truncated", "too_long", "fully_masked"]
    num_tokens: int
    num_targets: int
    spans: tuple[Span, ...]
    is_cut: bool
    rejected: tuple[Span, ...] = ()


class Preview(Frozen):
    """`is_complete`: the report counts every row. `problem`: why a run would refuse the dataset, if it would.

    `length`: of a run on the rows that were counted, if it was asked for.
    """

    report: Report
    is_complete: bool
    problem: str | None
    rows: tuple[PreviewRow, ...]
    length: RunLength | None = None
