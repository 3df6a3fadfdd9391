"""A tiny model in Hugging Face format, made from nothing: its own BPE tokenizer, its own chat template, random weights.

python -m examples.tiny_model FOLDER [--corpus FILE ...] [--family FAMILY]
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig


SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + call['function'] | tojson + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    folder: Path,
    corpus: Iterable[str],
    *,
    family: str = "qwen3",
    vocab_size: int = 512,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = True,
    single_digits: bool = False,
    seed: int = 0,
) -> Path:
    """Write config, fp32 weights, tokenizer and chat template into a folder. Equal arguments give equal bytes.

    `single_digits`: no token holds more than one, as in Qwen's vocabularies: what a model that adds wants.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = train_tokenizer(corpus, vocab_size, single_digits)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    config = _config(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def train_tokenizer(corpus: Iterable[str], vocab_size: int, single_digits: bool = False) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes]) if single_digits else by_bytes
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


# Their language models have their own type.
_HAVE_TOWERS = ("gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")
_ABSENT: Any = object()


def _config(family: str, **sizes: Any) -> "PretrainedConfig":
    from transformers import AutoConfig

    settings = sizes | _settings(family, sizes)
    given = {name: value for name, value in settings.items() if value is not _ABSENT}
    return AutoConfig.for_model(f"{family}_text" if family in _HAVE_TOWERS else family, **given)


def _settings(family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what a family's configuration has beside the sizes, or instead of them."""
    size, hidden_size, num_layers = sizes["head_dim"], sizes["hidden_size"], sizes["num_hidden_layers"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    mixers = [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
    windows = {"layer_types": mixers, "sliding_window": 24, "final_logit_softcapping": 20.0}
    delta_net = {
        "layer_types": [("linear_attention", "full_attention")[layer % 2] for layer in range(num_layers)],
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": size, "linear_value_head_dim": size},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }
    latents = {
        **{"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": size, "qk_rope_head_dim": size // 2},
        **{"num_key_value_heads": sizes["num_attention_heads"], "moe_intermediate_size": hidden_size},
        "head_dim": _ABSENT,
    }
    match family:
        case "gemma3":
            return windows | {"query_pre_attn_scalar": 2 * size}
        case "gemma4" | "gemma4_unified":  # with four layers the last two take the keys and values of those before
            own = windows | {
                "num_key_value_heads": sizes["num_attention_heads"],
                "global_head_dim": 2 * size,
                "num_global_key_value_heads": sizes["num_key_value_heads"],
                "attention_k_eq_v": True,
                "num_kv_shared_layers": max(0, num_layers - 2),
                "use_double_wide_mlp": True,
            }
            per_layer = {"hidden_size_per_layer_input": size // 2, "vocab_size_per_layer_input": sizes["vocab_size"]}
            return own | (per_layer if family == "gemma4" else {})
        case "glm4_moe_lite":
            return latents | {"n_routed_experts": 4, "num_experts_per_tok": 2, "v_head_dim": size + size // 2}
        case "glm4_moe":  # as GLM-4.5, and with groups; Air has no norms of queries and keys
            groups = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
            switches = {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5}
            return groups | switches | {"moe_intermediate_size": hidden_size}
        case "deepseek_v3":
            groups = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
            return latents | groups | {"v_head_dim": size, "first_k_dense_replace": 1}
        case "qwen3_5":
            return delta_net
        case "qwen3_5_moe":
            shared = {"shared_expert_intermediate_size": hidden_size // 2, "intermediate_size": _ABSENT}
            return delta_net | experts | shared
        case "gpt_oss":
            chosen = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": hidden_size}
            return chosen | {"sliding_window": 16}
        case "nemotron_h":  # a layer is one block, and its embeddings are never tied
            kinds = ("linear_attention", "full_attention", "moe", "mlp")
            return {
                **{"tie_word_embeddings": False, "num_hidden_layers": _ABSENT},
                **{"mamba_num_heads": 4, "mamba_head_dim": size, "ssm_state_size": size, "n_groups": 2},
                **{"n_routed_experts": 8, "n_group": 2, "routed_scaling_factor": 1.5, "moe_latent_size": 2 * size},
                **{"moe_intermediate_size": 2 * size, "moe_shared_expert_intermediate_size": 3 * size},
                "layers_block_type": [kinds[layer % 4] for layer in range(num_layers)],
            }
        case "qwen3":
            return {}
        case "phi3":  # as Phi-4-mini, whose heads are rotated in part
            return {"partial_rotary_factor": 0.75, "head_dim": _ABSENT}
        case "qwen3_moe":
            return experts | {"norm_topk_prob": True}
        case "qwen2":
            return {"head_dim": _ABSENT}
        case "mistral":
            return {"sliding_window": None}
        case "ministral":
            return {"sliding_window": 16, "layer_types": mixers}
        case "smollm3":
            return {"head_dim": _ABSENT, "no_rope_layer_interval": 2}
        case "granite":
            multipliers = {"embedding_multiplier": 1.5, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
            return multipliers | {"logits_scaling": 1.6}
        case "granitemoehybrid":  # as Granite 4.0 H Tiny: most layers are Mamba-2, and attention encodes no positions
            multipliers = {"embedding_multiplier": 1.5, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
            mamba = {"mamba_n_heads": 4, "mamba_d_head": hidden_size // 2, "mamba_d_state": size, "mamba_n_groups": 2}
            own = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 2 * size + 8}
            blocks = [("linear_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
            more = {"layer_types": blocks, "intermediate_size": 2 * size, "position_embedding_type": "nope"}
            return multipliers | mamba | own | more | {"logits_scaling": 1.6}
        case "lfm2":  # as LFM2-350M: MLPs are not of the configured size, and most layers have no attention
            mixers = [("conv", "full_attention")[layer % 2] for layer in range(num_layers)]
            return {"layer_types": mixers, "block_multiple_of": 16}
        case "olmo3":
            yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
            ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": yarn}
            return {"layer_types": mixers, "sliding_window": 24, "rope_parameters": ropes}
        case "llama":
            bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
            return {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, **bands}}
        case unknown:
            raise ValueError(f"there is no tiny model of the family {unknown}")


def read_texts(files: Iterable[Path]) -> Iterator[str]:
    """Texts to train a tokenizer on: what the messages of chat JSONL say, or the lines of any other file."""
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            if file.suffix == ".jsonl":
                yield from (message["content"] for message in json.loads(line)["messages"])
            else:
                yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, nargs="*", default=[], help="text or chat JSONL, for the tokenizer")
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--family", default="qwen3", help="model_type of its config.json")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("vocab_size", "hidden_size", "num_layers")}
    corpus = list(read_texts(arguments.corpus)) or ["a tiny model says hello"]
    print(make_tiny_model(arguments.folder, corpus, family=arguments.family, **sizes))


if __name__ == "__main__":
    main()
