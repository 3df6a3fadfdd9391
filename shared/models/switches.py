"""Refuses features of a `config.json` that we do not read, since the model would be computed without them.

Such files also have many fields that change nothing (names, dates, settings of training or of serving), so only fields
that are switched on are checked, and numbers whose names say that they scale or cap something.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

from shared.errors import InvalidInput

# These do not change the computation, or every model of their families has them on.
_WITHOUT_EFFECT = frozenset(
    {
        *("use_cache", "return_dict", "return_dict_in_generate", "use_return_dict", "is_decoder", "torchscript"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "do_sample"),
        *("early_stopping", "gradient_checkpointing", "use_flash_attn", "use_flash_attention", "use_kernels"),
        *("is_llama_config", "unsloth_fixed", "_attn_implementation_autoset", "_flash_attn_2_enabled"),
        *("_from_model_config", "trust_remote_code", "add_bos_token", "add_eos_token", "rescale_prenorm_residual"),
        *("moe_shared_expert_overlap", "use_mamba_kernels", "attn_output_gate"),
        *("seq_aux", "use_aux_loss"),  # for losses that balance experts, which we do not compute
    }
)
# These families always do what the switch asks for.
_ALWAYS = {
    "use_qk_norm": ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "olmo3", "gemma3", "gemma4"),
    "qkv_bias": ("qwen2",),
}
_SCALES = re.compile(
    r"soft_?cap|scale_(emb|depth)|clip_qkv|alibi|qk_norm"
    r"|(embeddings?|residual|attention|logits?)_(multiplier|scal(e|ing))(_factor)?$"
)


def refuse_unknown_switches(settings: Mapping[str, Any], known: Container[str], family: str, place: str) -> None:
    """Check the settings of a model's decoder.

    `known`: the settings that are read, for this family.

    Raises InvalidInput: another setting is switched on; names it.
    """
    for name, value in settings.items():
        if name in known or name in _WITHOUT_EFFECT or (value is True and family in _ALWAYS.get(name, ())):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is True or (_SCALES.search(name) and (value not in (0, 1) if is_number else value)):
            rule = f"it is not known in models of the family {family}, and what it asks for would be left out"
            raise InvalidInput(f"{name} = {value!r:.60} is not supported: {rule}", place)
