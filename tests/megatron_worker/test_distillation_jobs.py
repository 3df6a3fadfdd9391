"""Distillation on a tiny Qwen3, from a teacher, several, the base or a URL: against transformers and PEFT, resumed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from temporalio.testing import ActivityEnvironment

from activities.formats.dataset import open_dataset
from activities.grading.ask_teacher import AskTeacher, TeacherRequest
from activities.host_context import HostContext
from examples.tiny_model import make_tiny_model
from longshore.commands import ForwardBackward, OptimStep
from longshore.dataset_runs import DatasetSource, DistillRun
from longshore.events import Evaluated, Failed, Step, Succeeded
from longshore.fields import Artifact
from longshore.losses import CrossEntropy, Distillation, preset
from longshore.runs import RLRun
from longshore.training import Full, Layout, Lora
from megatron_worker.training.batches import PackedBatches
from shared.chat.completions import SamplerReady
from shared.errors import InvalidInput
from shared.jobs.job import Evaluation, Job, JobPlan, PackedData
from shared.jobs.packed import LIKELIEST_IDS, LIKELIEST_LOGPROBS, REQUIRED_COLUMNS, Units, UnitsWriter
from shared.settings import GradingSettings, ServerKey, Settings
from tests.depth import drawn
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.sampler_process import NAME, running, write_adapter
from tests.megatron_worker.session_jobs import data_of, do_all, packed_alike, result
from tests.megatron_worker.test_megatron_job import NUM_STEPS, checkpoint, do, plan, weights_sha256
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture  # a fixture  # a fixture  # a fixture
from tests.megatron_worker.test_megatron_job import (
    workshop as workshop,  # a fixture  # a fixture  # a fixture  # a fixture
)
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


@pytest.fixture(scope="module")
def opposite(workshop: Workshop, teacher: Artifact) -> Artifact:
    """An adapter that does the opposite of the teacher."""
    folder, theirs = workshop.root / "opposite", workshop.root / "teacher"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((theirs / "adapter_config.json").read_bytes())
    tensors = load_file(theirs / "adapter_model.safetensors")
    save_file({n: -t if "lora_B" in n else t for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    return sealed(folder)


def numbered(folder: Path, data: PackedData, num_teachers: int) -> PackedData:
    """Data whose units are taught by each teacher in turn."""
    with Units(Path(data.units.uri.removeprefix("file://"))) as units:
        writer = UnitsWriter(folder, (*REQUIRED_COLUMNS, "advantage"))
        for number in range(units.header.num_units):
            row = units.read_bin(np.array([number]))
            own = np.full(len(row.label_N), number % num_teachers, dtype=np.float32)
            columns = {"token_id": row.token_id_T, "hidden_index": row.hidden_index_N, "label": row.label_N}
            writer.append(**columns, weight=row.weight_N, advantage=own)
    writer.close()
    if (prompts := Path(data.units.uri.removeprefix("file://")) / "prompts.json").exists():
        (folder / "prompts.json").write_bytes(prompts.read_bytes())
    return data.model_copy(update={"units": sealed(folder)})


@pytest.fixture(scope="module")
def taught(workshop: Workshop) -> dict[str, PackedData]:
    whole = {"data": workshop.plan().data, "held_out": workshop.held_out}
    return {name: numbered(workshop.root / f"taught-{name}", data, 3) for name, data in whole.items()}


def plan_of_several(workshop: Workshop, taught: dict[str, PackedData], loss: Distillation) -> JobPlan:
    return plan(
        workshop, trainable=STUDENT, loss=loss, data=taught["data"], evaluation=Evaluation(data=taught["held_out"])
    )


def test_each_row_learns_from_its_own_teacher(worker, workshop, teacher, opposite, taught) -> None:
    """All ids named are whole distributions. Resumed after two of its steps the job ends with the same bits."""
    loss = Distillation(teacher="base", more_teachers=(teacher, opposite), tokens="top_k", top_k=VOCAB_SIZE)
    what = plan_of_several(workshop, taught, loss)
    job = do(worker, workshop, "several", what)
    (first, *_) = [e.metrics["loss"] for e in read_log(job.log_path) if isinstance(e, Evaluated)]
    held_out = transformers_loss(workshop, ("", "teacher", "opposite"), ("held-out-units", "held-out-plan"))
    assert first == pytest.approx(held_out, rel=1e-4) and first > 0.01
    assert losses(job)[-1] < losses(job)[0]
    resumed = do(worker, workshop, "several-resumed", what, checkpoint(job, 2))
    assert weights_sha256(resumed) == weights_sha256(job)


def test_the_drawn_tokens_probability_is_of_the_rows_own_teacher(worker, workshop, teacher, opposite, taught) -> None:
    """Which of them stands first makes no difference, but for the numbers."""
    one, other = (
        do(
            worker,
            workshop,
            f"drawn-{name}",
            plan_of_several(workshop, taught, Distillation(tokens="drawn", **teachers)),
        )
        for name, teachers in (
            ("alone", {"teacher": teacher, "more_teachers": (teacher, teacher)}),
            ("mixed", {"teacher": teacher, "more_teachers": (opposite, teacher)}),
        )
    )
    assert losses(one)[0] != pytest.approx(losses(other)[0], rel=1e-2)
    of_one = Distillation(tokens="drawn", teacher=teacher)
    alone = do(worker, workshop, "drawn-of-one", plan_of_several(workshop, taught, of_one))
    assert weights_sha256(alone) == weights_sha256(one) != weights_sha256(other)


def test_a_number_of_no_teacher_is_refused(worker, workshop, teacher, taught) -> None:
    loss = Distillation(teacher=teacher, more_teachers=("base",), tokens="drawn")
    job = workshop.job("no-such", plan_of_several(workshop, taught, loss))
    worker.do_one(job)
    last = read_log(job.log_path)[-1]
    assert isinstance(last, Failed) and "from 0 to 1" in last.message


def a_run(**fields: object) -> DistillRun:
    rest = {"model": "org/m", "dataset": {"uri": "file:///d"}, "epochs": 1, "batch_size": 2, "teacher": "file:///t"}
    return DistillRun.model_validate(rest | {"tokens": "drawn"} | fields)


def test_what_cannot_be_done_with_several_is_named() -> None:
    assert a_run(teachers={"maths": "file:///m", "b": "base"}).named_teachers == ("maths", "b")
    for rule, fields in {
        "several teachers are asked before the first step": {"tokens": "all"},
        "none behind a URL": {"teacher": "https://host/v1", "teacher_model": "m"},
        "two have one name": {"teachers": [["a", "base"], ["a", "base"]]},
    }.items():
        with pytest.raises(ValueError, match=rule):
            a_run(**{"teachers": {"a": "base"}} | fields)
    loss = preset("gkd", 8).loss.model_copy(update={"tokens": "drawn"}).model_dump() | {"more_teachers": ["base"]}
    with pytest.raises(ValueError, match="several teachers are of rows of a dataset"):
        RLRun.model_validate({"model": "org/m", "loss": loss, "advantages": "none"})


def test_a_row_names_its_teacher(tmp_path: Path) -> None:
    rows = ['{"prompt": "q", "completion": "a"' + more for more in ("}", ', "teacher": "b"}', ', "teacher": null}')]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    source = DatasetSource(uri="file:///rows")
    opened = open_dataset(tmp_path, source, pairs=False, teachers=("a", "b"))
    assert [opened.numbers[example.place] for example in opened] == [(0.0,), (2.0,), (0.0,)]
    with pytest.raises(InvalidInput, match=r"jsonl:2.*teacher must be one of c, or absent, not 'b'"):
        list(open_dataset(tmp_path, source, pairs=False, teachers=("c",)))


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


TOP_K = 16


def url_of(ready: SamplerReady) -> dict[str, str]:
    return {"url": f"{ready.url}/v1/", "key": ready.api_key}


def ask(
    machine: Path,
    ready: SamplerReady,
    units: Artifact,
    model: Artifact,
    top_k: int = TOP_K,
    is_operators: bool = True,
    grading: GradingSettings | None = None,
    **named: str,
) -> Path:
    url = f"{ready.url}/v1"
    own = GradingSettings(score_model_url=url, score_model_key=ready.api_key) if is_operators else GradingSettings()
    host = HostContext(Settings(root=machine, grading=grading or own))
    asked = {"url": url, "name": NAME, "top_k": top_k, **named}
    request = TeacherRequest(run_id="r", units=units, model=model, vocab_size=512, **asked)
    made = ActivityEnvironment().run(AskTeacher(host).ask_teacher, request)
    return Path(made.uri.removeprefix("file://"))


def test_a_sampler_teaches_what_the_base_on_the_worker_does(worker, workshop: Workshop, tmp_path: Path):
    lora = Lora(rank=4, alpha=12, targets=("q_proj", "down_proj"))
    path = write_adapter(tmp_path / "student", workshop.root / "model", 3, lora.targets) / "adapter_model.safetensors"
    save_file({n: t * 20 if "lora_B" in n else t for n, t in load_file(path).items()}, path)
    student = sealed(path.parent)
    fields = {"trainable": lora, "initial_adapter": student, "loss": Distillation(tokens="top_k", top_k=TOP_K)}
    of_base = workshop.data.units, workshop.model
    with running(workshop.root / "model", tmp_path) as ready:
        train, held_out = (
            PackedData(
                units=data.units, plan=data.plan, likeliest=sealed(ask(tmp_path, ready, data.units, workshop.model))
            )
            for data in (workshop.data, workshop.held_out)
        )
        drawn = ask(tmp_path, ready, workshop.data.units, workshop.model, top_k=0)
        keyed = GradingSettings(server_keys={"tutor": ServerKey(**url_of(ready), tenants=("a",))})
        by_name = ask(tmp_path / "named", ready, *of_base, grading=keyed, key="tutor", tenant="a")
        assert np.array_equal(np.load(by_name / LIKELIEST_IDS), np.load(Path(train.likeliest.uri[7:]) / LIKELIEST_IDS))
    by_url, by_slot = (
        do(worker, workshop, name, plan(workshop, data=data, evaluation=Evaluation(data=evaluated), **fields))
        for name, data, evaluated in (("by-url", train, held_out), ("by-slot", workshop.data, workshop.held_out))
    )
    assert losses(by_url) == pytest.approx(losses(by_slot), abs=1e-5) and losses(by_url)[0] > 0.003
    with Units(workshop.root / "units") as units:
        assert np.load(drawn / LIKELIEST_IDS)[:, 0].tolist() == units.columns["label"].tolist()
    assert np.load(drawn / LIKELIEST_LOGPROBS).shape == (units.header.num_targets, 1)


def test_another_tokenizer_a_private_address_and_a_server_that_tells_too_few_are_named(
    workshop: Workshop, tmp_path: Path
):
    make_tiny_model(tmp_path / "other", ["quite another text " * 50], vocab_size=512)
    with running(tmp_path / "other", tmp_path) as ready:
        with pytest.raises(InvalidInput, match="both must have one tokenizer"):
            ask(tmp_path, ready, workshop.data.units, workshop.model)
        with pytest.raises(InvalidInput, match="prompt_logprobs"):
            ask(tmp_path, ready, workshop.data.units, workshop.model, top_k=21)
        elsewhere, anothers = {"url": f"{ready.url}/v2", "key": "k"}, {**url_of(ready), "tenants": ["b"]}
        for name, key in (("other", url_of(ready)), ("tutor", elsewhere), ("tutor", anothers)):
            grading = GradingSettings(server_keys={name: ServerKey(**key)})
            with pytest.raises(InvalidInput, match=r"has no key tutor for .* that you may name"):
                ask(tmp_path, ready, workshop.data.units, workshop.model, grading=grading, key="tutor", tenant="a")
        wrong = GradingSettings(server_keys={"tutor": ServerKey(url=f"{ready.url}/v1", key="canary-1f6b30")})
        with pytest.raises(InvalidInput, match="401") as refused:
            ask(tmp_path, ready, workshop.data.units, workshop.model, grading=wrong, key="tutor")
        assert "canary" not in f"{refused.value!r} {wrong!r} {wrong.model_dump_json()}"
        with pytest.raises(InvalidInput, match="address"):
            ask(tmp_path, ready, workshop.data.units, workshop.model, is_operators=False)
