"""Tokenizes a downloaded dataset into units of tokens and targets, with a report on its rows."""

import json
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator
from temporalio import activity

from activities.formats.dataset import open_dataset
from activities.formats.scores import LABELS, Numbers
from activities.host_context import HostContext
from activities.tokenizing.encoding import NUM_PROMPTS, Prompt, encoded
from activities.tokenizing.tokenizer import ModelTokenizer, TokenizerFiles, tokenizer_files
from activities.tokenizing.units import (
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
from longshore.fields import Artifact, Frozen
from shared.jobs.packed import REQUIRED_COLUMNS, UnitsHeader, UnitsWriter
from shared.jobs.prefix_tree import ScoredRow, scored_pair, scored_unit
from shared.runs.previews import Report
from shared.runs.sources import DatasetSource
from shared.storage.artifacts import read_record
from shared.storage.paths import content_key, tokenized

_VERSION = "tokenize-4"  # raise it when the same input gives other units

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


class Tokenize:
    """The activity `tokenize`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="tokenize")
    def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Tokenize a dataset.

        Raises InvalidInput for a dataset that cannot be read or loses too many rows, or a model without tokenizer.
        """

        def write(folder: Path) -> None:
            dataset, tokenizer = self._host.stage(request.dataset), tokenizer_files(self._host, request.model)
            self._host.confined(write_units_with, dataset, tokenizer, request, folder, kind="dataset")

        key = tokenized(request.key)
        units = self._host.made_once(key, "tokenize", write)
        header = read_record(self._host.store, f"{key}/{UNITS}", UnitsHeader)
        return Tokenized(
            units=units,
            report_uri=f"{units.uri}/{REPORT}",
            num_units=header.num_units,
            num_tokens=header.num_tokens,
            num_targets=header.num_targets,
            notices=read_record(self._host.store, f"{key}/{REPORT}", Report).notices,
        )


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
    per_turn = request.numbers == (LABELS,)
    answers = LabelledAnswers(request.max_tokens, opened.format.has_pairs)
    with closing(encoded(opened, tokenizer)) as batches:
        for batch in batches:
            if request.labels:
                kept: KeptPairs | KeptRows = answers.keep(batch.block)
            elif request.numbers:
                kept = keep_scored(batch.block, opened.numbers, request.max_tokens, request.pairs, per_turn)
            elif request.pairs:
                kept = keep_pairs(batch.block, request.max_tokens)
            else:
                kept = keep_rows(batch.block, request.max_tokens, request.too_long == "truncate")
                if request.teachers:
                    taught_by = [opened.numbers.pop(place)[0] for place in batch.block.places]
                    kept = replace(kept, advantage_R=np.array(taught_by, dtype=np.float32))
            kept.count(tally)
            kept.write(writer)
            tally.add_refused(batch.refused)
            tally.add_warnings_of(batch.control_tokens, batch.hidden_thoughts, batch.unlike_prompts)
            prompts += batch.prompts
    rest = answers.rest()
    rest.count(tally)
    rest.write(writer)
    writer.close()
    tally.refuse_losses(request.max_lost_fraction, request.source.uri)
    report = tally.report()
    fitting = (p for p in prompts if len(p.prompt_ids) < request.max_tokens)
    chosen = [prompt.model_dump() for prompt in islice(fitting, NUM_PROMPTS)]
    (folder / REPORT).write_text(report.model_dump_json(indent=1) + "\n")
    (folder / PROMPTS).write_text(json.dumps(chosen, indent=1) + "\n")
    return report


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
