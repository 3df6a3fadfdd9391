"""MegatronEngine: the Engine on megatron-core. Its parts are in the other modules of this package.

Shape suffixes: N targets of a bin, M those whose hidden states are this rank's, t tokens of this rank, H hidden size; s
tokens that a rank has between layers.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from longshore.training import Dtype, Layout, Lora, OptimizerStates, Quantization
from megatron_worker.engine import Batch, EngineInfo, LossFunction, LossSums, Outputs, Scores, TeacherStates, over_ranks
from megatron_worker.head.distributions import score_with_divergence
from megatron_worker.head.logprobs import VocabShard
from megatron_worker.head.scalar import head_slices
from megatron_worker.megatron.attention import LocalBin, shard_bin
from megatron_worker.megatron.linears import MegatronAdapter
from megatron_worker.megatron.model import MegatronModel
from megatron_worker.megatron.optimizer import MegatronOptimizer
from megatron_worker.megatron.parallel import Link, join_mesh, one_forward_one_backward, placed, replicated_over
from megatron_worker.process.ranks import agreement
from megatron_worker.quantized import WholeWeights
from megatron_worker.tensors.slot_engine import Base, Engine
from megatron_worker.tensors.state_files import read_model
from shared.families import read_config
from shared.families.model_slices import shape_of
from shared.families.tensor_slices import TensorSlice, linears_of
from shared.models.shape import check_layout

Learned = tuple[Batch, dict[str, Tensor]]


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
        architecture = config.architecture()
        self._mesh = join_mesh(layout, device)
        self._folder, self._optimizer_states = model, optimizer_states
        with agreement():  # one rank alone may run out of memory
            self._model = MegatronModel(architecture, self._mesh, getattr(torch, dtype), quantize)
        self._let_recompute(self._model.layers)
        self._link = Link(self._mesh, architecture.hidden_size, self._model.dtype)
        self._slices_here = placed(architecture.slices(layout.tp, layout.etp), architecture, layout)
        weights = WholeWeights({**self._model.flat.views, **self._model.quantized})
        base = Base(model, architecture, self._slices_here, weights, self._model.storages)
        super().__init__(base, self._mesh)
        mesh, sizes = self._mesh, (architecture.vocab_size, architecture.hidden_size)
        ranks, windows = (mesh.rank, mesh.dp.rank, mesh.dp.size), self._model.architecture.windows
        began = time.perf_counter()
        self._read_base()
        read_s, is_whole = time.perf_counter() - began, quantize is None
        self.facts = EngineInfo(layout, dtype, mesh.device, *ranks, *sizes, windows, shape.routes, is_whole, read_s)

    def _read_base(self) -> None:
        with agreement():
            model, a = self._model, self._model.architecture
            slices, views = [*self._slices_here, *a.constants], {**model.flat.views, **model.constants}
            read_model(self._folder, slices, views, self._mesh, a.carried, model.quantized)

    def _new_adapter(self, lora: Lora, device: torch.device, own: Sequence[TensorSlice] = ()) -> MegatronAdapter:
        mesh = replace(self._mesh, device=device)
        architecture, layout = self._model.architecture, mesh.layout
        tied = placed([architecture.output_slice(layout.tp)] if architecture.tied else [], architecture, layout)
        linears, dtype = linears_of([*self._slices_here, *tied]), self._model.flat.buffer.dtype
        more = [*head_slices(lora.head, architecture.hidden_size, layout.pp - 1), *own]
        return MegatronAdapter(lora, linears, more, mesh, dtype)

    def _use(self, adapter: MegatronAdapter | None) -> None:
        self._model.set_adapter(adapter)

    def _new_optimizer(self, adapter: MegatronAdapter) -> MegatronOptimizer:
        own = adapter.regions, self._mesh, self._optimizer_states, adapter.slices
        return MegatronOptimizer(adapter.parameters, adapter.flat, *own)

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

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        here = {name: value.to(self._mesh.device) for name, value in sums.items()}
        return over_ranks(here, self._mesh.dp.rank, self._mesh.dp.size, self._mesh.dp.sum)

    # Passes of bins, alone or through the stages of a pipeline. Ranks bring equally many, the same ones if they share
    # data.

    def forward(self, batch: Batch, outputs: Outputs) -> Scores:
        """Score a bin's targets. With pipeline stages the scores have no graph, as none is sent between stages."""
        if batch.is_empty and self._mesh.experts.size == 1:
            return self._no_scores(batch, outputs)
        part = self._localised(batch)
        hidden_tH = self._through_stages(part)
        scores = None if hidden_tH is None else self._scores(batch, part, hidden_tH, outputs)
        return self._broadcast_scores([batch], [scores], outputs)[0]

    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, Tensor]:
        ((_batch, sums),) = self.forward_backward_all([batch], loss)
        return sums

    def forward_backward_all(self, batches: Iterable[Batch], loss: LossFunction) -> Iterator[Learned]:
        assert self.is_training, "nothing is being trained"
        passes = self._pipelined(list(batches), loss) if self._mesh.pp.size > 1 else self._one_by_one(batches, loss)
        return self.trained.weighed(passes)

    def _one_by_one(self, batches: Iterable[Batch], loss: LossFunction) -> Iterator[Learned]:
        for batch in batches:
            if batch.is_empty and self._mesh.experts.size == 1:
                yield batch, loss.sums(self._no_scores(batch, loss.outputs), batch).detached()
                continue
            part = self._localised(batch)
            with self.dropout_scope():
                hidden_tH = self._model.run(part, None)
                objective, sums, _scores = self._objective(batch, part, hidden_tH, loss)
            objective.backward()
            yield batch, sums.detached()

    def teacher_states(self, batch: Batch) -> TeacherStates | None:
        if batch.is_empty and self._mesh.experts.size == 1:
            return None
        part = self._localised(batch)
        hidden_tH = self._through_stages(part)
        if hidden_tH is None or batch.is_empty:
            return None
        hidden_MH = hidden_tH.index_select(0, part.hidden_index_M)
        beside = self._model.beside_head(hidden_MH)
        return TeacherStates(hidden_MH) if beside is None else TeacherStates(hidden_MH, beside.low_NR, beside.b_VR)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the targets' hidden states after the final norm, [N, H], and this rank's output embedding, [V, H].

        Hidden states are equal on all ranks that share the batch.
        """
        part = self._localised(batch)
        hidden_tH = self._through_stages(part)
        assert hidden_tH is not None, "hidden states are the last stage's alone"
        hidden_NH = part.of_all_targets(hidden_tH.index_select(0, part.hidden_index_M))
        return hidden_NH, replicated_over(self._model.output_weight_VH, self._mesh.cp)

    @property
    def vocab_shard(self) -> VocabShard:
        return self._model.shard

    def _localised(self, batch: Batch) -> LocalBin:
        model = self._model
        return shard_bin(batch, self._mesh, model.architecture, model.frequencies, model.dtype)

    def _through_stages(self, part: LocalBin) -> Tensor | None:
        """Return the last stage's hidden states on that stage; None on others."""
        assert self._mesh.pp.size == 1 or not torch.is_grad_enabled(), "pipelines learn by forward_backward alone"
        received_sH, _ = self._link.exchange(rows_forward=part.rows)
        hidden = self._model.run(part, received_sH)
        self._link.exchange(forward=hidden)
        return hidden if self._mesh.is_last_stage else None

    def _scores(self, batch: Batch, part: LocalBin, hidden_tH: Tensor, outputs: Outputs) -> Scores:
        if batch.is_empty:
            return self._no_scores(batch, outputs)
        hidden_MH = hidden_tH.index_select(0, part.hidden_index_M)
        if outputs.values:
            assert self._model.scalar_head is not None, "the slot has no head of scalars"
            return Scores(value_NL=part.of_all_targets(self._model.scalar_head.values(hidden_MH)))
        weight_VH, beside = self._model.output_weight_VH, self._model.beside_head(hidden_MH)
        own = score_with_divergence(hidden_MH, weight_VH, batch, outputs, self._model.shard, beside, part.target_M)
        return _mapped(part.of_all_targets, own)

    def _objective(
        self, batch: Batch, part: LocalBin, hidden_tH: Tensor, loss: LossFunction
    ) -> tuple[Tensor, LossSums, Scores]:
        """Return the scalar to differentiate, sums and scores. An empty bin has a scalar, too, as other ranks wait."""
        scores = self._scores(batch, part, hidden_tH, loss.outputs)
        sums = loss.sums(scores, batch)
        return (hidden_tH.sum() * 0 if batch.is_empty else sums.loss), sums, scores

    def _pipelined(self, batches: Sequence[Batch], loss: LossFunction) -> Iterator[Learned]:
        parts = [self._localised(batch) for batch in batches]
        scores: list[Scores | None] = [None] * len(batches)

        def forward(number: int, received_sH: Tensor | None) -> Tensor:
            with self.dropout_scope():
                hidden = self._model.run(parts[number], received_sH)
                if not self._mesh.is_last_stage:
                    return hidden
                objective, _sums, found = self._objective(batches[number], parts[number], hidden, loss)
            scores[number] = _mapped(torch.Tensor.detach, found)
            return objective

        one_forward_one_backward(self._link, [part.rows for part in parts], forward)
        for batch, told in zip(batches, self._broadcast_scores(batches, scores, loss.outputs), strict=True):
            yield batch, loss.sums(told, batch).detached()

    def _broadcast_scores(
        self, batches: Sequence[Batch], scores: Sequence[Scores | None], outputs: Outputs
    ) -> list[Scores]:
        """Send the last stage's scores to all stages."""
        if self._mesh.pp.size == 1:
            return [found for found in scores if found is not None]
        sizes, of_named = [len(batch.weight_N) for batch in batches], (outputs.num_named,)
        exact = torch.promote_types(torch.float32, self._model.dtype)
        asked = {
            "logprob_N": (outputs.logprob, (), exact),
            "entropy_N": (outputs.entropy, (), exact),
            "top_logprob_NK": (outputs.num_named, of_named, exact),
            "top_id_NK": (outputs.num_named, of_named, torch.int64),
            "value_NL": (outputs.values, (self._model.num_values,), exact),
            "divergence_N": (outputs.divergence, (), exact),
        }
        columns = {
            name: self._from_last_stage(name, scores, sizes, rest, dtype)
            for name, (is_asked, rest, dtype) in asked.items()
            if is_asked
        }
        return [Scores(**{name: x[number] for name, x in columns.items()}) for number in range(len(sizes))]

    def _from_last_stage(
        self,
        name: str,
        scores: Sequence[Scores | None],
        sizes: Sequence[int],
        rest: tuple[int, ...],
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        """Send a column of all bins from the last stage to all, in one message."""
        together = torch.empty(sum(sizes), *rest, dtype=dtype, device=self._mesh.device)
        if self._mesh.is_last_stage:
            found = [getattr(x, name).detach() for x in scores if x is not None]
            together.copy_(torch.cat([x.reshape(-1, *rest) for x in found]))
        self._mesh.pp.broadcast(together, self._mesh.pp.size - 1)
        return together.split(list(sizes))

    def _no_scores(self, batch: Batch, outputs: Outputs) -> Scores:
        """Return the scores of an empty bin."""
        nothing_0, nothing_0K = batch.weight_N, batch.weight_N.new_empty(0, outputs.num_named)
        if outputs.values:
            return Scores(value_NL=nothing_0.new_empty(0, self._model.num_values))
        logprob_0K, id_0K = (nothing_0K, nothing_0K.long()) if outputs.num_named else (None, None)
        divergence_0 = nothing_0 if outputs.divergence else None
        return Scores(nothing_0, nothing_0, logprob_0K, id_0K, divergence_N=divergence_0)


def _mapped(function: Callable[[Tensor], Tensor], scores: Scores) -> Scores:
    columns = (getattr(scores, column.name) for column in dataclasses.fields(scores))
    return Scores(*(None if x is None else function(x) for x in columns))
