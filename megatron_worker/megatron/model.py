"""This rank's part of a model: our layers (layers.py) on megatron-core's linears and embeddings.

The model is built on the CPU without initialising anything, then all its parameters become views of one flat buffer on
the device. Megatron knows only one parallel dimension, tp; a pipeline stage is a model of fewer layers.

Shape suffixes: N targets of a bin, H hidden size, V rows of this rank's vocabulary shard; t tokens of a bin that are
this context-parallel rank's, s those of them that this rank has between layers: t, or t / tp under sp.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from longshore.training import Quantization
from megatron_worker.families import frequencies_of
from megatron_worker.head.logprobs import VocabShard
from megatron_worker.head.scalar import HeadWeights, LmHeadLora
from megatron_worker.layers import Layer, PerLayerInputs
from megatron_worker.megatron.attention import BinPass, LocalBin
from megatron_worker.megatron.linears import MegatronAdapter, TrainedTensors
from megatron_worker.megatron.optimizer import arrange
from megatron_worker.megatron.parallel import Mesh, Placement, gather_alike, layers_of, own_rows
from megatron_worker.quantized import QuantizedTensor
from shared.families.architecture import Architecture

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_OF_EACH_TOKEN = (
    *(".router.weight", ".router.bias", ".shared_gate.weight", ".linear_proj.bias"),
    *(".router.scale", ".router.expert_scale"),
    *(".query_down.weight", ".latent_down.weight", ".latent_in.weight", ".latent_out.weight"),
    *(".per_layer.gate.weight", ".per_layer.projection.weight"),
)
_NORMS_OF_HEADS = (".q_layernorm.weight", ".k_layernorm.weight", ".self_attention.norm.weight")


class MegatronModel:
    """This rank's part of the model, its parameters views of `flat`. Frozen until trained; `constants` for ever.

    With `quantize` the weights of the linears
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
        tensors = TrainedTensors(a, mesh, dtype)
        if mesh.is_first_stage:
            self._embedding = tensors.embedding(_EMBEDDING)
        self._per_layer = None
        if a.block is not None and a.block.per_layer_size and mesh.is_first_stage:
            self._per_layer = PerLayerInputs(a, tensors, tensors.embedding("embedding.per_layer.table.weight"))
        self.layers = [Layer(a, tensors, number) for number in layers_of(mesh.pp.rank, mesh.pp.size, a.num_layers)]
        if mesh.is_last_stage:
            self._final_norm = tensors.norm("decoder.final_layernorm", a.norm_eps)
            self._output = _EMBEDDING if a.tied else _OUTPUT
            if self._output not in tensors.parameters:
                tensors[self._output]
        quantized = None if quantize is None else tensors.quantized(quantize, mesh.device)
        self.quantized: Mapping[str, QuantizedTensor] = quantized or {}
        self.parameters, self.constants, self._linears = tensors.parameters, tensors.constants, tensors.linears
        placements = {name: self._placement(name) for name in self.parameters}
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.flat, self.regions = arrange(shapes, placements, mesh, dtype)
        self.storages = [flat.buffer for flat in (self.flat, *(quantized.flats if quantized else ()))]
        for name, parameter in self.parameters.items():
            parameter.data = self.flat.views[name]
            parameter.requires_grad_(False)
        self.set_adapter(None)

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
        return self.parameters[self._output]

    def set_adapter(self, adapter: MegatronAdapter | None) -> None:
        """Let the linears that an adapter targets use its weights, and all others none; and its head, if it has one."""
        weights = {} if adapter is None else adapter.linears
        self.num_values = 0 if adapter is None or adapter.lora.head is None else len(adapter.lora.head.names)
        self.scalar_head = None if adapter is None else HeadWeights.among(adapter.parameters)
        self._beside_output = weights.get("output_layer")
        self._beside_embedding = weights.get(_EMBEDDING.removesuffix(".weight"))
        for name, linear in self._linears.items():
            linear.lora = weights.get(name)

    def beside_head(self, hidden_NH: Tensor) -> LmHeadLora | None:
        """Return what the adapter of the output layer adds there, if there is one."""
        return None if self._beside_output is None else self._beside_output.beside_head(hidden_NH)

    def run(self, part: LocalBin, received_sH: Tensor | None) -> Tensor:
        """Run a bin through this stage. Returns hidden states, [s, H]; of the last, after the final norm, [t, H].

        `received_sH`: what the stage before gave; None for the first.
        """
        x_sH, run = received_sH, BinPass(part, self._mesh, self.architecture)
        if x_sH is None:
            x_sH = self._embedding(part.token_id_t)
            if self._beside_embedding is not None:
                x_sH = x_sH + self._beside_embedding.of_tokens(part.token_id_t)
            x_sH = self._own(x_sH)
            if self._embedding_scale != 1:
                x_sH = x_sH * self._embedding_scale
            if self._per_layer is not None:
                run.per_layer_TLX = self._per_layer(part.token_id_t, x_sH, self._own)
        for layer in self.layers:
            x_sH = layer(x_sH, run)
        if not self._mesh.is_last_stage:
            return x_sH
        hidden_sH = self._final_norm(x_sH)
        return gather_alike(hidden_sH, self._mesh.tp) if self._mesh.layout.sp else hidden_sH

    def _own(self, x_tH: Tensor) -> Tensor:
        """Return the rows that this rank has between layers."""
        return own_rows(x_tH, self._mesh.tp) if self._mesh.layout.sp else x_tH
