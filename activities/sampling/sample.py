"""Sample completions of prompts from a policy, and prove that a sampler serves the adapter that a trainer made."""

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import Field, JsonValue, model_validator

from activities.formats.dataset import question_of
from activities.formats.rows import Chat, PromptCompletion, Question, Row
from activities.grading.grade import REWARDS, sampled_items
from activities.heartbeats import in_parallel, on_thread, stop_if_cancelled, tell
from activities.host_context import HostContext, Parts
from activities.sampling import agents
from activities.sampling.client import Sampler
from activities.sampling.completions import (
    COMPLETIONS,
    Drawing,
    RoutesWriter,
    Rows,
    SampledGroup,
    items_of,
    numbers_of,
    sample_of,
    sample_seed,
)
from activities.sampling.episodes import EpisodeCounts, EpisodePlan, Played, Player
from activities.sampling.questions import ChatPrompts
from activities.sampling.samplers import PolicyWeights, Samplers, Served, adapter_name, refusing
from activities.sandbox import calls as confined
from activities.telemetry import proof_counted
from activities.tokenizing.encoding import encoded
from activities.tokenizing.render_prompts import REPORT, PromptRow, PromptsFile, sources_of
from activities.tokenizing.tokenizer import TokenizerFiles, stopping_at, stops_of, tokenizer_files
from longshore.dataset_runs import Dataset, DatasetSource, named_sources
from longshore.environments import Course
from longshore.fields import Artifact, Frozen, added
from longshore.grading import SampleRewards
from longshore.runs import RunId
from longshore.training import Dtype
from longshore.views import SamplesNow
from shared.chat.completions import SamplerMemory
from shared.errors import SamplerMismatch
from shared.runs.status import RewardModel
from shared.serving import LeasedSampler, SamplerPlace, ServedSampler
from shared.storage.artifacts import find_artifact, read_record
from shared.storage.paths import SAMPLES, completions, content_key, rewarded, sampled_part, sampled_turn, samples
from shared.storage.store import ObjectStore

_VERSION = "sample-1"  # raise it when the same request would give other samples
_SAMPLES_UNDER_WAY = 256  # vLLM's own default of sequences at a time; ours has fewer slots, and lets the rest wait
_MAX_THREADS, _MIN_THREADS = 64, 2
_WRITERS = max(1, min(8, (os.cpu_count() or 1) // 2))  # of episodes' prompts; each writes one at a time
_log = logging.getLogger(__name__)
Drawn = TypeVar("Drawn", SampledGroup, Played)

SUMMARY = "summary.json"


class PolicySampleRequest(Drawing, PolicyWeights):
    """Prompts to answer, the policy, and the sampler.

    `model` and `dtype`: what the sampler at `place` serves; the samples depend on them, so they are part of the key.
    `refuted`: versions that a sampler failed to prove while samples were being drawn: these are drawn again.
    `groups`: the numbers of the groups to draw, if not all. `episodes`: each sample is an episode.
    """

    run_id: RunId
    model: Artifact
    dtype: Dtype = "float32"
    prompts: Artifact
    rows: Rows
    place: SamplerPlace
    refuted: tuple[int, ...] = ()
    groups: tuple[int, ...] | None = None
    episodes: EpisodePlan | None = added(None)

    @property
    def key(self) -> str:
        """The store key: a hash of everything that the samples depend on, without run, lease and files' places."""
        own = self.model_dump_json(include={*Drawing.model_fields, "dtype", "rows"} - {"routes"})
        weights = [(self.weights or self.model).sha256, self.adapter.sha256 if self.adapter else ""]
        if self.in_place is not None:  # samples depend on when newer versions came, so they are this run's only
            weights.append(f"{self.in_place} of {self.run_id}")
        weights += [f"again after version {version}" for version in self.refuted]
        if self.routes is not None:
            weights.append(self.routes.model_dump_json())
        if self.groups is not None:
            weights.append(f"groups {self.groups}")
        if self.episodes is not None:
            weights.append(self.episodes.key)
        match self.place:
            case ServedSampler():
                server = self.place.model_dump_json()
            case LeasedSampler(sampler="own"):
                server = "leased"
            case LeasedSampler(sampler=sampler):
                server = f"leased {sampler}"
        return content_key(_VERSION, own, self.prompts.sha256, *weights, server)

    def rows_of_groups(self, num_prompts: int) -> dict[int, int]:
        """Return the prompt of each group that is drawn."""
        numbers = dict(enumerate(numbers_of(self.rows, num_prompts)))
        return numbers if self.groups is None else {group: numbers[group] for group in self.groups}


class Share(Frozen):
    """A part of a request's prompts: the groups whose number is `number` modulo `count`."""

    number: int = Field(ge=0)
    count: int = Field(ge=1)

    def holds(self, group: int) -> bool:
        return group % self.count == self.number


class ShareRequest(PolicySampleRequest):
    """A sampler's share of the samples of a request. They are kept under the request's key, however it is shared."""

    share: Share


class Sampled(Frozen):
    """The samples: as `completions.jsonl`, one `SampledGroup` a line, and as `samples.jsonl`, the input of `grade`."""

    completions: Artifact
    samples: Artifact
    num_samples: int
    num_cut_off: int
    num_tokens: int
    episodes: EpisodeCounts | None = added(None)

    @property
    def metrics(self) -> dict[str, float]:
        return self.episodes.metrics if self.episodes is not None else {}


class SampledSummary(Frozen):
    """The content of `summary.json`. `num_tokens` counts the sampled tokens."""

    num_groups: int
    num_samples: int
    num_cut_off: int
    num_tokens: int
    episodes: EpisodeCounts | None = added(None)


class ProveRequest(PolicyWeights):
    """The trainer's log-probabilities of a probe under a policy, and the bound on a sampler's difference.

    `probe`: L token ids. `logprobs`: the trainer's L - 1 log-probabilities of probe[1:], in nats.
    """

    run_id: RunId
    probe: tuple[int, ...] = Field(min_length=2)
    logprobs: tuple[float, ...]
    bound: float = Field(gt=0, description="in nats, of any one token")
    place: SamplerPlace

    @model_validator(mode="after")
    def _one_each(self) -> "ProveRequest":
        if len(self.logprobs) != len(self.probe) - 1:
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.probe)} tokens: one for each but the first")
        return self


