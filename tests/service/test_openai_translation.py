"""From OpenAI's jobs to runs, forms and files as they are read; and from runs to OpenAI's events and tables."""

import asyncio
import gzip
import json
import math
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import select

from longshore.accounts import QuotaSettings
from longshore.dataset_runs import DatasetSource, DPORun, SFTRun
from longshore.events import Evaluated, Saved, Started, Step, Succeeded
from longshore.fields import Artifact, Fence
from longshore.runs import RLRun, Rollouts
from longshore.training import Lora
from longshore.views import EvaluationMetrics, Metrics, PhaseSpan, RunView, StepMetrics, StepStatus
from service.accounts.keys import Principal
from service.accounts.tenants import Quotas
from service.apis.bodies import validation_problem
from service.apis.openai import job_request, jobs
from service.apis.openai.files import MAX_NAME, FileForm, plain_name
from service.apis.openai.job_request import (
    Examples,
    JobRequest,
    LongshoreSettings,
    count_examples,
    published_name,
    run_of_job,
)
from service.apis.openai.jobs import JobEvent, job_events, job_of, metrics_csv, status_of
from service.database import engine
from service.database.engine import Database, DocumentRow
from service.inference.published_models import LORA_FIELDS, StartingPoint
from service.runs.files import Histories, RunReader
from shared.errors import InvalidInput
from shared.settings import S3Settings
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore, open_store

CHECK = {
    "type": "string_check",
    "name": "same",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "4",
}


BASE = StartingPoint("m")


def made(count: int | None = 1000, start: StartingPoint = BASE, valid: bool = False, **fields: Any) -> Any:
    try:
        request = JobRequest.model_validate({"model": "m", "training_file": "file-1", **fields})
    except ValidationError as error:
        problem = validation_problem(error.errors())
        raise InvalidInput(problem.message, problem.place) from None
    training, validation = Examples("file:///t.jsonl", count), Examples("file:///v.jsonl") if valid else None
    return run_of_job(request, start, training, validation)[:2]


def reinforcement(**hyperparameters: Any) -> dict[str, Any]:
    settings = {"grader": CHECK, "hyperparameters": hyperparameters}
    return {"type": "reinforcement", "reinforcement": settings}


@pytest.mark.parametrize(
    ("count", "batch", "epochs"),
    [
        *((1, 1, 25), (10, 1, 25), (50, 2, 6), (99, 2, 4), (100, 2, 3), (1000, 8, 3), (10_000, 32, 3)),
        *((10_001, 32, 2), (50_001, 64, 1), (10_000_000, 64, 1), (None, 8, 3)),
    ],
)
def test_what_auto_means_for_examples(count: int | None, batch: int, epochs: int) -> None:
    run, shown = made(count)
    assert (run.batch_size, run.epochs, run.learning_rate) == (batch, epochs, 1e-4)
    assert shown == {"batch_size": batch, "n_epochs": epochs, "learning_rate_multiplier": 1.0}


@given(st.integers(1, 10**9))
def test_auto_is_sane_for_every_size(count: int) -> None:
    batch = job_request.batch_size(count)
    assert 1 <= batch <= 64 and math.log2(batch).is_integer()
    assert job_request.batch_size(count + 1) >= batch and job_request.num_epochs(count + 1) <= job_request.num_epochs(
        count
    )
    prompts = job_request.prompts_per_step(count)
    assert 1 <= prompts <= min(32, count)
    assert 1 <= job_request.rollout_epochs(count, prompts) <= 25


def test_a_supervised_job_in_full() -> None:
    run, _ = made(
        1000,
        valid=True,
        suffix="My Model!",
        seed=7,
        hyperparameters={"n_epochs": 4, "batch_size": 16, "learning_rate_multiplier": 2},
        longshore={
            "rank": 8,
            "alpha": 16,
            "targets": ["q_proj"],
            "dtype": "bfloat16",
            "layout": {"dp": 2},
            "format": "chat",
        },
    )
    assert isinstance(run, SFTRun)
    assert (run.name, run.seed, run.epochs, run.batch_size) == ("my-model-", 7, 4, 16)
    assert run.learning_rate == pytest.approx(2e-4)
    assert run.trainable == Lora(rank=8, alpha=16, targets=("q_proj",))
    assert (run.dtype, run.layout.dp, run.dataset.format) == ("bfloat16", 2, "chat")
    assert run.eval_every == 25, "a tenth of 1000 * 4 / 16 steps"


