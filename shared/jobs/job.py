"""The job as the worker gets it, its layout and weight sync, and the leases of the hosts that do it."""

import hmac
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from longshore import losses, training
from longshore.fields import Artifact, Fence, Frozen, Sha256, added
from shared.errors import InvalidInput
from shared.field_rules import first_error
from shared.storage.host_states import HostAddress
from shared.storage.paths import WorkerPaths

# --- Layouts (longshore/training.py) from their labels, and their limits ---


def layout_of(label: str) -> training.Layout:
    """Parse a layout's label. Raises InvalidInput for any other text."""
    degrees: dict[str, int] = {}
    for part in () if label == "single" else label.split("-"):
        found = re.fullmatch(r"(sp)|(tp|pp|cp|ep|etp|dp|nodes)([1-9][0-9]{0,3})", part)
        name = (found[1] or found[2]) if found else None
        if found is None or name is None or name in degrees:
            raise InvalidInput(f"'{part}' is no degree: a layout is written like tp2-sp-pp2-dp4", "layout")
        degrees[name] = int(found[3] or 1)
    try:
        return training.Layout.model_validate(degrees)
    except ValidationError as error:
        field, rule = first_error(error)
        raise InvalidInput(rule, f"layout.{field}".rstrip(".")) from None


def check_ranks(layout: training.Layout, max_ranks: int, below: str = "", why: str = "(setting max_ranks)") -> None:
    """Refuse a layout with more ranks per machine than a host takes, whatever the model.

    `why`: the source of that limit, for the message.

    Raises InvalidInput: names the dimension if one alone exceeds the limit.
    """
    if layout.ranks_per_node > max_ranks:
        split = [name for name in ("tp", "pp", "cp", "dp") if getattr(layout, name) > 1]
        place = f"{below}layout.{split[0]}" if len(split) == 1 else f"{below}layout"
        each = " on each of its machines" if layout.nodes > 1 else ""
        rule = f"{layout.ranks_per_node:,} ranks{each} ({layout.label})"
        raise InvalidInput(f"{rule}; a host of this installation takes up to {max_ranks} {why}", place)


def check_nodes(layout: training.Layout, max_hosts: int | None, below: str = "") -> None:
    """Refuse a layout of more machines than there can be hosts. None: that is unknown. Raises InvalidInput."""
    if max_hosts is not None and layout.nodes > max_hosts:
        rule = f"{layout.nodes:,} machines ({layout.label}); this installation has up to {max_hosts} GPU host"
        raise InvalidInput(f"{rule}{'s' * (max_hosts > 1)} at a time (setting max_hosts)", f"{below}layout.nodes")


# --- Weight sync in runs and jobs: sends a trainer's weights to the samplers of its run ---


def newest_name(run_id: str) -> str:
    """Return the name under which a sampler serves the newest version of a run's policy."""
    return f"{run_id}-newest"


class SyncPlace(Frozen):
    """A sampler's address for a trainer: a socket's path on its own machine, and `host:port` for other machines."""

    socket: str
    address: str | None = None


class SyncTarget(Frozen):
    """The samplers that a job sends its weights to at its end. `sockets`: paths of their sockets on their machines.

    `addresses`: the same samplers' addresses for other machines, if they have one. `version`: the policy's, which only
    grows. `name`: the samplers' name for the run's newest version, if samples in progress continue with it. `waits`:
    without a name, full weights wait for samples in progress to end; if false, they are not sent while there are any.
    """

    sockets: tuple[str, ...] = Field(min_length=1, max_length=64)
    addresses: tuple[str | None, ...] = Field(default=(), max_length=64)
    version: int = Field(ge=0)
    backend: Literal["auto", "delta", training.Transport]
    bucket_bytes: int = Field(ge=1 << 10, le=4 << 30)
    name: str | None = Field(default=None, max_length=512)
    waits: bool = True
    profile_path: str | None = Field(default=None, pattern=training.PROFILE_PATH)

    @property
    def places(self) -> tuple[SyncPlace, ...]:
        addresses = self.addresses or (None,) * len(self.sockets)
        return tuple(SyncPlace(socket=s, address=a) for s, a in zip(self.sockets, addresses, strict=True))


