"""Distillation jobs on a tiny Qwen3: against transformers and PEFT, resumed, under layouts, on both engines."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.events import Evaluated, Failed, Step, Succeeded
from longshore.fields import Artifact
from longshore.losses import CrossEntropy, Distillation
from longshore.training import Full, Layout, Lora
from megatron_worker.training.batches import PackedBatches
from shared.jobs.job import Evaluation, Job, JobPlan
from tests.depth import drawn
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.test_megatron_job import NUM_STEPS, checkpoint, do, plan, weights_sha256
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.test_megatron_job import workshop as workshop  # a fixture
from tests.megatron_worker.workshop import Workshop, read_log, sealed

STUDENT = Lora(rank=2, alpha=8, targets=("q_proj", "down_proj", "lm_head"))
TEACHER = Lora(rank=4, alpha=8, targets=("v_proj", "up_proj", "lm_head"))
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def teacher(worker, workshop: Workshop) -> Artifact:
    """An adapter, published by hand: far enough from the base that there is something to learn."""
    job = do(worker, workshop, "teacher", plan(workshop, trainable=TEACHER, loss=CrossEntropy()))
    folder = workshop.root / "teacher"
    shutil.copytree(Path(job.checkpoint_dir) / f"step-{NUM_STEPS:08d}" / "weights", folder)
    path = folder / "adapter_model.safetensors"
    save_file({n: t * 30 if "lora_B" in n else t for n, t in load_file(path).items()}, path)
    return sealed(folder)


def a_plan(workshop: Workshop, teacher: Artifact, changes: dict[str, object] | None = None, **of_loss) -> JobPlan:
    fields = {"trainable": STUDENT, "loss": Distillation(teacher=teacher, **of_loss)}
    return plan(workshop, evaluation=Evaluation(data=workshop.held_out), **fields | (changes or {}))


def losses(job: Job) -> list[float]:
    return [e.metrics["loss"] for e in read_log(job.log_path) if isinstance(e, Step | Evaluated)]


def transformers_loss(
    workshop: Workshop, teachers: tuple[str, ...], data: tuple[str, str] = ("units", "plan"), temperature: float = 1.0
) -> float:
    """Return the first step's forward KL of a fresh student, which is the base, in float64.

    teachers: folders of the workshop, "" for the base; each is of a unit in turn.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def model() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(workshop.root / "model", dtype=torch.float64)

    folders = [workshop.root / name for name in teachers]
    tutors = [
        PeftModel.from_pretrained(model(), each).double() if each != workshop.root else model() for each in folders
    ]
    student, total, weight = model(), 0.0, 0.0
    read = PackedBatches.open(*(workshop.root / name for name in data))
    for unit in (int(unit) for units in read.bins(0) for unit in units):
        row = read.units.read_bin([unit])
        ids = torch.tensor(row.token_id_T.astype("int64"))[None]
        at_N = torch.tensor(row.hidden_index_N.astype("int64"))
        with torch.no_grad():
            own, theirs = (
                (m(ids).logits[0][at_N] / temperature).log_softmax(1) for m in (student, tutors[unit % len(tutors)])
            )
        weight_N = torch.tensor(row.weight_N.astype("float64"))
        total += float((weight_N * (theirs.exp() * (theirs - own)).sum(1)).sum())
        weight += float(weight_N.sum())
    return total / weight


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_the_first_loss_is_transformers_and_the_student_comes_near_its_teacher(worker, workshop, teacher, engine):
    changes = {"engine": engine, "temperature": 2.0}
    job = do(worker, workshop, f"first-{engine}", a_plan(workshop, teacher, changes))
    steps = [e.metrics for e in read_log(job.log_path) if isinstance(e, Step)]
    held_out = [e.metrics["loss"] for e in read_log(job.log_path) if isinstance(e, Evaluated)]
    assert steps[0]["loss"] == pytest.approx(transformers_loss(workshop, ("teacher",), temperature=2.0), rel=1e-4)
    assert steps[0]["loss"] > 0.01 and steps[0]["nll"] > 4 and 0 < held_out[-1] < 0.99 * held_out[0]


def test_naming_all_ids_is_the_whole_and_every_form_resumes_to_the_bit(worker, workshop, teacher):
    forms = {
        "whole": {"divergence": "jsd"},
        "every-id": {"divergence": "jsd", "tokens": "top_k", "top_k": VOCAB_SIZE},
        "drawn": {"divergence": "reverse_kl", "tokens": "drawn"},
    }
    found = {}
    for name, form in forms.items():
        what = a_plan(workshop, teacher, **form)
        job = do(worker, workshop, name, what)
        resumed = do(worker, workshop, f"{name}-resumed", what, checkpoint(job, 2))
        assert weights_sha256(resumed) == weights_sha256(job)
        found[name] = losses(job)
    assert found["whole"] == pytest.approx(found["every-id"], abs=1e-5)
    assert found["drawn"][-1] < found["drawn"][0]


def test_full_training_is_by_scores_from_before_the_first_step(worker, workshop, teacher):
    what = a_plan(workshop, teacher, {"trainable": Full()}, tokens="top_k", top_k=8)
    job = do(worker, workshop, "full", what)
    resumed = do(worker, workshop, "full-resumed", what, checkpoint(job, 2))
    assert weights_sha256(resumed) == weights_sha256(job)
    with pytest.raises(ValueError, match="full training changes the base"):
        a_plan(workshop, teacher, {"trainable": Full()})


def test_micro_batches_are_formed_to_a_budget(worker, workshop, teacher):
    budget = {"memory_budget_bytes": 3_000_000}
    whole, cut = (do(worker, workshop, f"budget-{n}", a_plan(workshop, teacher, c)) for n, c in ((0, {}), (1, budget)))
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-4)


def test_more_ids_than_there_are_are_refused(worker, workshop, teacher):
    job = workshop.job("too-many", a_plan(workshop, teacher, tokens="top_k", top_k=VOCAB_SIZE + 1))
    worker.do_one(job)
    last = read_log(job.log_path)[-1]
    assert isinstance(last, Failed) and "top_k may be 512 at most" in last.message


LAYOUTS = [
    *(("megatron", Layout(**each)) for each in ({"tp": 2}, {"dp": 2}, {"pp": 2}, {"cp": 2})),
    ("fsdp", Layout(dp=2)),
]


@pytest.fixture(scope="module")
def alone(worker, workshop, teacher) -> Job:
    return do(worker, workshop, "alone", a_plan(workshop, teacher, divergence="reverse_kl"))


@pytest.mark.parametrize(("engine", "layout"), drawn(LAYOUTS, 2), ids=str)
def test_layouts_are_one_rank(workshop, teacher, alone, engine, layout):
    changes = {"layout": layout, "engine": engine}
    job = workshop.job(f"{engine}-{layout}", a_plan(workshop, teacher, changes, divergence="reverse_kl"))
    path = workshop.root / f"{engine}-{layout}.json"
    path.write_text(job.model_dump_json())
    fork_ranks("megatron_worker", "--once", str(path), num_ranks=2)
    assert isinstance(read_log(job.log_path)[-1], Succeeded), read_log(job.log_path)[-1]
    assert losses(job) == pytest.approx(losses(alone), rel=1e-4, abs=1e-6)
