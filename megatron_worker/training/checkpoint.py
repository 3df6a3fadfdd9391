"""Checkpoints: the engine's state, the job's position, the random state; sealed, then made visible by one rename.

The worker never deletes a checkpoint: its host carries them into the store and prunes.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from longshore.fields import Frozen, Sha256
from longshore.training import Evaluations, Lora
from megatron_worker.process.ranks import WorkerRanks
from shared.errors import CorruptArtifact, InvalidInput
from shared.field_rules import first_rule
from shared.jobs.job import Job, WorkerPlan
from shared.models import peft as peft_format
from shared.storage.artifacts import seal
from shared.storage.files import fsync_folder, write_atomically

RandomState = dict[str, Tensor]
UseFolder = Callable[[Path], None]
"""Writes weights and optimizer state into a folder, or reads them from it."""


class CheckpointState(Frozen):
    """`state.json`: the position in the data, and the hashes of the data and of the model that was trained.

    `model_sha256`: of the contents of the base model's files (`Manifest.contents_sha256`). `micro_batch_tokens`: of the
    largest, if the job has a memory budget; not written elsewhere. `recompute`: layers were recomputed in the backward;
    not written otherwise. A session has no data on file, and as many steps as commands. `evaluations`: by step, the
    values of the metrics that the job's evaluation watches.
    """

    schema_version: Literal[2] = 2
    run_id: str
    step: int
    num_steps: int
    seed: int
    model_sha256: Sha256
    units_sha256: Sha256 | None = None
    plan_sha256: Sha256 | None = None
    micro_batch_tokens: int | None = Field(default=None, exclude_if=lambda value: value is None)
    recompute: bool = Field(default=False, exclude_if=lambda value: not value)
    evaluations: Evaluations = Field(default_factory=dict, exclude_if=lambda value: not value)


@dataclass(frozen=True)
class Written:
    """A checkpoint that was just written; the same on every rank. `sha256`: of its manifest."""

    path: Path
    sha256: str
    state: CheckpointState
    random_state: RandomState


def save_checkpoint(save: UseFolder, ranks: WorkerRanks, job: Job, state: CheckpointState) -> Written:
    """Write the checkpoint of a state; durable on return. All ranks call it.

    It grows in the job's scratch folder, so that `checkpoint_dir` (on the same file system) holds whole ones only.

    Raises:
        JobFailed: such as a full disk; nothing of the checkpoint is left.
    """
    final = Path(job.checkpoint_dir) / f"step-{state.step:08d}"
    temporary, drawn = Path(job.scratch_dir) / final.name, random_state()

    def write() -> str:
        try:
            save(temporary)
            return _commit(temporary, final, state, drawn) if ranks.rank == 0 else ""
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    sha256 = ranks.agree(write)
    return Written(final, ranks.broadcast(sha256.encode() or None).decode(), state, drawn)


def load_checkpoint(load: UseFolder, plan: WorkerPlan, model_sha256: str, folder: Path) -> None:
    """Load weights, optimizer and random state of a staged checkpoint.

    Raises:
        InvalidInput: it is incomplete, of another model, of other data, or of another shape. Nothing is ever
            replaced by a fresh start.
    """
    state = read_state(folder)
    _check_model(state, model_sha256, folder)
    expected = checkpoint_state(plan, model_sha256, state.step)
    for name in ("seed", "num_steps", "units_sha256", "plan_sha256"):
        if getattr(state, name) != getattr(expected, name):
            raise InvalidInput(
                f"the checkpoint's {name} is {getattr(state, name)}, the job's is {getattr(expected, name)}",
                str(folder / "state.json"),
            )
    load(folder)
    _load_random_state(folder / "rng.safetensors")


def load_initial_checkpoint(load: UseFolder, plan: WorkerPlan, model_sha256: str, folder: Path) -> None:
    """Load weights, optimizer and random state that the run's previous job saved, for this job's first step.

    Raises:
        InvalidInput: it is incomplete, of another model, of another run's seed or shape, or not of the step that this
            job begins at.
    """
    state = read_state(folder)
    _check_beginning(state, plan, model_sha256, folder)
    load(folder)
    _load_random_state(folder / "rng.safetensors")


def check_fits(plan: WorkerPlan, model_sha256: str, folder: Path) -> None:
    """Raise InvalidInput if a staged checkpoint, of whatever run, is of another base model or another shape."""
    _check_model(read_state(folder), model_sha256, folder)
    is_adapter = (folder / "weights" / peft_format.CONFIG).exists()
    if is_adapter != isinstance(plan.trainable, Lora):
        theirs, ours = ("an adapter", "the whole model") if is_adapter else ("the whole model", "an adapter")
        raise InvalidInput(f"the checkpoint is of {theirs}, and this trains {ours}", str(folder))
    if isinstance(plan.trainable, Lora):
        peft_format.read_config(folder / "weights", plan.trainable)


def go_on_from(written: Written, plan: WorkerPlan, model_sha256: str) -> None:
    """Begin with the state that the engine still has from writing this checkpoint, as if it had been loaded.

    Raises InvalidInput as `load_initial_checkpoint` does.
    """
    _check_beginning(written.state, plan, model_sha256, written.path)
    set_random_state(written.random_state)


def _check_beginning(state: CheckpointState, plan: WorkerPlan, model_sha256: str, folder: Path) -> None:
    _check_model(state, model_sha256, folder)
    place = str(folder / "state.json")
    if state.seed != plan.seed:
        raise InvalidInput(f"the checkpoint's seed is {state.seed}, the job's is {plan.seed}", place)
    if state.step != plan.first_step:
        raise InvalidInput(f"the checkpoint's step is {state.step}, the job begins at {plan.first_step}", place)


def read_state(folder: Path) -> CheckpointState:
    path = folder / "state.json"
    try:
        return CheckpointState.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CorruptArtifact("the checkpoint has no state.json", str(folder)) from error
    except ValidationError as error:
        raise CorruptArtifact(f"no state of this schema: {first_rule(error)}", str(path)) from error


def _check_model(state: CheckpointState, model_sha256: str, folder: Path) -> None:
    if state.model_sha256 != model_sha256:
        raise InvalidInput(
            "the checkpoint is of another base model than the job's: the SHA-256 of its files is "
            f"{state.model_sha256}, the job's model has {model_sha256}",
            str(folder / "state.json"),
        )


def checkpoint_state(plan: WorkerPlan, model_sha256: str, step: int, **progress: Any) -> CheckpointState:
    """Return the state of a plan after a step. `progress`: what its checkpoint records besides."""
    data = next(iter(plan.packed), None)
    return CheckpointState(
        run_id=plan.run_id,
        step=step,
        num_steps=step if plan.last_step is None else plan.last_step,
        seed=plan.seed,
        model_sha256=model_sha256,
        units_sha256=data.units.sha256 if data else None,
        plan_sha256=data.plan.sha256 if data else None,
        **progress,
    )


def _commit(temporary: Path, final: Path, state: CheckpointState, random_state: RandomState) -> str:
    safetensors.torch.save_file(random_state, temporary / "rng.safetensors")
    write_atomically(temporary / "state.json", state.model_dump_json(indent=1).encode())
    sha256 = seal(temporary)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.rename(final)
    fsync_folder(final.parent)
    return sha256


def random_state() -> RandomState:
    """Return the state of this rank's random generators. All ranks have the same seed, so rank 0's is saved for all."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _load_random_state(path: Path) -> None:
    if not path.exists():
        raise CorruptArtifact("the checkpoint has no rng.safetensors", str(path.parent))
    set_random_state(safetensors.torch.load_file(path))


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
