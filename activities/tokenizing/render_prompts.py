"""Render a dataset's rows into prompts for rollouts, as the same token ids that SFT has before the answer.

Prompts are stored as lines of JSON, with the offset of each line, so that single rows can be read.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from activities.formats.dataset import Dataset, open_prompts
from activities.formats.rows import Question
from activities.heartbeats import on_thread
from activities.host_context import OnHost
from activities.tokenizing.chat_template import HiddenThoughts, Rendered, WeightedSpan
from activities.tokenizing.encoding import batches_of, sign_longest
from activities.tokenizing.tokenizer import (
    Encoded,
    ModelTokenizer,
    TemplateProcess,
    TemplateSource,
    TokenizerFiles,
    tokenizer_files,
)
from longshore.dataset_runs import Dataset as AnyDataset
from longshore.dataset_runs import DatasetSource, Format, named_sources
from longshore.fields import Artifact, Frozen, added
from longshore.views import LostRow
from shared.errors import InvalidInput
from shared.storage.artifacts import read_record
from shared.storage.paths import content_key, rendered_prompts

_VERSION = "prompts-2"  # raise it when the same rows would give other prompts
_MIX_VERSION = "mixed-prompts-1"  # the same
_MAX_LISTED, _MAX_NAMED = 20, 3
_PROBE_TOKENS = 64
_STAND_IN = "A"

REPORT = "report.json"
ROWS, OFFSETS = "prompts.jsonl", "offsets.npy"


class PromptsRequest(Frozen):
    """A dataset as downloaded, how to read it, and the model whose tokenizer and chat template it is read with."""

    dataset: Artifact
    source: DatasetSource
    model: Artifact
    max_prompt_tokens: int = Field(ge=1)
    max_lost_fraction: float = Field(default=0.1, ge=0, le=1)

    @property
    def key(self) -> str:
        """The store key, by content: where the bytes came from does not matter."""
        fields = self.source.model_dump_json(exclude={"uri"})
        rules = self.model_dump_json(include={"max_prompt_tokens", "max_lost_fraction"})
        return content_key(_VERSION, self.dataset.sha256, self.model.sha256, fields, rules)


class Prompts(Frozen):
    """`prompts`: a folder that `PromptsFile` reads, with `report.json` beside the rows.

    `probe`: token ids from the first of them, at least 2, for comparing two engines' log-probabilities.
    `num_of_sources`: the prompts of each source of a mixture; those of the first come first.
    """

    prompts: Artifact
    probe: tuple[int, ...]
    report_uri: str
    num_prompts: int
    num_too_long: int
    num_of_sources: tuple[int, ...] = added(())


class PromptsOfSource(Frozen):
    """The prompts of a source of a mixture, and its name."""

    name: str
    prompts: Artifact


class MixPromptsRequest(Frozen):
    """The sources of a mixture, each rendered, in order."""

    parts: tuple[PromptsOfSource, ...] = Field(min_length=1)

    @property
    def key(self) -> str:
        return content_key(_MIX_VERSION, *(text for part in self.parts for text in (part.name, part.prompts.sha256)))


class PromptsReport(Frozen):
    """`report.json`. `num_answers`: rows that ended in an answer, which the model is not shown."""

    schema_version: int = 1
    format: Format
    num_rows: int
    num_prompts: int
    num_too_long: int
    num_refused: int = 0
    num_answers: int
    max_prompt_tokens: int
    longest_tokens: int
    probe: tuple[int, ...]
    lost: tuple[LostRow, ...]
    warnings: tuple[str, ...] = ()
    sources: "dict[str, PromptsReport]" = added({}, description="of a mixture, by name; its format is auto")


class RenderPrompts(OnHost):
    """The activities `render_prompts` and `mix_prompts`."""

    @on_thread("render_prompts")
    def render_prompts(self, request: PromptsRequest) -> Prompts:
        """Render a dataset's prompts.

        Raises InvalidInput for rows without a prompt, too many that are too long, or a model without tokenizer.
        """

        def write(folder: Path) -> None:
            dataset, tokenizer = self._host.stage(request.dataset), tokenizer_files(self._host, request.model)
            asked, reads = (dataset, tokenizer, request, folder), (dataset, tokenizer.folder)
            self._host.confined(write_prompts_with, *asked, kind="dataset", reads=reads, writes=[folder])

        return self._made(request.key, write)

    @on_thread("mix_prompts")
    def mix_prompts(self, request: MixPromptsRequest) -> Prompts:
        """Put the prompts of several sources into one folder, with one report. Which are asked when, steps decide."""

        def write(folder: Path) -> None:
            mix_rows({part.name: self._host.stage(part.prompts) for part in request.parts}, folder)

        return self._made(request.key, write)

    def _made(self, key: str, write: Callable[[Path], None]) -> Prompts:
        """Make prompts and their report, and describe them."""
        key = rendered_prompts(key)
        prompts = self._host.made_once(key, "prompts", write)
        report = read_record(self._host.store, f"{key}/{REPORT}", PromptsReport)
        return Prompts(
            prompts=prompts,
            report_uri=f"{prompts.uri}/{REPORT}",
            num_prompts=report.num_prompts,
            num_too_long=report.num_too_long,
            probe=report.probe,
            num_of_sources=tuple(source.num_prompts for source in report.sources.values()),
        )


def write_prompts_with(dataset: Path, tokenizer: TokenizerFiles, request: PromptsRequest, folder: Path) -> None:
    """Call `write_prompts` in a confined process. Raises InvalidInput as it does."""
    write_prompts(dataset, tokenizer.load(), request, folder)


def write_prompts(dataset: Path, tokenizer: ModelTokenizer, request: PromptsRequest, folder: Path) -> PromptsReport:
    """Stream a dataset's rows into a folder of prompts, with its report. Not sealed.

    Raises InvalidInput: a row has no prompt, or more rows than `max_lost_fraction` are too long or refused.
    """
    opened = open_prompts(dataset, request.source)
    tally = PromptTally(opened, request.max_prompt_tokens, tokenizer.template)
    usable = (
        PromptRow(question.place, tuple(token_ids), question.item)
        for question, token_ids in rendered(opened, tokenizer, tally.add_refused)
        if tally.count(question, token_ids)
    )
    write_rows(usable, folder)
    report = tally.report()
    tally.refuse_losses(request.max_lost_fraction, request.source.uri)
    (folder / REPORT).write_text(report.model_dump_json(indent=1) + "\n")
    return report


def _raise(place: str, reason: str) -> NoReturn:
    raise InvalidInput(reason, place)


def rendered(
    questions: Iterable[Question], tokenizer: ModelTokenizer, refused: Callable[[str, str], None] = _raise
) -> Iterator[tuple[Question, list[int]]]:
    """Render and tokenize questions: ids equal to what training on the same row has before the answer.

    A plain text is a user's message. If the model has no chat template, the text is tokenized alone, with the
    tokenizer's first tokens.

    `refused`: called with the place of each row at which the template raises an error, and that error. By default it
    raises InvalidInput.

    Raises InvalidInput: the template leaves a part of a conversation out, or there is none for it.
    """
    with ExitStack() as stack:
        process = None
        if tokenizer.template is not None:
            process = stack.enter_context(TemplateProcess(tokenizer.template, tokenizer.place))
        begin = tokenizer.decode(tokenizer.prefix_ids)
        for batch in batches_of(questions, _characters_of):
            if process:
                prompts = process.asked(batch, tells_refusals=True)
            else:
                prompts = [Rendered(_plain(question, begin), []) for question in batch]
            for question, prompt in zip(batch, prompts, strict=True):
                if prompt.refusal is not None:
                    refused(question.place, prompt.refusal)
            kept = [each for each in zip(batch, prompts, strict=True) if each[1].refusal is None]
            if not kept:
                continue
            batch, prompts = [question for question, _ in kept], [prompt for _, prompt in kept]
            texts = [prompt.text for prompt in prompts]
            sign_longest(texts, [question.place for question in batch])
            prefix = [] if process else tokenizer.prefix_ids
            rows = zip(batch, prompts, ids_before_answers(texts, tokenizer), strict=True)
            for question, prompt, token_ids in rows:
                yield replace(question, dropped_reasoning=prompt.dropped_reasoning), [*prefix, *token_ids]


def _characters_of(question: Question) -> int:
    return len(question.text or "") or sum(len(str(m.get("content"))) for m in question.messages)


def ids_before_answers(texts: list[str], tokenizer: ModelTokenizer) -> Iterator[list[int]]:
    """Yield the ids that each text has when an answer follows it, as in training.

    A text's last tokens can depend on what follows: by GPT-2's rule for spaces two newlines are separate tokens before
    a word, and one token at the end. So each text is encoded with a letter instead of the answer. If that letter
    shares a token with the text, or changes the text of its tokens, the ids of the text alone are taken.
    """
    alone = tokenizer.encode(texts, [[] for _ in texts])
    followed = tokenizer.encode(
        [text + _STAND_IN for text in texts], [[WeightedSpan(len(text), len(text) + 1, 1.0)] for text in texts]
    )
    rows = zip(
        _split(alone.id_T, alone), _split(followed.id_T, followed), _split(followed.weight_T, followed), strict=True
    )
    for alone_ids, followed_ids, weights in rows:
        before = followed_ids[: weights.index(1.0)]
        is_same_text = before == alone_ids or tokenizer.decode(before) == tokenizer.decode(alone_ids)
        yield before if is_same_text else alone_ids


def _split(values_T: NDArray[Any], codes: Encoded) -> Iterator[list[Any]]:
    """Split values of tokens into a list for each text."""
    ends = np.cumsum(codes.num_tokens_R)
    return (each.tolist() for each in np.split(values_T, ends[:-1]))


def _plain(question: Question, begin: str) -> str:
    """Return a prompt's text without the beginning that the tokenizer adds."""
    if question.text is None:
        raise InvalidInput("the model has no chat template, and the row is a conversation", question.place)
    return question.text.removeprefix(begin)


