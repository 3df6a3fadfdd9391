"""A dataset's examples as token ids: all of them for a run, or some for a preview."""

import json
import time
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Generic, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from temporalio import activity

from activities.formats.dataset import Dataset, open_dataset, open_prompts
from activities.formats.rows import Example
from activities.formats.specs import LABELS, MARGIN, Numbers
from activities.heartbeats import on_thread
from activities.host_context import HostContext, OnHost
from activities.models.resolve import Resolve
from activities.sandbox.calls import Kind
from activities.sources.download import Download, DownloadRequest
from activities.tokenizing.encoding import NO_ROWS, NUM_PROMPTS, EncodedBatch, Prompt, encoded
from activities.tokenizing.render_prompts import PromptTally, rendered
from activities.tokenizing.tokenizer import ModelTokenizer, TokenizerFiles, tokenizer_files
from activities.tokenizing.units import (
    MAX_LISTED,
    PAIR_COLUMNS,
    KeptPairs,
    KeptRows,
    LabelledAnswers,
    Pair,
    Tally,
    TokenBlock,
    keep_pairs,
    keep_rows,
)
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact, Frozen
from longshore.views import (
    Cut,
    LengthCount,
    Preview,
    PreviewRequest,
    PreviewRow,
    PreviewStart,
    Report,
    RunLength,
    SourceReport,
    Span,
)
from shared.errors import InvalidInput
from shared.jobs.bins import check_epochs, length_of, length_of_draws
from shared.jobs.packed import REQUIRED_COLUMNS, UnitsHeader, UnitsWriter, mix_units
from shared.jobs.prefix_tree import ScoredRow, scored_pair, scored_unit
from shared.runs.start import ModelRequest
from shared.storage.artifacts import read_record
from shared.storage.paths import RunKeys, content_key, tokenized

# --- Tokenizes a downloaded dataset into units of tokens and targets, with a report on its rows ---

_VERSION = "tokenize-4"  # raise it when the same input gives other units
_MIX_VERSION = "mix-1"  # the same

TAUGHT_COLUMNS = (*REQUIRED_COLUMNS, "advantage")
UNITS, REPORT, PROMPTS = "units.json", "report.json", "prompts.json"


class TokenizeRequest(Frozen):
    """A dataset as downloaded, how to read it, and the model whose tokenizer and chat template it is read with.

    `pairs`: whether all rows must be preference pairs, or none. `labels`: whether rows must be answers with a label, or
    pairs, as KTO learns from them. `numbers`: the fields that reward models learn: the margin of pairs, the scores of
    other rows. `teachers`: the names that a row's field `teacher` may have; a teacher's number, from 1, becomes the
    advantage of the row's targets, 0 without one.
    """

    dataset: Artifact
    source: DatasetSource
    model: Artifact
    max_tokens: int = Field(ge=2)
    too_long: Literal["drop", "truncate"] = "drop"
    max_lost_fraction: float = Field(default=0.1, ge=0, le=1)
    pairs: bool = False
    labels: bool = False
    numbers: tuple[str, ...] = ()
    teachers: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _pairs_are_not_cut(self) -> Self:
        if (self.pairs or self.labels or self.numbers) and self.too_long == "truncate":
            raise ValueError("pairs are never cut, nor answers with scores: too_long must be drop")
        return self

    @property
    def key(self) -> str:
        """The store key, by content: where the bytes came from does not matter."""
        fields = self.source.model_dump_json(exclude={"uri"})
        rules = self.model_dump_json(exclude={"dataset", "source", "model"})
        return content_key(_VERSION, self.dataset.sha256, self.model.sha256, fields, rules)


class Tokenized(Frozen):
    """Units (shared/jobs/packed.py) with `report.json` and `prompts.json` beside them.

    `notices`: for the run's user, about the rows.
    """

    units: Artifact
    report_uri: str
    num_units: int
    num_tokens: int
    num_targets: int
    notices: tuple[str, ...] = ()


