"""Blocks of tokenized rows as units: which rows, tokens and targets are kept, pairs as trees, and counts.

A preference pair is one unit: its common beginning once, then the chosen and the rejected answer as branches. The loss
DPO distinguishes them by columns alone: sequences 2k and 2k + 1 are a pair; the chosen has advantage +1, the rejected
-1. A KTO unit has an answer with advantage +1 or -1 as sequence 2k, and an answer to another prompt, of advantage and
weight 0, as sequence 2k + 1.

Legend: R rows of a block, two a pair; T tokens of a block, row after row; L tokens of one row; U units.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from activities.formats.specs import Unread
from activities.heartbeats import on_thread, stop_if_cancelled
from activities.host_context import OnHost
from activities.tokenizing.chat_template import HiddenThoughts
from activities.tokenizing.tokenizer import TemplateSource
from longshore.dataset_runs import Format
from longshore.fields import Artifact, Frozen
from longshore.views import Cut, LengthCount, LostRow, PlanHeader, Report
from shared.errors import InvalidInput
from shared.jobs import bins as packing
from shared.jobs.bins import Indices, check_epochs, steps_of
from shared.jobs.packed import PlanWriter, Units, UnitsWriter
from shared.jobs.prefix_tree import SequenceRow, TreeUnit, build_tree
from shared.storage.artifacts import read_record
from shared.storage.paths import content_key, packed

MAX_LISTED = 20
PAIR_COLUMNS = ("token_id", "position", "parent", "hidden_index", "label", "weight", "advantage", "sequence")
"""Columns of a pair's unit. There are none of log-probabilities: the worker computes the reference's itself."""
Ids = Sequence[int] | NDArray[np.integer]
Mask = Sequence[bool] | NDArray[np.bool_]


class Tally:
    """Counts rows as they come."""

    def __init__(
        self, kind: Format, max_tokens: int, unread: Unread | None = None, template: TemplateSource | None = None
    ) -> None:
        """`unread`: the rows' unread parts; it may grow until the report is made."""
        self._kind = kind
        self._unread = unread or Unread()
        self._template = template.text if template else ""
        self._hidden = HiddenThoughts()
        self._max_tokens = max_tokens
        self._counts: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()
        self._longest = 0
        self._shortest = 0
        self._lost: list[LostRow] = []
        self._first_control_token: tuple[str, str] | None = None
        self._first_unlike = ""

    @property
    def num_rows(self) -> int:
        return self._counts["rows"]

    def add_rows(self, num_tokens_R: NDArray[np.int64]) -> None:
        if not len(num_tokens_R):
            return
        self._shortest = min(int(num_tokens_R.min()), self._shortest if self.num_rows else 1 << 62)
        self._counts["rows"] += len(num_tokens_R)
        self._longest = max(self._longest, int(num_tokens_R.max()))
        # frexp gives e with 2**(e-1) <= x < 2**e. Less 0.5, so that a power of two is counted up to itself.
        exponents, counts = np.unique(np.frexp(np.maximum(num_tokens_R, 1) - 0.5)[1], return_counts=True)
        self._lengths.update({int(2 ** max(0, e)): int(c) for e, c in zip(exponents, counts, strict=True)})

    def add_kept(self, num_rows: int, num_tokens: int, num_targets: int, num_truncated: int) -> None:
        self._counts.update(kept=num_rows, tokens=num_tokens, targets=num_targets, truncated=num_truncated)

    def add_too_long(self, place: str, num_tokens: int) -> None:
        self._lose("too_long", place, f"{num_tokens} tokens are more than max_tokens {self._max_tokens}")

    def add_untrainable(self, place: str, reason: str) -> None:
        """Count a row that cannot be trained, for the reason given, with the fully masked ones."""
        self._lose("masked", place, reason)

    def add_refused(self, refused: Mapping[str, str]) -> None:
        """Count rows that the chat template refuses, by place, for these reasons."""
        self._counts["rows"] += len(refused)
        for place, reason in refused.items():
            self._lose("refused", place, reason)

    def add_warnings_of(
        self,
        quoted: Sequence[tuple[str, str]],
        hidden: Sequence[tuple[str, int]] = (),
        unlike_prompts: Sequence[str] = (),
    ) -> None:
        """Count rows that quote control tokens (place and token), whose thoughts are hidden (place and messages), or
        whose answers are trained after other tokens than their prompts'.
        """
        self._counts["unlike"] += len(unlike_prompts)
        self._first_unlike = self._first_unlike or next(iter(unlike_prompts), "")
        self._counts["control_tokens"] += len(quoted)
        self._first_control_token = self._first_control_token or next(iter(quoted), None)
        for place, num_messages in hidden:
            self._hidden.add(place, num_messages)

    def _lose(self, count: str, place: str, reason: str) -> None:
        self._counts[count] += 1
        if len(self._lost) < MAX_LISTED:
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
            num_refused=counts["refused"],
            lengths=tuple(LengthCount(up_to_tokens=k, num_rows=n) for k, n in sorted(self._lengths.items())),
            lost=tuple(self._lost),
            num_control_tokens=counts["control_tokens"],
            warnings=tuple(self._warnings()),
            notices=tuple(self._notices()),
        )

    def _warnings(self) -> Iterator[str]:
        if self._first_control_token is not None:
            place, token = self._first_control_token
            num = self._counts["control_tokens"]
            yield (
                f"messages of {num} row{'s' * (num != 1)} hold {token}, which the model reads as the token and not as "
                f"text, as transformers does; first: {place}"
            )
        yield from self._hidden.warnings()
        yield from self._notices()
        yield from self._unread.warnings(self._template)

    def _notices(self) -> Iterator[str]:
        if num := self._counts["unlike"]:
            yield (
                f"answers of {num} row{'s' * (num != 1)} are trained behind other tokens than those which ask for "
                "them, as the chat template rewrites earlier turns or begins an answer otherwise; first: "
                f"{self._first_unlike}"
            )

    def refuse_losses(self, max_lost_fraction: float, place: str) -> None:
        """Raises InvalidInput when no row is left, or more rows are lost than the run allows."""
        report = self.report()
        if not report.num_rows:
            raise InvalidInput("the dataset is empty: no file holds a row", place)
        if report.num_too_long == report.num_rows:
            why = f"the shortest has {self._shortest} tokens, max_tokens is {self._max_tokens}"
            raise InvalidInput(f"all {report.num_rows} rows are too long: {why}", place)
        if report.num_fully_masked == report.num_rows:
            raise InvalidInput(f"none of the {report.num_rows} rows has a token to train on{_first(report)}", place)
        if report.num_refused == report.num_rows:
            raise InvalidInput(f"the chat template refuses all {report.num_rows} rows{_first(report)}", place)
        if not report.num_kept:
            raise InvalidInput(f"no row is left to train on: {_losses(report)}", place)
        if report.num_lost > max_lost_fraction * report.num_rows:
            lost = f"{report.num_lost} of {report.num_rows} rows would be lost"
            raise InvalidInput(f"{lost}, more than max_lost_fraction {max_lost_fraction:g}: {_losses(report)}", place)


