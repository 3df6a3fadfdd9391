"""MegatronEngine: the Engine on megatron-core. Its parts are in the other modules of this package."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from longshore.layout import Layout
from longshore.training import Dtype, Lora, OptimizerStates, Quantization
from megatron_worker.engine import Batch, Facts, LossFunction, Outputs, Scores
from megatron_worker.head.logprobs import VocabShard
from megatron_worker.head.scalar import head_slices
from megatron_worker.megatron.lora import MegatronAdapter
from megatron_worker.megatron.model import MegatronModel
from megatron_worker.megatron.optimizer import MegatronOptimizer
from megatron_worker.megatron.parallel.collectives import alike_over
from megatron_worker.megatron.parallel.mesh import join_mesh
from megatron_worker.megatron.parallel.stages import placed
from megatron_worker.megatron.passes import PipelinePasses
from megatron_worker.quantized.weights import WholeWeights
from megatron_worker.sums import over_ranks
from megatron_worker.teachers import TeacherStates
from megatron_worker.tensors.adapter_slots import Base
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.tensors.state_files import read_model
from shared.families import architecture_of, read_config
from shared.families.model_slices import constants_of, output_slice, slices_of
from shared.families.tensor_slices import TensorSlice, linears_of
from shared.models.shape import check_layout, shape_of


class MegatronEngine(Engine[MegatronAdapter, MegatronOptimizer]):
    """See `megatron_worker.tensors.slot_engine.Engine`.

    Args:
        model: a Hugging Face folder. Its weights are read again when a full fine-tuning has used them up.
        layout: `torch.distributed` must be initialised with its world size, unless that is 1.
        quantize: hold the linears' weights so; then adapters alone are trained.
        optimizer_states: how both moments of AdamW are held.

    Raises:
        InvalidInput: the folder cannot be used, or the layout cannot hold the model. The same on every rank.
    """

    def __init__(
        self,
        model: Path,
        layout: Layout,
        dtype: Dtype,
        device: torch.device | None = None,
        quantize: Quantization | None = None,
        optimizer_states: OptimizerStates = "float32",
    ) -> None:
        config = read_config(model)
        shape = shape_of(config)
        check_layout(layout, shape)
        architecture = architecture_of(config)
        self._mesh = join_mesh(layout, device)
        self._folder, self._optimizer_states = model, optimizer_states
        with self._mesh.agreement():  # one rank alone may run out of memory
            self._model = MegatronModel(architecture, self._mesh, getattr(torch, dtype), quantize)
        self._let_recompute(self._model.layers)
        self._passes = PipelinePasses(self._model, self._mesh)
        self._slices_here = placed(slices_of(architecture, layout.tp, layout.etp), architecture, layout)
        weights = WholeWeights({**self._model.flat.views, **self._model.quantized})
        base = Base(model, architecture, self._slices_here, weights, self._model.storages)
        super().__init__(base, self._mesh)
        mesh, sizes = self._mesh, (architecture.vocab_size, architecture.hidden_size)
        ranks, windows = (mesh.rank, mesh.dp.rank, mesh.dp.size), self._model.architecture.windows
        began = time.perf_counter()
        self._read_base()
        read_s, is_whole = time.perf_counter() - began, quantize is None
        self.facts = Facts(layout, dtype, mesh.device, *ranks, *sizes, windows, shape.routes, is_whole, read_s)

    def _read_base(self) -> None:
        with self._mesh.agreement():
            model, a = self._model, self._model.architecture
            slices, views = [*self._slices_here, *constants_of(a)], {**model.flat.views, **model.constants}
            read_model(self._folder, slices, views, self._mesh, a.carried, model.quantized)

    def _new_adapter(self, lora: Lora, device: torch.device, own: Sequence[TensorSlice] = ()) -> MegatronAdapter:
        mesh = replace(self._mesh, device=device)
        architecture, layout = self._model.architecture, mesh.layout
        tied = placed([output_slice(architecture, layout.tp)] if architecture.tied else [], architecture, layout)
        linears, dtype = linears_of([*self._slices_here, *tied]), self._model.flat.buffer.dtype
        more = [*head_slices(lora.head, architecture.hidden_size, layout.pp - 1), *own]
        return MegatronAdapter(lora, linears, more, mesh, dtype)

    def _use(self, adapter: MegatronAdapter | None) -> None:
        self._model.set_adapter(adapter)

    def _new_optimizer(self, adapter: MegatronAdapter) -> MegatronOptimizer:
        return adapter.new_optimizer(self._optimizer_states)

    def _new_base_optimizer(self, device: torch.device) -> MegatronOptimizer:
        assert not self._model.quantized, "quantized weights are frozen"
        flat, own = self._model.flat, (self._mesh, self._optimizer_states, self._slices_here)
        if device != self._mesh.device:
            meta = flat.like(flat.buffer.dtype, device)
            return MegatronOptimizer({}, meta, self._model.regions, *own)
        return MegatronOptimizer(self._model.parameters, flat, self._model.regions, *own)

    # A step.

    @property
    def needs_lockstep(self) -> bool:
        """True if ranks with other data hold experts that this rank's tokens may choose."""
        layout = self._mesh.layout
        return layout.tp * layout.cp % (layout.ep * layout.etp) > 0

    def forward(self, batch: Batch, outputs: Outputs) -> Scores:
        return self._passes.forward(batch, outputs)

    def teacher_states(self, batch: Batch) -> TeacherStates | None:
        return self._passes.teacher_states(batch)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the targets' hidden states after the final norm, [N, H], and this rank's output embedding, [V, H].

        Hidden states are equal on all ranks that share the batch.
        """
        hidden_NH = self._passes.hidden_states(batch)
        assert hidden_NH is not None, "hidden states are the last stage's alone"
        return hidden_NH, alike_over(self._model.output_weight_VH, self._mesh.cp)

    @property
    def vocab_shard(self) -> VocabShard:
        return self._model.shard

    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, Tensor]:
        ((_batch, sums),) = self.forward_backward_all([batch], loss)
        return sums

    def forward_backward_all(
        self, batches: Iterable[Batch], loss: LossFunction
    ) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        assert self.is_training, "nothing is being trained"
        return self.trained.weighed(self._passes.forward_backward(batches, loss, self.dropping))

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        here = {name: value.to(self._mesh.device) for name, value in sums.items()}
        return over_ranks(here, self._mesh.dp.rank, self._mesh.dp.size, self._mesh.dp.sum)