class Tokenize(OnHost):
    """The activity `tokenize`."""

    @on_thread("tokenize")
    def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Tokenize a dataset.

        Raises InvalidInput for a dataset that cannot be read or loses too many rows, or a model without tokenizer.
        """

        def write(folder: Path) -> None:
            dataset, tokenizer = self._host.stage(request.dataset), tokenizer_files(self._host, request.model)
            asked, reads = (dataset, tokenizer, request, folder), (dataset, tokenizer.folder)
            self._host.confined(write_units_with, *asked, kind="dataset", reads=reads, writes=[folder])

        return _tokenized(self._host, self._host.made_once(tokenized(request.key), "tokenize", write), request.key)


class SourceUnits(Frozen):
    """The units of a source of a mixture, and its name."""

    name: str
    units: Artifact


class MixRequest(Frozen):
    """The sources of a mixture, each tokenized, in order."""

    parts: tuple[SourceUnits, ...] = Field(min_length=1)

    @property
    def key(self) -> str:
        return content_key(_MIX_VERSION, *(text for part in self.parts for text in (part.name, part.units.sha256)))


class MixSources(OnHost):
    """The activity `mix`."""

    @on_thread("mix")
    def mix(self, request: MixRequest) -> Tokenized:
        """Put the units of several sources into one folder, with one report. Which are trained when is the plan's."""

        def write(folder: Path) -> None:
            folders = {part.name: self._host.stage(part.units) for part in request.parts}
            mix_units(folders, folder)
            reports = {name: Report.model_validate_json((each / REPORT).read_bytes()) for name, each in folders.items()}
            (folder / REPORT).write_text(mixed_report(reports).model_dump_json(indent=1) + "\n")

        return _tokenized(self._host, self._host.made_once(tokenized(request.key), "mix", write), request.key)


def mixed_report(reports: Mapping[str, Report]) -> Report:
    """Return one report of all sources, from theirs by name."""
    parts = list(reports.values())
    sums = {name: sum(getattr(part, name) for part in parts) for name in Report.model_fields if name.startswith("num_")}
    formats = {part.format for part in parts}
    lengths = Counter({length.up_to_tokens: 0 for part in parts for length in part.lengths})
    for part in parts:
        lengths.update({length.up_to_tokens: length.num_rows for length in part.lengths})
    several: dict[str, tuple[str, ...]] = {
        kind: tuple(f"source {name}: {text}" for name, part in reports.items() for text in getattr(part, kind))
        for kind in ("warnings", "notices")
    }
    shown = SourceReport.model_fields.keys() - {"name"}
    return Report(
        format=formats.pop() if len(formats) == 1 else "auto",
        trained_fraction=sums["num_targets"] / sums["num_tokens"],
        max_tokens=parts[0].max_tokens,
        longest_tokens=max(part.longest_tokens for part in parts),
        lengths=tuple(LengthCount(up_to_tokens=k, num_rows=n) for k, n in sorted(lengths.items())),
        lost=tuple(row for part in parts for row in part.lost)[:MAX_LISTED],
        sources=tuple(
            SourceReport(name=name, **{each: getattr(part, each) for each in shown}) for name, part in reports.items()
        ),
        **sums,
        **several,
    )


def _tokenized(host: HostContext, units: Artifact, key: str) -> Tokenized:
    """Describe the units in the store at a key."""
    header = read_record(host.store, f"{tokenized(key)}/{UNITS}", UnitsHeader)
    notices = read_record(host.store, f"{tokenized(key)}/{REPORT}", Report).notices
    counts = header.model_dump(include={"num_units", "num_tokens", "num_targets"})
    return Tokenized(units=units, report_uri=f"{units.uri}/{REPORT}", notices=notices, **counts)


def write_units_with(dataset: Path, tokenizer: TokenizerFiles, request: TokenizeRequest, folder: Path) -> None:
    """Call `write_units` in a confined process. Raises InvalidInput as it does."""
    write_units(dataset, tokenizer.load(), request, folder)


def write_units(dataset: Path, tokenizer: ModelTokenizer, request: TokenizeRequest, folder: Path) -> Report:
    """Stream a dataset's rows into a folder of units, with its report and prompts. Not sealed."""
    opened = open_dataset(dataset, request.source, request.pairs, request.labels, request.numbers, request.teachers)
    tally = Tally(opened.format.name, request.max_tokens, opened.unread, tokenizer.template)
    prompts = list[Prompt]()
    has_columns = request.pairs or request.labels or request.numbers
    columns = TAUGHT_COLUMNS if request.teachers else PAIR_COLUMNS if has_columns else REQUIRED_COLUMNS
    writer = UnitsWriter(folder, columns)
    with closing(_kept(opened, opened, request.pairs, request, tokenizer, tally)) as units:
        for batch, kept in units:
            if request.teachers and isinstance(kept, KeptRows):
                taught_by = [opened.numbers.pop(place)[0] for place in batch.block.places]
                kept = replace(kept, advantage_R=np.array(taught_by, dtype=np.float32))
            kept.write(writer)
            prompts += batch.prompts
    writer.close()
    tally.refuse_losses(request.max_lost_fraction, request.source.uri)
    report = tally.report()
    fitting = (p for p in prompts if len(p.prompt_ids) < request.max_tokens)
    chosen = [prompt.model_dump() for prompt in islice(fitting, NUM_PROMPTS)]
    (folder / REPORT).write_text(report.model_dump_json(indent=1) + "\n")
    (folder / PROMPTS).write_text(json.dumps(chosen, indent=1) + "\n")
    return report


