"""A decoder for sampling: it reads one prompt at a time, and steps a fixed number of slots by one token each.

**Why batching cannot change a result.** Products round differently for differently shaped matrices, so shapes here
never depend on other requests: a prompt is prefilled alone, whatever waits; a step always computes every slot, empty
or not, with experts too (layers.py); attention runs over blocks of BLOCK positions, and blocks after a sequence's
end add exactly nothing (a weight of exp(-1e30) = 0, a rescaling by exp(0) = 1). This assumes that a product gives
equal rows for equal inputs in every row; `reliable_width` (generation.py) checks that.

Shape suffixes: B slots, T tokens of a prompt, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.families import frequencies_of, rope_tables
from megatron_worker.head.logprobs import VocabShard
from megatron_worker.layers import Layer, PerLayerInputs
from megatron_worker.sampler.drawing import PromptScores, score_prompt
from megatron_worker.sampler.layers import (
    BLOCK,
    Cache,
    Factors,
    FusedLinear,
    ModelTensors,
    Prefilled,
    PromptPass,
    StepPass,
    masks_of,
    token_table,
    with_tokens,
)
from megatron_worker.tensors.safetensors_files import model_files
from shared.errors import InvalidInput
from shared.families import read_architecture
from shared.families.architecture import Architecture

if TYPE_CHECKING:
    from megatron_worker.sampler.by_transformers import TransformersModel


class OwnModel:
    """A model of one of our families, by the trainer's parts.

    Attributes:
        architecture: its mixers say what caches hold.
        slices: what weights consist of; `tensors` has what is never trained, too, and both are read from folders.
        adaptable: the linears that an adapter can have factors for.
    """

    def __init__(self, a: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture, self.dtype = a, dtype
        self.slices = a.slices(1)
        self._held = held = ModelTensors(self.slices, a.constants, dtype, device, a.zero_centred_norms)
        self._embedding_VH = held["embedding.word_embeddings.weight"]
        self._embedding_scale = float(torch.tensor(a.embedding_scale, dtype=dtype))
        table_VX = held.get("embedding.per_layer.table.weight")
        look_up = None if table_VX is None else lambda token_T: F.embedding(token_T, table_VX)
        self._per_layer = None if look_up is None else PerLayerInputs(a, held, look_up)
        self._layers = [Layer(a, held, number) for number in range(a.num_layers)]
        self.final_norm = held.norm("decoder.final_layernorm", a.norm_eps)
        output_VH = self._embedding_VH if a.tied else held["output_layer.weight"]
        self._output = FusedLinear("lm_head", (a.output_slice(1),), output_VH, None)
        self._tables = token_table(held.slice_of("embedding.word_embeddings.weight"), self._embedding_VH)
        self._vocabulary = VocabShard(0, a.vocab_size, a.vocab_size, None, a.logit_cap, a.logit_divisor)
        self._frequencies = frequencies_of(a, device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = dict(self._held.others)
        for linear in self._held.linears:
            named |= linear.named_weights()
        return named

    @property
    def adaptable(self) -> list[FusedLinear]:
        return [*self._held.linears, self._output, *self._tables]

    def stream(self, token_T: Tensor, position_T: Tensor, run: PromptPass | StepPass) -> Tensor:
        """Return the tokens' states after the last layer, [T, H]."""
        run.rotary = {rope: rope_tables(rope, position_T, each, self.dtype) for rope, each in self._frequencies.items()}
        x_TH = with_tokens(F.embedding(token_T, self._embedding_VH), token_T, run.lora_weights)
        if self._embedding_scale != 1:
            x_TH = x_TH * self._embedding_scale
        run.per_layer_TLX = None if self._per_layer is None else self._per_layer(token_T, x_TH)
        for layer in self._layers:
            x_TH = layer(x_TH, run)
        return x_TH

    def logits(self, hidden_TH: Tensor, lora_weights: Factors) -> Tensor:
        return self._vocabulary.logits(self._output.with_adapter(hidden_TH, lora_weights).float())


