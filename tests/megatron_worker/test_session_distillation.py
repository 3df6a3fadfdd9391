"""Sessions whose adapter learns from the base that it is on: as a job does, and what is refused."""

from pathlib import Path

import pytest

from longshore.commands import ForwardBackward, OptimStep
from longshore.events import Step
from longshore.losses import Distillation
from longshore.training import Full
from tests.megatron_worker.session_jobs import data_of, do_all, packed_alike, result
from tests.megatron_worker.test_distillation_jobs import TEACHER
from tests.megatron_worker.test_distillation_jobs import teacher as teacher  # a fixture
from tests.megatron_worker.test_megatron_job import NUM_STEPS, do, plan
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.test_megatron_job import workshop as workshop  # a fixture
from tests.megatron_worker.workshop import read_log

LOSS = Distillation(divergence="reverse_kl")


def test_a_session_s_steps_are_a_job_s_to_the_byte(worker, workshop, teacher, tmp_path: Path) -> None:
    """Both begin with an adapter that is far from the base, and come nearer."""
    begins = {"trainable": TEACHER, "initial_adapter": teacher}
    job = do(worker, workshop, "back", plan(workshop, loss=LOSS, data=packed_alike(workshop), **begins))
    rate = OptimStep(learning_rate=5e-3)
    commands = [
        each for n in range(NUM_STEPS) for each in (ForwardBackward(data=data_of(workshop, n), loss=LOSS), rate)
    ]
    session = do_all(workshop, tmp_path / "session", commands, worker, **begins)
    wanted = [e.metrics["loss"] for e in read_log(job.log_path) if isinstance(e, Step)]
    assert [result(session, 2 * n + 1).metrics["loss"] for n in range(NUM_STEPS)] == wanted
    assert 0 < wanted[-1] < wanted[0]
    ends = (
        Path(job.checkpoint_dir) / f"step-{NUM_STEPS:08d}",
        Path(session.checkpoint_dir) / f"step-{2 * NUM_STEPS:08d}",
    )
    one, other = ((end / "weights" / "adapter_model.safetensors").read_bytes() for end in ends)
    assert one == other


def test_what_is_no_teacher_of_a_session_is_named(worker, workshop, tmp_path: Path) -> None:
    data = data_of(workshop, 0)
    for loss in (Distillation(teacher="file:///t"), Distillation(tokens="drawn")):
        with pytest.raises(ValueError, match="a session's teacher is its base"):
            ForwardBackward(data=data, loss=loss)
    asked = [ForwardBackward(data=data, loss=LOSS)]
    whole = do_all(workshop, tmp_path / "full", asked, worker, trainable=Full())
    problem = result(whole, 1).problem
    assert problem is not None and "the base is what this session trains" in problem.message
