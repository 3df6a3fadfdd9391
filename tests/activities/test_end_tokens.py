"""A base model: its files name the end of a text, its chat template ends turns otherwise. Every door stops there."""

import json
import shutil
from pathlib import Path

import pytest

from activities.host_context import HostContext
from activities.publishing.publish import Publish
from activities.sampling.samplers import SamplerCommand
from activities.tokenizing.tokenize import PROMPTS, TokenizeRequest, write_units
from activities.tokenizing.tokenizer import TokenizerFiles, end_ids_of, stopping_at, stops_of
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact, Fence
from longshore.losses import CrossEntropy
from longshore.training import Full
from megatron_worker.training.batches import OneStep, PackedBatches
from megatron_worker.training.evaluation import Evaluator, read_prompts
from shared.chat.completions import CompletionRequest, Sampling
from shared.errors import CorruptArtifact
from shared.jobs.job import Evaluation, SamplerKey
from shared.jobs.packed import Units
from shared.models.end_tokens import GENERATION, read_end_ids, with_end_ids
from shared.serving import LeasedSampler, ServedSampler
from shared.settings import Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from tests.activities.publishing.test_publish import request_for

TEXT_END, TURN_END = 0, 2  # <|endoftext|> and <|im_end|> of the tiny tokenizer
ROW = {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "12 sacks."}]}


def make_base(tiny_model: Path, folder: Path, eos_token: str | None = "<|endoftext|>") -> Path:
    """Turn a copy of the tiny model into a base model, as Qwen's are."""
    shutil.copytree(tiny_model, folder)
    for name in ("config.json", GENERATION):
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | {"eos_token_id": TEXT_END}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": eos_token}))
    return folder


@pytest.fixture
def host(tmp_path: Path) -> HostContext:
    return HostContext(Settings(root=tmp_path / "root"))


@pytest.fixture
def base(tiny_model: Path, tmp_path: Path, host: HostContext) -> Artifact:
    folder = make_base(tiny_model, tmp_path / "base")
    seal(folder)
    return upload_artifact(host.store, "base", folder)


def test_a_base_model_ends_where_its_template_ends_turns(base: Artifact, host: HostContext) -> None:
    assert set(end_ids_of(host, base)) == {TEXT_END, TURN_END}
    assert read_end_ids(host.stage(base)) == (TEXT_END,)


def test_every_sampler_is_told(base: Artifact, host: HostContext, tmp_path: Path) -> None:
    """One that we start by its command, a server behind a URL by each request that goes on to the model's end."""
    command = SamplerCommand(host)(tmp_path, SamplerKey(model=base))
    at = command.index("--end-ids")
    assert {command[at + 1], command[at + 2]} == {str(TEXT_END), str(TURN_END)}
    stops = stops_of(ServedSampler(url="http://sampler.example"), host, base)
    assert set(stops) == {TEXT_END, TURN_END}
    assert stops_of(LeasedSampler(run_id="r1", fence=Fence(epoch=1), worker_id="w"), host, base) == ()
    asked = CompletionRequest(model="m", prompt="How", stop_token_ids=[7, TURN_END])
    assert stopping_at(asked, (TEXT_END, TURN_END)).stop_token_ids == [7, TURN_END, TEXT_END]
    assert stopping_at(Sampling(), (TEXT_END,)).stop_token_ids == [TEXT_END]
    assert stopping_at(Sampling(ignore_eos=True), (TEXT_END,)).stop_token_ids == ()


@pytest.mark.parametrize("row", [ROW, {"text": "12 sacks lie on the quay."}], ids=["chat", "text"])
def test_samples_of_an_evaluation_stop_where_training_ends_answers(
    base: Artifact, host: HostContext, tmp_path: Path, row: dict[str, object]
) -> None:
    """Also where the model's files name no end at all, and the tokenizer does."""
    folder, data, units = host.stage(base), tmp_path / "data", tmp_path / "units"
    data.mkdir()
    (data / "rows.jsonl").write_text(json.dumps(row))
    request = TokenizeRequest(dataset=base, source=DatasetSource(uri="rows.jsonl"), model=base, max_tokens=64)
    write_units(data, TokenizerFiles(folder=folder, place="base").load(), request, units)
    for name in ("config.json", GENERATION):
        (folder / name).write_text("{}")
    asked: list[frozenset[int]] = []

    def greedy(prompts: list[list[int]], num_tokens: int, end_ids: frozenset[int]) -> list[list[int]]:
        asked.append(end_ids)
        return [[] for _ in prompts]

    evaluation = Evaluation(num_samples=1, sample_tokens=8)
    with PackedBatches(Units(units), OneStep([])) as batches:
        evaluator = Evaluator(evaluation, "", batches, read_prompts(units), folder, CrossEntropy())
        assert (units / PROMPTS).exists() and list(evaluator.samples(greedy, lambda: False)) != []
    assert asked == [frozenset({TEXT_END, TURN_END} if row is ROW else {TEXT_END})]


@pytest.mark.parametrize("trainable", [None, Full()], ids=["adapter", "model"])
def test_what_is_published_names_its_end(base: Artifact, host: HostContext, tmp_path: Path, trainable) -> None:
    """An adapter too: with it the model that it is merged into ends its answers."""
    changes = {} if trainable is None else {"trainable": trainable}
    request = request_for(host.store, tmp_path, **changes).model_copy(update={"model": base})
    published = Publish(host).publish(request)
    folder = stage(Artifact(uri=published.uri, sha256=published.sha256), tmp_path / "cache", host.settings.s3)
    kept = json.loads((folder / GENERATION).read_text())
    assert kept["eos_token_id"] == [TEXT_END, TURN_END]
    assert kept.items() >= {name: value for name, value in _generation(host, base).items() if name[:3] != "eos"}.items()


def _generation(host: HostContext, model: Artifact) -> dict[str, object]:
    found: dict[str, object] = json.loads((host.stage(model) / GENERATION).read_text())
    return found


def test_a_generation_config_is_made_where_there_is_none(tmp_path: Path) -> None:
    config = {"eos_token_id": 1, "pad_token_id": 5, "bos_token_id": None, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert with_end_ids(tmp_path, (1,)) == {"eos_token_id": [1], "pad_token_id": 5}
    (tmp_path / GENERATION).write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    assert with_end_ids(tmp_path, (2, 1)) is None
    assert with_end_ids(tmp_path, (3,)) == {"eos_token_id": [1, 2, 3], "temperature": 0.6}
    (tmp_path / GENERATION).write_text('{"eos_token_id": "<|im_end|>"}')
    with pytest.raises(CorruptArtifact, match="eos_token_id"):
        read_end_ids(tmp_path)
