"""gpt-oss: attention with sinks, in windows every other layer, and experts whose tensors are stored together.

Projections, router and experts have biases. Published checkpoints hold the experts in MXFP4
(tensors/safetensors_files.py); trained weights are written in the run's dtype.
"""

import dataclasses

from shared.families.architecture import Architecture, ClampedGate, Mixture
from shared.families.tensor_slices import TensorSlice
from shared.models.families import GptOssConfig


def architecture(alike: Architecture, config: GptOssConfig) -> Architecture:
    """Return the architecture, given one whose layers are plain attention and MLPs."""
    biased = config.attention_bias
    attention = dataclasses.replace(alike.attention, has_sinks=True, qkv_bias=biased, output_bias=biased)
    mixture = Mixture(
        num_experts=config.num_experts,
        ffn_size=config.intermediate_size,
        experts_per_token=config.num_experts_per_tok,
        scoring="chosen softmax",
        stacked=ClampedGate(config.swiglu_alpha, config.swiglu_limit),
    )
    mixers = tuple(dataclasses.replace(attention, window=window) for window in config.windows)
    return dataclasses.replace(alike, mixers=mixers, mlps=(mixture,) * len(mixers))


def stacked_expert_slices(m: Mixture, hidden_size: int, etp: int, theirs: str, ours: str) -> list[TensorSlice]:
    """Return the tensors of a mixture whose experts are stored together: [experts, inputs, outputs]."""
    assert etp == 1, etp  # refused by check_layout
    experts, gate_up = m.num_experts, 2 * m.ffn_size
    shapes = {
        "gate_up_proj": (experts, hidden_size, gate_up),
        "gate_up_proj_bias": (experts, gate_up),
        "down_proj": (experts, m.ffn_size, hidden_size),
        "down_proj_bias": (experts, hidden_size),
    }
    router = {"weight": (experts, hidden_size), "bias": (experts,)}
    return [
        *(TensorSlice(f"{theirs}.router.{n}", f"{ours}.router.{n}", s, None, 0, experts) for n, s in router.items()),
        *(
            TensorSlice(f"{theirs}.experts.{name}", f"{ours}.experts.{name}", shape, 0, 0, experts, is_stack=True)
            for name, shape in shapes.items()
        ),
    ]
