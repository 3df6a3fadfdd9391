"""What the API shows of runs, models and hosts, and the small requests about them."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, model_validator

from longshore.accounts import Room
from longshore.commands import CommandResult
from longshore.dataset_runs import Format, MixedSource, RowsSource
from longshore.environments import Course, EndReason
from longshore.events import EvaluationSample, RunEvent
from longshore.fields import Artifact, Fence, Frozen, Reason, Remark, Sha256, added
from longshore.grading import Grader, SampledItem
from longshore.runs import FIRST_TENANT, Kind, Precision, Run, RunId, Source, Tenant
from longshore.training import MAX_SCALARS


def _below(path: str) -> str:
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError("a manifest may not name files outside its artifact")
    return path


class FileEntry(Frozen):
    """A file of an artifact: its path below the artifact, size in bytes, SHA-256."""

    path: Annotated[str, AfterValidator(_below)]
    size: int = Field(ge=0)
    sha256: Sha256


Phase = Literal[
    "queued",
    "checking",
    "downloading",
    "tokenizing",
    "waiting_for_groups",
    "waiting_for_commands",
    "waiting_for_sampler",
    "evaluating",
    "sampling",
    "grading",
    "packing",
    "waiting_for_worker",
    "training",
    "publishing",
    "done",
]


# Paused: ended at a step boundary with a checkpoint, until somebody resumes it.
State = Literal["running", "paused", "succeeded", "failed", "cancelled"]


class CheckpointRef(Frozen):
    """A checkpoint in the store."""

    step: int
    fence: Fence
    artifact: Artifact


class Problem(Frozen):
    """The reason why a run failed, in words for its user."""

    kind: str
    message: Reason


class PhaseSpan(Frozen):
    """The time that a run was in a phase, in seconds since 1970. `lease`: the number of its lease at that time."""

    phase: Phase
    began: float
    ended: float | None = None
    lease: int = 0


class SamplesNow(Frozen):
    """The samples, or episodes, that a run draws at the moment: of a train step, of steps ahead, or of an evaluation.

    `before`: those that an interrupted attempt has drawn and stored, which are not drawn again. `ended`: the
    others, by the reason of their end. `errors`: what the first few without a reward failed with.
    """

    running: int = 0
    waiting: int = 0
    before: int = 0
    ended: dict[str, int] = Field(default_factory=dict)
    errors: tuple[Remark, ...] = ()

    def __add__(self, other: "SamplesNow") -> "SamplesNow":
        ended = {end: self.ended.get(end, 0) + other.ended.get(end, 0) for end in {**self.ended, **other.ended}}
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("running", "waiting", "before")}
        return SamplesNow(**sums, ended=ended, errors=(*self.errors, *other.errors)[:MOST_ERRORS])


MOST_ERRORS = 5


class RunStatus(Frozen):
    """A run's status: the answer of the workflow's `status` query, and the contents of `result.json` afterwards."""

    run_id: RunId
    kind: Kind = "sft"
    state: State = "running"
    phase: Phase = "queued"
    step: int = 0
    num_steps: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    epoch: int = Field(default=0, description="number of leases so far")
    workers_lost: int = Field(
        default=0,
        description="leases that ended because the host or worker was lost, not by a pause or a host's shutdown",
    )
    checkpoint: CheckpointRef | None = None
    adapter: str | None = Field(default=None, description="URI of the published adapter, or model after `full`")
    adapter_sha256: str | None = Field(default=None, description="SHA-256 of the artifact's manifest")
    name: str | None = None
    version: int | None = None
    policy_version: int | None = Field(default=None, description="RL runs: train steps that changed the policy")
    dataset_report: str | None = Field(default=None, description="URI of the tokenizing report")
    planned_tokens: int | None = Field(
        default=None, description="tokens in the examples of all steps, once they are packed; not for RL runs"
    )
    problem: Problem | None = None
    skipped_steps: int = Field(default=0, description="RL runs: train steps with nothing to learn from")
    failed_steps: int = Field(default=0, description="RL runs: train steps that failed")
    equal_reward_steps: int = Field(default=0, description="RL runs: trained steps whose rewards were all the same")
    zero_gradient_steps: int = Field(default=0, description="RL runs: trained steps whose gradient was 0 throughout")
    notices: tuple[Reason, ...] = Field(default=(), description="notices for the user, whether the run succeeds or not")
    started_at: float | None = Field(default=None, description="start of its first execution, also for a resumed run")
    ended_at: float | None = None
    estimated_end: float | None = Field(
        default=None, description="estimated end of its last step at the current pace; None if it is unknown"
    )
    timeline: tuple[PhaseSpan, ...] = Field(default=(), description="the run's last phases, oldest first")
    paused_by: str | None = Field(
        default=None,
        description="the limit that paused the run, in words; the run resumes by itself when that is raised",
    )
    client_away: bool = Field(
        default=False,
        description="the run was paused because its client sent nothing; the client's next command or step resumes it",
    )
    gpu_seconds: float = Field(default=0.0, description="seconds that workers were leased, times their ranks")
    samples_now: SamplesNow | None = added(None, description="what its samplers and environments do at the moment")


StepKey = Annotated[str, Field(min_length=1, max_length=256)]


class CarriedOver(Frozen):
    """The prompts that are begun or due after a train step, if steps carry prompts over (`rollouts.carry_over`).

    `next`: the first step of whose prompts none has been trained; nor has one of a later step. `left`: of the prompts
    of each step before, the numbers of those that are left, in the step's order.
    """

    next: int = Field(default=1, ge=1)
    left: dict[int, tuple[int, ...]] = Field(default_factory=dict)

    @property
    def oldest(self) -> int:
        """The first step that has a prompt left."""
        return min(self.left, default=self.next)

    def of_step(self, step: int, num_prompts: int) -> tuple[int, ...]:
        """Return the numbers of a step's prompts that are left; each step has `num_prompts`."""
        return self.left.get(step, ()) if step < self.next else tuple(range(num_prompts))

    def without(self, taken: Mapping[int, Sequence[int]], num_prompts: int) -> "CarriedOver":
        """Return the prompts that remain when these of these steps are taken."""
        after = max([self.next, *(step + 1 for step in taken)])
        are_taken = {step: frozenset(numbers) for step, numbers in taken.items()}
        left = {
            step: tuple(n for n in self.of_step(step, num_prompts) if n not in are_taken.get(step, ()))
            for step in range(self.oldest, after)
        }
        return CarriedOver(next=after, left={step: numbers for step, numbers in left.items() if numbers})