@dataclass
class PromptTally:
    """Counts rows as they come. `num_tokens`: of the prompts that are short enough."""

    dataset: Dataset[Question]
    max_tokens: int
    template: TemplateSource | None = None
    num_rows: int = 0
    num_answers: int = 0
    num_too_long: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    longest: int = 0
    shortest: int = 1 << 62
    probe: tuple[int, ...] = ()
    lost: list[LostRow] = field(default_factory=list)
    hidden: HiddenThoughts = field(default_factory=HiddenThoughts)

    def count(self, question: Question, token_ids: list[int]) -> bool:
        """Count a prompt. Returns whether it is short enough to use. Raises InvalidInput for a prompt of no token."""
        num_tokens = len(token_ids)
        if not num_tokens:
            raise InvalidInput("the prompt is empty: it has no token to continue from", question.place)
        self.num_rows += 1
        self.num_answers += question.had_answer
        self.hidden.add(question.place, question.dropped_reasoning)
        self.longest, self.shortest = max(self.longest, num_tokens), min(self.shortest, num_tokens)
        if num_tokens <= self.max_tokens:
            self.num_tokens += num_tokens
            # A single id is repeated, as the first token has no logprob.
            self.probe = self.probe or tuple(token_ids[:_PROBE_TOKENS] if num_tokens > 1 else 2 * token_ids)
            return True
        self.num_too_long += 1
        self._lose(question.place, f"{num_tokens} tokens are more than max_prompt_tokens {self.max_tokens}")
        return False

    def add_refused(self, place: str, reason: str) -> None:
        """Count a row that the chat template refuses."""
        self.num_rows += 1
        self.num_refused += 1
        self._lose(place, reason)

    def _lose(self, place: str, reason: str) -> None:
        if len(self.lost) < _MAX_LISTED:
            self.lost.append(LostRow(place=place, reason=reason))

    def report(self) -> PromptsReport:
        template = self.template.text if self.template else ""
        return PromptsReport(
            format=self.dataset.format.name,
            num_rows=self.num_rows,
            num_prompts=self.num_rows - self.num_too_long - self.num_refused,
            num_too_long=self.num_too_long,
            num_refused=self.num_refused,
            num_answers=self.num_answers,
            max_prompt_tokens=self.max_tokens,
            longest_tokens=self.longest,
            probe=self.probe,
            lost=tuple(self.lost),
            warnings=(
                *self.hidden.warnings(),
                *self.dataset.unread.warnings(template),
            ),
        )

    def refuse_losses(self, max_lost_fraction: float, place: str) -> None:
        """Raise InvalidInput when no prompt is left, or more are lost than the run allows."""
        if not self.num_rows:
            raise InvalidInput("the dataset is empty: no file holds a row", place)
        if self.num_too_long == self.num_rows:
            why = f"the shortest has {self.shortest} tokens, and {self.max_tokens} leave room for an answer"
            raise InvalidInput(f"all {self.num_rows} prompts are too long: {why}", place)
        num_lost = self.num_too_long + self.num_refused
        if num_lost == self.num_rows or num_lost > max_lost_fraction * self.num_rows:
            first = "; ".join(f"{row.place} ({row.reason})" for row in self.lost[:_MAX_NAMED])
            reasons = {"too long to be answered": self.num_too_long, "refused by the chat template": self.num_refused}
            why = " or ".join(reason for reason, num in reasons.items() if num)
            rule = f"more than max_lost_fraction {max_lost_fraction:g}; first: {first}"
            raise InvalidInput(f"{num_lost} of {self.num_rows} prompts are {why}, {rule}", place)