class SyncAccess(Frozen):
    """A file next to a job's log that the trainer's host writes for its worker only: the run's secret, in hexadecimal,
    and the file that traces are appended to.

    `target`: where weights are sent if the plan names no target: the sampler that answers users' questions. The host
    rewrites the file when that changes.
    """

    secret: Sha256 | None = None
    profile: str | None = None
    target: SyncTarget | None = None

    @staticmethod
    def path(log: str) -> Path:
        return Path(log).with_name("sync_access.json")

    @classmethod
    def read(cls, log: str) -> "SyncAccess":
        """Read the file next to a log. It is absent if a worker is started by hand: then all fields are empty."""
        path = cls.path(log)
        return cls.model_validate_json(path.read_bytes()) if path.exists() else cls()


def secret_of_run(key: bytes, run_id: str) -> bytes:
    """Return the secret that a run's trainer uses to authenticate to a sampler that knows `key`."""
    return hmac.digest(key, b"run " + run_id.encode(), "sha256")


# --- The job: everything one worker needs to do one piece of training, as one JSON file ---
#
# Schema version 1. A new field needs a default and keeps the version; any other change increments it.

ONLY_JOB = "000001"
"""The job of a run that has one. A run of several numbers them by its steps."""


class Schedule(Frozen):
    """The learning rate of step t of `num_steps`: linear warm-up, then constant, linear or cosine decay to 0.

    `rates`, if there are any, give each step's rate instead. `num_steps`: the decay's length, if it is not
    the job's.
    """

    kind: Literal["constant", "linear", "cosine"] = "linear"
    learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    rates: tuple[float, ...] = ()
    num_steps: int | None = Field(default=None, ge=1)


class PackedData(Frozen):
    """The training data: `units` (examples) and the `plan` that puts them into steps and bins (packed.py)."""

    units: Artifact
    plan: Artifact
    likeliest: Artifact | None = Field(
        default=None, description="a remote teacher's top ids for each target, and their log-probabilities"
    )


class JobCritic(losses.Critic):
    """The critic of a job, its trained parameters and learning rate. `alone`: the policy is not trained.

    `part`: what this job does of its step, while a job on another worker does the other part. Both compute the
    critic's values, so that neither waits for the other. `checkpoint`: the critic that the job begins with, if it is
    not that of the job's initial checkpoint.
    """

    trainable: training.Lora
    learning_rate: float = Field(gt=0)
    alone: bool = False
    part: Literal["both", "policy", "critic"] = added("both")
    checkpoint: Artifact | None = added(None)


class HeldOutGrades(Frozen):
    """What samplers and a grader found of the weights after a step, with held-out prompts.

    `metrics`: `eval_reward_mean` and others. `samples`: URIs of the samples, by name: `eval`, or `eval_NAME`.
    """

    step: int = Field(ge=0)
    metrics: dict[str, float]
    samples: dict[str, str]


