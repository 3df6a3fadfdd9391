"""A job by hand on one rank, CUDA and NCCL: the same losses as on the CPU, and a device that is free at the end."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from longshore.events import Offloaded, Step, Succeeded
from longshore.training import Lora
from shared.jobs.job import Job, PackedData, Schedule
from tests.gpu.cuda import NEEDS_CUDA
from tests.megatron_worker.launch import REPOSITORY, environment, ranks_command
from tests.megatron_worker.workshop import Workshop, read_log, sealed, write_plan, write_units

pytestmark = NEEDS_CUDA

NUM_STEPS = 3


@pytest.fixture(scope="module")
def workshop(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("gpu-job")
    write_units(root / "units", 6 * NUM_STEPS, vocab_size=512)
    write_plan(root / "plan", root / "units", [[list(range(6 * s, 6 * s + 6))] for s in range(NUM_STEPS)])
    data = PackedData(units=sealed(root / "units"), plan=sealed(root / "plan"))
    return Workshop(root, sealed(shutil.copytree(tiny_model, root / "model")), data, data, NUM_STEPS)


def done(workshop: Workshop, name: str, **variables: str) -> Job:
    """The same job, in a worker of its own."""
    schedule = Schedule(kind="constant", learning_rate=5e-3)
    job = workshop.job(
        name, workshop.plan(trainable=Lora(rank=4, alpha=8), schedule=schedule, dtype=name.split("-")[0])
    )
    path = workshop.root / f"{name}.json"
    path.write_text(job.model_dump_json())
    command = ranks_command("megatron_worker", "--once", str(path))
    alone = environment(**variables, LONGSHORE_ROOT=str(workshop.root / "longshore"))
    alone.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(command, cwd=REPOSITORY, env=alone, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert isinstance(read_log(job.log_path)[-1], Succeeded)
    return job


def losses(job: Job) -> list[float]:
    return [event.metrics["loss"] for event in read_log(job.log_path) if isinstance(event, Step)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_a_job_trains_on_cuda_as_on_the_cpu_and_frees_the_device(workshop, dtype, tolerance):
    """Kernels strict: the job fails where the head's cannot be used."""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    on_cuda = done(workshop, f"{dtype}-cuda", LONGSHORE_KERNELS="strict")
    on_cpu = done(workshop, f"{dtype}-cpu", CUDA_VISIBLE_DEVICES="")
    assert len(losses(on_cuda)) == NUM_STEPS
    for ours, theirs in zip(losses(on_cuda), losses(on_cpu), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    (offloaded,) = [event for event in read_log(on_cuda.log_path) if isinstance(event, Offloaded)]
    assert offloaded.device_bytes_before > offloaded.device_bytes_after
    assert offloaded.device_bytes_after < 1 << 20, "tables and scalars at most"


def test_the_same_job_gives_the_same_bits(workshop):
    one, other = (done(workshop, f"bfloat16-{n}") for n in ("one", "other"))
    assert losses(one) == losses(other)
