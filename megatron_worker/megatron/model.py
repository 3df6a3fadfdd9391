"""megatron-core's GPTModel for an architecture, with our norm, linears, attention and experts in its layer spec.

The model is built on the CPU without initialising anything, then all its parameters become views of one flat buffer on
the device. This avoids megatron's code that requires CUDA: its initialisers, random state, optimizer, schedules and
checkpoints. Megatron knows only one parallel dimension, tp; a pipeline stage is a model of fewer layers.

Shape suffixes: T tokens of a bin, N targets, H hidden size, V rows of this rank's vocabulary shard; t tokens of a bin
that are this context-parallel rank's, s those of them that this rank has between layers: t, or t / tp under sp.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from longshore.training import Quantization
from megatron_worker.families import activate, frequencies_of
from megatron_worker.head.logprobs import VocabShard
from megatron_worker.head.scalar import HeadWeights, LmHeadLora
from megatron_worker.megatron.attention import CoreAttention, LocalBin, PackedSelfAttention
from megatron_worker.megatron.experts import MegatronExperts, StackedExperts
from megatron_worker.megatron.layers import (
    RECURRENT,
    LatentSelfAttention,
    LayerInputs,
    PerLayerEmbedding,
    SandwichNormLayer,
    SharedKVAttention,
)
from megatron_worker.megatron.linears import AdaptedColumnLinear, AdaptedLinear, AdaptedRowLinear, MegatronAdapter
from megatron_worker.megatron.optimizer import arrange
from megatron_worker.megatron.parallel import (
    LAYERS,
    Group,
    Mesh,
    Placement,
    gather_alike,
    gather_rows,
    layers_of,
    own_rows,
)
from megatron_worker.quantized import CODES, QuantizedTensor, QuantizedTensors
from shared.families.architecture import (
    Architecture,
    Attention,
    LatentAttention,
    Mixer,
    Mixture,
    Mlp,
    SharedAttention,
)

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_OF_EACH_TOKEN = (
    *(".router.weight", ".router.bias", ".shared_gate.weight", ".linear_proj.bias"),
    *(".router.scale", ".router.expert_scale"),
    *(".query_down.weight", ".latent_down.weight", ".latent_in.weight", ".latent_out.weight"),
    *(".per_layer.gate.weight", ".per_layer.projection.weight"),
)
_NORMS_OF_HEADS = (".q_layernorm.weight", ".k_layernorm.weight", ".self_attention.norm.weight")


class RMSNorm(torch.nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019, arXiv:1910.07467); megatron's own refuses parallel layouts."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class ZeroCentredNorm(RMSNorm):
    """The same by 1 + the weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(torch.float32, x.dtype)
        return F.rms_norm(x.to(wide), (x.shape[-1],), 1 + self.weight.to(wide), self.eps).to(x.dtype)


class NormOfAllHeads(RMSNorm):
    """The same over all heads of a token together. The heads are split over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int, tp: Group) -> None:
        super().__init__(config, hidden_size * num_heads // tp.size, eps)
        self._tp = tp

    def forward(self, x_THD: Tensor) -> Tensor:
        own_TX, tp = x_THD.flatten(1), self._tp
        if tp.size == 1:
            return super().forward(own_TX).view_as(x_THD)
        wide_TX = own_TX.to(torch.promote_types(torch.float32, x_THD.dtype))
        square_T = gather_rows(wide_TX.square().mean(dim=-1), tp).view(tp.size, -1).mean(dim=0)
        normed_TX = wide_TX * (square_T + self.eps).rsqrt()[:, None] * self.weight
        return normed_TX.to(x_THD.dtype).view_as(x_THD)


def _scaled_residual_add(scale: float) -> Callable[..., Any]:
    """Return a function that replaces megatron's addition to the residual stream: it adds the output times `scale`."""

    def added(made: tuple[Tensor, None], residual: Tensor, _dropout: float) -> Tensor:
        return residual + made[0] * scale

    return lambda _is_training, _is_fused: added


