"""A teacher behind a URL: a sampler with the same base says what the worker computes; others are refused by name."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from temporalio.testing import ActivityEnvironment

from activities.grading.ask_teacher import AskTeacher, TeacherRequest
from activities.host_context import HostContext
from examples.tiny_model import make_tiny_model
from longshore.events import Evaluated, Step
from longshore.fields import Artifact
from longshore.losses import Distillation
from longshore.training import Lora
from shared.chat.completions import SamplerReady
from shared.errors import InvalidInput
from shared.jobs.job import Evaluation, PackedData
from shared.jobs.packed import LIKELIEST_IDS, LIKELIEST_LOGPROBS, Units
from shared.settings import GradingSettings, ServerKey, Settings
from tests.megatron_worker.sampler_process import NAME, running, write_adapter
from tests.megatron_worker.test_megatron_job import do, plan
from tests.megatron_worker.test_megatron_job import worker as worker  # a fixture
from tests.megatron_worker.test_megatron_job import workshop as workshop  # a fixture
from tests.megatron_worker.workshop import Workshop, read_log, sealed

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


def losses(job) -> list[float]:
    return [e.metrics["loss"] for e in read_log(job.log_path) if isinstance(e, Step | Evaluated)]


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
