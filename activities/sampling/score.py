"""Score samples by a reward model on a sampler: each as the conversation that its training would have made of it."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from temporalio import activity

from activities.confined import calls as confined
from activities.formats.dataset import question_of
from activities.formats.examples import Chat, PromptCompletion, Question
from activities.formats.rows import Row
from activities.grading.grade import REWARDS, sampled_items
from activities.host_context import HostContext, Parts
from activities.sampling.client import Sampler
from activities.sampling.samplers import OpenSampler, Samplers, adapter_name, refusal
from activities.tokenizing.encoding import EncodedBatch, encoded
from activities.tokenizing.render_prompts import REPORT, PromptsReport
from activities.tokenizing.tokenizer import TokenizerFiles, tokenizer_files
from longshore.fields import Artifact, Frozen
from longshore.training import Dtype
from shared.errors import InvalidInput
from shared.grading.graders import SampleRewards
from shared.runs.requests import RunId
from shared.runs.sources import DatasetSource
from shared.runs.status import RewardModel
from shared.serving import SamplerPlace
from shared.storage.paths import content_key, rewarded, rewarded_part

_VERSION = "rewards-1"  # raise it when the same samples would get other scores
_SAMPLES_A_PART = 64  # each part is stored before the next one begins, so that a kill costs one part
_SAMPLES_A_REQUEST = 16
_PREFIX = "grader."
"""Before the names of reward models in samplers, which no run's own adapters begin with."""


class ScoreSamplesRequest(Frozen):
    """Samples to score, and by whom. `prompts`: what they answer, as rendered from `source`.

    `dtype`: of the sampler at `place`, which decides the scores with the model, and so is a part of the key.
    """

    run_id: RunId
    samples: Artifact
    source: DatasetSource
    prompts: Artifact
    reward: RewardModel
    dtype: Dtype
    place: SamplerPlace

    @property
    def key(self) -> str:
        """The store key, by content: neither the run nor the lease matters."""
        fields = self.source.model_dump_json(include={"format", "prompt_field"})
        model, adapter = self.reward.model.sha256, self.reward.adapter.sha256
        return content_key(_VERSION, self.samples.sha256, fields, self.prompts.sha256, model, adapter, self.dtype)


class Conversation(Frozen):
    """A sample as a reward model reads it, or why it cannot be rendered."""

    token_ids: tuple[int, ...] = ()
    refusal: str | None = None


class ScoreSamples:
    """The activity `score_samples`."""

    def __init__(self, host: HostContext, samplers: Samplers) -> None:
        self._host = host
        self._samplers = samplers

    @activity.defn(name="score_samples")
    def score_samples(self, request: ScoreSamplesRequest) -> Artifact:
        """Score every sample: `rewards.jsonl`, a `SampleRewards` a line. What an earlier attempt has scored stays.

        Raises:
            InvalidInput: the sampler refuses the reward model or a conversation; its model has no chat template.
            SamplerUnavailable, WorkerLost: there is no sampler at this place now; finished parts are kept.
            StoreUnavailable: the store is away.
        """
        parts = Parts(self._host.store, partial(rewarded_part, request.key))
        firsts = list[int]()

        def write(folder: Path) -> None:
            prompts = self._host.stage(request.prompts, only=(REPORT,))
            report = PromptsReport.model_validate_json((prompts / REPORT).read_bytes())
            source = request.source.model_copy(update={"format": report.format})
            tokenizer = tokenizer_files(self._host, request.reward.model)
            asked = self._host.stage(request.samples), tokenizer, source, request.reward.head.per == "token"
            with (
                self._samplers.open(request.place) as opened,
                closing(confined.stream(self._host.settings.confined, conversations, *asked, parts.known())) as found,
                (folder / REWARDS).open("wb") as file,
            ):
                name = _served(opened, request.reward.adapter, self._host)
                for first, rows in found:
                    firsts.append(first)
                    if rows is not None:
                        told = _scored(opened.client, name, rows, request.reward)
                        parts.keep(first, b"".join(each.model_dump_json().encode() + b"\n" for each in told))
                    file.write(parts.get(first))

        made = self._host.made_once(rewarded(request.key), "score", write)
        parts.forget(firsts)
        return made


