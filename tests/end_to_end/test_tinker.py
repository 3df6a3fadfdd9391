"""Training through Tinker's own SDK, unmodified, on the real stack. Through kills: test_kills.py."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from longshore.training import LINEARS
from service.apis.tinker.wire import TINKER
from shared.jobs.bins import epoch_order, steps_by_count
from tests.depth import drawn, one_of
from tests.end_to_end.conftest import CLIENT_FILES, TINKER_MODEL
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Stack
from tests.end_to_end.tinker_data import BATCH, PROMPT, batches

pytestmark = [pytest.mark.slow, one_of(CLIENT_FILES, "tinker")]

ROOT = Path(__file__).parents[2]
CLIENTS = ("tinker-38", "tinker-36", "tinker-35")
COOKBOOK = "tinker-cookbook"


def started(stack: Stack, model: Path, program: str, argument: str = "", client: str = CLIENTS[0]) -> subprocess.Popen:
    """A program of tinker_session.py. The cookbook stands behind the client, for those that import it."""
    folders = [ROOT / ".venv" / "clients" / name for name in (client, COOKBOOK)]
    assert folders[0].is_dir(), "the clients are not installed: requirements/clients.sh"
    connection = stack.connection
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.end_to_end.tinker_session", program),
            *(connection.api_url, connection.api_key, str(model), argument),
        ],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT])),
            "HF_HUB_OFFLINE": "1",
            "TINKER_BASE_URL": f"{connection.api_url}/tinker",
            "TINKER_API_KEY": f"tml-{connection.api_key}",
        },
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told_by(process: subprocess.Popen) -> dict[str, Any]:
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-6000:]
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def told(stack: Stack, tiny_model: Path) -> dict[str, Any]:
    return told_by(started(stack, tiny_model, "whole"))


def test_ten_steps_are_a_job_s_to_the_byte(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    rows = [ids for batch in batches(10) for ids in batch]
    labelled = [{"input_ids": ids, "labels": [-100] * PROMPT + ids[PROMPT:]} for ids in rows]
    job = stack.cli(
        *(
            "submit",
            "sft",
            "--json",
            "--model",
            str(tiny_model),
            "--dataset",
            str(jsonl(tmp_path / "rows.jsonl", labelled)),
        ),
        *("--format", "tokenized", "--steps", "10", "--batch-size", str(BATCH), "--max-tokens", "4096"),
        *("--lora-rank", "4", "--learning-rate", "0.01", "--schedule", "constant", "--seed", "7"),
        *("--lora-targets", ",".join((*LINEARS, "lm_head"))),  # as Tinker's client, unless told otherwise
        "--wait",
    )
    steps = [[rows[index] for index in step] for step in steps_by_count(epoch_order(len(rows), 7, 0), BATCH)]
    told = told_by(started(stack, tiny_model, "sft", json.dumps(steps)))
    folder = Path(job.json["adapter"].removeprefix("file://"))
    assert (
        bytes.fromhex(told["files"]["adapter_model.safetensors"]) == (folder / "adapter_model.safetensors").read_bytes()
    )
    assert json.loads(bytes.fromhex(told["files"]["adapter_config.json"]))["r"] == 4
    assert told["losses"][-1] < told["losses"][0]
    assert told["scores"] == [10] * BATCH


def test_losses_and_states_are_what_the_client_asked_for(told: dict[str, Any], tiny_model: Path) -> None:
    assert told["info"]["lora_rank"] == 4 and told["info"]["model_name"] == str(tiny_model)
    assert told["tokenizer"] > 100
    assert told["passes"]["loss:sum"] > told["after"] == pytest.approx(told["again"], abs=0)
    assert told["still"] == told["again"]
    assert told["state"].endswith(":train:0/weights/first")
    cold, warm, own = (told["loaded"][name] for name in ("cold", "warm", "own"))
    assert cold[0] == own[1] == told["again"] != own[0], "the same weights, wherever they are loaded"
    assert cold[1] != cold[0] and cold[1] != warm, "the step is another one where the optimizer begins anew"
    assert told["trained"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert told["custom"]["loss:sum"] == pytest.approx(told["squares"], rel=1e-5)
    assert told["custom"]["own:sum"] == 1.0 and told["custom_step"]["grad_norm:mean"] > 0


def test_policy_losses_are_tinker_s_sums(told: dict[str, Any]) -> None:
    for name, each in told["policies"].items():
        new, old = np.array(each["new"]), np.array(each["old"])
        advantage = np.array(each["advantages"])[:, None]
        ratio = np.exp(new - old)
        clipped = np.clip(ratio, 0.9, 1.05)
        sequence = np.exp(np.mean(new - old, axis=1, keepdims=True)) + np.zeros_like(new)
        expected = {
            "importance_sampling": -(ratio * advantage),
            "ppo": -np.minimum(ratio * advantage, clipped * advantage),
            "cispo": -(clipped * new * advantage),
            "gspo": -np.minimum(sequence * advantage, np.clip(sequence, 0.9, 1.05) * advantage),
            "dro": -(new * advantage - 0.25 * (new - old) ** 2),
            "stable_reinforce": -np.minimum(ratio, 1.0) * advantage * new + 0.25 * (new - old) ** 2,
        }[name].sum()
        assert each["loss"] == pytest.approx(expected, rel=1e-5), name
        assert each["forward"] == pytest.approx(expected, rel=1e-5), name


def test_samples_are_of_the_weights_that_were_named(told: dict[str, Any]) -> None:
    assert [len(tokens) for tokens in told["drawn"]] == [6, 6, 6]
    assert len({tuple(tokens) for tokens in told["drawn"]}) == 3
    assert told["by_path"] == told["drawn"][0], "the same weights, by the same seed"
    assert told["by_base"] != told["by_path"]
    assert told["stopped"] == [told["by_base"][:3], "stop"]
    assert told["prompt_logprobs"][0] is None and all(each < 0 for each in told["prompt_logprobs"][1:])
    assert told["computed"] == told["prompt_logprobs"]


def test_the_likeliest_tokens_of_a_prompt_are_those_of_transformers(told: dict[str, Any], tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def scores(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)

    ids, top = told["top"]
    assert top[0] is None
    prompt, drawn, logprobs, likely = told["drawn_top"]
    assert len(drawn) == 6
    for found, computed in ((top[1:], scores(ids)[:-1]), (likely, scores([*prompt, *drawn])[len(prompt) - 1 : -1])):
        expected = computed.topk(3)
        assert [[token for token, _ in row] for row in found] == expected.indices.tolist()
        assert [[value for _, value in row] for row in found] == [
            pytest.approx(row, abs=1e-5) for row in expected.values.tolist()
        ]
    assert logprobs == pytest.approx(computed.gather(1, torch.tensor(drawn)[:, None])[:, 0].tolist(), abs=1e-5)


def test_refusals_name_what_is_wrong_and_cost_nothing(told: dict[str, Any]) -> None:
    refused = told["refused"]
    assert refused["loss"]["status"] == 422 and "the loss needs logprobs" in refused["loss"]["body"]["error"]
    assert refused["token"]["category"] == "User" and "99999 is outside the vocabulary" in refused["token"]["text"]
    assert refused["base"]["category"] == "User"
    assert all(each["body"]["category"] == "user" for each in refused.values() if "body" in each)


def test_the_rest_client_finds_runs_and_checkpoints(told: dict[str, Any]) -> None:
    rest = told["rest"]
    assert rest["run"]["lora_rank"] == 4 and rest["run"]["user_metadata"] == {"a": "b"}
    assert rest["checkpoints"] == [["weights/first", True, True], ["sampler_weights/policy", False, True]]
    assert rest["left"] == 1 and rest["runs"] >= 2 and rest["all"] >= 2
    assert len(rest["session"]["training_run_ids"]) == 5, "that of a model that could not be opened, too"
    assert rest["weights"]["lora_rank"] == 4 and rest["weights"]["train_unembed"] is True


@pytest.mark.deep
def test_two_older_clients_at_once_do_the_same(stack: Stack, tiny_model: Path, told: dict[str, Any]) -> None:
    processes = [started(stack, tiny_model, "whole", client=client) for client in CLIENTS[1:]]
    for process, version in zip(processes, ("0.36.0", "0.35.0"), strict=True):
        older = told_by(process)
        assert older["version"] == version
        for name in (
            "passes",
            "after",
            "drawn",
            "by_path",
            "by_base",
            "prompt_logprobs",
            "still",
            "loaded",
            "drawn_top",
        ):
            assert older[name] == told[name], name
        archive = older["rest"].get("archive", [])
        assert bool(archive) == (version == "0.35.0"), "later clients ask for addresses of files"
        assert not archive or {"adapter_config.json", "adapter_model.safetensors"} <= {
            Path(name).name for name in archive
        }


@pytest.mark.deep
def test_a_call_of_3000_data_comes_in_chunks_out_of_order(stack: Stack, tiny_model: Path) -> None:
    told = told_by(started(stack, tiny_model, "large"))
    print(f"3,000 data in {told['seconds']:.1f} s")
    assert told["num"] == 3000
    assert told["loss"] == pytest.approx(sum(told["halves"]), rel=1e-9)
    assert told["first"][0] == pytest.approx(told["first"][1], abs=1e-5)
    assert told["norms"][0] == pytest.approx(told["norms"][1], rel=1e-5) and math.isfinite(told["norms"][0])


RECIPES = {
    "sl_loop": ["lora_rank=4", "batch_size=8", "max_steps=3", "save_every=2"],
    "rl_loop": ["lora_rank=4", "batch_size=4", "group_size=4", "max_steps=2", "max_tokens=16"],
    "math_rl.train": ["lora_rank=4", "group_size=4", "groups_per_batch=2", "max_steps=2", "max_tokens=5"],
    "preference.dpo.train": ["batch_size=4", "max_steps=2"],
    "distillation.on_policy_distillation": [
        *("lora_rank=4", f"teacher_model={TINKER_MODEL}", "groups_per_batch=2", "group_size=2"),
        *("max_steps=2", "max_tokens=12"),
    ],
}


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path) -> Path:
    return hub_below(tmp_path, tiny_model)


def hub_below(folder: Path, model: Path) -> Path:
    """A folder where what the recipes name on the hub is found first: data, and a model's tokenizer."""

    def write(place: str, rows: list[dict[str, Any]]) -> None:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / place)

    chats = [
        {"messages": [{"role": "user", "content": f"Quay {n}?"}, {"role": "assistant", "content": f"{n} crates."}]}
        for n in range(24)
    ]
    write("HuggingFaceH4/no_robots/train.parquet", chats)
    sums = [{"question": f"What is {n} and {n}?", "answer": f"It is\n#### {2 * n}"} for n in range(8)]
    write("openai/gsm8k/main/train-0.parquet", sums)
    write("zwhe99/DeepMath-103K/train.parquet", [{"question": row["question"]} for row in sums])
    answered = "\n\nHuman: Quay {}?\n\nAssistant: {}"
    pairs = [{"chosen": answered.format(n, f"{n}."), "rejected": answered.format(n, "No.")} for n in range(12)]
    write("Anthropic/hh-rlhf/train.parquet", pairs)
    write("Anthropic/hh-rlhf/test.parquet", pairs[:4])
    configured = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
    (folder / "openai" / "gsm8k" / "README.md").write_text(f"---\n{configured}---\n")
    (folder / TINKER_MODEL).parent.mkdir(parents=True)
    (folder / TINKER_MODEL).symlink_to(model)
    return folder


