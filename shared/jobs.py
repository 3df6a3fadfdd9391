"""The job: everything one worker needs to do one piece of training, as one JSON file.

Schema version 1. A field that is added gets a default and keeps the version; anything else raises it.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shared.layout import Layout
from shared.models import Frozen

SCHEMA_VERSION = 1

Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS: tuple[Linear, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Dtype = Literal["float32", "bfloat16"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Artifact(Frozen):
    """A folder in a store, whose `manifest.json` lists its files; `sha256` is that manifest's."""

    uri: str
    sha256: Sha256


class Fence(Frozen):
    """Which scheduling of a run's work this is. A worker refuses one older than its lease's.

    `epoch` is raised by the workflow at every new lease; `attempt` is Temporal's own, within an epoch.
    """

    epoch: int = Field(ge=1)
    attempt: int = Field(default=1, ge=1)

    @property
    def label(self) -> str:
        """A path segment that sorts as the fences do: `e000003-a01`."""
        return f"e{self.epoch:06d}-a{self.attempt:02d}"

    @classmethod
    def from_label(cls, label: str) -> "Fence":
        """The fence of a path segment. Raises ValueError for any other segment."""
        epoch, attempt = label.split("-")
        fence = cls(epoch=int(epoch.removeprefix("e")), attempt=int(attempt.removeprefix("a")))
        if fence.label != label:
            raise ValueError(f"not a fence: {label}")
        return fence

    def is_older_than(self, other: "Fence") -> bool:
        return (self.epoch, self.attempt) < (other.epoch, other.attempt)


class Lora(Frozen):
    """Low-rank adapters beside the named linears (Hu et al. 2021, arXiv:2106.09685): y += B A x * alpha / rank."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[Linear, ...] = Field(default=LINEARS, min_length=1)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Full(Frozen):
    """Every weight is trained."""

    kind: Literal["full"] = "full"


Trainable = Annotated[Lora | Full, Field(discriminator="kind")]


class CrossEntropy(Frozen):
    """Weighted negative log-likelihood of the labels, divided by the step's sum of weights."""

    kind: Literal["cross_entropy"] = "cross_entropy"


Loss = CrossEntropy  # becomes a union, discriminated by `kind`, with the second objective


class Adam(Frozen):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); `clip_norm` bounds the global gradient norm, 0 for none."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, ge=0)


class Schedule(Frozen):
    """The learning rate of step t of `num_steps`: linear warm-up, then constant, linear or cosine decay to 0."""

    kind: Literal["constant", "linear", "cosine"] = "linear"
    learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(default=0, ge=0)


class PackedData(Frozen):
    """What is trained on: `units` (examples) and the `plan` that puts them into steps and bins (shared/packed.py)."""

    units: Artifact
    plan: Artifact


class Evaluation(Frozen):
    """Held-out loss and greedy completions, before the first step, every `every_steps`, and after the last."""

    data: PackedData | None = None
    every_steps: int = Field(default=0, ge=0, description="0: only before the first and after the last step")
    num_samples: int = Field(default=0, ge=0, le=16, description="greedy completions of the data's first prompts")
    sample_tokens: int = Field(default=64, ge=1, le=1024)


class Checkpointing(Frozen):
    """A checkpoint every `every_steps` (0: only the last), of which the newest `keep` stay."""

    every_steps: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)


class JobPlan(Frozen):
    """What to do, without where: the same for every attempt of a run."""

    run_id: str
    job_id: str = Field(pattern=r"^[0-9]{6}$")
    model: Artifact
    engine: Literal["megatron"] = "megatron"
    layout: Layout = Layout()
    dtype: Dtype = "float32"
    threads_per_rank: int = Field(default=1, ge=1, description="CPU threads; part of what makes a result bit-identical")
    trainable: Trainable
    initial_adapter: Artifact | None = Field(default=None, description="a published adapter to go on from")
    data: PackedData
    num_steps: int = Field(ge=1)
    loss: Loss = CrossEntropy()
    optimizer: Adam = Adam()
    schedule: Schedule
    evaluation: Evaluation = Evaluation()
    checkpointing: Checkpointing = Checkpointing()
    seed: int = Field(default=0, ge=0, lt=2**63)
    after: Literal["offload", "keep"] = "offload"


class Job(Frozen):
    """One job file. Paths are local and absolute; inputs are artifacts, so an archived job can be run again."""

    schema_version: Literal[1] = 1
    plan: JobPlan
    fence: Fence
    log_path: str
    checkpoint_dir: str
    scratch_dir: str
    start: Artifact | None = Field(default=None, description="the checkpoint to go on from")

    @model_validator(mode="after")
    def _paths_are_absolute(self) -> "Job":
        for name in ("log_path", "checkpoint_dir", "scratch_dir"):
            if not getattr(self, name).startswith("/"):
                raise ValueError(f"{name} must be an absolute path")
        return self
