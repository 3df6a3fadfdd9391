"""Distillation from several teachers, each of its own rows: against transformers, resumed, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from activities.formats.dataset import open_dataset
from longshore.dataset_runs import DatasetSource, DistillRun
from longshore.events import Evaluated, Failed
from longshore.fields import Artifact
from longshore.losses import Distillation, preset
from longshore.runs import RLRun
from shared.errors import InvalidInput
from shared.jobs.job import Evaluation, JobPlan, PackedData
from shared.jobs.packed import REQUIRED_COLUMNS, Units, UnitsWriter
from tests.megatron_worker.test_distillation_jobs import STUDENT, VOCAB_SIZE, losses, transformers_loss
from tests.megatron_worker.test_distillation_jobs import teacher as teacher  # a fixture
from tests.megatron_worker.test_megatron_job import checkpoint, do, plan, weights_sha256
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.test_megatron_job import workshop as workshop  # a fixture
from tests.megatron_worker.workshop import Workshop, read_log, sealed


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


def a_plan(workshop: Workshop, taught: dict[str, PackedData], loss: Distillation) -> JobPlan:
    return plan(
        workshop, trainable=STUDENT, loss=loss, data=taught["data"], evaluation=Evaluation(data=taught["held_out"])
    )


def test_each_row_learns_from_its_own_teacher(worker, workshop, teacher, opposite, taught) -> None:
    """All ids named are whole distributions. Resumed after two of its steps the job ends with the same bits."""
    loss = Distillation(teacher="base", more_teachers=(teacher, opposite), tokens="top_k", top_k=VOCAB_SIZE)
    what = a_plan(workshop, taught, loss)
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
        do(worker, workshop, f"drawn-{name}", a_plan(workshop, taught, Distillation(tokens="drawn", **teachers)))
        for name, teachers in (
            ("alone", {"teacher": teacher, "more_teachers": (teacher, teacher)}),
            ("mixed", {"teacher": teacher, "more_teachers": (opposite, teacher)}),
        )
    )
    assert losses(one)[0] != pytest.approx(losses(other)[0], rel=1e-2)
    alone = do(worker, workshop, "drawn", a_plan(workshop, taught, Distillation(tokens="drawn", teacher=teacher)))
    assert weights_sha256(alone) == weights_sha256(one) != weights_sha256(other)


def test_a_number_of_no_teacher_is_refused(worker, workshop, teacher, taught) -> None:
    loss = Distillation(teacher=teacher, more_teachers=("base",), tokens="drawn")
    job = workshop.job("no-such", a_plan(workshop, taught, loss))
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
