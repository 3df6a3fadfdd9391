"""The job: everything one worker needs to do one piece of training, as one JSON file.

Schema version 1. A new field needs a default and keeps the version; any other change increments it.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from longshore.fields import Artifact, Frozen
from longshore.layout import EngineName, Layout, engine_takes_the_layout
from longshore.losses import CrossEntropy
from longshore.training import (
    Adam,
    Dtype,
    Lora,
    Optimizer,
    OptimizerStates,
    Quantization,
    Recompute,
    Trainable,
    check_optimizer,
    fields_fit_engine,
)
from shared.fence import Fence
from shared.jobs.layout import pipelines_have_bins
from shared.jobs.losses import (
    Critic,
    Distillation,
    Loss,
    adapters_of,
    check_head,
    is_policy_loss,
    reference_of,
    scores_old,
    teacher_stays,
)
from shared.jobs.weight_sync import SyncTarget
from shared.storage.paths import WorkerPaths

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


class JobCritic(Critic):
    """The critic of a job, its trained parameters and learning rate. `alone`: the policy is not trained."""

    trainable: Lora
    learning_rate: float = Field(gt=0)
    alone: bool = False


class Evaluation(Frozen):
    """Held-out loss and greedy completions, before the first step, every `every_steps`, and after the last."""

    data: PackedData | None = None
    every_steps: int = Field(default=0, ge=0, description="0: only before the first and after the last step")
    num_samples: int = Field(default=0, ge=0, le=16, description="greedy completions of the data's first prompts")
    sample_tokens: int = Field(default=64, ge=1, le=1024)


class Checkpointing(Frozen):
    """A checkpoint every `every_steps` (0: only the last); the newest `keep` are kept."""

    every_steps: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)


class WorkerPlan(Frozen):
    """The engine and the slot that a job or session needs: the same for every attempt."""

    run_id: str
    job_id: str = Field(pattern=r"^[0-9]{6}$")
    model: Artifact
    engine: EngineName = "megatron"
    layout: Layout = Layout()
    dtype: Dtype = "float32"
    quantize_base: Quantization | None = Field(default=None, description="how the frozen base's linears are stored")
    optimizer_states: OptimizerStates = Field(default="float32", description="how both moments are stored")
    recompute: Recompute = Field(default="auto", description="layers are recomputed in the backward pass")
    threads_per_rank: int = Field(default=1, ge=1, description="CPU threads; bit-identical results depend on them")
    trainable: Trainable
    initial_adapter: Artifact | None = Field(default=None, description="a published adapter to continue from")
    initial_checkpoint: Artifact | None = Field(
        default=None, description="the last checkpoint of the run's job before: weights, optimizer and random state"
    )
    first_step: int = Field(
        default=0, ge=0, description="steps of the run's earlier jobs; counting continues from there"
    )
    checkpointing: Checkpointing = Checkpointing()
    seed: int = Field(default=0, ge=0, lt=2**63)
    after: Literal["offload", "keep"] = "offload"

    _engine_takes_the_layout = model_validator(mode="after")(engine_takes_the_layout)
    _fields_fit_engine = model_validator(mode="after")(fields_fit_engine)

    # Properties that differ between kinds of plans, so that callers need not check the kind.

    @property
    def takes_commands(self) -> bool:
        """True if a client decides the steps."""
        return False

    @property
    def step_loss(self) -> Loss:
        """The loss of the plan's own steps. Commands name their own losses, which only need the trained model."""
        return CrossEntropy()

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
        """How many of the newest checkpoints that a client asked for are kept."""
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
    num_steps: int = Field(ge=1, description="of this job")
    loss: Loss = CrossEntropy()
    critic: JobCritic | None = Field(
        default=None, description="makes advantages from rewards, which the data has in the column of advantages"
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="for a policy loss: logits are divided by it, as when the trajectories were sampled; for "
        "distillation: the teacher's and the student's logits are",
    )
    optimizer: Optimizer = Adam()
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
    def step_loss(self) -> Loss:
        return self.loss

    @property
    def step_critic(self) -> JobCritic | None:
        return self.critic

    @property
    def packed(self) -> tuple[PackedData, ...]:
        return (self.data,) if self.evaluation.data is None else (self.data, self.evaluation.data)

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_steps

    @property
    def sync_target(self) -> SyncTarget | None:
        return self.sync

    @property
    def client_samples(self) -> bool:
        return is_policy_loss(self.loss) and self.sync is None and not self.probe

    @model_validator(mode="after")
    def _temperature_means_something(self) -> Self:
        if self.temperature != 1 and not (is_policy_loss(self.loss) or isinstance(self.loss, Distillation)):
            raise ValueError(
                "temperature belongs to losses of sampled sequences and to distillation: "
                f"with {self.loss.kind} it must be 1"
            )
        return self

    _pipelines_have_bins = model_validator(mode="after")(pipelines_have_bins)

    @model_validator(mode="after")
    def _optimizer_fits(self) -> Self:
        check_optimizer(self.optimizer, self.engine, self.layout, self.trainable)
        return self

    @model_validator(mode="after")
    def _loss_is_of_what_is_there(self) -> Self:
        reference_of(self.loss)
        check_head(self.loss, self.trainable.head)
        if self.trainable.head is not None and (self.evaluation.num_samples or self.probe):
            raise ValueError(f"evaluation.num_samples and probe: this trains {self.trainable.head}, and no tokens")
        return self

    @model_validator(mode="after")
    def _critic_has_a_policy(self) -> Self:
        if self.critic is not None and not (is_policy_loss(self.loss) and isinstance(self.trainable, Lora)):
            raise ValueError("critic: it belongs to a policy loss, and to a lora, beside which it has the base")
        return self

    @model_validator(mode="after")
    def _teacher_stays(self) -> Self:
        if isinstance(self.loss, Distillation):
            teacher_stays(self.trainable, self.loss)
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
        default=None, description="of a session: the folder of its commands, <number>.json, and their results"
    )
    start: Artifact | None = Field(default=None, description="the checkpoint to resume from")
    tenant: str = Field(default="", description="the run's tenant: tenants share a worker's time by weight")
    tenant_weight: float = Field(default=1.0, gt=0, description="the tenant's weight, relative to others'")

    @property
    def needs_its_beginning(self) -> bool:
        """True if the weights before the job's first step are needed: at its first attempt, or to score data."""
        return self.start is None or scores_old(self.plan.step_loss) or self.plan.step_critic is not None

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
    own = [*files, *adapters_of(job.plan.step_loss)]
    return [plan.model, *(a for a in (*own, plan.initial_adapter, before, job.start) if a is not None)]