class StepStatus(Frozen):
    """The status of a train step. `done`: its checkpoint is durable, and a later step trains on from it.

    `adapter`, `name` and `version`: what was published, if anything (`publish_every`).

    `skipped`: there was nothing to learn from; `failed`: it could not be trained. Neither changes the policy.
    """

    step: int = Field(
        description="number in order of arrival, from 1; 0: the evaluation of the policy before the first step"
    )
    key: StepKey
    groups: str
    state: Literal["queued", "running", "done", "skipped", "failed"] = "queued"
    policy_version: int | None = Field(default=None, description="the policy's version after the step")
    optimizer_step: int | None = Field(default=None, description="the run's optimizer steps after the step")
    adapter: str | None = None
    adapter_sha256: str | None = None
    synced: Sha256 | None = Field(default=None, description="digest of the weights that samplers were sent")
    name: str | None = None
    version: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    checkpoint: CheckpointRef | None = None
    critic_checkpoint: CheckpointRef | None = added(None, description="the critic's, if it has its own worker")
    problem: Problem | None = None
    same_as: int | None = Field(default=None, description="the earlier step that trained this key")
    samples: dict[str, str] = added(
        {}, description="URIs of samples that a run drew itself: `train`, and of evaluations `eval` or `eval_NAME`"
    )
    carried: CarriedOver | None = added(None, description="prompts that later steps train, with rollouts.carry_over")

    @property
    def is_final(self) -> bool:
        return self.state not in ("queued", "running")


class Cost(Frozen):
    """What a run costs, by the price of a GPU hour.

    `estimated`: at its end, at the pace of its steps so far; None while nobody can say.
    """

    currency: str
    so_far: float
    estimated: float | None = None