def _kept(
    opened: Dataset[Example],
    examples: Iterable[Example],
    are_pairs: bool,
    request: TokenizeRequest | PreviewRequest,
    tokenizer: ModelTokenizer,
    tally: Tally,
) -> Generator[tuple[EncodedBatch, KeptRows | KeptPairs], None, None]:
    """Encode examples of a dataset in batches, and yield each with the units that are kept of it, which are counted."""
    answers = LabelledAnswers(request.max_tokens, opened.format.has_pairs)
    with closing(encoded(examples, tokenizer)) as batches:
        for batch in batches:
            if request.labels:
                kept: KeptRows | KeptPairs = answers.keep(batch.block)
            elif request.numbers:
                per_turn = request.numbers == (LABELS,)
                kept = keep_scored(batch.block, opened.numbers, request.max_tokens, are_pairs, per_turn)
            elif are_pairs:
                kept = keep_pairs(batch.block, request.max_tokens)
            else:
                kept = keep_rows(batch.block, request.max_tokens, request.too_long == "truncate")
            kept.count(tally)
            tally.add_refused(batch.refused)
            tally.add_warnings_of(batch.control_tokens, batch.dropped_reasoning, batch.unlike_prompts)
            yield batch, kept
    rest = answers.rest()
    rest.count(tally)
    yield EncodedBatch(NO_ROWS), rest


def keep_scored(
    block: TokenBlock, numbers: Numbers, max_tokens: int, are_pairs: bool, per_turn: bool = False
) -> KeptPairs:
    """The units of a block: of each row, or of rows 2k and 2k + 1, a chosen and a rejected answer to one prompt.

    None is cut: one of more than `max_tokens` tokens is too long. `per_turn`: numbers are of a row's answers, each at
    the token that ends it.
    """
    ends = block.start_R + block.num_tokens_R
    rows = [block.id_T[first:end] for first, end in zip(block.start_R, ends, strict=True)]
    kept = list[Pair]()
    for number in range(0, len(rows), 2 if are_pairs else 1):
        place, row, values = block.places[number], rows[number], numbers.pop(block.places[number])
        if are_pairs and np.array_equal(row, rows[number + 1]):
            kept.append(Pair(place, None, reason="both answers become the same tokens: nothing to prefer"))
            continue
        if are_pairs:
            unit = scored_pair(row, rows[number + 1], values[0])
        elif per_turn:
            at_L = block.weight_T[block.start_R[number] :][: len(row)] > 0
            places = np.flatnonzero(at_L & ~np.append(at_L[1:], False)).tolist()
            if len(places) != len(values):
                kept.append(Pair(place, None, reason=f"{len(values)} labels for {len(places)} answers"))
                continue
            unit = scored_unit([ScoredRow(row, places, [0] * len(values), values)])
        else:
            unit = scored_unit([ScoredRow(row, [len(row) - 1] * len(values), range(len(values)), values)])
        kept.append(Pair(place, unit, unit.num_tokens <= max_tokens))
    return KeptPairs(kept)


# --- Preview a dataset before training ---
# How its first rows are tokenized, and the report that tokenizing would give.

R = TypeVar("R")
_FEW_ROWS = 100_000  # counting more leaves places to others
_MAX_CHARACTERS = 30_000  # of all rows together, since a preview is a Temporal payload


