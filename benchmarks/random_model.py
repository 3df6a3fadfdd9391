"""A model's shape without its weights: a folder of a config alone, engines that draw their weights, and their FLOPs."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_worker.fsdp.engine import FsdpEngine
from megatron_worker.megatron.engine import MegatronEngine


@dataclass(frozen=True)
class Sizes:
    """Sizes of a dense Qwen3 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Input and output sizes of a layer's linears."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, query), (self.hidden, key_value), (self.hidden, key_value), (query, self.hidden)]
        return [*attention, (self.hidden, self.ffn), (self.hidden, self.ffn), (self.ffn, self.hidden)]

    @property
    def layer_weights(self) -> int:
        """Number of weights of a layer's linears."""
        return sum(a * b for a, b in self.linears)

    @property
    def num_weights(self) -> int:
        """Number of weights of linears and embeddings, without norms, which are few."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.vocab * self.hidden

    def with_weights(self, number: int) -> "Sizes":
        """As many layers as come nearest to a number of weights."""
        rest = replace(self, layers=0).num_weights
        return replace(self, layers=max(1, round((number - rest) / self.layer_weights)))


QWEN3_8B = Sizes(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=12_288, vocab=151_936)
TINY = Sizes(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=192, vocab=512)


def flops(
    sizes: Sizes, rank: int, num_tokens: int, num_pairs: int, num_targets: int, attention_products: int = 6
) -> dict[str, float]:
    """Floating-point operations of a LoRA step that cannot be avoided; a multiply-add is two.

    linears     T * (4 P + 6 R)     P weights of the frozen linears: forward and gradient of the input; R of LoRA: also
                                    their own gradient
    attention   A * 2 k H D         A pairs of a token and one that it sees; H heads of size D; k products of matrices:
                                    2 forward and 4 backward; 5 backward, if scores that nobody kept are counted again
    head        N * 4 V h           N targets: their logits, and the rows that are their gradient; hidden size h
    """
    lora = sum(rank * (a + b) for a, b in sizes.linears)
    return {
        "linears": sizes.layers * num_tokens * (4.0 * sizes.layer_weights + 6 * lora),
        "attention": sizes.layers * num_pairs * 2.0 * attention_products * sizes.heads * sizes.head_dim,
        "head": num_targets * 4.0 * sizes.vocab * sizes.hidden,
    }


def write_config(folder: Path, sizes: Sizes) -> Path:
    """Write the files of a Hugging Face folder that an engine reads, except weights."""
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.ffn,
        vocab_size=sizes.vocab,
        tie_word_embeddings=sizes.tied,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ).save_pretrained(folder)
    return folder


class RandomMegatron(MegatronEngine):
    """Draws its base on the device: no file of many GB is downloaded, written or read."""

    def _read_base(self) -> None:
        draw(self._model.flat.views)


class RandomFsdp(FsdpEngine):
    def _read_base(self) -> None:
        draw(self._model.shards)


@torch.no_grad()
def draw(weights: dict[str, Tensor]) -> None:
    """Norms of 1, everything else from a normal distribution of deviation 0.02; the same at every call."""
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(0)
    for name, weight in weights.items():
        if "norm" in name:
            weight.fill_(1)
        else:
            weight.normal_(std=0.02, generator=generator)


def described(sizes: Sizes) -> dict[str, object]:
    """For a benchmark's JSON."""
    return {**asdict(sizes), "weights": sizes.num_weights}