class RunView(RunStatus):
    """A run in the API: its status, its request, when it was submitted, and its cost if GPU hours have a price."""

    created_at: float
    tenant: Tenant = FIRST_TENANT
    owner: str | None = None
    source: Source = Source()
    run: Run
    precision: Precision | None = None
    cost: Cost | None = None


class RunPage(Frozen):
    """Runs, newest first. `next` is the `after` of the following page.

    `num_hidden_sessions`: idle ones that no page has, as they were not asked for.
    """

    runs: tuple[RunView, ...]
    has_more: bool
    next: str | None = None
    num_hidden_sessions: int = 0


class EventPage(Frozen):
    """Events after a cursor. `next` is the cursor to ask with again: the last event's, or the one that was given."""

    events: tuple[RunEvent, ...]
    next: str | None


class StepPage(Frozen):
    """Train steps of an RL run that are on record, in order.

    `next` is the number to ask after, also for steps that are still to come: the last step's, or what was given.
    """

    steps: tuple[StepStatus, ...]
    has_more: bool
    next: int | None = None


class StepMetrics(Frozen):
    """Metrics of one optimizer step."""

    step: int
    metrics: dict[str, float]


class EvaluationMetrics(Frozen):
    """Held-out metrics and greedy completions after a step; step 0 is before training.

    `drawn`: of graded held-out prompts, URIs of the samples by name: `eval`, or `eval_NAME`.
    """

    step: int
    metrics: dict[str, float]
    samples: tuple[EvaluationSample, ...] = ()
    drawn: dict[str, str] = added({})


class TrainStepMetrics(Frozen):
    """Metrics of one train step of an RL run: rewards, training, seconds. `optimizer_step`: the run's, after it."""

    step: int
    optimizer_step: int | None
    metrics: dict[str, float]


class Metrics(Frozen):
    """Metrics of each optimizer step, in order; of a step that was done twice, those of the last time.

    `train_steps`: metrics of each train step of an RL run, except steps that repeat another one's key.
    """

    steps: tuple[StepMetrics, ...]
    evaluations: tuple[EvaluationMetrics, ...]
    train_steps: tuple[TrainStepMetrics, ...] = ()


class Overview(Frozen):
    """A tenant's runs, counted. `waiting`: places in the installation's queue for workers, from 1, oldest first."""

    counts: dict[State, int]
    waiting: dict[RunId, int]
    owners: dict[str, str]


class Sparkline(Frozen):
    """A run's loss, or the reward of an RL run's train steps, in a few numbers, in order."""

    name: Literal["loss", "reward"]
    values: tuple[float, ...]


class CommandView(Frozen):
    """A command's state, and its result if there is one. A `dropped` command must be sent again with a new number."""

    number: int
    state: str = Field(description="waiting, done, failed or dropped")
    message: str | None = Field(default=None, description="why the command was dropped")
    result: CommandResult | None = None


class Estimate(Frozen):
    """What a run would do. `is_exact`: steps and tokens are exact for the rows that were counted.

    For an RL run, examples are prompts, and tokens are those of its samples plus each group's prompt once: `tokens` is
    an upper bound; `seconds` and `cost` assume the lengths of earlier samples.
    """

    problem: str | None = Field(default=None, description="why a run would refuse the dataset; absent if it would not")
    precision: Precision | None = Field(default=None, description="the precision of the run if it was submitted now")
    is_complete: bool = Field(description="every row was counted")
    rows: int
    examples: int
    dataset_tokens: int = Field(description="tokens of one pass over the examples, or of all prompts")
    trained_fraction: float | None = None
    epochs: float
    steps: int
    samples: int | None = None
    tokens: int
    is_exact: bool = Field(
        description="false for RL, whose tokens are an upper bound, and for very many steps of batch_tokens"
    )
    tokens_per_s: float | None = None
    seconds_per_step: float | None = None
    measured_on: tuple[str, ...] = Field(default=(), description="runs")
    same_layout: bool | None = None
    not_measured: str | None = Field(default=None, description="why no time is estimated")
    seconds: float | None = Field(
        default=None, description="seconds of training, without waiting, loading and evaluating"
    )
    cost: float | None = Field(default=None, description="cost of these seconds, if a GPU hour has a price")
    currency: str = "USD"


