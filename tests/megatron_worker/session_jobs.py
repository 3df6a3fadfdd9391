"""Sessions by hand: jobs whose commands stand in their folder, and what they leave."""

from collections.abc import Sequence
from pathlib import Path

from longshore.commands import CommandResult, Datum, ForwardBackward, OptimStep
from longshore.fields import Artifact
from longshore.training import Lora
from megatron_worker.planned import learning_rate
from megatron_worker.worker import Worker
from shared.jobs import bins as packing
from shared.jobs.commands import Command, LoadStored, stored_form
from shared.jobs.job import Job, PackedData, SessionPlan
from shared.jobs.packed import Units
from tests.megatron_worker.tiny_jobs import checkpoint, new_worker
from tests.megatron_worker.workshop import FIRST, Workshop, sealed, write_plan

MAX_TOKENS = 24


def session_plan(workshop: Workshop, **changes: object) -> SessionPlan:
    fields: dict[str, object] = {
        "run_id": "run-1",
        "job_id": "000001",
        "model": workshop.model,
        "trainable": Lora(rank=4, alpha=8),
        "max_tokens": MAX_TOKENS,
        "seed": 7,
    }
    return SessionPlan.model_validate(fields | changes)


def session_job(
    workshop: Workshop,
    folder: Path,
    commands: Sequence[Command | str],
    start: Artifact | None = None,
    **changes: object,
) -> Job:
    """A session whose commands, from number 1 on, stand in its folder."""
    (folder / "commands").mkdir(parents=True)
    for number, each in enumerate(commands, start=1):
        data = each.encode() if isinstance(each, str) else stored_form(each)
        (folder / "commands" / f"{number:08d}.json").write_bytes(data)
    return Job(
        plan=session_plan(workshop, **changes),
        fence=FIRST,
        log_path=str(folder / "log.jsonl"),
        checkpoint_dir=str(folder / "checkpoints"),
        scratch_dir=str(folder / "scratch"),
        commands_dir=str(folder / "commands"),
        start=start,
    )


def result(job: Job, number: int) -> CommandResult:
    assert job.commands_dir is not None
    return CommandResult.model_validate_json((Path(job.commands_dir) / f"{number:08d}.result.json").read_bytes())


def do_all(
    workshop: Workshop, folder: Path, commands: Sequence[Command | str], worker: Worker | None = None, **changes: object
) -> Job:
    job = session_job(workshop, folder, commands, **changes)
    (worker or new_worker(workshop.root)).do_one(job)
    return job


def data_of(workshop: Workshop, step: int) -> tuple[Datum, ...]:
    """The six units of a step as a client would send them."""
    with Units(workshop.root / "units") as units:
        read = [units.read_bin([unit]) for unit in range(6 * step, 6 * step + 6)]
    return tuple(Datum(tokens=tuple(b.token_id_T.tolist()), weights=tuple(b.weight_N.tolist())) for b in read)


def sft_commands(workshop: Workshop) -> list[Command]:
    """What the workshop's job does, a command at a time."""
    schedule = workshop.plan().schedule
    commands: list[Command] = []
    for step in range(workshop.num_steps):
        commands.append(ForwardBackward(data=data_of(workshop, step)))
        commands.append(OptimStep(learning_rate=learning_rate(schedule, step, workshop.num_steps)))
    return commands


def packed_alike(workshop: Workshop) -> PackedData:
    """The workshop's data with the bins that a session makes."""
    with Units(workshop.root / "units") as units:
        sizes = [int(n) for n in units.token_offsets[1:] - units.token_offsets[:-1]]
    steps = [range(6 * step, 6 * step + 6) for step in range(workshop.num_steps)]
    bins = [[[step[i] for i in b] for b in packing.pack_bins([sizes[u] for u in step], MAX_TOKENS)] for step in steps]
    folder = workshop.root / "plan-alike"
    if not folder.exists():
        write_plan(folder, workshop.root / "units", bins, MAX_TOKENS)
    return PackedData(units=workshop.data.units, plan=sealed(folder))


def load(job: Job, step: int, optimizer: bool = True) -> LoadStored:
    """The command that goes on from a state of another session's job."""
    return LoadStored(state=f"run-1:step-{step}", optimizer=optimizer, checkpoint=checkpoint(job, step))


def state_of(job: Job, step: int) -> tuple[bytes, bytes]:
    """Weights and optimizer state of a checkpoint, as bytes."""
    folder = Path(job.checkpoint_dir) / f"step-{step:08d}"
    return (
        (folder / "weights" / "adapter_model.safetensors").read_bytes(),
        (folder / "optimizer" / "optimizer.safetensors").read_bytes(),
    )
