"""Preview a dataset before training: how its first rows are tokenized, and the report that tokenizing would give."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from temporalio import activity

from activities.formats.dataset import open_dataset
from activities.formats.examples import Example
from activities.host_context import HostContext, beating
from activities.models.resolve import Resolve
from activities.sources.download import Download, DownloadRequest
from activities.tokenizing.encoding import encoded
from activities.tokenizing.tokenizer import ModelTokenizer, TokenizerFiles, tokenizer_files
from activities.tokenizing.units import Block, KeptRows, Pair, Tally, keep_pairs, keep_rows
from shared.errors import InvalidInput
from shared.runs.previews import Preview, PreviewRequest, PreviewRow, PreviewStart, Span
from shared.runs.start import ModelRequest
from shared.storage.paths import RunKeys, content_key
from shared.storage.stored_bytes import Ledger

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


@dataclass
class _Counted:
    """The first examples of a stream. `is_at_end`: there were no more."""

    examples: Iterator[Example]
    limit: int
    is_at_end: bool = field(default=False, init=False)

    def first(self) -> Iterator[Example]:
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
