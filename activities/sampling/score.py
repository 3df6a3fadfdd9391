"""Score samples by a reward model on a sampler: each as the conversation that its training would have made of it."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
from temporalio import activity

from activities.formats.dataset import question_of
from activities.formats.messages import Chat, PromptCompletion, Question
from activities.formats.rows import Row
from activities.grading.grade import REWARDS, sampled_items
from activities.host_context import HostContext
from activities.sampling.client import Sampler
from activities.sampling.samplers import Samplers, adapter_name, refusal
from activities.sandbox import calls as confined
from activities.tokenizing.encoding import encoded
from activities.tokenizing.render_prompts import REPORT, PromptsReport
from activities.tokenizing.tokenizer import TokenizerFiles, tokenizer_files
from longshore.dataset_runs import Dataset, DatasetSource, named_sources
from longshore.fields import Artifact, Frozen
from longshore.grading import SampleRewards
from longshore.runs import RunId
from longshore.training import Dtype
from shared.errors import InvalidInput
from shared.runs.status import RewardModel
from shared.serving import SamplerPlace
from shared.storage.paths import content_key, rewarded

_VERSION = "rewards-1"  # raise it when the same samples would get other scores
_SAMPLES_A_REQUEST = 16
_PREFIX = "grader."
"""Before the names of reward models in samplers, which no run's own adapters begin with."""


class ScoreSamplesRequest(Frozen):
    """Samples to score, and the sampler. `prompts`: the samples' prompts, as rendered from `source`.

    `dtype`: of the sampler at `place`. The scores depend on it, so it is part of the key.
    """

    run_id: RunId
    samples: Artifact
    source: Dataset
    prompts: Artifact
    reward: RewardModel
    dtype: Dtype
    place: SamplerPlace

    @property
    def key(self) -> str:
        """The store key, by content: neither the run nor the lease matters."""
        sources = named_sources(self.source).values()
        fields = "".join(source.model_dump_json(include={"format", "prompt_field"}) for source in sources)
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

    @activity.defn(name="score_samples", no_thread_cancel_exception=True)
    def score_samples(self, request: ScoreSamplesRequest) -> Artifact:
        """Score every sample, once: `rewards.jsonl`, a `SampleRewards` a line.

        Raises:
            InvalidInput: the sampler refuses the reward model or a conversation; its model has no chat template.
            SamplerUnavailable, WorkerLost: there is no sampler at this place now. StoreUnavailable: the store is away.
        """

        def write(folder: Path) -> None:
            host, reward = self._host, request.reward
            told = (host.stage(request.prompts, only=(REPORT,)) / REPORT).read_bytes()
            report = PromptsReport.model_validate_json(told)
            sources = {
                name: source.model_copy(update={"format": report.sources.get(name, report).format})
                for name, source in named_sources(request.source).items()
            }
            samples, files = host.stage(request.samples), tokenizer_files(host, reward.model)
            asked, reads = (samples, files, sources, reward.head.per == "token"), (samples, files.folder)
            with (
                self._samplers.open(request.place) as opened,
                closing(confined.stream(host.settings.confined, conversations, *asked, reads=reads)) as found,
                (folder / REWARDS).open("w") as file,
            ):
                name = adapter_name(_PREFIX, reward.adapter)
                if name not in opened.client.models():
                    opened.client.load_adapter(name, str(host.stage(reward.adapter)))
                while some := list(islice(found, _SAMPLES_A_REQUEST)):
                    file.writelines(
                        f"{each.model_dump_json()}\n" for each in _scored(opened.client, name, some, reward)
                    )

        return self._host.made_once(rewarded(request.key), "score", write)


def _scored(client: Sampler, name: str, rows: list[Conversation], reward: RewardModel) -> Iterator[SampleRewards]:
    asked = [row.token_ids for row in rows if row.refusal is None]
    try:
        found = iter(client.rewards(name, asked) if asked else [])
    except InvalidInput as error:
        raise refusal(client, name, error, reward.scorer) from error
    for row in rows:
        if row.refusal is None and (values := next(found)) is not None:
            yield SampleRewards(values=dict(zip(reward.head.names, values, strict=True)))
        else:
            too_long = f"{len(row.token_ids)} tokens of prompt and sample are more than the reward model reads"
            yield SampleRewards(error=row.refusal or too_long)


def conversations(
    samples: Path, tokenizer: TokenizerFiles, sources: Mapping[str, DatasetSource], ends_with_answer: bool
) -> Iterator[Conversation]:
    """Yield the samples' conversations, in order.

    Args:
        sources: how the prompts are read from the samples' rows, by the names of a mixture's sources.
        ends_with_answer: they end with the token that ends the answer, as models of turns' labels learn; else with the
            chat template's last token.

    Raises:
        InvalidInput: the tokenizer cannot be used, or its model has no chat template.
    """
    read, order = {name: question_of(source) for name, source in sources.items()}, dict[str, int]()

    def examples() -> Iterator[Chat | PromptCompletion]:
        for place, item in sampled_items(samples):
            order[place] = len(order)
            question = read[str(item.sample.get("source", ""))](Row(place, item.item))
            yield answered(question, str(item.sample["output_text"]))

    with closing(encoded(examples(), tokenizer.load())) as batches:
        for batch in batches:
            block = batch.block
            told = {place: Conversation(refusal=reason) for place, reason in batch.refused.items()}
            for place, first, num in zip(
                block.places, block.start_R.tolist(), block.num_tokens_R.tolist(), strict=True
            ):
                trained = np.flatnonzero(block.weight_T[first : first + num])
                end = int(trained[-1]) + 1 if ends_with_answer and len(trained) else num
                told[place] = Conversation(token_ids=tuple(block.id_T[first : first + end].tolist()))
            yield from (told[place] for place in sorted(told, key=order.__getitem__))


def answered(question: Question, text: str) -> Chat | PromptCompletion:
    """Return a prompt with a sample as an example of the same kind as training would read."""
    if question.text is not None:
        return PromptCompletion(question.place, question.text, text)
    messages = [*question.messages, {"role": "assistant", "content": text}]
    return Chat(question.place, messages, question.tools, [0.0] * len(question.messages) + [1.0])