class PlanHeader(Frozen):
    """`plan.json`. `packing_efficiency` is tokens / (bins * bin_tokens)."""

    schema_version: Literal[1] = 1
    num_steps: int
    num_bins: int
    bin_tokens: int
    num_tokens: int
    packing_efficiency: float


MAX_PROFILED_STEPS = 10
PROFILE_ID = r"^[0-9a-f]{16}$"


class ProfileRequest(Frozen):
    """A request to a worker for torch's trace of a running job's next optimizer steps.

    `profile_id`: the name of the resulting trace.
    """

    profile_id: str = Field(pattern=PROFILE_ID)
    steps: int = Field(ge=1, le=MAX_PROFILED_STEPS)

    @staticmethod
    def path(log: str) -> Path:
        """The request's path. The host writes the file; rank 0 deletes it when the trace begins."""
        return Path(log).with_name("profile.json")

    def trace(self, log: str) -> Path:
        """The trace's path. Rank 0 writes it atomically: Chrome's JSON, compressed by gzip."""
        return Path(log).with_name(f"profile-{self.profile_id}.json.gz")


class JobFile(Frozen):
    """One attempt at a job. `has_output`: its worker's last output was stored, which happens if it fails."""

    job_id: str
    fence: str
    has_job: bool = False
    has_output: bool = False


class RunReport(Frozen):
    """Reports on a run's data. `dataset`: the tokenizing's own report (of an RL run: of its last step's groups).

    None: it is not there yet.
    """

    dataset: dict[str, JsonValue] | None = None
    packing: PlanHeader | None = None


class TextPart(Frozen):
    """A part of a trajectory. `is_drawn`: it was sampled from the policy, and is trained."""

    text: str
    is_drawn: bool


class DrawnSample(Frozen):
    """A sample that a run drew itself, as graders see it. `number`: among all samples of the step or evaluation."""

    number: int
    group: int
    text: str
    num_tokens: int
    finish_reason: str
    item: dict[str, JsonValue]
    episode: Course | None = None


class SampleText(Frozen):
    """One trajectory as text. `is_cut`: not all of it is shown.

    `parts`: of one with several answers, its text in parts: the drawn ones, and the observations between
    them. `turn_rewards`: what each answer earned. `end`: why an episode ended.
    """

    text: str
    reward: float
    num_tokens: int | None = None
    finish_reason: str | None = None
    is_cut: bool = False
    parts: tuple[TextPart, ...] = added(())
    turn_rewards: tuple[float, ...] | None = added(None)
    end: EndReason | None = added(None)


class GroupTexts(Frozen):
    """The trajectories of one prompt. `prompt`: the tokens before the first sampled one."""

    prompt: str
    samples: tuple[SampleText, ...]
    place: str | None = None


class Trace(Frozen):
    """A trace of steps, of one attempt at a job: Chrome's JSON, as gzip, for Perfetto."""

    profile_id: str
    job_id: str
    fence: str
    num_bytes: int


class Traces(Frozen):
    """A run's traces, and the one that is waited for."""

    asked: ProfileRequest | None
    traces: tuple[Trace, ...]


class RunRemoved(Frozen):
    """A run that is no more. `stays_published`: it published versions, which stay, with its record."""

    run_id: RunId
    stays_published: bool
    num_objects: int = Field(description="objects deleted from the store")
    num_bytes: int


class Health(Frozen):
    """The service's view of Temporal and the store."""

    status: Literal["ok", "degraded"]
    temporal: str
    store: str
    temporal_ui: str | None = None


class StepSubmission(Frozen):
    """One train step. The same key trains once, however often it is sent."""

    key: StepKey
    groups: str = Field(min_length=1, max_length=2048, description="URI of JSONL; POST /files returns one")
    wait_s: float = Field(default=0, ge=0, le=60, description="how long to wait for the step's end")


class AskedProfile(Frozen):
    """How many steps a trace is to have, at most: a job has only those that are left of it."""

    steps: int = Field(default=3, ge=1, le=MAX_PROFILED_STEPS)


class GraderTrial(Frozen):
    """A grader and a sample to grade; without a sample the grader is only loaded."""

    grader: Grader
    sample: SampledItem | None = None