def test_every_setting_of_an_adapter_is_a_setting_of_a_job() -> None:
    given = {
        **{"rank": 8, "alpha": 16.0, "target_pattern": ".*q_proj", "rank_pattern": {"layers.0.*": 2}},
        **{"alpha_pattern": {"layers.1.*": 3.0}, "rank_stabilized": True, "dropout": 0.1, "dora": True},
    }
    assert made(longshore=given)[0].trainable == Lora.model_validate(given)
    others = {"targets": "all-linear", "layers": [0, 3]}
    assert made(longshore=others)[0].trainable == Lora.model_validate(others)
    assert set(given) | set(others) == set(LORA_FIELDS) <= set(LongshoreSettings.model_fields)


def test_full_training_moves_slower() -> None:
    run, _ = made(longshore={"full": True})
    assert run.trainable.kind == "full"
    assert run.learning_rate == pytest.approx(1e-5)
    rewarded, _ = made(method=reinforcement(), longshore={"full": True})
    assert rewarded.kind == "rl" and rewarded.trainable.kind == "full"


def test_a_preference_job() -> None:
    run, shown = made(method={"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto", "batch_size": 4}}})
    assert isinstance(run, DPORun)
    assert (run.beta, run.batch_size, run.learning_rate) == (0.1, 4, 1e-5)
    assert shown["beta"] == 0.1


def test_a_reinforcement_job() -> None:
    method = reinforcement(compute_multiplier=0.5, eval_interval=3, eval_samples=2, n_epochs=2)
    run, shown = made(100, method=method, valid=True, longshore={"max_completion_tokens": 64, "target": 0.9})
    assert isinstance(run, RLRun) and run.rollouts is not None and run.rollouts.held_out is not None
    assert (run.rollouts.group_size, run.rollouts.prompts_per_step, run.rollouts.epochs) == (4, 32, 2)
    assert run.rollouts.max_completion_tokens == 64
    held_out = run.rollouts.held_out
    assert (held_out.every_steps, held_out.samples_per_prompt, held_out.temperature) == (3, 2, 1.0)
    assert held_out.target == 0.9
    assert shown == {
        "batch_size": 32,
        "compute_multiplier": 0.5,
        "eval_interval": 3,
        "eval_samples": 2,
        "learning_rate_multiplier": 1.0,
        "n_epochs": 2,
    }


def test_a_job_goes_on_from_what_was_published() -> None:
    before = StartingPoint("Qwen/Qwen3-0.6B", "s3://b/tenants/t/adapters/a/v000001", Lora(rank=4, alpha=8))
    run, _ = made(start=before)
    assert (run.model, run.initial_adapter) == ("Qwen/Qwen3-0.6B", before.initial_adapter)
    assert run.trainable == Lora(rank=4, alpha=8)


@pytest.mark.parametrize(
    ("fields", "place", "words"),
    [
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "greater than 0"),
        ({"hyperparameters": {"batch_size": 0}}, "hyperparameters.batch_size", "greater"),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": -1}}}},
            "method.dpo.hyperparameters.beta",
            "greater",
        ),
        ({"longshore": {"rank": 0}}, "longshore.rank", "greater"),
        ({"longshore": {"layout": {"pp": 2, "dp": 2}, "engine": "fsdp"}}, "longshore", "fsdp"),
        ({"longshore": {"group_size": 3}}, "longshore.group_size", "no such field"),
        ({"longshore": {"full": True, "rank": 3}}, "longshore", "no adapter"),
        ({"longshore": {"prompt_field": "q", "format": "auto"}}, "training_file", "go together"),
        (
            {"hyperparameters": {"n_epochs": 2}, "longshore": {"steps": 5}},
            "hyperparameters.n_epochs",
            "longshore.steps",
        ),
        (
            {"hyperparameters": {"learning_rate_multiplier": 2.0}, "longshore": {"learning_rate": 0.1}},
            *("hyperparameters.learning_rate_multiplier", "longshore.learning_rate"),
        ),
        ({"suffix": "!!!"}, "suffix", "letter"),
        (
            {"method": reinforcement(eval_samples=2)},
            "method.reinforcement.hyperparameters.eval_samples",
            "validation_file",
        ),
        ({"method": reinforcement(batch_size=0)}, "method.reinforcement.hyperparameters.batch_size", "greater"),
        ({"method": reinforcement(), "longshore": {"too_long": "drop"}}, "longshore.too_long", "no such field"),
    ],
)
def test_what_a_run_would_refuse_is_told_in_the_clients_names(fields: dict[str, Any], place: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        made(**fields)
    assert caught.value.place is not None and caught.value.place.startswith(place)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"colour": "red"},
        {"hyperparameters": {"warmup_ratio": 0.1}},
        {"hyperparameters": {"batch_size": "many"}},
        {"method": {"type": "supervised", "dpo": {}}},
        {"method": {"type": "dpo"}, "hyperparameters": {"n_epochs": 1}},
        {"method": {"type": "reinforcement"}},
        {"method": reinforcement(reasoning_effort="high")},
        {"integrations": [{"type": "wandb", "wandb": {"project": "a/b"}}]},
        {"metadata": {str(n): "" for n in range(17)}},
        {"longshore": {"learning_speed": 1}},
    ],
)
def test_what_would_be_ignored_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        JobRequest.model_validate({"model": "m", "training_file": "file-1", **fields})


