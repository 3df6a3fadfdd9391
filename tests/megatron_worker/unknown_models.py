"""Tiny models of families that we have no architecture for, made by transformers alone."""

from pathlib import Path
from typing import Any

import torch

from tests.megatron_worker.rows import VOCAB_SIZE

SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
COMPUTED: dict[str, dict[str, Any]] = {
    "olmo2": {},  # norms behind its blocks
    "granite": {  # multipliers, of scores and logits too
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.5, "logits_scaling": 4.0}
    },
    "phi3": {"sliding_window": 24},  # fused linears, a window
    "starcoder2": {"sliding_window": None, "use_bias": True},  # layer norms, biases, an MLP without a gate
    "cohere2": {"sliding_window": 24},  # windows in some layers, parallel blocks, scaled logits, tied
    "glm4": {},  # rotates a part, by pairs
    "stablelm": {},  # passes no keywords on to its attention
}


def unknown_model(folder: Path, family: str, **settings: Any) -> Path:
    """A model whose norms are not ones and whose biases are not zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **COMPUTED.get(family, {}), **settings})
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "bias" in name:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(1 + 0.2 * noise if "norm" in name else 3 * weight)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return folder