ExportFormat = Literal["merged", "gguf", "fp8", "mlx"]
ExportType = Literal["q8_0", "f16", "bf16", "q4", "q8"]
_TYPES: dict[str, tuple[ExportType, ...]] = {"gguf": ("q8_0", "f16", "bf16"), "mlx": ("q4", "q8")}


class Export(Frozen):
    """How a whole model is written. Without a type: GGUF in `q8_0`, MLX in `q4`."""

    format: ExportFormat = Field(
        description="merged: safetensors as the base model's; gguf: one file for llama.cpp; fp8: safetensors in blocks "
        "of 128 by 128, which vLLM reads; mlx: groups of 64 for mlx-lm"
    )
    type: ExportType | None = Field(default=None, description="gguf: q8_0, f16 or bf16; mlx: q4 or q8")

    @model_validator(mode="after")
    def _is_of_format(self) -> Self:
        types = _TYPES.get(self.format, ())
        if self.type is not None and self.type not in types:
            known = f"it has {', '.join(types)}" if types else "it has none"
            raise ValueError(f"{self.format} has no type {self.type}: {known}")
        return self

    @property
    def stored_as(self) -> ExportType | None:
        """The type of the weights, if the format has several."""
        return self.type or (_TYPES[self.format][0] if self.format in _TYPES else None)

    @property
    def label(self) -> str:
        """`merged`, `fp8`, `gguf-q8_0`, …: equal for exports that have equal files."""
        return "-".join(filter(None, (self.format, self.stored_as)))


class ExportView(Frozen):
    """An export of one version. `label`: its format, and its type where the format has several.

    `num_bytes`: of all files, once it has succeeded. `error`: why it failed.
    """

    model: str
    label: str
    state: Literal["running", "succeeded", "failed"]
    num_bytes: int | None = None
    error: str | None = None


class ModelView(Frozen):
    """A published model. `id`: that of its newest version, or of the requested version.

    `base`: the model that an adapter was trained on, as its run named it. `versions`: those in the store, in order.
    `num_bytes`: of all files of this version. `rewards`: the names of a reward model's outputs.
    """

    id: str
    name: str
    kind: Literal["adapter", "model", "checkpoint"]
    version: int
    versions: tuple[int, ...] = ()
    base: str | None = None
    run_id: str
    created_at: float
    num_bytes: int | None = None
    rewards: tuple[str, ...] = ()


class EpisodeSampling(Frozen):
    """How an episode's answers are drawn, whatever the agent asks for."""

    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1, description="of an answer; the agent may ask for fewer")
    stop: tuple[str, ...] = Field(default=(), max_length=16)


class EpisodeRequest(Frozen):
    """A new episode: an address where an agent asks a model, and its answers are kept to be trained on."""

    model: str = Field(
        min_length=1,
        max_length=256,
        description="a published model, or a base model. Answers to questions for other names are not trained",
    )
    sampling: EpisodeSampling = EpisodeSampling()
    max_turns: int = Field(default=128, ge=1, le=1024, description="answers, those that are not trained included")
    lasts_s: float = Field(default=3600.0, gt=0, le=604_800, description="then it ends by itself")
    seed: int | None = Field(default=None, ge=0, lt=2**61, description="of all answers; by default a random one")


class EndedEpisode(Frozen):
    """The part of an ended episode that counts: the answers that are trained; and the number of the others.

    `num_later_turns`: of the former, those that have answers of the episode before them. `num_continuing`: of these,
    those that were drawn after the ids of the earlier answers as they were drawn; each other one begins a new branch.
    """

    num_turns: int
    num_side_turns: int
    num_later_turns: int
    num_continuing: int


class EpisodeTurnView(Frozen):
    """A turn of an episode: what was new in the question, and the answer.

    `after`: the answer that the question continues; `continues`: by its ids, as they were drawn. A turn without
    `after` begins a branch. `is_side`: it is not trained.
    """

    answer_id: str
    after: str | None
    continues: bool
    is_side: bool
    messages: tuple[dict[str, JsonValue], ...]
    answer: dict[str, JsonValue]
    finish_reason: str
    num_tokens: int
    at: float


