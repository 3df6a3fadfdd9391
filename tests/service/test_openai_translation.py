"""From OpenAI's jobs to runs: what `auto` means, what is refused, and forms and files as they are read."""

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

from longshore.fields import Artifact
from longshore.training import Lora
from service.accounts.keys import Principal
from service.accounts.tenants import Quotas
from service.apis.openai.files import MAX_NAME, FileForm, plain_name
from service.apis.openai.fine_tuning import jobs, runs
from service.apis.openai.fine_tuning.runs import Examples, JobRequest, count_examples, published_name, run_of_job
from service.database import engine
from service.database.engine import Database
from service.inference.published_models import StartingPoint
from service.runs.own_settings import LORA_FIELDS, OwnSettings
from shared.errors import InvalidInput
from shared.limits import QuotaSettings
from shared.runs.dataset_runs import DPORun, SFTRun
from shared.runs.requests import RLRun
from shared.settings import S3Settings
from shared.storage import paths
from shared.storage.store import open_store

CHECK = {
    "type": "string_check",
    "name": "same",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "4",
}


BASE = StartingPoint("m")


def made(count: int | None = 1000, start: StartingPoint = BASE, valid: bool = False, **fields: Any) -> Any:
    request = JobRequest.model_validate({"model": "m", "training_file": "file-1", **fields})
    return run_of_job(
        request, start, Examples("file:///t.jsonl", count), Examples("file:///v.jsonl") if valid else None
    )


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
    batch = runs.batch_size(count)
    assert 1 <= batch <= 64 and math.log2(batch).is_integer()
    assert runs.batch_size(count + 1) >= batch and runs.num_epochs(count + 1) <= runs.num_epochs(count)
    prompts = runs.prompts_per_step(count)
    assert 1 <= prompts <= min(32, count)
    assert 1 <= runs.rollout_epochs(count, prompts) <= 25


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
    assert set(given) | set(others) == set(LORA_FIELDS) <= set(OwnSettings.model_fields)


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

    def key(retry_count: str | None) -> str:
        return asyncio.run(jobs.idempotency_key(store, quotas, asking, request, retry_count))

    first = key(None)
    jobs.prune_sent_requests(store)
    assert key("1") == first, "as long as a client may ask again, it is remembered"
    monkeypatch.setattr(jobs, "WINDOW_S", 0.0)
    jobs.prune_sent_requests(store)
    assert not list(store.list(paths.SENT_REQUESTS))
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
