"""Models with weights that tell layers apart, rows to train on, bins of them, and the plain loop to compare with.

Shape suffixes: T tokens of a bin, N targets of a bin.
"""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_model
from megatron_worker.engine import Batch
from shared.jobs.packed import RouteShape

EXPERTS_BESIDE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
"""Settings of Gemma 4 with experts beside its MLPs."""
GRANITE_DENSE = {
    **{"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_groups": 1, "position_embedding_type": "rope"},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
"""Settings of Granite 4.0 without experts, whose attention rotates."""
VOCAB_SIZE = 301  # odd, so that a vocabulary shard is padded under tp


def distinct_model(
    folder: Path,
    family: str = "qwen3",
    tied: bool = True,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    **sizes: Any,
) -> Path:
    """A tiny model whose norms are not ones and whose biases are not zeros. `config`: changes of its config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family == "nemotron_h":
        sizes = {"num_layers": 4} | sizes  # one of each kind
    make_tiny_model(folder, ["hello there"], family=family, tied=tied, vocab_size=VOCAB_SIZE, seed=seed, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if config:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **config), dtype=torch.float32)
    make_distinct(model, family, seed)
    model.save_pretrained(folder)
    return folder


def talking_model(folder: Path) -> Path:
    """The tiny model, but its answers end after a few tokens, as the end token's row is that large."""
    from tests.conftest import CORPUS  # not on ranks, whose variables it drops

    model = make_tiny_model(folder, CORPUS, tied=False)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][json.loads((model / "config.json").read_text())["eos_token_id"]] *= 60
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def make_distinct(model: Any, family: str, seed: int = 0) -> None:
    """Give transformers' model weights that tell its layers apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name or name.endswith("scale"):  # of routers and experts
                is_zero_centred = family == "gemma3" or (family.startswith("qwen3_5") and "linear_attn" not in name)
                weight.copy_((0 if is_zero_centred else 1) + 0.2 * noise)
                if family.startswith("gemma4") and "q_norm" in name:  # has what others' scale of scores does
                    weight.mul_(weight.numel() ** -0.5)
            elif "bias" in name:
                weight.copy_(0.3 * noise)
            elif name.endswith(".D"):
                weight.copy_(noise)
            elif "A_log" not in name:  # rates from fast to slow already
                weight.copy_(3 * weight)
            elif family in ("nemotron_h", "granitemoehybrid"):  # states that last for many tokens
                weight.sub_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        for number, scalar in enumerate(value for name, value in model.named_buffers() if "layer_scalar" in name):
            scalar.fill_(0.75 + 0.125 * number)


_SMALL = {"hidden_size": 16, "intermediate_size": 16}
# By family: its classes' name, the tower's settings, and those of the whole.
_TOWERS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    **{
        family: (name, _SMALL | {"depth": 1, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 64}, {})
        for family, name in (("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"))
    },
    "mistral": (
        "Mistral3",
        _SMALL | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32},
        {"tie_word_embeddings": False},
    ),
    "gemma3": (
        "Gemma3",
        _SMALL | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        {"mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "Gemma4",
        {
            **_SMALL,
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
            **{"patch_size": 4, "position_embedding_size": 8},
        },
        {},
    ),
    "gemma4_unified": ("Gemma4Unified", {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8}, {}),
}


def model_with_tower(folder: Path, family: str) -> tuple[Path, Path]:
    """A text model; and one that reads images, as it is published, with that for its decoder."""
    import transformers

    is_tied = family.startswith("gemma")
    alone = distinct_model(folder / "alone", family, tied=is_tied, num_layers=4)
    if family == "gemma3":  # which caps no logits beside a tower
        config = json.loads((alone / "config.json").read_text())
        (alone / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": None}))
    decoder = transformers.AutoModelForCausalLM.from_pretrained(alone)
    name, tower, more = _TOWERS[family]
    config = getattr(transformers, f"{name}Config")(text_config=decoder.config.to_dict(), vision_config=tower, **more)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.lm_head.load_state_dict(decoder.lm_head.state_dict())
    whole = shutil.copytree(alone, folder / "whole")
    model.save_pretrained(whole)
    if family == "mistral":  # published files say of no part whether it is tied
        config = json.loads((whole / "config.json").read_text())
        del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
        (whole / "config.json").write_text(json.dumps(config))
    if family.startswith("qwen"):
        tensors = load_file(whole / "model.safetensors")
        save_file(tensors | {"mtp.norm.weight": torch.ones(64)}, whole / "model.safetensors", {"format": "pt"})
    return alone, whole


@dataclass(frozen=True)
class Row:
    """One example: its ids, and the weight of predicting each of them (the first has none)."""

    ids: list[int]
    weights: list[float]


def random_rows(lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[Row]:
    """The first third of a row is its prompt; the rest counts 1 or a half.

    No special tokens: transformers gives the embedding of its padding token no gradient, we know no padding.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        halves = torch.randint(1, 3, (length,), generator=generator).tolist()
        weights = [0.0 if i < max(1, length // 3) else halves[i] / 2 for i in range(length)]
        rows.append(Row(ids, weights))
    return rows


def bin_of(rows: Sequence[Row]) -> Batch:
    """Rows one after another in one bin, positions restarting, every id but the first of a row a target."""
    start, index, label, weight, sequence = 0, [], [], [], []
    for number, row in enumerate(rows):
        for i in range(1, len(row.ids)):
            if row.weights[i]:
                index.append(start + i - 1)
                label.append(row.ids[i])
                weight.append(row.weights[i])
                sequence.append(number)
        start += len(row.ids)
    zeros_N = torch.zeros(len(index))
    return dataclasses.replace(
        Batch.of_sequences([row.ids for row in rows], torch.device("cpu")),
        hidden_index_N=torch.tensor(index),
        label_N=torch.tensor(label),
        weight_N=torch.tensor(weight),
        advantage_N=zeros_N,
        old_logprob_N=zeros_N,
        ref_logprob_N=zeros_N,
        sampler_logprob_N=zeros_N,
        sequence_N=torch.tensor(sequence),
    )


def empty_bin() -> Batch:
    """What a rank gives whose bins are used up."""
    whole = bin_of(random_rows([4]))
    columns = {name: values[:0] for name, values in vars(whole).items() if values is not None}
    return Batch(**columns)


def total_weight(rows: Sequence[Row]) -> float:
    return sum(sum(row.weights) for row in rows)


def reference_loss(model: torch.nn.Module, rows: Sequence[Row]) -> torch.Tensor:
    """Weighted mean negative log-likelihood, a row at a time through transformers."""
    total = torch.zeros(())
    for row in rows:
        logprob = model(torch.tensor([row.ids])).logits[0, :-1].float().log_softmax(-1)
        picked = logprob.gather(1, torch.tensor(row.ids)[1:, None])[:, 0]
        total = total - (picked * torch.tensor(row.weights)[1:]).sum()
    return total / total_weight(rows)


def reference_steps(
    model: torch.nn.Module,
    steps: Sequence[Sequence[Row]],
    learning_rate: float,
    weight_decay: float,
    clip_norm: float,
    eps: float = 1e-8,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a plain torch loop."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.999), eps=eps, weight_decay=weight_decay)
    history = []
    for rows in steps:
        loss = reference_loss(model, rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(loss.detach()), float(norm)))
    return history


def routed(routes: RouteShape | None, batch: Batch, seed: int) -> Batch:
    """The bin with a random route of each token, if the model has experts."""
    if routes is None:
        return batch
    generator = torch.Generator().manual_seed(seed)
    scores_TLE = torch.rand(len(batch.token_id_T), routes.num_layers, routes.num_experts, generator=generator)
    return dataclasses.replace(batch, route_TLK=scores_TLE.topk(routes.per_token).indices.to(torch.uint8))