class Evaluation(training.Watched):
    """Held-out loss and greedy completions, before the first step, every `every_steps`, and after the last.

    A worker does not sample held-out prompts that are graded: at each step after which they are, the job ends if its
    plan does not have their grades, and the run's next job goes on from its checkpoint.
    """

    data: PackedData | None = None
    sets: dict[str, PackedData] = added({}, description="further held-out data: metrics begin with its name")
    every_steps: int = Field(default=0, ge=0, description="0: only before the first and after the last step")
    num_samples: int = Field(default=0, ge=0, le=16, description="greedy completions of the data's first prompts")
    sample_tokens: int = Field(default=64, ge=1, le=1024)
    graded_every: int | None = added(
        None, ge=0, description="steps between evaluations that are graded; 0: only before and after; None: none is"
    )
    graded: HeldOutGrades | None = added(None, description="what the newest of these found")

    def next_graded(self, step: int, num_steps: int) -> int:
        """Return the step with which a job ends that begins at a step: after it held-out prompts are graded."""
        if self.graded_every is None:
            return num_steps
        if self.awaits_grades(step, num_steps):
            return step
        return min(num_steps, (step // self.graded_every + 1) * self.graded_every if self.graded_every else num_steps)

    def awaits_grades(self, step: int, num_steps: int) -> bool:
        """Return True if held-out prompts are graded after a step, and the plan does not have their grades."""
        every = self.graded_every
        is_due = every is not None and (step in (0, num_steps) or (every > 0 and step % every == 0))
        return is_due and (self.graded is None or self.graded.step != step)

    @property
    def held_out(self) -> dict[str, PackedData]:
        """All held-out data by name; `data` has an empty one."""
        return ({} if self.data is None else {"": self.data}) | self.sets


class Checkpointing(Frozen):
    """A checkpoint every `every_steps` (0: only the last); the newest `keep` are kept."""

    every_steps: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)


class WorkerPlan(Frozen):
    """The engine and the slot that a job or session needs: the same for every attempt."""

    run_id: str
    job_id: str = Field(pattern=r"^[0-9]{6}$")
    model: Artifact
    engine: training.EngineName = "megatron"
    layout: training.Layout = training.Layout()
    dtype: training.Dtype = "float32"
    quantize_base: training.Quantization | None = Field(
        default=None, description="how the frozen base's linears are stored"
    )
    optimizer_states: training.OptimizerStates = Field(default="float32", description="how both moments are stored")
    recompute: training.Recompute = Field(default="auto", description="layers are recomputed in the backward pass")
    threads_per_rank: int = Field(default=1, ge=1, description="CPU threads; bit-identical results depend on them")
    trainable: training.Trainable
    initial_adapter: Artifact | None = Field(default=None, description="a published adapter to continue from")
    initial_checkpoint: Artifact | None = Field(
        default=None, description="the last checkpoint of the run's previous job: weights, optimizer and random state"
    )
    first_step: int = Field(
        default=0, ge=0, description="steps of the run's earlier jobs; counting continues from there"
    )
    checkpointing: Checkpointing = Checkpointing()
    seed: int = Field(default=0, ge=0, lt=2**63)
    after: Literal["offload", "keep"] = "offload"

    _fields_fit_engine = model_validator(mode="after")(training.fields_fit_engine)

    # Properties that differ between kinds of plans, so that callers need not check the kind.

    @property
    def takes_commands(self) -> bool:
        """True if a client decides the steps."""
        return False

    @property
    def step_loss(self) -> losses.Loss:
        """The loss of the plan's own steps. Commands name their own losses, which only need the trained model."""
        return losses.CrossEntropy()

    @property
    def step_critic(self) -> JobCritic | None:
        """The critic that the plan's own steps train with the policy."""
        return None

    @property
    def packed(self) -> tuple[PackedData, ...]:
        """The data of the plan's own steps, and the held-out data."""
        return ()

    @property
    def last_step(self) -> int | None:
        """Steps of the run when this plan is done; None if a client decides."""
        return None

    @property
    def sync_target(self) -> SyncTarget | None:
        """The samplers that the plan sends its weights to."""
        return None

    @property
    def client_samples(self) -> bool:
        """True if a client trains step by step on its own samples, from the sampler that answers questions."""
        return False

    @property
    def num_kept_states(self) -> int:
        """How many of the newest checkpoints are kept for which the worker has emitted `kept`."""
        return 0


class SessionPlan(WorkerPlan):
    """Work whose steps a client decides, command by command (commands.py). Steps in events and checkpoints are the
    numbers of commands: a checkpoint of step n is the state after command n.
    """

    kind: Literal["session"] = "session"
    max_tokens: int = Field(ge=2, description="longest sequence, and tokens of a micro-batch")
    save_after_s: float = Field(default=30.0, gt=0, description="seconds of commands after which the state is saved")
    keep_states: int = Field(default=32, ge=1, description="how many of save_state's newest states are kept")
    offload_after_s: float = Field(
        default=10.0, gt=0, description="seconds without a command until the slot is offloaded"
    )

    @property
    def takes_commands(self) -> bool:
        return True

    @property
    def client_samples(self) -> bool:
        return self.trainable.head is None

    @property
    def num_kept_states(self) -> int:
        return self.keep_states


class JobPlan(WorkerPlan):
    """The work of a job without paths and fence: the same for every attempt of a run."""

    data: PackedData
    num_steps: int = Field(ge=1, description="train steps of this job")
    loss: losses.Loss = losses.CrossEntropy()
    critic: JobCritic | None = Field(
        default=None, description="computes advantages from rewards, which the data has in the column of advantages"
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="for a policy loss: logits are divided by it, as when the trajectories were sampled; for "
        "distillation: the teacher's and the student's logits are",
    )
    optimizer: training.Optimizer = training.Adam()
    schedule: Schedule
    evaluation: Evaluation = Evaluation()
    memory_budget_bytes: int | None = Field(
        default=None,
        gt=0,
        description="memory of a pass on a rank, besides weights and optimizer: the worker forms micro-batches of a "
        "step's examples that fit. If absent, the plan's bins are the micro-batches",
    )
    max_micro_batch_tokens: int | None = Field(
        default=None, ge=2, description="the most tokens of a micro-batch, even if the memory budget has room for more"
    )
    sync: SyncTarget | None = Field(default=None, description="samplers that get the weights at the end")
    probe: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="token ids whose log-probabilities under the final weights the job reports at its end"
    )

    @property
    def step_loss(self) -> losses.Loss:
        return self.loss

    @property
    def step_critic(self) -> JobCritic | None:
        return self.critic

    @property
    def packed(self) -> tuple[PackedData, ...]:
        return (self.data, *self.evaluation.held_out.values())

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_steps

    @property
    def num_kept_states(self) -> int:
        return int(self.evaluation.keep == "best")

    @property
    def sync_target(self) -> SyncTarget | None:
        return self.sync

    @property
    def client_samples(self) -> bool:
        return losses.is_policy_loss(self.loss) and self.sync is None and not self.probe

    @model_validator(mode="after")
    def _temperature_means_something(self) -> Self:
        if self.temperature != 1 and not (
            losses.is_policy_loss(self.loss) or isinstance(self.loss, losses.Distillation)
        ):
            raise ValueError(
                "temperature belongs to losses of sampled sequences and to distillation: "
                f"with {self.loss.kind} it must be 1"
            )
        return self

    _pipelines_have_bins = model_validator(mode="after")(training.pipelines_have_bins)

    @model_validator(mode="after")
    def _optimizer_fits(self) -> Self:
        training.check_optimizer(self.optimizer, self.engine, self.layout, self.trainable)
        return self

    @model_validator(mode="after")
    def _loss_is_of_what_is_there(self) -> Self:
        losses.reference_of(self.loss)
        losses.check_head(self.loss, self.trainable.head)
        if self.trainable.head is not None and (self.evaluation.num_samples or self.probe):
            raise ValueError(f"evaluation.num_samples and probe: this trains {self.trainable.head}, and no tokens")
        return self

    @model_validator(mode="after")
    def _critic_has_a_policy(self) -> Self:
        if self.critic is not None and not (
            losses.is_policy_loss(self.loss) and isinstance(self.trainable, training.Lora)
        ):
            raise ValueError("critic: it belongs to a policy loss, and to a lora, beside which it has the base")
        return self

    @model_validator(mode="after")
    def _teacher_stays(self) -> Self:
        if isinstance(self.loss, losses.Distillation):
            losses.check_teacher_is_frozen(self.trainable, self.loss)
        return self

    @model_validator(mode="after")
    def _probe_says_something(self) -> Self:
        if len(self.probe) == 1:
            raise ValueError("probe: the first of its tokens has no log-probability; give none, or two at least")
        return self