@given(st.text(max_size=64))
def test_every_suffix_becomes_a_name_or_is_refused(suffix: str) -> None:
    try:
        name = published_name(suffix)
    except InvalidInput as error:
        assert error.place == "suffix"
        return
    SFTRun.model_validate({"name": name, "model": "m", "dataset": {"uri": "u"}, "epochs": 1, "batch_size": 1})


@given(st.text(max_size=300))
def test_every_file_name_becomes_a_plain_one(filename: str) -> None:
    name = plain_name(filename)
    assert 1 <= len(name) <= MAX_NAME
    assert name[0] not in ".-" and not set(name) & set('/\\\0 "')


def form_body(boundary: str, parts: list[tuple[str, str | None, bytes]]) -> bytes:
    lines = b""
    for name, filename, content in parts:
        of_file = f'; filename="{filename}"' if filename is not None else ""
        lines += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{of_file}\r\n\r\n'.encode()
        lines += content + b"\r\n"
    return lines + f"--{boundary}--\r\n".encode()


async def read(body: bytes, cuts: list[int], boundary: str = "XX") -> tuple[str, bytes, dict[str, str]]:
    async def pieces() -> AsyncGenerator[bytes, None]:
        places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
        for start, end in pairwise(places):
            yield body[start:end]

    form = FileForm(f"multipart/form-data; boundary={boundary}", pieces(), "file")
    try:
        name = await form.find_file()
        content = b"".join([chunk async for chunk in form.chunks()])
    finally:
        await form.close()
    return name, content, form.fields


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.booleans(), st.lists(st.integers(0, 10_000), max_size=12))
def test_a_form_is_read_however_it_is_cut(content: bytes, purpose_first: bool, cuts: list[int]) -> None:
    if b"--XX" in content:
        return
    parts: list[tuple[str, str | None, bytes]] = [("file", "a b.jsonl", content), ("purpose", None, b"fine-tune")]
    body = form_body("XX", parts[::-1] if purpose_first else parts)
    assert asyncio.run(read(body, cuts)) == ("a b.jsonl", content, {"purpose": "fine-tune"})


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=4), st.booleans())
def test_what_is_no_form_is_refused_and_nothing_worse(noise: bytes, cuts: list[int], begins_well: bool) -> None:
    body = form_body("XX", [("file", "a", b"content")])[:40] + noise if begins_well else noise
    with pytest.raises(InvalidInput):
        asyncio.run(read(body, cuts))


@pytest.mark.parametrize(
    "parts",
    [
        [("purpose", None, b"fine-tune")],
        [("file", "a", b"1"), ("file", "b", b"2")],
        [("file", "a", b"1"), ("purpose", None, b"x" * 9000)],
        [("file", "a", b"1"), *((f"f{n}", None, b"") for n in range(33))],
    ],
)
def test_forms_that_are_refused(parts: list[tuple[str, str | None, bytes]]) -> None:
    with pytest.raises(InvalidInput):
        asyncio.run(read(form_body("XX", parts), []))