# Prompts as files.


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt's token ids, the dataset's row, which graders see as the item, and the row's place.

    `source`: the name of its source in a mixture.
    """

    place: str
    token_ids: tuple[int, ...]
    item: dict[str, Any]
    source: str = ""


def write_rows(rows: Iterable[PromptRow], folder: Path) -> None:
    """Write `prompts.jsonl` and `offsets.npy` (int64 [rows + 1], bytes) into a folder. Not sealed."""
    offsets = array("q", [0])
    with (folder / ROWS).open("wb") as file:
        for row in rows:
            fields = {"place": row.place, "token_ids": row.token_ids, "item": row.item}
            fields |= {"source": row.source} if row.source else {}
            try:
                text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            except ValueError as error:
                rule = "the row holds a number beyond what JSON readers agree on (about 1.8e308)"
                raise InvalidInput(rule, row.place) from error
            offsets.append(offsets[-1] + file.write(text.encode() + b"\n"))
    np.save(folder / OFFSETS, np.frombuffer(offsets, dtype=np.int64))


class PromptsFile:
    """The rows of a folder that `write_rows` wrote, by number."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / ROWS).open("rb")
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> PromptRow:
        """Read a row by its number, from 0. Not safe to use from several threads."""
        start, end = (int(at) for at in self._offsets[number : number + 2])
        self._file.seek(start)
        fields = json.loads(self._file.read(end - start))
        return PromptRow(fields["place"], tuple(fields["token_ids"]), fields["item"], fields.get("source", ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def sources_of(folder: Path, dataset: AnyDataset) -> dict[str, DatasetSource]:
    """Return the sources of a folder's prompts by name, as the run names them, with the formats that were found."""
    report = PromptsReport.model_validate_json((folder / REPORT).read_bytes())
    return {
        name: source.model_copy(update={"format": report.sources.get(name, report).format})
        for name, source in named_sources(dataset).items()
    }


def mix_rows(folders: Mapping[str, Path], folder: Path) -> None:
    """Write the prompts of several sources, by their names, into one folder, those of the first first. Not sealed."""

    def rows() -> Iterator[PromptRow]:
        for name, each in folders.items():
            with PromptsFile(each) as prompts:
                for number in range(len(prompts)):
                    row = prompts[number]
                    yield replace(row, place=f"{name}/{row.place}", source=name)

    write_rows(rows(), folder)
    reports = {name: PromptsReport.model_validate_json((each / REPORT).read_bytes()) for name, each in folders.items()}
    parts = list(reports.values())
    sums = {n: sum(getattr(part, n) for part in parts) for n in PromptsReport.model_fields if n.startswith("num_")}
    mixed = PromptsReport(
        format="auto",
        max_prompt_tokens=parts[0].max_prompt_tokens,
        longest_tokens=max(part.longest_tokens for part in parts),
        probe=parts[0].probe,
        lost=tuple(row for part in parts for row in part.lost)[:_MAX_LISTED],
        warnings=tuple(f"source {name}: {text}" for name, part in reports.items() for text in part.warnings),
        sources=reports,
        **sums,
    )
    (folder / REPORT).write_text(mixed.model_dump_json(indent=1) + "\n")