def _losses(report: Report) -> str:
    refused = f", {report.num_refused} that the chat template refuses" if report.num_refused else ""
    lost = f"{report.num_too_long} too long, {report.num_fully_masked} with nothing to train on"
    return f"{lost}{refused}{_first(report)}"


def _first(report: Report) -> str:
    """Describe the first lost rows."""
    return "; first: " + "; ".join(f"{row.place} ({row.reason})" for row in report.lost[:3])


@dataclass(frozen=True)
class TokenBlock:
    """Rows as tokens: ids and labels int64, weights float32 (0: not trained; -1: a bad answer of KTO's). Token t-1
    predicts `label_T[t]`."""

    places: list[str]
    id_T: NDArray[np.int64]
    label_T: NDArray[np.int64]
    weight_T: NDArray[np.float32]
    num_tokens_R: NDArray[np.int64]

    @property
    def start_R(self) -> NDArray[np.int64]:
        return np.cumsum(self.num_tokens_R) - self.num_tokens_R

    @cached_property
    def row_T(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.num_tokens_R)), self.num_tokens_R)

    @cached_property
    def position_T(self) -> NDArray[np.int64]:
        return np.arange(len(self.id_T)) - np.repeat(self.start_R, self.num_tokens_R)

    def refuse_unknown_ids(self, vocab_size: int) -> None:
        """Raises InvalidInput for a token or trained label that the model has no embedding for."""
        trained_T = self.weight_T > 0
        for name, id_T, checked_T in (
            ("token", self.id_T, np.ones_like(trained_T)),
            ("label", self.label_T, trained_T),
        ):
            bad = np.flatnonzero(checked_T & ((id_T < 0) | (id_T >= vocab_size)))
            if len(bad):
                place = self.places[int(self.row_T[bad[0]])]
                raise InvalidInput(f"{name} id {id_T[bad[0]]} is not in the model's vocabulary of {vocab_size}", place)