class Proved(Frozen):
    """`max_difference`: of the sampler's logprobs and the trainer's, in nats. `was_sent`: the trainer itself had sent
    the weights, by a weight sync; else they were loaded from the store. `was_reloaded`: the sampler's weights were
    not the policy's, and were replaced from the store.
    """

    max_difference: float
    was_sent: bool = False
    was_reloaded: bool = False


class SamplerActivities:
    """The activities that ask a sampler for something on behalf of a run."""

    def __init__(self, host: HostContext, samplers: Samplers) -> None:
        self._host = host
        self._samplers = samplers

    @on_thread("sample")
    def sample(self, request: PolicySampleRequest) -> Sampled:
        """Draw every prompt's samples, except those that an earlier attempt has drawn.

        Raises:
            InvalidInput: the server refuses a prompt or the adapter, or sends samples that cannot be trained.
            SamplerUnavailable, WorkerLost: there is no sampler at this place now; finished prompts are kept.
            StoreUnavailable: the store is away.
        """
        store = self._host.store
        parts = Parts(store, partial(sampled_part, request.key))
        self._host.use(completions(request.key))
        if done := find_sampled(store, request.key):
            for left in (parts, *_turns(store, request)):  # by an attempt that was killed while it deleted them
                left.forget(left.known())
            return done
        with self._host.scratch("sample") as scratch:
            with PromptsFile(self._host.stage(request.prompts)) as prompts:
                numbers = request.rows_of_groups(len(prompts))
                self._draw_missing(request, prompts, numbers, parts)
                groups = (read_record(store, parts.key_of(n), SampledGroup) for n in numbers)
                folders = scratch / "completions", scratch / "samples"
                write_samples(groups, prompts, *folders)
            for folder, key in zip(folders, (completions(request.key), samples(request.key)), strict=True):
                self._host.keep(key, folder)
        parts.forget(numbers)
        for turns in _turns(store, request):
            turns.forget(turns.known())
        result = find_sampled(store, request.key)
        assert result is not None
        return result

    @on_thread("draw_share")
    def draw_share(self, request: ShareRequest) -> None:
        """Draw the samples of some of a request's prompts, for `sample` to put together. Raises as `sample` does."""
        store = self._host.store
        self._host.use(completions(request.key))
        if find_sampled(store, request.key):
            return
        with PromptsFile(self._host.stage(request.prompts)) as prompts:
            numbers = request.rows_of_groups(len(prompts)).items()
            mine = {group: row for group, row in numbers if request.share.holds(group)}
            self._draw_missing(request, prompts, mine, Parts(store, partial(sampled_part, request.key)))

    @on_thread("prove_adapter")
    def prove_adapter(self, request: ProveRequest) -> Proved:
        """Load the adapter, score the probe, and compare. Nothing is cached: the proof is of the sampler's state now.

        If they differ, the whole policy is loaded from the store and compared once more. A leased sampler that still
        differs is ended.

        Raises:
            SamplerMismatch: a token's logprob differs by more than the bound, so the sampler has other weights.
            InvalidInput: the server refuses the adapter or the probe.
            SamplerUnavailable, WorkerLost: there is no sampler at this place now.
        """
        with proof_counted():
            try:
                with self._samplers.serving(request.place, request.run_id, request, self._host) as (opened, served):
                    return _proved(opened.client, served, request)
            except SamplerMismatch:
                self._samplers.end(request.place)
                raise

    @on_thread("sleep_sampler")
    def sleep_sampler(self, place: LeasedSampler) -> SamplerMemory:
        """Make a sampler free its device's memory. One that already sleeps stays asleep.

        Raises:
            SamplerUnavailable, WorkerLost: there is no sampler at this place now.
        """
        return self._samplers.sleep(place)

    @on_thread("wake_sampler")
    def wake_sampler(self, place: LeasedSampler) -> SamplerMemory:
        """Make a sampler take its memory again. Raises as `sleep_sampler` does."""
        return self._samplers.wake(place)

    def _draw_missing(
        self, request: PolicySampleRequest, prompts: PromptsFile, numbers: dict[int, int], parts: Parts
    ) -> None:
        """Draw the samples that are not in the store, of these groups. `numbers`: their prompts.

        Each thread stores a prompt's samples before it takes another prompt.
        """
        drawn = parts.known()
        missing = [(group, row) for group, row in numbers.items() if group not in drawn]
        if not missing:
            return
        stops = stops_of(request.place, self._host, request.model)
        how = request.model_copy(update={"sampling": stopping_at(request.sampling, stops)})
        with (
            self._samplers.serving(request.place, request.run_id, request, self._host) as (opened, served),
            ExitStack() as stack,
        ):
            told = _Told(len(missing) * how.group_size, (len(numbers) - len(missing)) * how.group_size)
            drawing = partial(draw_group, opened.client, served.name, how)
            play: Callable[[int, int, PromptRow], SampledGroup] = told.counted(drawing, how.group_size)
            if (plan := request.episodes) is not None:
                sources = sources_of(self._host.stage(request.prompts), plan.source)
                [turns] = _turns(self._host.store, request)
                who = opened.client, served.name, request.model
                writers = [stack.enter_context(closing(ChatPrompts(self._host))) for _ in range(_WRITERS)]
                player = Player(self._host, writers, *who, how, plan, sources, turns, turns.known(), request.run_id)
                episode = player.in_environment if plan.agent is None else partial(agents.play, player)
                play = partial(player.group, told.counted(episode, 1))

            def draw(asked: tuple[int, int, PromptRow]) -> None:
                group = play(*asked)
                parts.keep(group.group, group.encoded())

            asked = ((group, row, prompts[row]) for group, row in missing)
            num_threads = max(_MIN_THREADS, min(_MAX_THREADS, _SAMPLES_UNDER_WAY // request.group_size))
            for _ in in_parallel(draw, asked, num_threads):
                pass


class _Told:
    """Counts the samples of an activity, and tells the counts with its heartbeats. Used by several threads.

    Args:
        num: the samples that are to be drawn. `before`: those that were drawn by an earlier attempt.
    """

    def __init__(self, num: int, before: int) -> None:
        self._lock = threading.Lock()
        self._now = SamplesNow(waiting=num, before=before)
        tell(self._now)

    def counted(self, draw: Callable[[int, int, PromptRow], Drawn], num: int) -> Callable[[int, int, PromptRow], Drawn]:
        """Return a function that draws a group, or plays an episode, with `num` samples, and counts these."""

        def counting(group: int, member: int, prompt: PromptRow) -> Drawn:
            self._add(SamplesNow(waiting=-num, running=num))
            drawn = draw(group, member, prompt)
            found = drawn.samples if isinstance(drawn, SampledGroup) else (drawn.sample,)
            ends = Counter(one.finish_reason if one.course is None else one.course.end for one in found)
            errors = tuple(one.course.error for one in found if one.course is not None and one.course.error is not None)
            self._add(SamplesNow(running=-num, ended=ends, errors=errors))
            return drawn

        return counting

    def _add(self, change: SamplesNow) -> None:
        with self._lock:
            self._now += change
            tell(self._now)


def _proved(sampler: Sampler, served: Served, request: ProveRequest) -> Proved:
    """Prove that a sampler serves a policy; if not, reload it from the store and retry. Raises SamplerMismatch."""

    def difference() -> float | None:
        """Return None if the trainer has sent a later version, which will be proved separately."""
        with refusing(sampler, served.name, "probe"):
            told, by = sampler.scored_by(served.name, request.probe)
        if request.in_place is not None and (by.policy_version or 0) > request.policy_version:
            return None
        return compare(told, request.logprobs, request.probe, request.bound)

    try:
        found = difference()
        return Proved(max_difference=found or 0.0, was_sent=served.was_sent or found is None)
    except SamplerMismatch as mismatch:
        if served.reload is None:
            raise
        _log.warning("sampler %s: %s; loading the policy from the store", sampler.place, mismatch)
        served.reload()
        try:
            return Proved(max_difference=difference() or 0.0, was_reloaded=True)
        except SamplerMismatch as again:
            raise SamplerMismatch(f"{again}, after it was loaded anew from the store") from again


def _turns(store: ObjectStore, request: PolicySampleRequest) -> list[Parts]:
    """Return the answers of a request's episodes that have not ended; nothing if its samples are no episodes."""
    return [Parts(store, partial(sampled_turn, request.key))] if request.episodes is not None else []


def draw_group(sampler: Sampler, model: str, how: Drawing, group: int, row: int, prompt: PromptRow) -> SampledGroup:
    """Draw one prompt's samples. They are bitwise reproducible, whatever else the sampler computes at the time.

    Raises:
        InvalidInput: the server refuses the prompt, or sends samples that cannot be trained; names the prompt's place,
            and the sample if its routes are at fault.
        SamplerUnavailable: it does not answer, gave up a sample, or no longer serves the adapter.
    """
    seed = sample_seed(how.seed, group)
    with refusing(sampler, model, prompt.place):
        drawn = sampler.sample(model, prompt.token_ids, how.sampling, how.group_size, seed, how.route_bytes)
    num_prompt = len(prompt.token_ids)
    routes = [how.routes_of(each, num_prompt, f"{prompt.place}: sample {number}") for number, each in enumerate(drawn)]
    prompt_bytes = num_prompt * (how.routes.dtype.itemsize if how.routes is not None else 0)
    return SampledGroup(
        group=group,
        row=row,
        place=prompt.place,
        source=prompt.source,
        prompt_ids=prompt.token_ids,
        policy_version=how.policy_version,
        samples=tuple(
            sample_of(completion, prompt.place, how.policy_version, own[prompt_bytes:])
            for completion, own in zip(drawn, routes, strict=True)
        ),
        drawn_by=tuple(dict.fromkeys(one for completion in drawn for one in how.weights_of(completion))),
        prompt_routes=routes[0][:prompt_bytes],
    )


def write_samples(
    groups: Iterable[SampledGroup], prompts: PromptsFile, completions_folder: Path, samples_folder: Path
) -> SampledSummary:
    """Write groups into two folders, one at a time: as tokens, and as graders see them. Writes no manifests."""
    num_groups = num_samples = num_cut_off = num_tokens = 0
    courses: list[Course] = []
    for folder in (completions_folder, samples_folder):
        folder.mkdir(parents=True, exist_ok=True)
    with (
        (completions_folder / COMPLETIONS).open("wb") as drawn,
        (samples_folder / SAMPLES).open("wb") as shown,
        RoutesWriter(completions_folder) as routes,
    ):
        for group in groups:
            stop_if_cancelled()
            drawn.write(routes.without_bytes(group).encoded() + b"\n")
            for item in items_of(group, prompts[group.row]):
                shown.write(item.model_dump_json().encode() + b"\n")
            num_groups += 1
            num_samples += len(group.samples)
            num_cut_off += sum(sample.finish_reason == "length" for sample in group.samples)
            num_tokens += sum(sample.num_drawn for sample in group.samples)
            played = (sample.course for sample in group.samples if sample.course is not None)
            courses += [course.model_copy(update={"messages": ()}) for course in played]
    summary = SampledSummary(
        num_groups=num_groups,
        num_samples=num_samples,
        num_cut_off=num_cut_off,
        num_tokens=num_tokens,
        episodes=EpisodeCounts.of(courses) if courses else None,
    )
    (completions_folder / SUMMARY).write_text(summary.model_dump_json(indent=1) + "\n")
    return summary


def find_sampled(store: ObjectStore, key: str) -> Sampled | None:
    """Read the samples of a key from the store; None unless all of them are there."""
    drawn, shown = find_artifact(store, completions(key)), find_artifact(store, samples(key))
    if drawn is None or shown is None:
        return None
    summary = read_record(store, f"{completions(key)}/{SUMMARY}", SampledSummary)
    return Sampled(completions=drawn, samples=shown, **summary.model_dump(exclude={"num_groups"}))


def compare(sampler: tuple[float, ...], trainer: tuple[float, ...], probe: tuple[int, ...], bound: float) -> float:
    """Return the largest difference, in nats. Raises SamplerMismatch if it is greater than the bound, or NaN."""
    differences = [abs(one - other) for one, other in zip(sampler, trainer, strict=True)]
    # NaN counts as the largest difference.
    worst = max(range(len(differences)), key=lambda at: math.inf if math.isnan(differences[at]) else differences[at])
    if not differences[worst] <= bound:
        raise SamplerMismatch(
            f"token {worst + 1} of the probe (id {probe[worst + 1]}) has the logprob {sampler[worst]:.6g} in the "
            f"sampler, {trainer[worst]:.6g} in the trainer: {differences[worst]:.3g} apart, and the bound is {bound:g}"
        )
    return differences[worst]


# --- Score samples by a reward model on a sampler: each as the conversation that its training would have made of it ---

_SCORES_VERSION = "rewards-1"  # raise it when the same samples would get other scores
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
        by = self.reward.model.sha256, self.reward.adapter.sha256
        return content_key(_SCORES_VERSION, self.samples.sha256, fields, self.prompts.sha256, *by, self.dtype)


class Conversation(Frozen):
    """A sample as a reward model reads it, or why it cannot be rendered."""

    token_ids: tuple[int, ...] = ()
    refusal: str | None = None


class ScoreSamples:
    """The activity `score_samples`."""

    def __init__(self, host: HostContext, samplers: Samplers) -> None:
        self._host = host
        self._samplers = samplers

    @on_thread("score_samples")
    def score_samples(self, request: ScoreSamplesRequest) -> Artifact:
        """Score every sample, once: `rewards.jsonl`, a `SampleRewards` a line.

        Raises:
            InvalidInput: the sampler refuses the reward model or a conversation; its model has no chat template.
            SamplerUnavailable, WorkerLost: there is no sampler at this place now. StoreUnavailable: the store is away.
        """

        def write(folder: Path) -> None:
            host, reward = self._host, request.reward
            sources = sources_of(host.stage(request.prompts, only=(REPORT,)), request.source)
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
    with refusing(client, name, reward.scorer):
        found = iter(client.rewards(name, asked) if asked else [])
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
            yield answered(read[str(item.sample.get("source", ""))](Row(place, item.item)), item.sample)

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


def answered(question: Question, sample: Mapping[str, JsonValue]) -> Chat | PromptCompletion:
    """Return a prompt with a sample, or its episode, as an example of the same kind as training would read."""
    text = str(sample["output_text"])
    match sample.get("episode"):
        case {"messages": list(after)}:
            messages = [*question.messages, *after]
        case _ if question.text is not None:
            return PromptCompletion(question.place, question.text, text)
        case _:
            messages = [*question.messages, {"role": "assistant", "content": text}]
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return Chat(question.place, messages, question.tools, [float(n == last) for n in range(len(messages))])