class PreviewDataset(OnHost):
    """The activity `preview`."""

    @on_thread("preview")
    def preview(self, start: PreviewStart) -> Preview:
        """Make a preview. Raises InvalidInput for a dataset or a model that cannot be read."""
        host, request, tenant = self._host, start.request, start.tenant
        run_id = f"preview-{content_key(activity.info().workflow_id or '')}"  # a new run, for the download
        try:
            asked = ModelRequest(uri=request.model_uri, tenant=tenant, any_family=True, room=start.room)
            model = Resolve(host).resolve_model(asked).model
            download = DownloadRequest(
                run_id=run_id, tenant=tenant, split="train", source=request.source, room=start.room
            )
            dataset = Download(host, keeps_parts=False).download(download).dataset
            kind: Kind = "short" if request.max_rows <= _FEW_ROWS else "dataset"
            files = tokenizer_files(host, model)
            rows = host.stage(dataset)
            return host.confined(preview_with, rows, files, request, start.cut, kind=kind, reads=[rows, files.folder])
        finally:
            for item in list(host.store.list(f"{RunKeys(run_id).prefix}/")):
                host.store.delete(item.key)


def preview_with(dataset: Path, tokenizer: TokenizerFiles, request: PreviewRequest, cut: Cut | None) -> Preview:
    """Call `preview_of` in a confined process. Raises InvalidInput as it does."""
    return preview_of(dataset, tokenizer.load(), request, cut)


def preview_of(dataset: Path, tokenizer: ModelTokenizer, request: PreviewRequest, cut: Cut | None = None) -> Preview:
    """Tokenize a dataset's first rows, and show some of them; with a cut, tell how long a run on them is."""
    if request.are_prompts:
        return _preview_of_prompts(dataset, tokenizer, request, cut)
    pairs = request.numbers == (MARGIN,) if request.numbers else None
    opened = open_dataset(dataset, request.source, pairs, labels=request.labels, fields=request.numbers)
    examples = _Counted(iter(opened), request)
    tally = Tally(opened.format.name, request.max_tokens, opened.unread, tokenizer.template)
    shown, tokens_U = list[PreviewRow](), array("q")
    with closing(_kept(opened, examples.first(), opened.format.has_pairs, request, tokenizer, tally)) as units:
        for batch, kept in units:
            num_left = request.num_rows - len(shown)
            if isinstance(kept, KeptRows):
                for row in range(min(len(batch.block.places), num_left)):
                    shown.append(_row(kept, row, tokenizer, _budget(shown)))
            elif not request.labels and not request.numbers:
                for number in range(min(len(kept.pairs), num_left)):
                    shown.append(_pair_row(batch.block, kept.pairs[number], number, tokenizer, _budget(shown)))
            tokens_U.extend(kept.num_tokens_U.tolist())
    problem = _problem(tally.refuse_losses, request.max_lost_fraction, request.source.uri)
    return Preview(
        report=tally.report(),
        is_complete=examples.is_at_end,
        problem=problem or (cut and _problem(check_epochs, np.array(tokens_U, dtype=np.int64), cut)),
        rows=tuple(shown),
        length=_length(tokens_U, cut, are_prompts=False),
    )


def _preview_of_prompts(dataset: Path, tokenizer: ModelTokenizer, request: PreviewRequest, cut: Cut | None) -> Preview:
    """Render the first prompts as rollouts do, and count their tokens. None of them is trained."""
    opened = open_prompts(dataset, request.source)
    questions = _Counted(iter(opened), request)
    tally = PromptTally(opened, request.max_tokens, tokenizer.template)
    shown, tokens_U = list[PreviewRow](), array("q")
    for question, token_ids in rendered(questions.first(), tokenizer, tally.add_refused):
        if is_kept := tally.count(question, token_ids):
            tokens_U.append(len(token_ids))
        if len(shown) < request.num_rows:
            shown.append(_prompt_row(question.place, token_ids, is_kept, tokenizer, _budget(shown)))
    counted = tally.report()
    same = ("format", "num_rows", "longest_tokens", "num_too_long", "num_refused", "lost", "warnings")
    nothing = dict.fromkeys(("num_targets", "trained_fraction", "num_truncated", "num_fully_masked"), 0)
    report = Report(
        **{name: getattr(counted, name) for name in same} | nothing,
        num_kept=counted.num_prompts,
        num_tokens=tally.num_tokens,
        max_tokens=request.max_tokens,
        lengths=(),
    )
    return Preview(
        report=report,
        is_complete=questions.is_at_end,
        problem=_problem(tally.refuse_losses, request.max_lost_fraction, request.source.uri),
        rows=tuple(shown),
        length=_length(tokens_U, cut, are_prompts=True),
    )


def _length(tokens_U: "array[int]", cut: Cut | None, are_prompts: bool) -> RunLength | None:
    if cut is None:
        return None
    return (length_of_draws if are_prompts else length_of)(np.array(tokens_U, dtype=np.int64), cut)