def recipe(stack: Stack, hub: Path, name: str, options: list[str], log: str) -> subprocess.Popen:
    """A recipe of the cookbook's, which tells of itself in the folder `log` of the hub's."""
    connection = stack.connection
    folders = [str(ROOT / ".venv" / "clients" / each) for each in (CLIENTS[0], COOKBOOK)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(folders),
        "TINKER_API_KEY": f"tml-{connection.api_key}",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(hub / "cache" / log),
    }
    common = [f"base_url={connection.api_url}/tinker", f"model_name={TINKER_MODEL}", "learning_rate=0.01"]
    return subprocess.Popen(
        [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *common, f"log_path={hub / log}", *options],
        env=environment,
        cwd=hub,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines_of(hub: Path, log: str, name: str) -> list[dict[str, Any]]:
    """Lines that a recipe has written as far as it has come."""
    path = hub / log / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finished(process: subprocess.Popen, hub: Path, log: str) -> dict[str, Any]:
    """The last checkpoint of a recipe that has ended well."""
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-6000:]
    saved = lines_of(hub, log, "checkpoints.jsonl")[-1]
    assert saved["state_path"].endswith("/weights/final"), log
    assert saved["sampler_path"].endswith("/sampler_weights/final"), log
    return saved


@pytest.mark.drawn
def test_the_cookbook_s_recipes_run_unmodified(stack: Stack, hub: Path) -> None:
    names = drawn(list(RECIPES), 1)
    running = {name: recipe(stack, hub, name, RECIPES[name], name) for name in names}
    for name, process in running.items():
        finished(process, hub, name)
    if "sl_loop" in names:
        metrics = lines_of(hub, "sl_loop", "metrics.jsonl")
        assert metrics[2]["train_mean_nll"] < metrics[0]["train_mean_nll"]
    if "preference.dpo.train" in names:
        steps = lines_of(hub, "preference.dpo.train", "metrics.jsonl")
        losses = [step["dpo_loss"] for step in steps if "dpo_loss" in step]
        assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and losses[-1] < losses[0]


def adapter_of(stack: Stack, tinker_path: str) -> bytes:
    """The weights of a checkpoint."""
    connection = stack.connection
    model_id, kind, name = tinker_path.removeprefix("tinker://").split("/")
    path = f"/training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls"
    headers = {"x-api-key": f"tml-{connection.api_key}"}
    with httpx.Client(timeout=60, trust_env=False) as client:
        urls = client.get(f"{connection.api_url}{TINKER}{path}", headers=headers).raise_for_status().json()["urls"]
        return client.get(urls["adapter_model.safetensors"]).raise_for_status().content


def test_the_cookbook_exports_what_was_trained(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    told = told_by(started(stack, tiny_model, "export", str(tmp_path)))
    assert told["merged"] == pytest.approx(told["here"], abs=1e-4)
