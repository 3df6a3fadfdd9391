"""Preview a dataset before training: how its first rows are tokenized, and the report that tokenizing would give."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from temporalio import activity

from activities.formats.dataset import open_dataset, open_prompts
from activities.host_context import HostContext, beating
from activities.models.resolve import Resolve
from activities.sources.download import Download, DownloadRequest
from activities.tokenizing.encoding import encoded
from activities.tokenizing.render_prompts import rendered
from activities.tokenizing.tokenizer import ModelTokenizer, TokenizerFiles, tokenizer_files
from activities.tokenizing.units import Block, KeptRows, Pair, Tally, keep_pairs, keep_rows
from shared.errors import InvalidInput
from shared.runs.previews import LostRow, Preview, PreviewRequest, PreviewRow, PreviewStart, Report, Span
from shared.runs.start import ModelRequest
from shared.storage.paths import RunKeys, content_key
from shared.storage.stored_bytes import Ledger

R = TypeVar("R")
_MAX_LISTED = 20
_MAX_CHARACTERS = 30_000  # of all rows together, since a preview is a Temporal payload


class PreviewDataset:
    """The activity `preview`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="preview")
    def preview(self, start: PreviewStart) -> Preview:
        """Make a preview. Raises InvalidInput for a dataset or a model that cannot be read."""
        host, request, tenant = self._host, start.request, start.tenant
        run_id = f"preview-{content_key(activity.info().workflow_id or '')}"  # a run of its own, for the download
        try:
            model = Resolve(host).resolve_model(ModelRequest(uri=request.model_uri, tenant=tenant)).model
            download = DownloadRequest(run_id=run_id, tenant=tenant, split="train", source=request.source)
            dataset = Download(host, keeps_parts=False).download(download).dataset
            with beating():
                return host.confined(preview_with, host.stage(dataset), tokenizer_files(host, model), request)
        finally:
            for item in list(host.store.list(f"{RunKeys(run_id).prefix}/")):
                host.store.delete(item.key)
            Ledger(host.store, tenant).forget(run_id)


def preview_with(dataset: Path, tokenizer: TokenizerFiles, request: PreviewRequest) -> Preview:
    """Call `preview_of` in a confined process. Raises InvalidInput as it does."""
    return preview_of(dataset, tokenizer.load(), request)


def preview_of(dataset: Path, tokenizer: ModelTokenizer, request: PreviewRequest) -> Preview:
    """Tokenize a dataset's first rows, and show some of them."""
    if request.are_prompts:
        return _preview_of_prompts(dataset, tokenizer, request)
    opened = open_dataset(dataset, request.source)
    examples = _Counted(iter(opened), request.max_rows)
    tally, shown = Tally(opened.format.name, request.max_tokens), list[PreviewRow]()
    with closing(encoded(examples.first(), tokenizer)) as batches:
        for batch in batches:
            tally.add_control_tokens(batch.control_tokens)
            if opened.format.has_pairs:
                pairs = keep_pairs(batch.block, request.max_tokens)
                pairs.count(tally)
                for number in range(min(len(pairs.pairs), request.num_rows - len(shown))):
                    shown.append(_pair_row(batch.block, pairs.pairs[number], number, tokenizer, _budget(shown)))
                continue
            kept = keep_rows(batch.block, request.max_tokens, request.too_long == "truncate")
            kept.count(tally)
            for row in range(min(len(batch.block.places), request.num_rows - len(shown))):
                shown.append(_row(kept, row, tokenizer, _budget(shown)))
    problem = None
    try:
        tally.refuse_losses(request.max_lost_fraction, request.source.uri)
    except InvalidInput as error:
        problem = str(error)
    return Preview(report=tally.report(), is_complete=examples.is_at_end, problem=problem, rows=tuple(shown))


def _preview_of_prompts(dataset: Path, tokenizer: ModelTokenizer, request: PreviewRequest) -> Preview:
    """Render the first prompts as rollouts do, and count their tokens. None of them is trained."""
    opened = open_prompts(dataset, request.source)
    questions = _Counted(iter(opened), request.max_rows)
    lengths, places, shown = list[int](), list[str](), list[PreviewRow]()
    for question, token_ids in rendered(questions.first(), tokenizer):
        lengths.append(len(token_ids))
        if len(token_ids) > request.max_tokens and len(places) < _MAX_LISTED:
            places.append(question.place)
        if len(shown) < request.num_rows:
            shown.append(_prompt_row(question.place, token_ids, request.max_tokens, tokenizer, _budget(shown)))
    num_tokens_R = np.array(lengths, dtype=np.int64)
    kept_R = num_tokens_R <= request.max_tokens
    report = Report(
        format=opened.format.name,
        num_rows=len(lengths),
        num_kept=int(kept_R.sum()),
        num_tokens=int(num_tokens_R[kept_R].sum()),
        num_targets=0,
        trained_fraction=0.0,
        max_tokens=request.max_tokens,
        longest_tokens=int(num_tokens_R.max(initial=0)),
        num_truncated=0,
        num_too_long=int((~kept_R).sum()),
        num_fully_masked=0,
        lengths=(),
        lost=tuple(LostRow(place=place, reason="its prompt leaves no room for an answer") for place in places),
    )
    problem = None
    if report.num_too_long > request.max_lost_fraction * report.num_rows or not report.num_kept:
        problem = (
            f"{report.num_too_long} of {report.num_rows} prompts have more than {request.max_tokens} tokens, and leave "
            "no room for an answer"
        )
    return Preview(report=report, is_complete=questions.is_at_end, problem=problem, rows=tuple(shown))


def _prompt_row(
    place: str, token_ids: list[int], max_tokens: int, tokenizer: ModelTokenizer, budget: int
) -> PreviewRow:
    text = tokenizer.decode(token_ids[: max(0, budget)])[: max(0, budget)]
    return PreviewRow(
        place=place,
        fate="kept" if len(token_ids) <= max_tokens else "too_long",
        num_tokens=len(token_ids),
        num_targets=0,
        spans=(Span(text=text, trained=False),) if text else (),
        is_cut=len(text) < len(tokenizer.decode(token_ids)),
    )


@dataclass
class _Counted(Generic[R]):
    """The first rows of a stream. `is_at_end`: there were no more."""

    examples: Iterator[R]
    limit: int
    is_at_end: bool = field(default=False, init=False)

    def first(self) -> Iterator[R]:
        yield from islice(self.examples, self.limit)
        self.is_at_end = next(self.examples, None) is None


def _budget(shown: list[PreviewRow]) -> int:
    """Return the most characters of the next row: half of what is left."""
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


def _pair_row(block: Block, pair: Pair, number: int, tokenizer: ModelTokenizer, budget: int) -> PreviewRow:
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