class Decoder:
    """A model, whole on one device. Raises InvalidInput when the folder cannot be used."""

    _model: "OwnModel | TransformersModel"

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = read_architecture(folder)
        self.folder, self.dtype, self.device = folder, dtype, device
        if self.architecture.is_generic:
            # Its import takes seconds, and most samplers do without it.
            from megatron_worker.sampler.by_transformers import TransformersModel

            self._model = TransformersModel(folder, self.architecture, dtype, device)
        else:
            self._model = OwnModel(self.architecture, dtype, device)
        self.read_weights(folder)
        if self.architecture.is_generic:
            self._check_steps()

    def _check_steps(self) -> None:
        """Refuse a model whose layers keep more than what attention tells: its steps would mix slots."""
        token_ids, cache = range(1, 10), self.new_cache(2)
        cache.fill(1, self.prefill(token_ids[:-1], {}))
        token_B, position_B = (torch.tensor([0, last], device=self.device) for last in (token_ids[-1], 8))
        stepped_H, whole_H = self.step(token_B, position_B, cache, {})[1], self.prefill(token_ids, {}).hidden_H
        bound = 1e-4 if self.dtype == torch.float32 else 0.1
        if not (stepped_H - whole_H).abs().max() <= bound * whole_H.abs().max():
            problem = f"{self.architecture.family} keeps more of earlier tokens than keys and values"
            raise InvalidInput(f"{problem}: it is not computed", str(self.folder))

    def named_weights(self) -> dict[str, Tensor]:
        """Return every tensor by its Hugging Face name: what is written to one is computed with from then on."""
        tensors = self._model.tensors
        return {s.name: tensors[s.name] for s in self._model.slices}

    def read_weights(self, folder: Path) -> None:
        """Replace all weights by those of a Hugging Face folder of the same architecture.

        Raises:
            InvalidInput: the folder cannot be used. The weights may have been replaced in part, if a file is damaged.
        """
        if read_architecture(folder) != self.architecture:
            raise InvalidInput("the weights are of another architecture than the model", str(folder / "config.json"))
        slices, tensors = [*self._model.slices, *self.architecture.constants], self._model.tensors
        with model_files(folder) as files:
            files.assign(slices, folder, self.architecture.carried)
            for s in slices:
                tensors[s.name].copy_(files.local(s, s.name, 0, 1))

    @property
    def adaptable(self) -> list[FusedLinear]:
        """The linears that an adapter can have factors for."""
        return self._model.adaptable

    def new_cache(self, num_slots: int) -> Cache:
        return Cache(self._model.architecture, num_slots, self.dtype, self.device)

    def new_pass(self, num_tokens: int, lora_weights: Factors) -> PromptPass:
        return PromptPass(self._model.architecture, num_tokens, lora_weights)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], lora_weights: Factors, run: PromptPass | None = None) -> Prefilled:
        """Read one prompt. `run`: a pass that may have blocks of it already, but not its last token."""
        run = run or self.new_pass(len(token_ids), lora_weights)
        token_T = torch.tensor(token_ids, device=self.device)
        stream_TH = torch.cat([self._model.stream(*block, run) for block in run.blocks(token_T)])
        hidden_H = self._model.final_norm(stream_TH[-1:])[0]
        experts = [torch.cat(blocks) for blocks in zip(*run.experts, strict=True)]
        return Prefilled(lora_weights, hidden_H, stream_TH, run.states, experts, len(token_ids))

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...], prompt: Prefilled, num_top: int = 0) -> PromptScores:
        """Score a prompt's tokens but the first, with `num_top` of the likeliest in the place of each."""

        def logits(x_CH: Tensor) -> Tensor:
            return self.logits(self._model.final_norm(x_CH), prompt.lora_weights)

        return score_prompt(token_ids, prompt.stream_TH, logits, num_top)

    @torch.inference_mode()
    def step(
        self,
        token_B: Tensor,
        position_B: Tensor,
        cache: Cache,
        lora_weights: Factors,
        chosen: list[Tensor] | None = None,
    ) -> Tensor:
        """Compute one token of every slot at its position. Returns final hidden states, [B, H].

        It takes as many blocks as the longest sequence needs; more would change nothing.

        Args:
            chosen: the slots' experts in each layer with experts are appended, [B, K].
        """
        num_tokens = int(position_B.max()) + 1
        cache.reserve(num_tokens)
        num_blocks = -(-num_tokens // BLOCK)
        masks = {window: masks_of(position_B, num_blocks, window) for window in self._model.architecture.windows}
        run = StepPass(cache, position_B, masks, lora_weights, [] if chosen is None else chosen)
        return self._model.final_norm(self._model.stream(token_B, position_B, run))

    @torch.inference_mode()
    def logits(self, hidden_BH: Tensor, lora_weights: Factors) -> Tensor:
        """Return logits, float32 [B, V]."""
        return self._model.logits(hidden_BH, lora_weights)