def test_examples_are_lines_that_say_something() -> None:
    lines = b'{"a": 1}\n\n{"a": 2}\n   \n{"a": 3}'
    assert count_examples([lines], len(lines)) == 3
    assert count_examples([lines[:5], lines[5:]], len(lines)) == 3
    assert count_examples(
        [b"x" * (31 << 20) + b"\n", b"y\n" * (1 << 20), b"never read"], 10 * (33 << 20)
    ) == pytest.approx(10 * ((1 << 20) + 1), rel=0.1)
    for packed in (gzip.compress(lines), b"PAR1....", b" \n[{}]"):
        assert count_examples([packed], len(packed)) is None


def test_the_largest_request_is_json() -> None:
    """What is kept to be shown again is what JSON can hold."""
    run, shown = made(method=reinforcement())
    assert json.loads(json.dumps(shown)) == shown
    assert json.loads(run.model_dump_json())["rollouts"]["grader"] == CHECK


def test_sent_requests_are_forgotten_when_nobody_sends_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path.as_uri(), S3Settings())
    database = Database(f"sqlite:///{tmp_path}/index.db")
    engine.upgrade(database)
    quotas = Quotas(QuotaSettings(), store, database)
    asking = Principal(tenant="default", key_id="key-1", scopes=frozenset({"write"}))
    request = Artifact(uri="file:///a", sha256="0" * 64)

    sent = jobs.SentRequests(database, quotas)

    def key(retry_count: str | None) -> str:
        return asyncio.run(sent.key_of(asking, request, retry_count))

    first = key(None)
    asyncio.run(sent.prune())
    assert key("1") == first, "as long as a client may ask again, it is remembered"
    monkeypatch.setattr(jobs, "WINDOW_S", 0.0)
    asyncio.run(sent.prune())
    assert not database.write(lambda session: session.scalars(select(DocumentRow)).all())
    assert key("1") != first


@pytest.mark.parametrize(
    ("kind", "name", "most", "words"),
    [
        ("supervised", "n_epochs", 50, "at most 50, as at OpenAI: for more, give steps"),
        ("supervised", "batch_size", 256, "at most 256, as at OpenAI: for more, give batch_tokens"),
        ("dpo", "beta", 2, "at most 2, as at OpenAI"),
        ("reinforcement", "batch_size", 256, "at most 256, as at OpenAI"),
        ("reinforcement", "compute_multiplier", 10, "give group_size"),
    ],
)
def test_more_than_anybody_means_is_refused_where_the_job_is_sent(kind: str, name: str, most: int, words: str) -> None:
    def asked(value: int) -> JobRequest:
        settings = {"hyperparameters": {name: value}} | ({"grader": CHECK} if kind == "reinforcement" else {})
        method = {"type": kind, kind: settings}
        return JobRequest.model_validate({"model": "org/tiny", "training_file": "file-1", "method": method})

    for value in (most + 1, 1000):
        with pytest.raises(ValidationError, match=words):
            asked(value)
    assert getattr(asked(most).how.hyperparameters, name) == most


# A value of each setting whose default is none, and settings that it needs.
WITHOUT_DEFAULT: dict[str, dict[str, Any]] = {
    "target_pattern": {"target_pattern": ".*q_proj"},
    "layers": {"layers": [0]},
    "bin_tokens": {"bin_tokens": 4096},
    "memory_budget_bytes": {"memory_budget_bytes": 1_000_000},
    "quantize_base": {"quantize_base": "nf4"},
    "steps": {"steps": 5},
    "batch_tokens": {"batch_tokens": 4096},
    "learning_rates": {"learning_rates": [0.1], "steps": 1, "learning_rate": 0.1, "schedule": "constant"},
    "prompt_field": {"prompt_field": "q", "completion_field": "a"},
    "completion_field": {"prompt_field": "q", "completion_field": "a"},
    "assistant_pattern": {"assistant_pattern": "yes"},
    "gamma": {"objective": "simpo", "gamma": 0.5},
    "rpo_alpha": {"rpo_alpha": 0.1},
    "reference": {"reference": "base"},
    "algorithm": {"algorithm": "grpo"},
    "overlong": {"overlong": {"buffer_tokens": 8}},
    "max_staleness": {"max_staleness": 1},
    "top_k": {"top_k": 5, "loss": {"kind": "ppo", "old": "trainer"}},
    "loss": {"algorithm": "grpo", "loss": {"clip_high": 0.3}},
    "critic": {"critic": {}},
    "environment": {"environment": {"source": "class Environment: pass"}},
    "agent": {"agent": {"command": "codex"}},
    "credit": {"credit": "turn", "advantages": "leave_one_out"},
    "sampler_url": {"sampler_url": "http://host/v1"},
    "carry_over": {"carry_over": True, "off_policy_steps": 1},
    "probe_bound": {"probe_bound": 0.1},
    "target": {"target": 0.5},
    "full": {"full": True},
}


