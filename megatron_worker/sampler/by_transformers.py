"""transformers' model of a family that is none of ours, as the engine fsdp trains it: our attention is in its layers.

Only transformers' code runs, never a folder's, and nothing is downloaded.

Shape suffixes: T tokens, H hidden size, V vocabulary.
"""

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from megatron_worker.fsdp.model import ATTENTION, attentions_of, final_states
from megatron_worker.sampler.layers import Factors, FusedLinear, PromptPass, StepPass, token_table, with_tokens
from shared.errors import InvalidInput
from shared.families.architecture import Architecture
from shared.families.tensor_slices import TensorSlice
from shared.models.peft import EMBEDDING, OUTPUT


class TransformersModel:
    """What `OwnModel` is for our families. Raises InvalidInput if the model is not computed in this way."""

    def __init__(self, folder: Path, a: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model = _empty_model(folder, a, dtype, device)
        self.tensors: dict[str, Tensor] = dict(model.named_parameters())  # of tied ones one
        self.slices = [TensorSlice(name, name, tuple(p.shape), None, 0, len(p)) for name, p in self.tensors.items()]
        slices = {s.name: s for s in self.slices}
        attentions = attentions_of(model, torch.zeros(1, dtype=torch.int64, device=device))
        self._layers = {module: number for number, module in enumerate(attentions)}
        self.architecture = dataclasses.replace(a, mixers=tuple(attentions.values()))
        self._lora_weights: Factors = {}  # the adapter that is computed with
        self.adaptable = [
            FusedLinear(name, (slices[f"{name}.weight"],), module.weight, module.bias)
            for name, module in model.named_modules()
            if type(module) is nn.Linear and name != OUTPUT
        ]
        tied = dataclasses.replace(a, tied=model.config.tie_word_embeddings)
        self.adaptable.append(FusedLinear(OUTPUT, (tied.output_slice(1),), model.lm_head.weight, None))
        for linear in self.adaptable:
            model.get_submodule(linear.name).forward = partial(self._linear, linear)
        table = model.get_input_embeddings()
        for s in self.slices:
            if s.name.endswith(f".{EMBEDDING}.weight"):
                self.adaptable += token_table(s, table.weight)
        table.register_forward_hook(self._beside_tokens)
        # Only the model's code knows the caps and factors of its logits: it is the head, without its layers.
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: _KnownLayers()}

    def stream(self, token_T: Tensor, position_T: Tensor, run: PromptPass | StepPass) -> Tensor:
        def attend(module: Any, query_TQD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
            layer = self._layers[module]
            return run.attend(layer, query_TQD, (key_TGD, value_TGD), module.attention_asked, None)

        self._lora_weights = run.lora_weights
        return final_states(self._model, token_T, position_T, attend)

    def final_norm(self, x_TH: Tensor, /) -> Tensor:
        return x_TH  # transformers has applied it

    def logits(self, hidden_TH: Tensor, lora_weights: Factors) -> Tensor:
        self._lora_weights = lora_weights
        logit_1TV: Tensor = self._head(inputs_embeds=hidden_TH[None], use_cache=False).logits
        return logit_1TV[0].float()

    def _beside_tokens(self, table: Any, inputs: tuple[Tensor], output_1TH: Tensor) -> Tensor:
        return with_tokens(output_1TH, inputs[0], self._lora_weights, getattr(table, "embed_scale", 1.0))

    def _linear(self, linear: FusedLinear, x: Tensor) -> Tensor:
        return linear.with_adapter(x, self._lora_weights)


def _empty_model(folder: Path, a: Architecture, dtype: torch.dtype, device: torch.device) -> Any:
    """Make transformers' model of a folder, its weights undefined."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
        )
    model.tie_weights()
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if unknown := sorted(model.state_dict().keys() - known):
        raise InvalidInput(f"transformers' model of {a.family} keeps a tensor that is no parameter", unknown[0])
    return model.requires_grad_(False).eval()


class _Known(tuple[Any, ...]):
    """Output of a model's layers: hidden states that are known, and nothing else."""

    @property
    def last_hidden_state(self) -> Tensor:
        hidden: Tensor = self[0]
        return hidden

    def __getattr__(self, name: str) -> None:
        return None


class _KnownLayers(nn.Module):
    def forward(self, inputs_embeds: Tensor, **_: Any) -> _Known:
        return _Known((inputs_embeds,))