def _served(opened: OpenSampler, adapter: Artifact, host: HostContext) -> str:
    """Have a sampler serve a reward model, and return its name there."""
    name = adapter_name(_PREFIX, adapter)
    if name not in opened.client.models():
        opened.client.load_adapter(name, str(host.stage(adapter)))
    return name


def _scored(client: Sampler, name: str, rows: tuple[Conversation, ...], reward: RewardModel) -> Iterator[SampleRewards]:
    for first in range(0, len(rows), _SAMPLES_A_REQUEST):
        some = rows[first : first + _SAMPLES_A_REQUEST]
        asked = [row.token_ids for row in some if row.refusal is None]
        try:
            found = iter(client.rewards(name, asked) if asked else [])
        except InvalidInput as error:
            raise refusal(client, name, error, reward.grader) from error
        for row in some:
            values = None if row.refusal is not None else next(found)
            if values is not None:
                yield SampleRewards(values=dict(zip(reward.head.names, values, strict=True)))
            else:
                too_long = f"{len(row.token_ids)} tokens of prompt and sample are more than the reward model reads"
                yield SampleRewards(error=row.refusal or too_long)


def conversations(
    samples: Path, tokenizer: TokenizerFiles, source: DatasetSource, ends_with_answer: bool, done: frozenset[int]
) -> Iterator[tuple[int, tuple[Conversation, ...] | None]]:
    """Yield the number of each part's first sample, and its conversations; None where it is among `done`.

    Args:
        source: how the prompts are read from the samples' rows.
        ends_with_answer: they end with the token that ends the answer, where per-turn labels are learned; else with
            whatever the chat template puts last.

    Raises:
        InvalidInput: the tokenizer cannot be used, or its model has no chat template.
    """
    read, numbers = question_of(source), dict[str, int]()

    def examples() -> Iterator[Chat | PromptCompletion]:
        for number, (place, item) in enumerate(sampled_items(samples)):
            numbers[place] = number
            if _first_of(number) not in done:
                yield answered(read(Row(place, item.item)), str(item.sample["output_text"]))

    def rendered() -> Iterator[tuple[int, Conversation]]:
        with closing(encoded(examples(), tokenizer.load())) as batches:
            for batch in batches:
                told = {numbers[place]: each for place, each in _conversations_of(batch, ends_with_answer)}
                yield from sorted(told.items())

    made = {
        first: tuple(each for _, each in part) for first, part in groupby(rendered(), lambda one: _first_of(one[0]))
    }
    for first in sorted({*map(_first_of, numbers.values())}):
        yield first, made.get(first)


def _first_of(number: int) -> int:
    return number - number % _SAMPLES_A_PART


def answered(question: Question, text: str) -> Chat | PromptCompletion:
    """Return a prompt with a sample as an example of the same kind as training would read."""
    if question.text is not None:
        return PromptCompletion(question.place, question.text, text)
    messages = [*question.messages, {"role": "assistant", "content": text}]
    return Chat(question.place, messages, question.tools, [0.0] * len(question.messages) + [1.0])


def _conversations_of(batch: EncodedBatch, ends_with_answer: bool) -> Iterable[tuple[str, Conversation]]:
    yield from ((place, Conversation(refusal=reason)) for place, reason in batch.refused.items())
    block = batch.block
    for place, first, num in zip(block.places, block.start_R.tolist(), block.num_tokens_R.tolist(), strict=True):
        trained = np.flatnonzero(block.weight_T[first : first + num])
        end = int(trained[-1]) + 1 if ends_with_answer and len(trained) else num
        yield place, Conversation(token_ids=tuple(block.id_T[first : first + end].tolist()))