class DenseMLP(MLP):
    """Megatron's MLP without its general activation, which passes over the widest tensors more often."""

    def __init__(self, config: TransformerConfig, mlp: Mlp, **_: object) -> None:
        own = copy(config)
        own.ffn_hidden_size = mlp.ffn_size  # megatron's second linear goes by this alone
        own.gated_linear_unit = mlp.is_gated
        linears = MLPSubmodules(linear_fc1=AdaptedColumnLinear, linear_fc2=AdaptedRowLinear)
        super().__init__(own, linears, ffn_hidden_size=mlp.ffn_size)
        self._mlp = mlp

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor | None]:
        made, _bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(activate(made, self._mlp.activation, self._mlp.is_gated))


class NormedMLP(DenseMLP):
    """The MLP that runs beside experts, between separate norms."""

    def __init__(self, config: TransformerConfig, mlp: Mlp, norm: type[RMSNorm]) -> None:
        super().__init__(config, mlp)
        self.input_norm, self.output_norm = (
            norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2)
        )

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor | None]:
        made, bias = super().forward(self.input_norm(hidden_states))
        return self.output_norm(made), bias


class MegatronModel:
    """This rank's part of the model, its parameters views of `flat`. Frozen until trained; `constants` for ever.

    Parameters have their names in the whole model, not those of this stage. With `quantize` the weights of the linears
    are in `quantized` and are no parameters; the dtype is that of all other tensors.
    """

    def __init__(
        self, architecture: Architecture, mesh: Mesh, dtype: torch.dtype, quantize: Quantization | None = None
    ) -> None:
        a = architecture
        share = -(-a.vocab_size // mesh.tp.size)
        self.architecture = a
        self.shard = VocabShard(mesh.tp.rank * share, share, a.vocab_size, mesh.tp.group, a.logit_cap, a.logit_divisor)
        self.dtype, self.frequencies = dtype, frequencies_of(a, mesh.device)
        self._embedding_scale = float(torch.tensor(a.embedding_scale, dtype=dtype))
        self._mesh = mesh
        self._layers = layers_of(mesh.pp.rank, mesh.pp.size, a.num_layers)
        self._gpt = _build(a, mesh, dtype, share * mesh.tp.size, self._layers)
        experts = [module for module in self._gpt.modules() if isinstance(module, MegatronExperts)]
        for place, module in enumerate(experts, sum(isinstance(mlp, Mixture) for mlp in a.mlps[: self._layers.start])):
            module.place = place
        quantized = None if quantize is None else self._quantized(quantize)
        self.quantized: Mapping[str, QuantizedTensor] = quantized or {}
        self.parameters = {self._whole_name(name): p for name, p in self._gpt.named_parameters()}
        placements = {name: self._placement(name) for name in self.parameters}
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.flat, self.regions = arrange(shapes, placements, mesh, dtype)
        self.storages = [flat.buffer for flat in (self.flat, *(quantized.flats if quantized else ()))]
        for name, parameter in self.parameters.items():
            parameter.data = self.flat.views[name]
            parameter.requires_grad_(False)
        self.constants: dict[str, Tensor] = {}
        for name, buffer in self._gpt.named_buffers():
            buffer.data = buffer.to(mesh.device)
            self.constants[self._whole_name(name)] = buffer
        self.set_adapter(None)

    def _quantized(self, kind: Quantization) -> QuantizedTensors:
        """Put quantized weights in the places of those of the linears; they hold nothing yet."""
        owners = {
            self._whole_name(f"{name}.{attribute}"): (module, attribute)
            for name, module in self._gpt.named_modules()
            for attribute in _weights_of(module)
        }
        shapes = {name: tuple(getattr(*owner).shape) for name, owner in owners.items()}
        made = QuantizedTensors(CODES[kind], shapes, self.dtype, self._mesh.device)
        for name, (module, attribute) in owners.items():
            delattr(module, attribute)
            setattr(module, attribute, made[name])
        return made

    def _whole_name(self, name: str) -> str:
        """Return a parameter's name in the whole model: its layer's number there; one name for tied embeddings."""
        if name.startswith(LAYERS):
            number, rest = name.removeprefix(LAYERS).split(".", 1)
            return f"{LAYERS}{int(number) + self._layers.start}.{rest}"
        return _EMBEDDING if name == _OUTPUT and self.architecture.tied else name

    def _placement(self, name: str) -> Placement:
        if ".experts." in name:
            return "expert"
        if name.endswith(_NORMS_OF_HEADS) and self.architecture.attention.norms_all_heads:
            return "split"
        if "norm" in name or name.endswith(_OF_EACH_TOKEN):
            # Under sp each rank applies norms to its own tokens only; norms of heads are applied to a rank's own heads.
            return "partial" if self._mesh.layout.sp or name.endswith(_NORMS_OF_HEADS) else "whole"
        return "tied" if name == _EMBEDDING and self.architecture.tied else "split"

    @property
    def output_weight_VH(self) -> Tensor:
        """The output embedding of the last stage."""
        return self.parameters[_EMBEDDING if self.architecture.tied else _OUTPUT]

    @property
    def layers(self) -> Iterable[torch.nn.Module]:
        layers: torch.nn.ModuleList = self._gpt.decoder.layers
        return layers

    def set_adapter(self, adapter: MegatronAdapter | None) -> None:
        """Let the linears that an adapter targets use its weights, and all others none; and its head, if it has one."""
        weights = {} if adapter is None else adapter.linears
        self.num_values = 0 if adapter is None or adapter.lora.head is None else len(adapter.lora.head.names)
        self.scalar_head = None if adapter is None else HeadWeights.among(adapter.parameters)
        self._beside_output = weights.get("output_layer")
        self._beside_embedding = weights.get(_EMBEDDING.removesuffix(".weight"))
        for name, module in self._gpt.named_modules():
            if isinstance(module, AdaptedLinear):
                module.lora = weights.get(self._whole_name(name))

    def beside_head(self, hidden_NH: Tensor) -> LmHeadLora | None:
        """Return what the adapter of the output layer adds there, if there is one."""
        return None if self._beside_output is None else self._beside_output.beside_head(hidden_NH)

    def run(self, part: LocalBin, received_s1H: Tensor | None) -> Tensor:
        """Run a bin through this stage. Returns hidden states, [s, 1, H]; of the last, after the final norm, [t, H].

        `received_s1H`: what the stage before gave; None for the first.
        """
        per_layer_sLP = None
        if received_s1H is None:
            received_s1H = self._gpt.embedding(part.token_id_t[None], None)
            if self._beside_embedding is not None:
                received_s1H = received_s1H + self._beside_embedding.of_tokens(part.token_id_t)[:, None]
            if self._mesh.layout.sp:
                received_s1H = own_rows(received_s1H, self._mesh.tp)
            if self._embedding_scale != 1:
                received_s1H = received_s1H * self._embedding_scale
            if (per_layer := getattr(self._gpt.embedding, "per_layer", None)) is not None:
                per_layer_sLP = per_layer(part.token_id_t, received_s1H)
        plan = part.plan if self.architecture.block is None else LayerInputs(part.plan, per_layer_sLP)
        self._gpt.decoder.set_input_tensor(received_s1H)
        # Megatron passes a padding mask on to MLPs, also when they are recomputed for the backward.
        hidden_s1H: Tensor = self._gpt.decoder(received_s1H, attention_mask=plan, padding_mask=part.route_LsK)
        self._gpt.decoder.set_input_tensor(None)
        if not self._mesh.is_last_stage:
            return hidden_s1H
        # Two dimensions from here on: the gradient of a sliced [T, 1, H] has strides that slow every product below it.
        hidden_sH = hidden_s1H.reshape(-1, self.architecture.hidden_size)
        return gather_alike(hidden_sH, self._mesh.tp) if self._mesh.layout.sp else hidden_sH


def _weights_of(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that a linear, or a stack of experts, multiplies by."""
    if isinstance(module, StackedExperts):
        return "gate_up_proj", "down_proj"
    return ("weight",) if isinstance(module, AdaptedLinear) else ()


def _build(a: Architecture, mesh: Mesh, dtype: torch.dtype, padded_vocab: int, layers: range) -> Any:
    config = _config(a, mesh, dtype, len(layers))
    norm = ZeroCentredNorm if a.zero_centred_norms else RMSNorm
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            [_layer_of(a, number, mesh, norm) for number in layers], layer_norm=norm
        ),
        vocab_size=padded_vocab,
        max_sequence_length=0,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
        position_embedding_type="none",
        share_embeddings_and_output_weights=a.tied,
    )
    if a.block is not None and a.block.per_layer_size and mesh.is_first_stage:
        gpt.embedding.per_layer = PerLayerEmbedding(a, mesh, config, norm)
    for module in gpt.modules():
        if isinstance(module, AdaptedLinear) and mesh.layout.sp:
            module.sequence = mesh.tp
    return gpt


def _config(a: Architecture, mesh: Mesh, dtype: torch.dtype, num_layers: int) -> TransformerConfig:
    """Return what all layers share; each mixer and MLP puts its own sizes into a copy."""
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=a.hidden_size,
        num_attention_heads=a.attention.num_heads,
        layernorm_epsilon=a.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=mesh.tp.size,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def _layer_of(a: Architecture, number: int, mesh: Mesh, norm: type[RMSNorm]) -> ModuleSpec:
    """Return megatron's spec of a layer, or of one of ours in its place."""
    spec = _layer(a.mixers[number], a.mlps[number], mesh, norm)
    if a.residual_scale != 1:
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = _scaled_residual_add(a.residual_scale)
    if a.block is None:
        return spec
    parts = {"self_attention": spec.submodules.self_attention, "mlp": spec.submodules.mlp}
    return ModuleSpec(module=SandwichNormLayer, params={"number": number, "block": a.block, "norm": norm, **parts})


def _layer(mixer: Mixer | None, mlp: Mlp | Mixture | None, mesh: Mesh, norm: type[RMSNorm]) -> ModuleSpec:
    """Return megatron's spec of a layer, with our parts in it."""
    has_norms = isinstance(mixer, Attention) and mixer.qk_norm
    layer = get_gpt_layer_local_spec(qk_layernorm=has_norms, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    match mixer:
        case LatentAttention():
            params = {"attention": mixer, "tp": mesh.tp, "norm": norm}
            layer.submodules.self_attention = ModuleSpec(module=LatentSelfAttention, params=params)
        case SharedAttention():
            params = {"attention": mixer, "norm": norm}
            layer.submodules.self_attention = ModuleSpec(module=SharedKVAttention, params=params)
        case Attention():
            attention = layer.submodules.self_attention
            attention.module, attention.params = PackedSelfAttention, {**attention.params, "attention": mixer}
            attention.submodules.linear_qkv, attention.submodules.linear_proj = AdaptedColumnLinear, AdaptedRowLinear
            attention.submodules.core_attention = CoreAttention
            if mixer.qk_norm:
                attention.submodules.q_layernorm = _norm_of_heads(mixer, mixer.num_heads, mesh, norm)
                attention.submodules.k_layernorm = _norm_of_heads(mixer, mixer.num_kv_heads, mesh, norm)
        case None:
            layer.submodules.input_layernorm = layer.submodules.self_attention = IdentityOp
            layer.submodules.self_attn_bda = IdentityFuncOp
        case _:
            layer.submodules.self_attention = ModuleSpec(module=RECURRENT[type(mixer)], params={"mixer": mixer})
    match mlp:
        case Mixture() as mixture:
            shared, own = partial(DenseMLP, mlp=mixture.shared_mlp), None
            if mixture.is_beside:
                shared, own = partial(NormedMLP, mlp=mixture.shared_mlp, norm=norm), norm
            params = {"mixture": mixture, "mesh": mesh, "shared": shared, "norm": own}
            layer.submodules.mlp = ModuleSpec(module=MegatronExperts, params=params)
        case Mlp():
            layer.submodules.mlp = ModuleSpec(module=DenseMLP, params={"mlp": mlp})
        case None:
            layer.submodules.pre_mlp_layernorm = layer.submodules.mlp = IdentityOp
            layer.submodules.mlp_bda = IdentityFuncOp
    return layer


def _norm_of_heads(a: Attention, num_heads: int, mesh: Mesh, norm: type[RMSNorm]) -> ModuleSpec | type[RMSNorm]:
    return ModuleSpec(NormOfAllHeads, {"num_heads": num_heads, "tp": mesh.tp}) if a.norms_all_heads else norm
