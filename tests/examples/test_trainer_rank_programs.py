"""The three example programs on TrainerRank: short, and each learns what it is for."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from examples import trainer_rank_distil, trainer_rank_grpo, trainer_rank_sft
from longshore.training import Lora
from megatron_worker.trainer_rank import Snapshot, start
from tests.megatron_worker.launch import fork_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[2] / "examples"
CHATS = EXAMPLES / "data" / "harbour_train.jsonl"


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with seven times its embedding: as it is, no hidden state makes any token likely."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("lively")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    lively = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        lively.get_input_embeddings().weight.mul_(7)
    lively.save_pretrained(folder)
    return folder


def lines(printed: str, name: str) -> list[float]:
    return [json.loads(line)[name] for line in printed.splitlines() if line.startswith("{")]


def test_each_is_shorter_than_100_lines():
    for path in EXAMPLES.glob("trainer_rank_*.py"):
        assert len(path.read_text().splitlines()) < 100, path


def test_sft_learns_answers_and_two_ranks_learn_the_same(model, tmp_path, capsys):
    arguments = [
        str(model),
        str(CHATS),
        str(tmp_path / "alone"),
        "--steps",
        "6",
        "--batch-size",
        "8",
        "--learning-rate",
        "0.02",
    ]
    trainer_rank_sft.main(arguments)
    losses = lines(capsys.readouterr().out, "loss")
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "alone" / "adapter_model.safetensors").exists()
    arguments[2] = str(tmp_path / "two")
    both = lines(fork_ranks("examples.trainer_rank_sft", *arguments, num_ranks=2), "loss")
    assert both == pytest.approx(losses, rel=1e-4)


def test_sft_learns_by_all_weights(model, tmp_path, capsys):
    options = ["--full", "--steps", "6", "--batch-size", "8", "--learning-rate", "0.003"]
    trainer_rank_sft.main([str(model), str(CHATS), str(tmp_path / "model"), *options])
    losses = lines(capsys.readouterr().out, "loss")
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_grpo_learns_what_is_rewarded(model, capsys):
    trainer_rank_grpo.main([str(model), "--steps", "14"])
    rewards = lines(capsys.readouterr().out, "reward")
    assert sum(rewards[:2]) / 2 < 0.4
    assert sum(rewards[-2:]) / 2 > 0.7


def test_distillation_brings_the_student_to_the_teacher(model, tmp_path, capsys):
    rank = start(model)
    rank.create_adapter("teacher", Lora(rank=4, alpha=32), seed=1)
    generator = torch.Generator().manual_seed(0)
    fresh = rank.snapshot("teacher")
    tensors = {name: 0.3 * torch.randn(t.shape, generator=generator) for name, t in fresh.tensors.items()}
    Snapshot(fresh.lora, tensors).write(tmp_path / "teacher")
    trainer_rank_distil.main(
        [str(model), str(tmp_path / "teacher"), str(tmp_path / "student"), "--steps", "12", "--batch-size", "4"]
    )
    divergences = lines(capsys.readouterr().out, "divergence")
    assert divergences[0] > 0 and divergences[-1] < 0.7 * divergences[0]