def _problem(check: Callable[..., None], *arguments: object) -> str | None:
    """Return a check's refusals."""
    try:
        check(*arguments)
    except InvalidInput as error:
        return str(error)
    return None


def _prompt_row(place: str, token_ids: list[int], is_kept: bool, tokenizer: ModelTokenizer, budget: int) -> PreviewRow:
    text = tokenizer.decode(token_ids[: max(0, budget)])[: max(0, budget)]
    return PreviewRow(
        place=place,
        fate="kept" if is_kept else "too_long",
        num_tokens=len(token_ids),
        num_targets=0,
        spans=(Span(text=text, trained=False),) if text else (),
        is_cut=len(text) < len(tokenizer.decode(token_ids)),
    )


@dataclass
class _Counted(Generic[R]):
    """The rows of a stream that a preview counts. `is_at_end`: there were no more."""

    examples: Iterator[R]
    request: PreviewRequest
    is_at_end: bool = field(default=False, init=False)

    def first(self) -> Iterator[R]:
        end = time.monotonic() + self.request.max_seconds
        for row in islice(self.examples, self.request.max_rows):
            yield row
            if time.monotonic() > end:
                break
        self.is_at_end = next(self.examples, None) is None


def _budget(shown: list[PreviewRow]) -> int:
    """Return the most characters of the next row: half of the remaining ones."""
    return (_MAX_CHARACTERS - sum(len(s.text) for row in shown for s in (*row.spans, *row.rejected))) // 2


def _row(kept: KeptRows, row: int, tokenizer: ModelTokenizer, budget: int) -> PreviewRow:
    block = kept.block
    start, num_tokens = int(block.start_R[row]), int(block.num_tokens_R[row])
    here = slice(start, start + num_tokens)
    target_T = kept.target_T[here]
    spans, is_cut = _spans(block.id_T[here], target_T, tokenizer, budget)
    return PreviewRow(
        place=block.places[row],
        fate=_fate(kept, row),
        num_tokens=num_tokens,
        num_targets=int(target_T.sum()),
        spans=spans,
        is_cut=is_cut,
    )


def _pair_row(block: TokenBlock, pair: Pair, number: int, tokenizer: ModelTokenizer, budget: int) -> PreviewRow:
    """Show both answers of a pair. Their common prompt is shown once, before the chosen one."""
    ends = np.cumsum(block.num_tokens_R).tolist()
    chosen, rejected = (slice(ends[r] - int(block.num_tokens_R[r]), ends[r]) for r in (2 * number, 2 * number + 1))
    trained_T = (block.weight_T > 0) & (block.position_T > 0)
    answer = slice(rejected.start + int(np.argmax(trained_T[rejected])), rejected.stop)
    target_T = trained_T & pair.is_kept
    spans, is_cut = _spans(block.id_T[chosen], target_T[chosen], tokenizer, budget // 2)
    others, other_is_cut = _spans(block.id_T[answer], target_T[answer], tokenizer, budget // 2)
    return PreviewRow(
        place=pair.place,
        fate="kept" if pair.is_kept else "fully_masked" if pair.unit is None else "too_long",
        num_tokens=pair.unit.num_tokens if pair.unit else 0,
        num_targets=pair.unit.num_targets if pair.unit and pair.is_kept else 0,
        spans=spans,
        is_cut=is_cut or other_is_cut,
        rejected=others,
    )


def _spans(
    id_T: NDArray[np.int64], target_T: NDArray[np.bool_], tokenizer: ModelTokenizer, budget: int
) -> tuple[tuple[Span, ...], bool]:
    """Return the text as spans of tokens that are or are not targets, and True if it was cut to `budget` characters."""
    spans, is_cut = list[Span](), False
    for trained, run in groupby(range(len(id_T)), key=lambda t: bool(target_T[t])):
        tokens = np.fromiter(run, dtype=np.int64)
        if is_cut := budget <= 0 or len(tokens) > budget:
            tokens = tokens[: max(0, budget)]
        if len(tokens):
            text = tokenizer.decode(id_T[tokens].tolist())
            budget -= len(text)
            spans.append(Span(text=text, trained=trained))
        if is_cut:
            break
    return tuple(spans), is_cut


def _fate(kept: KeptRows, row: int) -> Literal["kept", "truncated", "too_long", "fully_masked"]:
    if kept.kept_R[row]:
        return "truncated" if kept.too_long_R[row] else "kept"
    return "too_long" if kept.too_long_R[row] and not kept.truncate else "fully_masked"
