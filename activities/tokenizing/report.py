"""The tokenizing report: counts that say whether a dataset is what its user thinks it is."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidInput
from shared.runs.previews import LengthCount, LostRow, Report
from shared.runs.requests import Format

_MAX_LISTED = 20


class Tally:
    """Counts rows as they come."""

    def __init__(self, kind: Format, max_tokens: int) -> None:
        self._kind = kind
        self._max_tokens = max_tokens
        self._counts: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()
        self._longest = 0
        self._shortest = 0
        self._lost: list[LostRow] = []
        self._first_control_token: tuple[str, str] | None = None

    @property
    def num_rows(self) -> int:
        return self._counts["rows"]

    def add_rows(self, num_tokens_R: NDArray[np.int64]) -> None:
        if not len(num_tokens_R):
            return
        self._shortest = min(int(num_tokens_R.min()), self._shortest if self.num_rows else 1 << 62)
        self._counts["rows"] += len(num_tokens_R)
        self._longest = max(self._longest, int(num_tokens_R.max()))
        # frexp gives the exponent e with 2**(e-1) <= x < 2**e: exact powers of two need the value below.
        exponents, counts = np.unique(np.frexp(np.maximum(num_tokens_R, 1) - 0.5)[1], return_counts=True)
        self._lengths.update({int(2 ** max(0, e)): int(c) for e, c in zip(exponents, counts, strict=True)})

    def add_kept(self, num_rows: int, num_tokens: int, num_targets: int, num_truncated: int) -> None:
        self._counts.update(kept=num_rows, tokens=num_tokens, targets=num_targets, truncated=num_truncated)

    def add_too_long(self, place: str, num_tokens: int) -> None:
        self._lose("too_long", place, f"{num_tokens} tokens are more than max_tokens {self._max_tokens}")

    def add_fully_masked(self, place: str, was_truncated: bool) -> None:
        reason = "no token to train on"
        self.add_untrainable(place, f"{reason} is left within max_tokens" if was_truncated else reason)

    def add_untrainable(self, place: str, reason: str) -> None:
        """A row that says nothing, for a reason of its format's own; counted with the fully masked ones."""
        self._lose("masked", place, reason)

    def add_control_tokens(self, found: Sequence[tuple[str, str]]) -> None:
        """Rows, each by its place and the token that one of its messages quotes."""
        self._counts["control_tokens"] += len(found)
        self._first_control_token = self._first_control_token or next(iter(found), None)

    def _lose(self, count: str, place: str, reason: str) -> None:
        self._counts[count] += 1
        if len(self._lost) < _MAX_LISTED:
            self._lost.append(LostRow(place=place, reason=reason))

    def report(self) -> Report:
        counts = self._counts
        return Report(
            format=self._kind,
            num_rows=counts["rows"],
            num_kept=counts["kept"],
            num_tokens=counts["tokens"],
            num_targets=counts["targets"],
            trained_fraction=counts["targets"] / counts["tokens"] if counts["tokens"] else 0.0,
            max_tokens=self._max_tokens,
            longest_tokens=self._longest,
            num_truncated=counts["truncated"],
            num_too_long=counts["too_long"],
            num_fully_masked=counts["masked"],
            lengths=tuple(LengthCount(up_to_tokens=k, num_rows=n) for k, n in sorted(self._lengths.items())),
            lost=tuple(self._lost),
            num_control_tokens=counts["control_tokens"],
            warnings=tuple(self._warnings()),
        )

    def _warnings(self) -> Iterator[str]:
        if self._first_control_token is not None:
            place, token = self._first_control_token
            num = self._counts["control_tokens"]
            yield (
                f"messages of {num} row{'s' * (num != 1)} hold {token}, which the model reads as the token and not as "
                f"text, as transformers does; first: {place}"
            )

    def refuse_losses(self, max_lost_fraction: float, place: str) -> None:
        """Raises InvalidInput when no row is left, or more rows are lost than the run allows."""
        report = self.report()
        if not report.num_rows:
            raise InvalidInput("the dataset is empty: no file holds a row", place)
        if report.num_too_long == report.num_rows:
            raise InvalidInput(
                f"all {report.num_rows} rows are too long: the shortest has {self._shortest} tokens, "
                f"max_tokens is {self._max_tokens}",
                place,
            )
        if report.num_fully_masked == report.num_rows:
            raise InvalidInput(f"none of the {report.num_rows} rows has a token to train on{_first(report)}", place)
        if not report.num_kept:
            raise InvalidInput(f"no row is left to train on: {_losses(report)}", place)
        if report.num_lost > max_lost_fraction * report.num_rows:
            raise InvalidInput(
                f"{report.num_lost} of {report.num_rows} rows would be lost, more than max_lost_fraction "
                f"{max_lost_fraction:g}: {_losses(report)}",
                place,
            )


def _losses(report: Report) -> str:
    return f"{report.num_too_long} too long, {report.num_fully_masked} with nothing to train on{_first(report)}"


def _first(report: Report) -> str:
    """The first lost rows, to look at."""
    return "; first: " + "; ".join(f"{row.place} ({row.reason})" for row in report.lost[:3])
