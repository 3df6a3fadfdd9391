"""Jobs that fail or are refused: what they say, and what is left of them."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

from longshore.events import Started, Step, Succeeded
from longshore.fields import Artifact
from longshore.training import Full, Layout, Lora
from megatron_worker.engine import Batch, LossFunction
from shared.errors import InvalidInput
from shared.jobs.job import Checkpointing, Evaluation, Job, PackedData, Schedule
from shared.storage.artifacts import seal
from tests.depth import drawn
from tests.megatron_worker.tiny_engine import TinyEngine
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, failure, losses, new_worker
from tests.megatron_worker.workshop import Workshop, read_log, sealed, write_units


def test_a_probe_of_tokens_that_the_model_lacks_fails_before_any_step(workshop: Workshop):
    job = do(workshop, "a", workshop.plan(probe=(3, 64)))
    assert failure(job).kind == "invalid_input"
    assert "probe[1]: token 64 is outside the vocabulary of 64" in failure(job).message
    assert not losses(job)


class Diverging(TinyEngine):
    """The loss of the fourth bin (the second step) is not a number."""

    calls = 0

    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, torch.Tensor]:
        self.calls += 1
        sums = super().forward_backward(batch, loss)
        return sums | {"loss": sums["loss"] * torch.nan} if self.calls == 4 else sums


def test_a_loss_that_is_not_finite_fails_and_keeps_the_last_good_checkpoint(workshop: Workshop):
    plan = workshop.plan(checkpointing=Checkpointing(every_steps=1))
    job = workshop.job("nan", plan)
    new_worker(workshop.root, lambda plan, model: Diverging(model)).do_one(job)
    failed = failure(job)
    assert (failed.kind, failed.step, failed.device) == ("not_finite", 1, "released")
    assert failed.message.startswith("step 2: the loss is nan")
    assert [p.name for p in Path(job.checkpoint_dir).iterdir()] == ["step-00000001"]
    whole = do(workshop, "whole", plan)
    assert adapter_sha256(job, 1) == adapter_sha256(whole, 1)


def test_a_learning_rate_beyond_reason_is_reported_not_trained_on(workshop: Workshop):
    schedule = Schedule(kind="constant", learning_rate=1e25)
    job = do(workshop, "a", workshop.plan(schedule=schedule, trainable=Full()))
    assert failure(job).kind == "not_finite"


class FullDisk(TinyEngine):
    def save(self, folder: Path) -> None:
        super().save(folder)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "weights"))


def test_a_full_disk_is_named_and_nothing_half_written_stays(workshop: Workshop):
    job = workshop.job("a", workshop.plan())
    new_worker(workshop.root, lambda plan, model: FullDisk(model)).do_one(job)
    assert failure(job).kind == "disk_full"
    assert "no space is left" in failure(job).message
    assert not Path(job.scratch_dir).exists()
    assert not list(Path(job.checkpoint_dir).glob("*"))


def test_an_error_is_told_without_its_trace(workshop: Workshop, capfd: pytest.CaptureFixture[str]):
    class Broken(TinyEngine):
        def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, torch.Tensor]:
            raise RuntimeError("the kernel is broken\nat line 3")

    job = workshop.job("a", workshop.plan())
    new_worker(workshop.root, lambda plan, model: Broken(model)).do_one(job)
    assert (failure(job).kind, failure(job).message) == ("error", "RuntimeError: the kernel is broken")
    assert "Traceback" in capfd.readouterr().err


def test_a_worker_goes_on_after_a_failure(workshop: Workshop):
    worker = new_worker(workshop.root)
    missing = Artifact(uri=f"file://{workshop.root}/nowhere", sha256="0" * 64)
    failed = do(workshop, "failed", workshop.plan(model=missing), worker=worker)
    assert failure(failed).kind == "corrupt_artifact"
    good = do(workshop, "good", workshop.plan(), worker=worker)
    assert isinstance(read_log(good.log_path)[-1], Succeeded)


def corrupt_adapter(workshop: Workshop, job: Job) -> Artifact:
    """A checkpoint whose adapter was changed after it was sealed."""
    artifact = checkpoint(job, 6)
    path = Path(artifact.uri.removeprefix("file://")) / "weights" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return artifact


def without_state(workshop: Workshop, job: Job) -> Artifact:
    folder = Path(checkpoint(job, 6).uri.removeprefix("file://"))
    copy = workshop.root / "without-state"
    shutil.copytree(folder, copy)
    (copy / "state.json").unlink()
    return Artifact(uri=f"file://{copy}", sha256=seal(copy))


def without_adapter(workshop: Workshop, job: Job) -> Artifact:
    copy = workshop.root / "without-adapter"
    shutil.copytree(Path(checkpoint(job, 6).uri.removeprefix("file://")), copy)
    shutil.rmtree(copy / "weights")
    return Artifact(uri=f"file://{copy}", sha256=seal(copy))


def never_completed(workshop: Workshop, job: Job) -> Artifact:
    artifact = checkpoint(job, 6)
    (Path(artifact.uri.removeprefix("file://")) / "manifest.json").unlink()
    return artifact


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (corrupt_adapter, "SHA-256"),
        (without_state, "state.json"),
        (without_adapter, "missing"),
        (never_completed, "never completed"),
    ],
)
def test_a_damaged_checkpoint_fails_before_any_step(workshop: Workshop, damage, message: str):
    plan = workshop.plan()
    start = damage(workshop, do(workshop, "whole", plan))
    job = do(workshop, "resumed", plan, start=start)
    assert failure(job).kind == "corrupt_artifact"
    assert message in failure(job).message
    assert not [e for e in read_log(job.log_path) if isinstance(e, Step | Started)]


INPUTS = ("model", "units", "plan", "held-out-units", "held-out-plan", "checkpoint")


@pytest.mark.parametrize("kind", drawn(INPUTS, 2))
def test_a_flipped_byte_in_any_file_of_any_input_is_a_corrupt_artifact_before_any_step(workshop: Workshop, kind: str):
    """Manifests, headers, columns, weights, optimizer state, random state and cursor: each file, one byte."""
    plan = workshop.plan(evaluation=Evaluation(data=workshop.held_out))
    start = checkpoint(do(workshop, "whole", plan), 6)
    folder = Path(start.uri.removeprefix("file://")) if kind == "checkpoint" else workshop.root / kind
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert folder / "manifest.json" in files
    for number, path in enumerate(files):
        whole = path.read_bytes()
        for at in {len(whole) // 2} if whole else set():
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            job = do(workshop, f"{number}-{at}", plan, start=start)
            assert failure(job).kind == "corrupt_artifact", (path, at, failure(job).message)
            assert str(folder) in failure(job).message
            assert not [e for e in read_log(job.log_path) if isinstance(e, Step | Started)]
        path.write_bytes(whole)


def test_a_checkpoint_of_another_base_model_is_refused(workshop: Workshop, tmp_path: Path):
    """Its weights alone differ: shape, data and seed are the job's."""
    start = checkpoint(do(workshop, "whole", workshop.plan()), 6)
    shutil.copytree(workshop.root / "model", tmp_path / "moved")
    shutil.copytree(workshop.root / "model", tmp_path / "other")
    moved = sealed(tmp_path / "moved")
    same = do(workshop, "moved", workshop.plan(model=moved), start=start)
    assert isinstance(read_log(same.log_path)[-1], Succeeded)
    weights = next((tmp_path / "other").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    other = sealed(tmp_path / "other")
    for changes, begins in (({}, {"start": start}), ({"initial_checkpoint": start, "first_step": 6}, {})):
        job = do(workshop, f"other-{len(changes)}", workshop.plan(model=other, **changes), **begins)
        assert failure(job).kind == "invalid_input"
        assert "the checkpoint is of another base model than the job's" in failure(job).message


def test_a_checkpoint_of_another_shape_or_of_other_data_is_refused(workshop: Workshop):
    whole = do(workshop, "whole", workshop.plan())
    other_rank = do(workshop, "rank", workshop.plan(trainable=Lora(rank=2)), start=checkpoint(whole, 6))
    assert "another shape" in failure(other_rank).message
    other_seed = do(workshop, "seed", workshop.plan(seed=8), start=checkpoint(whole, 6))
    assert "the checkpoint's seed is 7, the job's is 8" in failure(other_seed).message
    write_units(workshop.root / "other-units", num_units=36, seed=5)
    data = PackedData(units=sealed(workshop.root / "other-units"), plan=workshop.data.plan)
    other_data = do(workshop, "data", workshop.plan(data=data), start=checkpoint(whole, 6))
    assert "units_sha256" in failure(other_data).message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 7}, "the job has 7 steps, its data 6"),
        ({"layout": Layout(dp=2)}, "it has 2 ranks, this worker 1"),
    ],
)
def test_a_plan_that_cannot_be_done_is_refused(workshop: Workshop, changes: dict, message: str):
    failed = failure(do(workshop, "a", workshop.plan(**changes)))
    assert (failed.kind, failed.step) == ("invalid_input", 0)
    assert message in failed.message


def test_prompts_that_are_no_prompts_are_named(workshop: Workshop):
    (workshop.root / "held-out-units" / "prompts.json").write_text(json.dumps([{"prompt": "no ids"}]))
    held_out = PackedData(units=sealed(workshop.root / "held-out-units"), plan=workshop.held_out.plan)
    failed = failure(do(workshop, "a", workshop.plan(evaluation=Evaluation(data=held_out, num_samples=1))))
    assert failed.kind == "corrupt_artifact"
    assert "prompts.json" in failed.message


def test_a_log_in_use_is_refused_and_left_alone(workshop: Workshop):
    job = do(workshop, "a", workshop.plan())
    before = Path(job.log_path).read_bytes()
    with pytest.raises(InvalidInput, match="already holds events"):
        new_worker(workshop.root).do_one(job)
    assert Path(job.log_path).read_bytes() == before