def test_every_setting_is_a_field_of_a_methods_run_and_refused_by_its_name_elsewhere() -> None:
    models = (Lora, SFTRun, DPORun, RLRun, DatasetSource, Rollouts)
    defaults = {name: field.default for model in reversed(models) for name, field in model.model_fields.items()}
    methods = ({"type": "supervised"}, {"type": "dpo"}, reinforcement())
    for name in LongshoreSettings.model_fields:
        given, taken = WITHOUT_DEFAULT.get(name) or {name: defaults[name]}, 0
        for method in methods:
            try:
                run, _ = made(valid=True, method=method, longshore=given)
            except InvalidInput as error:
                assert error.place is not None and error.place.startswith(("longshore", "training_file")), (name, error)
                continue
            taken += 1
            assert f'"{name}":' in run.model_dump_json() or name == "full"
        assert taken, f"no method takes {name}"


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"loss": {"kind": "ppo", "clip_low": 2}}, "longshore.loss.ppo.clip_low"),
        ({"loss": {"kind": "ppo", "speed": 2}}, "longshore.loss.ppo.speed"),
        ({"critic": {"warmup": 2}}, "longshore.critic.warmup"),
    ],
)
def test_a_wrong_loss_is_named(settings: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        made(method=reinforcement(), longshore=settings)
    assert caught.value.place == place


FIRST, SECOND = Fence(epoch=1), Fence(epoch=2)
RUN = SFTRun(model="m", dataset={"uri": "u"}, steps=3, batch_size=1)  # type: ignore[arg-type]


def view(run_id: str = "sft-1", **changes: Any) -> RunView:
    fields = {"run_id": run_id, "name": "bot", "created_at": 10.0, "run": RUN, "source": {"api": "openai"}}
    return RunView.model_validate(fields | changes)


def put_log(store: ObjectStore, run_id: str, fence: Fence, events: list[Any], name: str = "000001") -> None:
    lines = "".join(event.model_dump_json() + "\n" for event in events)
    store.put_bytes(RunKeys(run_id).log_part(name, fence, events[0].seq), lines.encode())


def started(run_id: str, fence: Fence, when: float = 20) -> Started:
    fields = {"run_id": run_id, "job_id": "000001", "device": "cpu", "world_size": 1, "num_steps": 3}
    return Started(seq=1, time=when, fence=fence, first_step=0, **fields)  # type: ignore[arg-type]


def test_events_do_not_change_places_as_a_run_goes_on(tmp_path: Any) -> None:
    store = open_store(tmp_path.as_uri(), S3Settings())
    histories = Histories(RunReader(store))

    def told(view: RunView) -> list[JobEvent]:
        return job_events(view, asyncio.run(histories.of(view.run_id)))

    put_log(
        store,
        "sft-1",
        FIRST,
        [started("sft-1", FIRST), Step(seq=2, time=21, step=1, metrics={"loss": 2.0, "tokens": 8})],
    )
    timeline = (PhaseSpan(phase="downloading", began=11), PhaseSpan(phase="training", began=20, lease=1))
    going = view(phase="training", timeline=timeline, version=1)
    before = told(going)
    assert [event.message for event in before][::-1] == [
        "Created fine-tuning job: sft-1",
        "Reading the files",
        "training starts at step 0 of 3, 1 rank on cpu",
        "Step 1/3: training loss=2.0000",
    ]
    assert before[0].type == "metrics" and before[0].data["train_loss"] == 2.0
    # The worker is lost; another one repeats the step, and goes on.
    more = [started("sft-1", SECOND, 22), Step(seq=2, time=22, step=1, metrics={"loss": 2.0, "tokens": 8})]
    more += [
        Step(seq=3, time=23, step=2, metrics={"loss": 1.0, "tokens": 6}),
        Saved(seq=4, time=24, step=2, path="p", manifest_sha256="0" * 64),
    ]
    more += [Evaluated(seq=5, time=25, step=2, metrics={"loss": 1.5}), Succeeded(seq=6, time=26, step=2, device="held")]
    put_log(store, "sft-1", SECOND, more)
    done = view(state="succeeded", phase="done", timeline=timeline, version=1, ended_at=30.0)
    after = told(done)
    assert [event.id for event in after[-len(before) :]] == [event.id for event in before]
    assert len({event.id for event in after}) == len(after)
    assert [event.created_at for event in after] == sorted((event.created_at for event in after), reverse=True)
    assert after[1].message == "New fine-tuned model created: bot:v1"
    assert asyncio.run(histories.of(done.run_id)).trained_tokens() == 14, "a step that was repeated counts once"
    assert asyncio.run(histories.of(done.run_id)).saved_at() == {2: 24.0}


def test_statuses_in_openais_words() -> None:
    phases = ["queued", "downloading", "waiting_for_worker", "training", "publishing"]
    told = [status_of(view(phase=phase)) for phase in phases]
    assert told == ["validating_files", "validating_files", "queued", "running", "running"]
    assert status_of(view(phase="waiting_for_worker", step=3)) == "running", "it never goes back"
    assert [status_of(view(state=state)) for state in ("paused", "failed", "cancelled")] == [
        "paused",
        "failed",
        "cancelled",
    ]


def test_the_error_of_a_job_names_its_file() -> None:
    def param(*phases: str, kind: str = "invalid_input", **changes: Any) -> str | None:
        spans = [{"phase": phase, "began": 0.0} for phase in phases]
        failed = {"state": "failed", "phase": phases[-1], "problem": {"kind": kind, "message": "rows.jsonl:3: no"}}
        error = job_of(view(**failed, timeline=spans, **changes), None).error
        assert error is not None
        return error.param

    assert param("checking", "downloading") == param("downloading", "tokenizing") == "training_file"
    assert param("downloading", "tokenizing", "packing", "downloading", "tokenizing") == "validation_file"
    assert param("checking") is None and param("downloading", "tokenizing", kind="store_unavailable") is None
    assert param("downloading", "tokenizing", "packing", "waiting_for_worker") is None


def test_metrics_as_a_table() -> None:
    metrics = Metrics(
        steps=(StepMetrics(step=1, metrics={"loss": 2.0, "tokens": 8}), StepMetrics(step=2, metrics={"loss": 1.0})),
        evaluations=(
            EvaluationMetrics(step=0, metrics={"loss": 3.0}),
            EvaluationMetrics(step=2, metrics={"loss": 1.5}),
        ),
    )
    assert metrics_csv(metrics).decode().splitlines() == [
        "step,train_loss,valid_loss,train_tokens",
        "0,,3.0,",
        "1,2.0,,8.0",
        "2,1.0,1.5,",
    ]


def test_events_of_train_steps_stand_behind_their_jobs(tmp_path: Any) -> None:
    store = open_store(tmp_path.as_uri(), S3Settings())
    histories = Histories(RunReader(store))

    def told(view: RunView) -> list[JobEvent]:
        return job_events(view, asyncio.run(histories.of(view.run_id)))

    rollouts = {"prompts": {"uri": "u"}, "grader": CHECK, "steps": 2}
    run = RLRun.model_validate({"model": "m", "rollouts": rollouts})

    def record(step: int, **metrics: float) -> None:
        status = StepStatus(step=step, key=str(step), groups="u", state="done", metrics=metrics)
        store.put_bytes(RunKeys("rl-1").step(step), status.model_dump_json().encode())

    def work(step: int, when: float) -> None:
        put_log(store, "rl-1", FIRST, [Step(seq=1, time=when, step=step, metrics={"tokens": 8})], f"{step:06d}")

    record(0, eval_reward_mean=0.25)
    work(1, 21)
    record(1, reward_mean=0.5)
    going = view("rl-1", kind="rl", run=run, phase="training")
    before = told(going)
    work(2, 31)
    record(2, reward_mean=0.75, eval_reward_mean=0.5)
    after = told(going)
    assert [event.id for event in after[-len(before) :]] == [event.id for event in before]
    rewards = [
        (e.data["step"], e.data.get("train_mean_reward"), e.data.get("valid_mean_reward"))
        for e in after[::-1]
        if "Train step" in e.message
    ]
    assert rewards == [(0, None, 0.25), (1, 0.5, None), (2, 0.75, 0.5)]
    assert [e.message.split()[0] for e in after[::-1]] == ["Created", "Train", "Step", "Train", "Step", "Train"]