@dataclass(frozen=True)
class KeptRows:
    """The rows of a block that are trained, as flags by row and by token."""

    block: TokenBlock
    kept_R: NDArray[np.bool_]
    too_long_R: NDArray[np.bool_]
    kept_T: NDArray[np.bool_]
    target_T: NDArray[np.bool_]
    truncate: bool
    advantage_R: NDArray[np.float32] | None = None

    @property
    def num_tokens_U(self) -> NDArray[np.int64]:
        """Tokens of each unit."""
        return np.bincount(self.block.row_T[self.kept_T], minlength=len(self.kept_R))[self.kept_R]

    def count(self, tally: Tally) -> None:
        """Give the tally each row's outcome."""
        block, cut_R = self.block, self.too_long_R & self.truncate
        tally.add_rows(block.num_tokens_R)
        tally.add_kept(
            int(self.kept_R.sum()), int(self.kept_T.sum()), int(self.target_T.sum()), int((self.kept_R & cut_R).sum())
        )
        for row in np.flatnonzero(~self.kept_R):
            if self.too_long_R[row] and not self.truncate:
                tally.add_too_long(block.places[row], int(block.num_tokens_R[row]))
            else:
                left = " is left within max_tokens" if self.too_long_R[row] else ""
                tally.add_untrainable(block.places[row], f"no token to train on{left}")

    def write(self, writer: UnitsWriter) -> None:
        """Append the kept rows as units: label x[t] is predicted from the hidden state of token t-1."""
        block, row_T, num_rows = self.block, self.block.row_T, len(self.block.num_tokens_R)
        writer.extend(
            self.num_tokens_U,
            np.bincount(row_T[self.target_T], minlength=num_rows)[self.kept_R],
            token_id=block.id_T[self.kept_T],
            hidden_index=block.position_T[self.target_T] - 1,
            label=block.label_T[self.target_T],
            weight=block.weight_T[self.target_T],
            **({} if self.advantage_R is None else {"advantage": self.advantage_R[row_T[self.target_T]]}),
        )


def keep_rows(block: TokenBlock, max_tokens: int, truncate: bool) -> KeptRows:
    """Drop or cut rows beyond `max_tokens`, then drop those without a target. A row's first token is never a target."""
    row_T, position_T = block.row_T, block.position_T
    too_long_R = block.num_tokens_R > max_tokens
    fits_T = position_T < max_tokens if truncate else ~too_long_R[row_T]
    target_T = fits_T & (position_T > 0) & (block.weight_T > 0)
    has_target_R = np.bincount(row_T[target_T], minlength=len(too_long_R)) > 0
    return KeptRows(block, has_target_R, too_long_R, fits_T & has_target_R[row_T], target_T, truncate)


@dataclass(frozen=True)
class Pair:
    """A pair of a block: its unit, or the reason why it has none. `fits`: within max_tokens."""

    place: str
    unit: TreeUnit | None
    fits: bool = True
    reason: str = ""

    @property
    def is_kept(self) -> bool:
        return self.unit is not None and self.fits


@dataclass(frozen=True)
class KeptPairs:
    """The pairs of a block, in order."""

    pairs: list[Pair]

    @property
    def units(self) -> list[TreeUnit]:
        """The units of the pairs that are kept."""
        return [pair.unit for pair in self.pairs if pair.unit is not None and pair.fits]

    @property
    def num_tokens_U(self) -> NDArray[np.int64]:
        """Tokens of each unit."""
        return np.array([unit.num_tokens for unit in self.units], dtype=np.int64)

    def count(self, tally: Tally) -> None:
        """Give the tally each pair's outcome."""
        tally.add_rows(np.array([pair.unit.num_tokens if pair.unit else 0 for pair in self.pairs], dtype=np.int64))
        kept = self.units
        num_trained = sum(int((unit.weight_N > 0).sum()) for unit in kept)
        tally.add_kept(len(kept), sum(unit.num_tokens for unit in kept), num_trained, 0)
        for pair in self.pairs:
            if pair.unit is None:
                tally.add_untrainable(pair.place, pair.reason)
            elif not pair.fits:
                tally.add_too_long(pair.place, pair.unit.num_tokens)

    def write(self, writer: UnitsWriter) -> None:
        """Append the pairs that are kept as units, to a writer of `PAIR_COLUMNS`."""
        if not (kept := self.units):
            return
        tables = [unit.columns() for unit in kept]
        writer.extend(
            [unit.num_tokens for unit in kept],
            [unit.num_targets for unit in kept],
            **{name: np.concatenate([table[name] for table in tables]) for name in PAIR_COLUMNS},
        )


