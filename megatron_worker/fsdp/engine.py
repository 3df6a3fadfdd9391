"""FsdpEngine: the Engine with torch alone. Its parts are in the other modules of this package."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from longshore.training import Dtype, Layout, Lora, broken_rule
from megatron_worker.engine import Batch, EngineInfo, LossFunction, Outputs, Scores, TeacherStates, over_ranks
from megatron_worker.fsdp.model import FsdpModel, probe, refusing
from megatron_worker.fsdp.optimizer import FsdpOptimizer, join_ranks
from megatron_worker.head.distributions import score_with_divergence
from megatron_worker.head.logprobs import VocabShard, whole_vocabulary
from megatron_worker.head.scalar import head_slices
from megatron_worker.lora import Adapter
from megatron_worker.process.ranks import agreement
from megatron_worker.tensors.slot_engine import Base, Engine
from megatron_worker.tensors.state_files import read_model
from shared.errors import InvalidInput
from shared.families import read_architecture
from shared.families.tensor_slices import TensorSlice


class FsdpEngine(Engine[Adapter, FsdpOptimizer]):
    """See `megatron_worker.tensors.slot_engine.Engine`.

    Args:
        model: a Hugging Face folder. Its weights are read again when a full fine-tuning has used them up.
        layout: of data and tensor parallelism. `torch.distributed` must be initialised with its world
            size, unless that is 1.

    Raises:
        InvalidInput: the folder cannot be used, the layout splits something else, or the model is one that we do not
            compute. The same on every rank.
    """

    def __init__(self, model: Path, layout: Layout, dtype: Dtype, device: torch.device | None = None) -> None:
        if rule := broken_rule("fsdp", layout):
            raise InvalidInput(rule, "layout")
        self._ranks = join_ranks(layout, device)
        self._folder = model
        self._dtype: torch.dtype = getattr(torch, dtype)
        # One rank alone may run out of memory.
        with agreement(), refusing(read_architecture(model).family):
            self._model = FsdpModel(model, self._ranks, self._dtype)
        self._let_recompute(self._model.layers)
        shards = self._model.shards
        base = Base(model, self._model.architecture, self._model.slices, shards, list(shards.values()))
        super().__init__(base, self._ranks)
        self._is_cut_short = False
        ranks, architecture = self._ranks, self._model.architecture
        began = time.perf_counter()
        self._read_base()
        weights_s = time.perf_counter() - began
        with refusing(architecture.family):
            self._model.warm_up()
            if architecture.is_generic:
                probe(self._model)
        sizes = architecture.vocab_size, architecture.hidden_size, self._model.windows
        places = ranks.device, ranks.rank, ranks.dp_rank, ranks.dp_size
        self.facts = EngineInfo(layout, dtype, *places, *sizes, weights_s=weights_s)

    def _read_base(self) -> None:
        with agreement():
            model = self._model
            read_model(self._folder, model.slices, model.shards, self._ranks, model.architecture.carried)

    def _new_adapter(self, lora: Lora, device: torch.device, own: Sequence[TensorSlice] = ()) -> Adapter:
        more = [*head_slices(lora.head, self._model.architecture.hidden_size), *own]
        if self._ranks.tp_size > 1 and (rule := lora.why_not_split):
            raise InvalidInput(rule, "trainable")
        return Adapter(lora, self._model.linears, more, self._dtype, device, mask_place=self._ranks.rank)

    def _use(self, adapter: Adapter | None) -> None:
        self._model.set_adapter(adapter)

    def _new_optimizer(self, adapter: Adapter) -> FsdpOptimizer:
        ranks = dataclasses.replace(self._ranks, device=adapter.flat.buffer.device)
        return FsdpOptimizer(adapter.slices, adapter.parameters, adapter.flat.views, ranks)

    def _new_base_optimizer(self, device: torch.device) -> FsdpOptimizer:
        model = self._model
        if device != self._ranks.device:
            shards = {name: torch.empty_like(shard, device=device) for name, shard in model.shards.items()}
            return FsdpOptimizer(model.slices, {}, shards, dataclasses.replace(self._ranks, device=device))
        return FsdpOptimizer(model.slices, model.parameters, model.shards, self._ranks)

    # What is trained.

    def drop_slot(self, slot: str | None) -> None:
        self._forget()
        super().drop_slot(slot)

    # A step.

    @property
    def needs_lockstep(self) -> bool:
        """True with several ranks, as every layer is gathered from all of them."""
        return self._ranks.size > 1

    def forward(self, batch: Batch, outputs: Outputs) -> Scores:
        if not (outputs.logprob or outputs.entropy or outputs.num_named or outputs.values or outputs.divergence):
            return Scores()
        shard = self.vocab_shard

        def head(hidden_NH: Tensor, weight_VH: Tensor) -> dict[str, Tensor]:
            if outputs.values:
                return {"value_NL": self._model.values(hidden_NH)}
            beside = self._model.beside_head(hidden_NH)
            scores = score_with_divergence(hidden_NH, weight_VH, batch, outputs, shard, beside)
            return {name: value for name, value in vars(scores).items() if value is not None}

        return Scores(**self._model.forward(batch, head))

    def teacher_states(self, batch: Batch) -> TeacherStates | None:
        def states(hidden_NH: Tensor, _weight_VH: Tensor) -> dict[str, Tensor]:
            beside = self._model.beside_head(hidden_NH)
            return {"hidden_NH": hidden_NH, **({} if beside is None else vars(beside))}

        return TeacherStates(**self._model.forward(batch, states))

    def hidden_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the batch's targets, after the final norm, [N, H], and the output embedding.

        The embedding, [V, H], is a copy: what the pass has gathered is freed at its end.
        """
        found = self._model.forward(
            batch, lambda states_NH, weight_VH: {"states": states_NH, "head": weight_VH.clone()}
        )
        return found["states"], found["head"]

    @property
    def vocab_shard(self) -> VocabShard:
        divisor = self._model.logit_divisor
        return dataclasses.replace(whole_vocabulary(self.facts.vocab_size), logit_divisor=divisor)

    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, Tensor]:
        assert self.is_training, "nothing is being trained"
        self._is_cut_short = True  # until it is done
        with self.dropout_scope():
            scores = self.forward(batch, loss.outputs)
        sums = loss.sums(scores, batch)
        # A bin without targets has a backward, too, since other ranks wait for this one in their collectives.
        made = (
            scores.value_NL
            if loss.outputs.values
            else scores.logprob_N
            if loss.outputs.divergence is None
            else scores.divergence_N
        )
        assert made is not None, "a loss is made of log-probabilities, of divergences, or of a head's scalars"
        (sums.loss if len(batch.label_N) else made.sum()).backward()
        self._is_cut_short = False
        return sums.detached()

    def forward_backward_all(
        self, batches: Iterable[Batch], loss: LossFunction
    ) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        return self.trained.weighed((batch, self.forward_backward(batch, loss)) for batch in batches)

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        here = {name: value.to(self._ranks.device) for name, value in sums.items()}
        return over_ranks(here, self._ranks.rank, self._ranks.size, self._ranks.sum_over_dp)

    def zero_grad(self) -> None:
        self._forget()
        super().zero_grad()

    # State.

    def _forget(self) -> None:
        """Free what a pass has left that an error interrupted on some rank. Collective."""
        if self._ranks.any(self._is_cut_short):
            self._model.forget()
        self._is_cut_short = False
