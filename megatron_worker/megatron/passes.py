"""Forward and backward passes of bins, alone or through the stages of a pipeline.

Shape suffixes: N targets of a bin, M those whose hidden states are this rank's, t tokens of this rank, H hidden size;
s tokens that a rank has between layers.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatron_worker.engine import Batch, LossFunction, Outputs, Scores
from megatron_worker.head.distributions import score_beside_teacher
from megatron_worker.megatron.local_bins import LocalBin, localised
from megatron_worker.megatron.model import MegatronModel
from megatron_worker.megatron.parallel.mesh import Mesh
from megatron_worker.megatron.parallel.pipeline import Link, one_forward_one_backward
from megatron_worker.sums import LossSums
from megatron_worker.teachers import TeacherStates

Dropping = Callable[[], AbstractContextManager[None]]
Learned = tuple[Batch, dict[str, Tensor]]


class PipelinePasses:
    """Forward and backward passes. Collective: ranks bring equally many bins, the same ones if they share data."""

    def __init__(self, model: MegatronModel, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        self._link = Link(mesh, model.architecture.hidden_size, model.dtype)

    def forward(self, batch: Batch, outputs: Outputs) -> Scores:
        """Score a bin's targets. With pipeline stages the scores have no graph, as none is sent between stages."""
        if batch.is_empty and self._mesh.experts.size == 1:
            return self._no_scores(batch, outputs)
        part = self._localised(batch)
        hidden_tH = self._through_stages(part)
        scores = None if hidden_tH is None else self._scores(batch, part, hidden_tH, outputs)
        return self._told([batch], [scores], outputs)[0]

    def forward_backward(
        self, batches: Iterable[Batch], loss: LossFunction, dropping: Dropping = nullcontext
    ) -> Iterator[Learned]:
        """Accumulate gradients of sums. Yields each bin with its detached sums. `dropping`: entered at each forward."""
        if self._mesh.pp.size > 1:
            yield from self._pipelined(list(batches), loss, dropping)
            return
        for batch in batches:
            if batch.is_empty and self._mesh.experts.size == 1:
                yield batch, loss.sums(self._no_scores(batch, loss.outputs), batch).detached()
                continue
            part = self._localised(batch)
            with dropping():
                hidden_tH = self._model.run(part, None)
                objective, sums, _scores = self._objective(batch, part, hidden_tH, loss)
            objective.backward()
            yield batch, sums.detached()

    def teacher_states(self, batch: Batch) -> TeacherStates | None:
        """See `megatron_worker.tensors.slot_engine.Engine`."""
        if batch.is_empty and self._mesh.experts.size == 1:
            return None
        part = self._localised(batch)
        hidden_tH = self._through_stages(part)
        if hidden_tH is None or batch.is_empty:
            return None
        hidden_MH = hidden_tH.index_select(0, part.hidden_index_M)
        beside = self._model.beside_head(hidden_MH)
        return TeacherStates(hidden_MH) if beside is None else TeacherStates(hidden_MH, beside.low_NR, beside.b_VR)

    def hidden_states(self, batch: Batch) -> Tensor | None:
        """Return the targets' final hidden states, [N, H], on all ranks of the last stage; None on others."""
        part = self._localised(batch)
        hidden_tH = self._through_stages(part)
        return None if hidden_tH is None else part.of_all_targets(hidden_tH.index_select(0, part.hidden_index_M))

    def _localised(self, batch: Batch) -> LocalBin:
        model = self._model
        return localised(batch, self._mesh, model.architecture, model.frequencies, model.dtype)

    def _through_stages(self, part: LocalBin) -> Tensor | None:
        """Return the last stage's hidden states on that stage; None on others."""
        assert self._mesh.pp.size == 1 or not torch.is_grad_enabled(), "pipelines learn by forward_backward alone"
        received_s1H, _ = self._link.exchange(rows_forward=part.rows)
        hidden = self._model.run(part, received_s1H)
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
        own = score_beside_teacher(hidden_MH, weight_VH, batch, outputs, self._model.shard, beside, part.target_M)
        return _mapped(part.of_all_targets, own)

    def _objective(
        self, batch: Batch, part: LocalBin, hidden_tH: Tensor, loss: LossFunction
    ) -> tuple[Tensor, LossSums, Scores]:
        """Return the scalar to differentiate, sums and scores. An empty bin has a scalar, too, as other ranks wait."""
        scores = self._scores(batch, part, hidden_tH, loss.outputs)
        sums = loss.sums(scores, batch)
        return (hidden_tH.sum() * 0 if batch.is_empty else sums.loss), sums, scores

    def _pipelined(self, batches: Sequence[Batch], loss: LossFunction, dropping: Dropping) -> Iterator[Learned]:
        parts = [self._localised(batch) for batch in batches]
        scores: list[Scores | None] = [None] * len(batches)

        def forward(number: int, received_s1H: Tensor | None) -> Tensor:
            with dropping():
                hidden = self._model.run(parts[number], received_s1H)
                if not self._mesh.is_last_stage:
                    return hidden
                objective, _sums, found = self._objective(batches[number], parts[number], hidden, loss)
            scores[number] = _mapped(torch.Tensor.detach, found)
            return objective

        one_forward_one_backward(self._link, [part.rows for part in parts], forward)
        for batch, told in zip(batches, self._told(batches, scores, loss.outputs), strict=True):
            yield batch, loss.sums(told, batch).detached()

    def _told(self, batches: Sequence[Batch], scores: Sequence[Scores | None], outputs: Outputs) -> list[Scores]:
        """Send the last stage's scores to all stages."""
        if self._mesh.pp.size == 1:
            return [found for found in scores if found is not None]
        sizes, k = [len(batch.weight_N) for batch in batches], outputs.num_named
        exact = torch.promote_types(torch.float32, self._model.dtype)
        columns: dict[str, Sequence[Tensor]] = {}
        if outputs.logprob:
            columns["logprob_N"] = self._from_last_stage("logprob_N", scores, sizes, (), exact)
        if outputs.entropy:
            columns["entropy_N"] = self._from_last_stage("entropy_N", scores, sizes, (), exact)
        if k:
            columns["top_logprob_NK"] = self._from_last_stage("top_logprob_NK", scores, sizes, (k,), exact)
            columns["top_id_NK"] = self._from_last_stage("top_id_NK", scores, sizes, (k,), torch.int64)
        if outputs.values:
            columns["value_NL"] = self._from_last_stage("value_NL", scores, sizes, (self._model.num_values,), exact)
        if outputs.divergence is not None:
            columns["divergence_N"] = self._from_last_stage("divergence_N", scores, sizes, (), exact)
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