def keep_pairs(block: TokenBlock, max_tokens: int) -> KeptPairs:
    """The pairs of a block whose rows 2k and 2k + 1 are the chosen and the rejected answer to one prompt.

    Pairs are never cut: a unit of more than `max_tokens` tokens, with the common beginning counted once, is too
    long.
    """
    first_R, num_tokens_R = block.start_R.tolist(), block.num_tokens_R.tolist()
    target_T = (block.weight_T > 0) & (block.position_T > 0)
    rows = [slice(first, first + num) for first, num in zip(first_R, num_tokens_R, strict=True)]
    pairs = []
    for place, chosen, rejected in zip(block.places[::2], rows[::2], rows[1::2], strict=True):
        try:
            unit = pair_unit(block.id_T[chosen], target_T[chosen], block.id_T[rejected], target_T[rejected])
            pairs.append(Pair(place, unit, unit.num_tokens <= max_tokens))
        except InvalidInput as error:
            pairs.append(Pair(place, None, reason=error.message))
    return KeptPairs(pairs)


class LabelledAnswers:
    """Rows with good and bad answers, as KTO's units: each answer, and its prompt with the previous row's answer.

    For pairs, this is the previous pair's answer of the same side. The first row gets the last row's answer, so its
    unit comes last.
    """

    def __init__(self, max_tokens: int, are_pairs: bool) -> None:
        self._max_tokens = max_tokens
        self._are_pairs = are_pairs
        self._first: dict[float, _Answer] = {}  # by the side of the pair
        self._before: dict[float, _Answer] = {}

    def keep(self, block: TokenBlock) -> KeptPairs:
        """The units of a block's rows. None is cut: one of more than `max_tokens` tokens is too long."""
        target_T, pairs = (block.weight_T != 0) & (block.position_T > 0), list[Pair]()
        for place, first, num in zip(block.places, block.start_R.tolist(), block.num_tokens_R.tolist(), strict=True):
            row, at = slice(first, first + num), first + np.argmax(target_T[first : first + num])
            if not target_T[at]:
                pairs.append(Pair(place, None, reason="no token to train on"))
                continue
            answer = _Answer(place, block.id_T[row], target_T[row], float(block.weight_T[at]), int(at) - first)
            side = answer.sign if self._are_pairs else 0.0
            if side in self._before:
                pairs.append(self._unit(answer, self._before[side]))
            self._first.setdefault(side, answer)
            self._before[side] = answer
        return KeptPairs(pairs)

    def rest(self) -> KeptPairs:
        """The units of the first rows. Raises InvalidInput if there is no other row."""
        for side, first in self._first.items():
            if self._before[side] is first:
                raise InvalidInput("kto compares with answers to other prompts, and there is no other row", first.place)
        return KeptPairs([self._unit(first, self._before[side]) for side, first in self._first.items()])

    def _unit(self, answer: "_Answer", other: "_Answer") -> Pair:
        ids = np.concatenate([answer.id_L[: answer.begin], other.id_L[other.begin :]])
        mask = np.concatenate([np.zeros(answer.begin, dtype=np.bool_), other.target_L[other.begin :]])
        asked = replace(_row(ids, mask, 0.0), weight=np.zeros(len(ids), dtype=np.float32))
        unit = build_tree([_row(answer.id_L, answer.target_L, answer.sign), asked])
        return Pair(answer.place, unit, unit.num_tokens <= self._max_tokens)


