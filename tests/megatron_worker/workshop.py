"""What tests of the worker make their jobs from: data, artifacts, job files, logs read back."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longshore.events import Event, Step, parse_event
from longshore.fields import Artifact, Fence
from longshore.metrics import metric_of
from longshore.training import Lora
from shared.jobs.job import Job, JobPlan, PackedData, Schedule, SessionPlan
from shared.jobs.packed import PlanWriter, Units, UnitsWriter
from shared.storage.artifacts import seal
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
from tests.megatron_worker.tiny_engine import VOCAB_SIZE, write_tiny_weights

FIRST = Fence(epoch=1)


def sealed(folder: Path) -> Artifact:
    return Artifact(uri=f"file://{folder}", sha256=seal(folder))


def write_units(folder: Path, num_units: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> None:
    """Examples of 4 to 12 random tokens; every token but the first is a target, every third of weight 0.5."""
    random = np.random.default_rng(seed)
    writer = UnitsWriter(folder)
    for _ in range(num_units):
        length = int(random.integers(4, 13))
        ids = random.integers(0, vocab_size, length)
        weight = np.where(np.arange(length - 1) % 3 == 0, 0.5, 1.0)
        writer.append(token_id=ids, hidden_index=np.arange(length - 1), label=ids[1:], weight=weight)
    writer.close()


def write_plan(folder: Path, units: Path, steps: list[list[list[int]]], bin_tokens: int = 64) -> None:
    writer = PlanWriter(folder, bin_tokens)
    for bins in steps:
        writer.append_step([np.array(b, dtype=np.int64) for b in bins])
    with Units(units) as read:
        writer.close(np.diff(read.token_offsets))


def packed(root: Path, units: str, plan: str, steps: list[list[list[int]]]) -> PackedData:
    """Units that lie below this folder, by a plan that is written beside them."""
    write_plan(root / plan, root / units, steps)
    return PackedData(units=sealed(root / units), plan=sealed(root / plan))


@dataclass
class Workshop:
    """A folder with a tiny model, training data of `num_steps` steps, and held-out data with prompts."""

    root: Path
    model: Artifact
    data: PackedData
    held_out: PackedData
    num_steps: int

    def plan(self, **changes: object) -> JobPlan:
        fields: dict[str, object] = {
            "run_id": "run-1",
            "job_id": "000001",
            "model": self.model,
            "trainable": Lora(rank=4, alpha=8),
            "data": self.data,
            "num_steps": self.num_steps,
            "schedule": Schedule(kind="cosine", learning_rate=0.05, warmup_steps=1),
            "seed": 7,
        }
        return JobPlan.model_validate(fields | changes)

    def job(self, name: str, plan: JobPlan, start: Artifact | None = None, fence: Fence = FIRST) -> Job:
        """A job with paths of its own below this workshop."""
        folder = self.root / "jobs" / name
        return Job(
            plan=plan,
            fence=fence,
            log_path=str(folder / "log.jsonl"),
            checkpoint_dir=str(folder / "checkpoints"),
            scratch_dir=str(folder / "scratch"),
            start=start,
        )


def make_workshop(root: Path, num_steps: int = 6) -> Workshop:
    write_tiny_weights(root / "model")
    write_tokenizer(root / "model")
    write_units(root / "units", num_units=6 * num_steps)
    write_units(root / "held-out-units", num_units=5, seed=1)
    prompts = [{"prompt_ids": [3, 5], "prompt": "c e", "reference": "g"}, {"prompt_ids": [9], "prompt": "i"}]
    return workshop_around(root, root / "model", num_steps, [[0, 1], [2], [3, 4]], prompts)


def workshop_of_ids(
    root: Path, model: Path, vocab_size: int, num_steps: int, held_out: list[list[int]], prompt_ids: list[int]
) -> Workshop:
    """Around a model of this vocabulary; four units are held out."""
    for name, num_units in (("units", 6 * num_steps), ("held-out-units", 4)):
        write_units(root / name, num_units, seed=num_units, vocab_size=vocab_size)
    prompts = [{"prompt_ids": prompt_ids, "prompt": "three tokens", "reference": "four"}]
    return workshop_around(root, model, num_steps, held_out, prompts)


def workshop_around(
    root: Path, model: Path, num_steps: int, held_out: list[list[int]], prompts: list[dict[str, object]]
) -> Workshop:
    """Around units that stand there: six a step in three bins, those held out in these, with prompts to continue."""
    bins = [[[6 * s, 6 * s + 1], [6 * s + 2, 6 * s + 3, 6 * s + 4], [6 * s + 5]] for s in range(num_steps)]
    (root / "held-out-units" / "prompts.json").write_text(json.dumps(prompts))
    write_plan(root / "plan", root / "units", bins)
    write_plan(root / "held-out-plan", root / "held-out-units", [held_out])
    trained, evaluated = (
        PackedData(units=sealed(root / f"{of}units"), plan=sealed(root / f"{of}plan")) for of in ("", "held-out-")
    )
    return Workshop(root, sealed(model), trained, evaluated, num_steps)


def write_tokenizer(folder: Path) -> None:
    """A word for every id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "eos_token_id": 63}))


def read_log(path: str | Path) -> list[Event]:
    """The events of a log; every line must be whole, and numbered from 1 without a gap."""
    lines = Path(path).read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    events = [parse_event(line) for line in lines]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    named = {name for event in events if isinstance(event, Step) for name in event.metrics}
    assert not (undefined := {name for name in named if metric_of(name) is None}), undefined
    return events


def submit(paths: WorkerPaths, plan: JobPlan | SessionPlan, fence: Fence = FIRST, start: Artifact | None = None) -> Job:
    """Write a job file into a worker's folder, as a host does."""
    outputs = paths.outputs(plan.run_id, plan.job_id, fence)
    job = Job(
        plan=plan,
        fence=fence,
        log_path=str(outputs / "log.jsonl"),
        checkpoint_dir=str(outputs / "checkpoints"),
        scratch_dir=str(paths.scratch(plan.run_id, plan.job_id, fence)),
        commands_dir=str(outputs / "commands") if isinstance(plan, SessionPlan) else None,
        start=start,
    )
    write_atomically(paths.job(plan.run_id, plan.job_id, fence), job.model_dump_json(indent=1).encode())
    return job
