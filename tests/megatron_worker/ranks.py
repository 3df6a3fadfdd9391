"""TrainerRanks to drive: adapters whose weights tell slots apart, random inputs, what an output says, what PEFT says.

Shape suffixes: P positions of an input, K labels a position.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longshore.training import Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.trainer_rank import ForwardInput, ForwardOutput, Snapshot, TopK, TrainerRank
from tests.megatron_worker.rows import VOCAB_SIZE

LORAS = {
    "one": Lora(rank=4, alpha=8),
    "two": Lora(rank=2, alpha=8, targets=("q_proj", "v_proj", "down_proj")),
    "frozen": Lora(rank=3, alpha=3),
}


def write_adapters(model: Path, folder: Path) -> dict[str, Path]:
    """A PEFT folder of each of LORAS, neither matrix of any zero."""
    rank = TrainerRank(MegatronEngine(model, Layout(), "float32"))
    folders = {}
    for seed, (name, lora) in enumerate(LORAS.items()):
        rank.create_adapter(name, lora, seed)
        generator = torch.Generator().manual_seed(seed)
        tensors = {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in rank.snapshot(name).tensors.items()}
        folders[name] = folder / name
        Snapshot(lora, tensors).write(folders[name])
    return folders


def load_adapters(rank: TrainerRank, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        rank.load_adapter(name, folder, trainable=name != "frozen")


def reference_logits(model: Path, folder: Path | None, ids: list[int]) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model)
    if folder is not None:
        reference = PeftModel.from_pretrained(reference, folder)
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0]


def random_ids(generator: np.random.Generator, length: int) -> list[int]:
    return generator.integers(3, VOCAB_SIZE, length).tolist()


def random_input(generator: np.random.Generator, prefix: Sequence[int] = (), longest: int = 40) -> ForwardInput:
    """Any questions about a sequence, of any slot of LORAS or none."""
    ids = [*prefix, *random_ids(generator, int(generator.integers(2, longest + 1)))]
    scored = bool(generator.random() < 0.6)
    positions = np.flatnonzero(generator.random(len(ids) - 1) < 0.7) if generator.random() < 0.5 else None
    num_positions = len(positions) if positions is not None else len(ids) - (1 if scored else 0)
    labels = generator.integers(0, VOCAB_SIZE, (num_positions, 3)) if generator.random() < 0.3 else None
    return ForwardInput(
        ids,
        positions=positions,
        target_logprobs=scored,
        entropy=scored and bool(generator.random() < 0.3),
        labels=labels,
        top_k=int(generator.choice([0, 0, 1, 5])),
        logits=bool(generator.random() < 0.3),
        hidden=bool(generator.random() < 0.3),
        adapter=[*LORAS, None][int(generator.integers(4))],
        temperature=float(generator.choice([1.0, 0.7])),
        no_grad=bool(generator.random() < 0.2),
    )


def tensors_of(output: ForwardOutput) -> dict[str, Tensor]:
    """What an output has, by name. Top ids are left out: equals may change places."""
    return {name: each.logprob_PK if isinstance(each, TopK) else each for name, each in output.found.items()}


def some_loss(outputs: Sequence[ForwardOutput]) -> Tensor:
    """A number that depends on every element of every output, on each otherwise."""
    total = torch.zeros(())
    for number, output in enumerate(outputs):
        for name, tensor in tensors_of(output).items():
            if tensor.requires_grad:
                weights = torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape) / (number + 1)
                scale = 0.01 if name in ("logit_PV", "hidden_PH") else 1.0
                total = total + scale * (weights * tensor).sum()
    return total


def gradient(rank: TrainerRank, name: str | None) -> Tensor:
    """What an adapter (None: the base) has accumulated on this rank."""
    return rank.engine.trainings[rank.slot(name)].optimizer.grad.buffer.clone()