class _Answer(NamedTuple):
    """A row's tokens, which are targets, +1 for a good answer or -1, and the index of its first token."""

    place: str
    id_L: NDArray[np.int64]
    target_L: NDArray[np.bool_]
    sign: float
    begin: int


def pair_unit(chosen_ids: Ids, chosen_mask: Mask, rejected_ids: Ids, rejected_mask: Mask) -> TreeUnit:
    """One pair as one unit. Each row is a prompt with an answer; its targets are the tokens in its mask.

    Raises InvalidInput if there is nothing to prefer, or a row's first token is a target.
    """
    for name, mask in (("chosen", chosen_mask), ("rejected", rejected_mask)):
        if not np.any(mask):
            raise InvalidInput(f"the {name} answer has no token to train on", "pair")
    if np.array_equal(chosen_ids, rejected_ids):
        raise InvalidInput("both answers become the same tokens: nothing to prefer", "pair")
    return build_tree([_row(chosen_ids, chosen_mask, 1.0), _row(rejected_ids, rejected_mask, -1.0)])


def _row(ids: Ids, mask: Mask, sign: float) -> SequenceRow:
    return SequenceRow(
        token_ids=np.asarray(ids, dtype=np.int64),
        target_mask=np.asarray(mask, dtype=np.bool_),
        weight=np.ones(len(ids), dtype=np.float32),
        advantage=np.full(len(ids), sign, dtype=np.float32),
        old_logprob=np.full(len(ids), np.nan, dtype=np.float32),
        ref_logprob=np.zeros(len(ids), dtype=np.float32),
    )


# --- Pack: units into a plan of steps and bins ---

_VERSION = "pack-1"  # raise it when the same input gives another plan


class PackRequest(Cut):
    """Units, and how to cut them into steps; or `whole`, for evaluation."""

    units: Artifact
    bin_tokens: int = Field(ge=2)
    whole: bool = Field(default=False, description="evaluation: every unit once, in order")

    @property
    def _is_cut(self) -> bool:
        return not self.whole

    @property
    def key(self) -> str:
        return content_key(_VERSION, self.units.sha256, self.model_dump_json(exclude={"units"}))


class Packed(Frozen):
    """A plan (shared/jobs/packed.py). `packing_efficiency` is tokens / (bins * tokens of a bin)."""

    plan: Artifact
    num_steps: int
    num_bins: int
    num_tokens: int | None = Field(default=None, description="of the units of all steps")
    packing_efficiency: float


class PackDataset(OnHost):
    """The activity `pack`."""

    @on_thread("pack")
    def pack(self, request: PackRequest) -> Packed:
        """Make a plan. Raises InvalidInput if a unit is longer than a bin or a batch."""

        def write(folder: Path) -> None:
            # Packing only needs the units' lengths.
            staged = self._host.stage(request.units, only=("units.json", "token_offsets.bin"))
            write_plan(Units.read_lengths(staged), request, folder)

        key = packed(request.key)
        plan = self._host.made_once(key, "pack", write)
        header = read_record(self._host.store, f"{key}/plan.json", PlanHeader)
        return Packed(plan=plan, **header.model_dump(include={*Packed.model_fields}))


def write_plan(tokens_U: Indices, request: PackRequest, folder: Path) -> PlanHeader:
    """Stream a plan for units of these lengths into a folder. Not sealed."""
    if not request.whole:
        check_epochs(tokens_U, request)
    longest = int(tokens_U.max(initial=0))
    capacity = _capacity(longest, request)
    writer = PlanWriter(folder, capacity)
    for step in iter([np.arange(len(tokens_U))]) if request.whole else steps_of(tokens_U, request):
        stop_if_cancelled()
        bins = packing.pack_bins(tokens_U[step].tolist(), capacity)
        writer.append_step([step[each] for each in bins])
    return writer.close(tokens_U)


def _capacity(longest: int, request: PackRequest) -> int:
    """Return the tokens of a bin: at most `bin_tokens`, and such that the bins of a full step are filled evenly."""
    for name in ("bin_tokens", "batch_tokens"):
        limit = getattr(request, name)
        if limit is not None and longest > limit:
            raise InvalidInput(f"an example has {longest} tokens, {name} is {limit}", name)
    if request.batch_tokens is None:
        return request.bin_tokens
    num_bins = -(-request.batch_tokens // request.bin_tokens)
    return max(longest, -(-request.batch_tokens // num_bins))