class EpisodeView(Frozen):
    """An episode. `url`: its address, which only the answer that made it shows.

    An agent's client gets it as its base URL: `url` for Anthropic's clients, and with `/v1` for OpenAI's.
    """

    episode_id: str
    model: str
    state: Literal["open", "ended", "expired"]
    sampling: EpisodeSampling
    max_turns: int
    created_at: float
    expires_at: float
    ended_at: float | None = None
    end: EndedEpisode | None = None
    url: str | None = None


class Signature(Frozen):
    """`keyid`: the SHA-256 of the public key's 32 bytes; `sig`: Ed25519 of `signed_bytes`, in base64."""

    keyid: str
    sig: str


PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Envelope(Frozen):
    """DSSE's envelope. `payload`: the statement as JSON, in base64."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    payload: str
    payload_type: str = Field(default=PAYLOAD_TYPE, alias="payloadType")
    signatures: tuple[Signature, ...] = ()

    @property
    def signed_bytes(self) -> bytes:
        """The signed bytes: DSSE's pre-authentication encoding of type and payload. Raises ValueError."""
        body = base64.b64decode(self.payload, validate=True)
        return b" ".join((b"DSSEv1", *(b"%d %s" % (len(part), part) for part in (self.payload_type.encode(), body))))


class PublicKey(Frozen):
    """A key of this installation that verifies statements. `pem`: SubjectPublicKeyInfo of Ed25519."""

    keyid: str
    pem: str


class Devices(Frozen):
    """A host's devices: their number, and the bytes of the smallest. A CPU counts as one, which all ranks share."""

    number: int
    num_bytes: int


class HostView(Frozen):
    """A GPU or sampler host that is up. `id` tells hosts of one machine apart, and a restarted host keeps it.

    `name`: of its machine; only an operator's key sees it. `lease_since`: when it took the lease that it works on, in
    seconds since 1970, as `seen_at` is. `lacking`: why it takes no runs, if it does not.
    """

    id: str
    name: str | None
    shape: str
    max_ranks: int | None = None
    devices: Devices | None = None
    lease_since: float | None = None
    seen_at: float
    lacking: tuple[str, ...] = ()


class QueueHosts(Frozen):
    """The hosts of a role. `num_polling`: how many ask for work now; a host that has all the work it takes does not.

    `lacking`: why hosts take no runs, with their names if an operator's key asks. `precision`: on GPU hosts, of runs
    that name none. `hosts`: those that are up, without control hosts.
    """

    role: Literal["control", "gpu", "sampler"]
    queue: str
    num_polling: int
    lacking: tuple[str, ...] = ()
    precision: Precision | None = None
    hosts: tuple[HostView, ...] = ()


class DeletedVersions(Frozen):
    """What was deleted: one version, or a name with all of them."""

    id: str
    deleted: bool = True


# --- Results of tokenizing: the report of a whole dataset, and a preview of its first rows ---


class SourceShare(Frozen):
    """A source of a mixture: its units, and how many of those that are trained it gives (dataset_runs.MixedSource)."""

    num_units: int = Field(ge=1)
    weight: float | None = Field(default=None, ge=0)
    epochs: float | None = Field(default=None, gt=0)


def shares(sources: Sequence[MixedSource], num_units: Sequence[int]) -> tuple[SourceShare, ...]:
    """Return the shares of a mixture's sources, given the units of each."""
    both = zip(sources, num_units, strict=True)
    return tuple(SourceShare(num_units=n, weight=source.weight, epochs=source.epochs) for source, n in both)


class Cut(Frozen):
    """How units are cut into steps: `epochs` or `steps`, and `batch_size` or `batch_tokens`.

    An epoch's last step may be smaller. With `steps` the data is repeated for as many epochs as needed.
    """

    seed: int = Field(ge=0, lt=2**63)
    epochs: float | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    batch_tokens: int | None = Field(default=None, ge=1)
    sources: tuple[SourceShare, ...] = added((), description="of a mixture: its units are those of each, in order")

    @property
    def _is_cut(self) -> bool:
        return True

    @model_validator(mode="after")
    def _one_length_one_batch(self) -> Self:
        if self._is_cut and ((self.epochs is None) == (self.steps is None)):
            raise ValueError("give exactly one of epochs and steps")
        if self._is_cut and ((self.batch_size is None) == (self.batch_tokens is None)):
            raise ValueError("give exactly one of batch_size and batch_tokens")
        return self


