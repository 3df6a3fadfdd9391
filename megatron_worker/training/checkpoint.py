"""Checkpoints: the engine's state, the job's position, the random state; sealed, then made visible by one rename.

The worker never deletes a checkpoint: its host carries them into the store and prunes.
"""

import shutil
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from pydantic import ValidationError

from megatron_worker.engine import Engine
from megatron_worker.process.ranks import WorkerRanks
from shared.contract import Frozen, Sha256
from shared.errors import CorruptArtifact, InvalidInput
from shared.field_rules import first_rule
from shared.jobs.job import Job, JobPlan
from shared.storage.artifacts import seal
from shared.storage.paths import fsync_folder, write_atomically


class CheckpointState(Frozen):
    """`state.json`: the position in the data, and the hashes of the data and of the model that was trained.

    `model_sha256`: of the base model's files wherever they lie (`Manifest.contents_sha256`); None in checkpoints of
    schema 1, which did not say.
    """

    schema_version: Literal[1, 2] = 2
    run_id: str
    step: int
    num_steps: int
    seed: int
    model_sha256: Sha256 | None = None
    units_sha256: Sha256
    plan_sha256: Sha256


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(engine: Engine, ranks: WorkerRanks, job: Job, model_sha256: str, step: int) -> tuple[Path, str]:
    """Write the checkpoint of `step`; durable on return. All ranks call it.

    It grows in the job's scratch folder, so that `checkpoint_dir` (on the same file system) holds whole ones only.

    Returns:
        its path, and on rank 0 its manifest's SHA-256 (elsewhere an empty string).

    Raises:
        JobFailed: such as a full disk; nothing of the checkpoint is left.
    """
    final = Path(job.checkpoint_dir) / checkpoint_name(step)
    temporary = Path(job.scratch_dir) / final.name

    def write() -> str:
        try:
            engine.save(temporary)
            return _commit(temporary, final, _state(job.plan, model_sha256, step)) if ranks.rank == 0 else ""
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    return final, ranks.agree(write)


def load_checkpoint(engine: Engine, plan: JobPlan, model_sha256: str, folder: Path) -> int:
    """Load weights, optimizer and random state of a staged checkpoint. Returns the number of steps that are done.

    Raises:
        InvalidInput: it is incomplete, of another model, of other data, or of another shape. Nothing is ever
            replaced by a fresh start.
    """
    state = read_state(folder)
    _check_model(state, model_sha256, folder)
    expected = _state(plan, model_sha256, state.step)
    for name in ("seed", "num_steps", "units_sha256", "plan_sha256"):
        if getattr(state, name) != getattr(expected, name):
            raise InvalidInput(
                f"the checkpoint's {name} is {getattr(state, name)}, the job's is {getattr(expected, name)}",
                str(folder / "state.json"),
            )
    _load(engine, folder)
    return state.step - plan.first_step


def load_initial_checkpoint(engine: Engine, plan: JobPlan, model_sha256: str, folder: Path) -> None:
    """Load weights, optimizer and random state that the run's previous job saved, for this job's first step.

    Raises:
        InvalidInput: it is incomplete, of another model, of another run's seed or shape, or not of the step that this
            job begins at.
    """
    state = read_state(folder)
    _check_model(state, model_sha256, folder)
    place = str(folder / "state.json")
    if state.seed != plan.seed:
        raise InvalidInput(f"the checkpoint's seed is {state.seed}, the job's is {plan.seed}", place)
    if state.step != plan.first_step:
        raise InvalidInput(f"the checkpoint's step is {state.step}, the job begins at {plan.first_step}", place)
    _load(engine, folder)


def read_state(folder: Path) -> CheckpointState:
    path = folder / "state.json"
    try:
        return CheckpointState.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CorruptArtifact("the checkpoint has no state.json", str(folder)) from error
    except ValidationError as error:
        raise CorruptArtifact(f"no state of this schema: {first_rule(error)}", str(path)) from error


def _check_model(state: CheckpointState, model_sha256: str, folder: Path) -> None:
    if state.model_sha256 not in (None, model_sha256):
        raise InvalidInput(
            "the checkpoint is of another base model than the job's: the SHA-256 of its files is "
            f"{state.model_sha256}, the job's model has {model_sha256}",
            str(folder / "state.json"),
        )


def _state(plan: JobPlan, model_sha256: str, step: int) -> CheckpointState:
    return CheckpointState(
        run_id=plan.run_id,
        step=step,
        num_steps=plan.first_step + plan.num_steps,
        seed=plan.seed,
        model_sha256=model_sha256,
        units_sha256=plan.data.units.sha256,
        plan_sha256=plan.data.plan.sha256,
    )


def _commit(temporary: Path, final: Path, state: CheckpointState) -> str:
    _save_random_state(temporary / "rng.safetensors")
    write_atomically(temporary / "state.json", state.model_dump_json(indent=1).encode())
    sha256 = seal(temporary)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.rename(final)
    fsync_folder(final.parent)
    return sha256


def _save_random_state(path: Path) -> None:
    """Save the generators of rank 0: all ranks are seeded alike."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    safetensors.torch.save_file(state, path)


def _load(engine: Engine, folder: Path) -> None:
    """Load weights, optimizer and random state."""
    engine.load(folder)
    path = folder / "rng.safetensors"
    if not path.exists():
        raise CorruptArtifact("the checkpoint has no rng.safetensors", str(folder))
    state = safetensors.torch.load_file(path)
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
