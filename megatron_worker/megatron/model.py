"""megatron-core's GPTModel for an architecture, with our norm, linears and attention in its layer spec.

The model is built on the CPU without initialising anything, then all its parameters become views of one flat buffer on
the device. So nothing here meets megatron's hard calls of CUDA: those are in its initialisers, random state, optimizer,
schedules and checkpoints.

Shape suffixes: T tokens of a bin, N targets, H hidden size, V rows of this rank's vocabulary shard.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_worker.engine import Batch
from megatron_worker.families.architecture import Architecture, rotary_frequencies
from megatron_worker.flat import Flat
from megatron_worker.head import VocabShard
from megatron_worker.lora import AdaptedColumnLinear, AdaptedLinear, AdaptedRowLinear, Beside
from megatron_worker.megatron.attention import CoreAttention, PackedSelfAttention, plan_bin
from megatron_worker.megatron.mesh import Mesh


class RMSNorm(torch.nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019, arXiv:1910.07467); megatron's own refuses parallel layouts."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class SwigluMLP(MLP):
    """Megatron's MLP without its general activation, which passes over the widest tensors more often."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor | None]:
        gate_up, _bias = self.linear_fc1(hidden_states)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.linear_fc2(F.silu(gate) * up)


class Model:
    """This rank's part of the model, its parameters views of `flat`, sharded tensors first. Frozen until trained."""

    def __init__(self, architecture: Architecture, mesh: Mesh, dtype: torch.dtype) -> None:
        a = architecture
        share = -(-a.vocab_size // mesh.tp_size)
        self.architecture = a
        self.shard = VocabShard(mesh.tp_rank * share, share, a.vocab_size, mesh.tp_group)
        self._dtype = dtype
        self._frequency_D2 = rotary_frequencies(a.rope, a.head_dim).to(mesh.device)
        self._gpt = _build(a, mesh, dtype, share * mesh.tp_size)
        self.parameters: dict[str, Parameter] = dict(self._gpt.named_parameters())
        self.flat = self._flatten(mesh.device)
        self.num_sharded = min(
            (self.flat.offsets[n] for n in self.parameters if not _is_sharded(n)), default=self.flat.num_elements
        )

    def _flatten(self, device: torch.device) -> Flat:
        names = sorted(self.parameters, key=lambda name: not _is_sharded(name))
        flat = Flat({name: tuple(self.parameters[name].shape) for name in names}, self._dtype, device)
        for name, parameter in self.parameters.items():
            parameter.data = flat.views[name]
            parameter.requires_grad_(False)
        return flat

    @property
    def partial(self) -> set[str]:
        """Replicated parameters that see only this rank's heads: their gradients want adding up over tp."""
        return {name for name in self.parameters if name.endswith((".q_layernorm.weight", ".k_layernorm.weight"))}

    @property
    def output_weight_VH(self) -> Tensor:
        name = "embedding.word_embeddings.weight" if self.architecture.tied else "output_layer.weight"
        return self.parameters[name]

    def set_beside(self, beside: dict[str, Beside]) -> None:
        """Put adapter weights beside the linears named, and take them away from all others."""
        for name, module in self._gpt.named_modules():
            if isinstance(module, AdaptedLinear):
                module.beside = beside.get(name)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm, [T, H]."""
        plan = plan_bin(batch.position_T, batch.parent_T, self._frequency_D2, self._dtype)
        embedded_T1H = self._gpt.embedding(batch.token_id_T[None], None)
        hidden_T1H = self._gpt.decoder(embedded_T1H, attention_mask=plan)
        # Two dimensions from here on: the gradient of a sliced [T, 1, H] has strides that slow every product below it.
        return hidden_T1H.reshape(-1, self.architecture.hidden_size)


def _is_sharded(name: str) -> bool:
    return "norm" not in name


def _build(a: Architecture, mesh: Mesh, dtype: torch.dtype, padded_vocab: int) -> Any:
    config = _config(a, mesh, dtype)
    layer = get_gpt_layer_local_spec(qk_layernorm=a.qk_norm, normalization="RMSNorm")
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([_with_ours(layer, a)] * a.num_layers, layer_norm=RMSNorm),
        vocab_size=padded_vocab,
        max_sequence_length=0,
        position_embedding_type="none",
        share_embeddings_and_output_weights=a.tied,
    )


def _config(a: Architecture, mesh: Mesh, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        ffn_hidden_size=a.ffn_size,
        num_attention_heads=a.num_heads,
        num_query_groups=a.num_kv_heads,
        kv_channels=a.head_dim,
        layernorm_epsilon=a.norm_eps,
        add_qkv_bias=a.qkv_bias,
        qk_layernorm=a.qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=mesh.tp_size,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def _with_ours(layer: ModuleSpec, a: Architecture) -> ModuleSpec:
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    attention.module, mlp.module = PackedSelfAttention, SwigluMLP
    attention.submodules.linear_qkv, attention.submodules.linear_proj = AdaptedColumnLinear, AdaptedRowLinear
    attention.submodules.core_attention = CoreAttention
    if a.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    mlp.submodules.linear_fc1, mlp.submodules.linear_fc2 = AdaptedColumnLinear, AdaptedRowLinear
    return layer