def _kind_of(plan: Any) -> str:
    return "session" if (plan.get("kind") if isinstance(plan, dict) else getattr(plan, "kind", None)) else "training"


AnyPlan = Annotated[
    Annotated[JobPlan, Tag("training")] | Annotated[SessionPlan, Tag("session")], Discriminator(_kind_of)
]


class Job(Frozen):
    """One job file. Paths are local and absolute. Inputs are artifacts, so an archived job can be run again."""

    schema_version: Literal[1] = 1
    plan: AnyPlan
    fence: Fence
    log_path: str
    checkpoint_dir: str
    scratch_dir: str
    commands_dir: str | None = Field(
        default=None, description="for a session: the folder of its commands, <number>.json, and their results"
    )
    start: Artifact | None = Field(default=None, description="the checkpoint to resume from")
    tenant: str = Field(default="", description="the run's tenant: tenants share a worker's time by weight")
    tenant_weight: float = Field(default=1.0, gt=0, description="the tenant's weight, relative to others'")

    @property
    def needs_its_beginning(self) -> bool:
        """True if the weights before the job's first step are needed: at its first attempt, or to score data."""
        return self.start is None or losses.scores_old(self.plan.step_loss) or self.plan.step_critic is not None

    @staticmethod
    def places(paths: WorkerPaths, plan: AnyPlan, fence: Fence) -> dict[str, str | None]:
        """Return the fields of a job that are paths, below a worker's folder."""
        outputs = paths.outputs(plan.run_id, plan.job_id, fence)
        return {
            "log_path": str(outputs / "log.jsonl"),
            "checkpoint_dir": str(outputs / "checkpoints"),
            "scratch_dir": str(paths.scratch(plan.run_id, plan.job_id, fence)),
            "commands_dir": str(outputs / "commands") if plan.takes_commands else None,
        }

    @model_validator(mode="after")
    def _paths_are_absolute(self) -> "Job":
        for name in ("log_path", "checkpoint_dir", "scratch_dir", "commands_dir"):
            if not (getattr(self, name) or "/").startswith("/"):
                raise ValueError(f"{name} must be an absolute path")
        if (self.commands_dir is None) == self.plan.takes_commands:
            raise ValueError("commands_dir: a session has one, and nothing else has")
        return self