class RunLength(Frozen):
    """The passes, steps and tokens of a run. `is_exact`: equal to those of its plan."""

    epochs: float
    steps: int
    tokens: int
    is_exact: bool = True


class LengthCount(Frozen):
    """The number of rows with more than half of `up_to_tokens` tokens, and at most that."""

    up_to_tokens: int
    num_rows: int


class LostRow(Frozen):
    """A row that is not trained on, and why."""

    place: str
    reason: Remark


class SourceReport(Frozen):
    """What became of the rows of a source of a mixture."""

    name: str
    format: Format
    num_rows: int
    num_kept: int
    num_tokens: int
    num_lost: int


class Report(Frozen):
    """`report.json`. Lengths are from before truncation; tokens and targets are those trained on."""

    schema_version: int = 1
    format: Format
    num_rows: int
    num_kept: int
    num_tokens: int
    num_targets: int
    trained_fraction: float
    max_tokens: int
    longest_tokens: int
    num_truncated: int
    num_too_long: int
    num_fully_masked: int
    num_refused: int = Field(default=0, description="rows for which the chat template raises an error")
    lengths: tuple[LengthCount, ...]
    lost: tuple[LostRow, ...]
    num_control_tokens: int = Field(default=0, description="rows whose messages hold the text of a control token")
    warnings: tuple[Reason, ...] = ()
    notices: tuple[Reason, ...] = Field(default=(), description="the warnings that a run on these rows also shows")
    sources: tuple[SourceReport, ...] = added((), description="of a mixture; its format is auto if theirs differ")

    @property
    def num_lost(self) -> int:
        return self.num_too_long + self.num_fully_masked + self.num_refused


class PreviewRequest(Frozen):
    """A dataset and a model as a user names them. The report covers the first `max_rows` rows."""

    source: RowsSource
    model_uri: str = Field(min_length=1, max_length=2048)
    max_tokens: int = Field(default=2048, ge=2)
    too_long: Literal["drop", "truncate"] = "drop"
    max_lost_fraction: float = Field(default=0.1, ge=0, le=1)
    num_rows: int = Field(default=4, ge=0, le=100, description="rows to show")
    max_rows: int = Field(default=100_000, ge=1, description="rows to count")
    max_seconds: float = Field(
        default=120.0, gt=0, le=200, description="seconds to count rows in; at least one row is counted"
    )
    are_prompts: bool = Field(default=False, description="rows are prompts of RL: only the model's input counts")
    labels: bool = Field(default=False, description="rows are for kto: they are counted, and none is shown")
    numbers: tuple[str, ...] = Field(
        default=(), max_length=MAX_SCALARS, description="fields that a reward model learns; as with labels"
    )


class PreviewStart(Frozen):
    """A preview's request, and its tenant. `cut`: how a run would cut the rows into steps, to compute its length."""

    tenant: Tenant
    request: PreviewRequest
    cut: Cut | None = None
    room: Room = Room()


class Span(Frozen):
    """Neighbouring tokens as text; `trained`: whether they are targets."""

    text: str
    trained: bool


class PreviewRow(Frozen):
    """A row as the model sees it. `fate`: how a run would treat it; `is_cut`: the text is shown in part.

    For a pair, `spans` are the prompt and the chosen answer, and `rejected` is the other answer.
    """

    place: str
    fate: Literal["kept", "truncated", "too_long", "fully_masked"]
    num_tokens: int
    num_targets: int
    spans: tuple[Span, ...]
    is_cut: bool
    rejected: tuple[Span, ...] = ()


class Preview(Frozen):
    """`is_complete`: the report counts every row. `problem`: why a run would refuse the dataset, if it would.

    `length`: of a run on the rows that were counted, if it was asked for.
    """

    report: Report
    is_complete: bool
    problem: str | None
    rows: tuple[PreviewRow, ...]
    length: RunLength | None = None
