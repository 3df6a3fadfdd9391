"""lm-eval, as its users start it, asks a base model here: its numbers are those that transformers computes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.conftest import TINKER_MODEL
from tests.end_to_end.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.deep, pytest.mark.timeout(600)]

CLIENTS = Path(__file__).parents[2] / ".venv" / "clients"
DOCUMENTS = [
    {"question": f"How many crates are on quay {n}?", "choices": [" Seven crates.", " None", " crates"], "label": n % 3}
    for n in range(3)
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
output_type: {kind}
"""
CHOSEN = """
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
CONTINUED = """
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["?"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def samples(stack: Stack, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """What lm-eval has logged of each document, by task."""
    folder = tmp_path_factory.mktemp("lm-eval")
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    for name, kind, rest in (("chosen", "multiple_choice", CHOSEN), ("continued", "generate_until", CONTINUED)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind) + rest)
    connection = stack.connection
    asked = {
        "model": TINKER_MODEL,
        "base_url": f"{connection.api_url}/v1/completions",
        "tokenizer": str(tiny_model),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 512,
    }
    command = [
        *("-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "chosen,continued"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in asked.items()), "--batch_size", "2"),
        *("--include_path", str(folder), "--log_samples", "--output_path", str(folder / "told")),
    ]
    path = os.pathsep.join(str(CLIENTS / each) for each in ("lm-eval", "tinker-cookbook"))
    mine = {"PYTHONPATH": path, "OPENAI_API_KEY": connection.api_key, "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [sys.executable, "-P", *command], env=os.environ | mine, cwd=folder, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-6000:]
    logged = {each.name.split("_")[1]: each for each in (folder / "told").rglob("samples_*.jsonl")}
    return {name: [json.loads(line) for line in logged[name].read_text().splitlines()] for name in logged}


@pytest.fixture(scope="module")
def by_transformers(tiny_model: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


def test_log_likelihoods_are_those_of_transformers(
    samples: dict[str, list[dict]], by_transformers: tuple[Any, Any]
) -> None:
    model, tokenizer = by_transformers
    chosen = []
    for sample in sorted(samples["chosen"], key=lambda each: each["doc_id"]):
        question = tokenizer(sample["doc"]["question"])["input_ids"]
        for choice, told in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            ids = tokenizer(sample["doc"]["question"] + choice)["input_ids"]
            assert ids[: len(question)] == question
            with torch.no_grad():
                logprob_TV = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            at = slice(len(question) - 1, None)
            label_T = torch.tensor(ids[1:])[at]
            expected = logprob_TV[at].gather(1, label_T[:, None]).sum()
            assert float(told[0]) == pytest.approx(float(expected), abs=1e-3)
            assert told[1] == str(bool((logprob_TV[at].argmax(-1) == label_T).all()))
            chosen.append(float(told[0]))
    assert len(set(chosen)) == 9, "each question with each choice has a number of its own"


def test_texts_are_continued_as_transformers_would(
    samples: dict[str, list[dict]], by_transformers: tuple[Any, Any]
) -> None:
    model, tokenizer = by_transformers
    for sample in samples["continued"]:
        prompt = tokenizer(sample["doc"]["question"], return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        expected = tokenizer.decode(ids, skip_special_tokens=True).split("?")[0]
        assert sample["resps"] == [[expected]]