def artifacts_of(job: Job) -> list[Artifact]:
    """Return every input of a job; for a session those that it begins with."""
    plan = job.plan
    before = plan.initial_checkpoint if job.needs_its_beginning else None
    files = [artifact for data in plan.packed for artifact in (data.units, data.plan, data.likeliest)]
    own = [*files, *losses.adapters_of(job.plan.step_loss)]
    critic = None if plan.step_critic is None else plan.step_critic.checkpoint
    return [plan.model, *(a for a in (*own, plan.initial_adapter, before, job.start, critic) if a is not None)]


# --- Files between a host and its worker or sampler other than jobs: the process's identity, and its leases ---


class WorkerKey(Frozen):
    """Properties that a worker process has for life. A released worker may serve another run with an equal key."""

    model: Artifact
    layout: training.Layout
    dtype: training.Dtype
    quantize_base: training.Quantization | None = None
    optimizer_states: training.OptimizerStates = "float32"
    engine: training.EngineName = "megatron"
    threads_per_rank: int = 1

    @classmethod
    def of(cls, plan: WorkerPlan) -> Self:
        """Return the key of the worker that a plan needs."""
        return cls.model_validate(plan, from_attributes=True)


class SamplerKey(Frozen):
    """Properties that a sampler process has for life.

    On one machine, equal keys of Longshore's own sampler give bit-identical samples.
    """

    model: Artifact
    sampler: training.SamplerKind = "own"
    dtype: training.Dtype = "float32"
    threads: int = Field(default=1, ge=1, description="CPU threads")
    slots: int = Field(default=32, ge=1, description="sequences per step")
    max_model_len: int = Field(default=4096, ge=2, description="prompt and completion together, in tokens")
    max_lora_rank: int = Field(default=0, ge=0, description="for vLLM: the highest rank of its adapters")
    tells_routes: bool = Field(default=False, description="for vLLM: it returns the experts of each token")


ProcessKey = WorkerKey | SamplerKey


class WorkerRecord(Frozen):
    """`worker.json`, written by the host at launch. If a host is killed, the next one finds and ends its worker by it.

    A process is identified by pid and start time (seconds since 1970), since pids are reused. Every rank has the
    environment variable `LONGSHORE_WORKER_ID=<worker_id>`. `pid` is 0 until the worker has been started.
    """

    worker_id: str
    pid: int
    started_at: float
    host_pid: int
    host_started_at: float
    key: ProcessKey


class LeaseMark(Frozen):
    """`leases/<run>.json`: a lease that the worker serves. A job of this run with an older fence is refused."""

    run_id: str
    fence: Fence


WORKER_ID_VARIABLE = "LONGSHORE_WORKER_ID"


class GangLeader(Frozen):
    """Signal to the workflow: the first of several machines has started its ranks, which wait for the others'.

    `worker_id`: of the first machine's worker. `at`: its address for the other hosts.
    """

    fence: Fence
    worker_id: str
    at: HostAddress


class LeaseGrant(Frozen):
    """Signal to the workflow: the worker is up, and jobs for it go to the host's own queue.

    `joined`: the worker already trained other runs. A sampler also has addresses for weights: `weights_socket`, a
    path for trainers on its machine, and `weights_address`, `host:port` for trainers on other machines. `host_socket`
    and `host_address`: the addresses of the sampler's host for the web service; the latter uses mutual TLS.
    """

    fence: Fence
    host_queue: str
    worker_id: str
    joined: bool = False
    weights_socket: str | None = None
    weights_address: str | None = None
    host_socket: str | None = None
    host_address: str | None = None
