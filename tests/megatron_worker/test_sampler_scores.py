"""Reward models in Longshore's own sampler: scores beside transformers' classifiers under PEFT; what it refuses."""

import concurrent.futures
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from activities.sampling.client import Sampler
from shared.chat.completions import SamplerReady
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.sampler_process import NAME, http, post, running, write_adapter
from tests.megatron_worker.scored_rows import HEADS, lora, scored_rows, step, transformers_head

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 9, 12, 3, 44, 8], [7], list(range(3, 60)), [5, 9, 12, 3, 44, 9]]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = distinct_model(tmp_path_factory.mktemp("scoring"), "qwen3", tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return folder


def trained(base: Path, folder: Path, per: str) -> Path:
    """A reward model of either kind, as training leaves it."""
    driven = start("fsdp", base)
    driven.add_adapter("run", lora(per), seed=3)
    for number in range(3):
        step(driven, per, [scored_rows(per, [20, 31, 12], seed=number)], 0.01)
    driven.save(folder)
    return folder / "weights"


@pytest.fixture(scope="module")
def rewards(base: Path, tmp_path_factory) -> dict[str, Path]:
    return {per: trained(base, tmp_path_factory.mktemp(per), per) for per in HEADS}


@pytest.fixture(scope="module")
def sampler(base: Path, rewards, tmp_path_factory) -> Iterator[SamplerReady]:
    with running(base, tmp_path_factory.mktemp("sampler"), "--max-model-len", "16") as found:
        for per, folder in rewards.items():
            assert post(found, "/v1/load_lora_adapter", {"lora_name": per, "lora_path": str(folder)}).is_success
        yield found


def scored(sampler: SamplerReady, model: str, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    with Sampler(sampler.url, sampler.api_key, socket_path=sampler.socket) as client:
        return client.rewards(model, [tuple(ids) for ids in prompts])


def theirs(base: Path, per: str, adapter: Path) -> torch.Tensor:
    model = transformers_head(base, per, adapter)
    with torch.no_grad():
        found = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    return torch.stack([value if per == "sequence" else value[-1] for value in found])


@pytest.mark.parametrize("per", HEADS)
def test_scores_are_those_of_transformers_and_peft(base, rewards, sampler, per) -> None:
    expected = theirs(base, per, rewards[per])
    assert expected.std(dim=0).min() > 1e-3
    torch.testing.assert_close(torch.tensor(scored(sampler, per)), expected, atol=1e-5, rtol=1e-5)


def test_scores_are_the_same_bits_whatever_else_is_asked(base, rewards, sampler, tmp_path) -> None:
    before = scored(sampler, "sequence")
    policy = write_adapter(tmp_path / "policy", base, 1, ("q_proj", "v_proj"))
    assert post(sampler, "/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": str(policy)}).is_success
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        body = {"model": "policy", "prompt": [5, 9, 12], "n": 20, "max_tokens": 12, "ignore_eos": True, "seed": 1}
        drawn = threads.submit(post, sampler, "/v1/completions", body)
        told = [*threads.map(lambda per: scored(sampler, per), ["sequence", "token", "sequence"])]
    assert drawn.result().is_success and told[0] == told[2] == before
    for path, ask in (("/v1/sleep", {"level": 2}), ("/v1/wake", {})):
        assert post(sampler, path, ask).is_success
    assert scored(sampler, "sequence") == before


def test_what_is_too_long_or_no_finite_number_has_no_score(base, rewards, sampler, tmp_path) -> None:
    assert scored(sampler, "sequence", [[3] * 64, [3] * 65, [4, 3]])[1] is None
    assert scored(sampler, "sequence", [[3] * 65]) == [None]
    broken = Path(shutil.copytree(rewards["sequence"], tmp_path / "broken"))
    tensors = load_file(broken / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"][1] = 3e38  # the sum overflows
    save_file(tensors, broken / "adapter_model.safetensors")
    assert post(sampler, "/v1/load_lora_adapter", {"lora_name": "broken", "lora_path": str(broken)}).is_success
    [values] = scored(sampler, "broken", [[4, 3]])
    assert values[1] is None and values[0] == scored(sampler, "sequence", [[4, 3]])[0][0]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"model": "sequence", "prompt": [3]}, "is a reward model"),
        ("/v1/score", {"model": NAME, "prompts": [[3]]}, "has no head of scalars"),
        ("/v1/score", {"model": "absent", "prompts": [[3]]}, "does not exist"),
        ("/v1/score", {"model": "sequence", "prompts": [[]]}, "a prompt has no tokens"),
        ("/v1/score", {"model": "sequence", "prompts": [[99999]]}, "outside the vocabulary"),
        ("/v1/score", {"model": "sequence", "prompts": []}, "at least 1 item"),
    ],
)
def test_wrong_requests_are_refused(sampler, path, body, words) -> None:
    answer = post(sampler, path, body)
    assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"]


def test_a_head_that_does_not_fit_is_refused(base, rewards, sampler, tmp_path) -> None:
    cut = Path(shutil.copytree(rewards["sequence"], tmp_path / "cut"))
    tensors = load_file(cut / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"] = tensors["base_model.model.score.weight"][:, :-1].clone()
    save_file(tensors, cut / "adapter_model.safetensors")
    answer = post(sampler, "/v1/load_lora_adapter", {"lora_name": "cut", "lora_path": str(cut)})
    assert answer.status_code == 400 and "score.weight" in answer.json()["error"]["message"]
    with http(sampler) as client:
        assert "cut" not in {card["id"] for card in client.get("/v1/models").json()["data"]}
