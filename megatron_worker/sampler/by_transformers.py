"""The tensors of transformers' model by their names in files, as views; and the linears that can have adapters.

When transformers reads a folder it renames tensors, and stacks the matrices of a layer's experts. Its own table of that
(`transformers.conversion_mapping`) says here where each tensor of a file lies in the model.

Shape suffixes: O outputs and I inputs of a linear.
"""

import copy
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.initialization import no_init_weights

from megatron_worker.sampler.decoder import read_into
from megatron_worker.sampler.drawing import PromptScores, score_prompt
from megatron_worker.sampler.layers import FusedLinear, LoraFactors, token_table, with_tokens
from shared.errors import InvalidInput
from shared.families import is_generic, read_architecture
from shared.families.architecture import Architecture
from shared.families.model_slices import constants_of, output_slice, slices_of
from shared.families.tensor_slices import TensorSlice
from shared.models.peft import EMBEDDING

_OUTPUT = "lm_head"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Stack = dict[int, dict[int, TensorSlice]]
"""The matrices that each expert's rows of a parameter are, by their places."""


@dataclass(frozen=True)
class CheckpointViews:
    """Every tensor once.

    Attributes:
        linears: by the module that each is.
        experts: for each module that holds a layer's experts the linears of each parameter, in the experts' order.
        others: what is in no linear, by its Hugging Face name.
    """

    linears: dict[str, FusedLinear]
    experts: dict[str, dict[str, list[FusedLinear]]]
    others: dict[str, Tensor]

    @property
    def all_linears(self) -> list[FusedLinear]:
        stacks = [stack for stacks in self.experts.values() for stack in stacks.values()]
        return [*self.linears.values(), *(linear for stack in stacks for linear in stack)]

    def named_weights(self) -> dict[str, Tensor]:
        """Return every tensor by its Hugging Face name: what is written to one is computed with from then on."""
        named = dict(self.others)
        for linear in self.all_linears:
            named |= linear.named_weights()
        return named


def find_views(model: Any, a: Architecture, slices: Sequence[TensorSlice]) -> CheckpointViews:
    """Find every tensor of the files in transformers' model.

    Raises InvalidInput: the model has no such tensor, or one of another shape, or one that no file has; or a file's
    lies there otherwise than whole or as rows of an expert's matrix.
    """
    tensors: dict[str, Tensor] = model.state_dict()
    whole, stacks = _places(model, a, slices, tensors)
    tied = {f"{_OUTPUT}.weight"} if a.tied else set()
    for key in sorted(tensors.keys() - whole.keys() - stacks.keys() - tied):
        _refuse(a, key, "no file has it")
    for key, s in whole.items():
        if tensors[key].shape != s.shape:
            _refuse(a, s.name, f"its shape is {list(tensors[key].shape)}, expected {list(s.shape)}")
    experts = defaultdict[str, dict[str, list[FusedLinear]]](dict)
    for key, stack in stacks.items():
        module_name, _, parameter = key.rpartition(".")
        experts[module_name][parameter] = _linears_of(a, key, stack, tensors[key])
    linears = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != _OUTPUT:
            bias_O = tensors[f"{name}.bias"] if whole.pop(f"{name}.bias", None) else None
            linears[name] = FusedLinear(name, (whole.pop(f"{name}.weight"),), tensors[f"{name}.weight"], bias_O)
    return CheckpointViews(linears, experts, {s.name: tensors[key] for key, s in whole.items()})


def _places(
    model: Any, a: Architecture, slices: Sequence[TensorSlice], tensors: dict[str, Tensor]
) -> tuple[dict[str, TensorSlice], dict[str, Stack]]:
    """Return what is a whole tensor of the model, by that one's name, and what is a part of a stack, by its name."""
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = {p: each for each in transforms if isinstance(each, WeightConverter) for p in each.source_patterns}
    whole: dict[str, TensorSlice] = {}
    stacks = defaultdict[str, Stack](lambda: defaultdict(dict))
    for s in slices:
        # Towers beside the text model change the names of its tensors, and are not here.
        name = re.sub(rf"^{re.escape(a.tensor_prefix)}\.", f"{model.base_model_prefix}.", s.name)
        name = f"{_OUTPUT}.weight" if s.name == a.output_name else name
        key, pattern = rename_source_key(name, renamings, list(converters.values()), model.base_model_prefix, tensors)
        if key not in tensors:
            _refuse(a, s.name, f"there is no {key}")
        if pattern is None:
            whole[key] = s
            continue
        expert = _EXPERT.search(name)
        match converters[pattern].operations:
            case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)] if expert is not None:
                stacks[key][int(expert[1])][converters[pattern].source_patterns.index(pattern)] = s
            case operations:
                _refuse(a, s.name, f"how it lies in {key} is not known here: {operations}")
    return whole, stacks


def _linears_of(a: Architecture, key: str, stack: Stack, weight_EOI: Tensor) -> list[FusedLinear]:
    """Return each expert's rows of a parameter as a linear."""
    linears = []
    for number, weight_OI in enumerate(weight_EOI):
        parts = tuple(part for _, part in sorted(stack[number].items()))
        if (sum(part.shape[0] for part in parts), *{part.shape[1] for part in parts}) != weight_OI.shape:
            shapes = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
            _refuse(a, f"{key}.{number}", f"its shape is {list(weight_OI.shape)}, and its rows are {shapes or 'none'}")
        linears.append(FusedLinear(f"{key}.{number}", parts, weight_OI, None))
    return linears


def _refuse(a: Architecture, name: str, reason: str) -> NoReturn:
    raise InvalidInput(f"transformers' model of {a.family} does not have this tensor as files have it: {reason}", name)


# --- A decoder that uses transformers' model and cache ---
# Exact, slower than ours, for families that ours does not have.
#
# **Why batching cannot change a result.** Nothing is batched: each slot has a separate cache, and is computed alone.
#
# Only transformers' code runs, never a folder's, and nothing is downloaded.
#
# Shape suffixes: B slots, T tokens of a prompt, H hidden size, K experts of a token, M tokens that chose one expert,
# V vocabulary, O outputs and I inputs of a linear.

_READ = 256  # tokens of a prompt that are read at a time: attention may hold a score for each of them and all before


@dataclass(frozen=True)
class TransformersPrompt:
    """A prompt that was read: the adapter, its tokens' final hidden states, its cache, and the experts that each layer
    with experts chose, [T, K]."""

    lora_weights: Mapping[str, LoraFactors]
    hidden_TH: Tensor
    cache: DynamicCache
    experts: list[Tensor]

    @property
    def hidden_H(self) -> Tensor:
        return self.hidden_TH[-1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.hidden_TH, *self.experts)) + _bytes_of(self.cache)


class TransformersCache:
    """A cache of transformers for each slot that is in use."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[DynamicCache | None] = [None] * num_slots

    @property
    def num_bytes(self) -> int:
        return sum(_bytes_of(cache) for cache in self.slots if cache is not None)

    def reserve(self, num_tokens: int) -> None:
        """Do nothing: a cache grows with its tokens."""

    @torch.inference_mode()
    def fill(self, slot: int, prompt: TransformersPrompt) -> None:
        # A copy: the states of recurrent layers are changed in place, and other samples of the prompt begin at them.
        self.slots[slot] = copy.deepcopy(prompt.cache)


class TransformersDecoder:
    """A decoder of any family whose tensors transformers' model has as files have them; see `Decoder`.

    Raises InvalidInput when the folder cannot be used.
    """

    computes_slots_alone = True

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = read_architecture(folder)
        self.folder, self.dtype, self.device = folder, dtype, device
        self._model = _empty_model(folder, self.architecture, dtype, device)
        self._slices = _slices(self._model, self.architecture)
        # No trainer sends these: they are read with the weights.
        self._constants = constants_of(self.architecture)
        tied = dataclasses.replace(self.architecture, tied=self._model.config.tie_word_embeddings)
        self._views = find_views(self._model, tied, [*self._slices, *self._constants])
        # The adapter of the slot that is being computed, and the experts that its layers chose.
        self._lora_weights: Mapping[str, LoraFactors] = {}
        self._chosen: list[Tensor] = []
        for name, module in self._model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(lambda _, given: self._chosen.append(given[1]))
        self._output = FusedLinear("lm_head", (output_slice(tied, 1),), self._model.lm_head.weight, None)
        for name, linear in {**self._views.linears, "lm_head": self._output}.items():
            self._model.get_submodule(name).forward = partial(self._linear, linear)
        for name, stacks in self._views.experts.items():
            module = self._model.get_submodule(name)
            module.forward = partial(self._experts, module, stacks)
        table = self._model.get_input_embeddings()
        self._tables = [token_table(s, table.weight) for s in self._slices if s.name.endswith(f".{EMBEDDING}.weight")]
        table.register_forward_hook(self._beside_tokens)
        self._head = _head_of(self._model)
        self.read_weights(folder)

    def named_weights(self) -> dict[str, Tensor]:
        """Return every tensor by its Hugging Face name: what is written to one is computed with from then on."""
        constants = {s.name for s in self._constants}
        return {name: weight for name, weight in self._views.named_weights().items() if name not in constants}

    def read_weights(self, folder: Path) -> None:
        """Replace all weights; see `Decoder.read_weights`."""
        slices = [*self._slices, *self._constants]
        read_into(self._views.named_weights(), folder, self.architecture, slices)

    @property
    def adaptable(self) -> list[FusedLinear]:
        return [*self._views.all_linears, self._output, *self._tables]

    def new_cache(self, num_slots: int) -> TransformersCache:
        return TransformersCache(num_slots)

    @torch.inference_mode()
    def prefill(self, token_ids: tuple[int, ...], lora_weights: Mapping[str, LoraFactors]) -> TransformersPrompt:
        """Read one prompt, some tokens at a time."""
        cache = DynamicCache(config=self._model.config)
        hidden, experts = [], []
        for part_T in torch.tensor(token_ids, device=self.device).split(_READ):
            hidden.append(self._read(part_T, cache, lora_weights))
            experts.append(self._chosen)
        chosen = [torch.cat(parts) for parts in zip(*experts, strict=True)]
        return TransformersPrompt(lora_weights, torch.cat(hidden), cache, chosen)

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...], prompt: TransformersPrompt, num_top: int = 0) -> PromptScores:
        """Score a prompt's tokens but the first, as `Decoder.score` does."""
        self._lora_weights = prompt.lora_weights
        return score_prompt(token_ids, prompt.hidden_TH, self._head, num_top)

    @torch.inference_mode()
    def step(
        self,
        token_B: Tensor,
        position_B: Tensor,
        num_blocks: int,
        cache: TransformersCache,
        lora_weights: Mapping[str, LoraFactors],
        chosen: list[Tensor] | None = None,
    ) -> Tensor:
        """Compute one token of every slot behind those that its cache has. Returns final hidden states, [B, H].

        A slot at position 0 is empty: its cache is dropped, and its rows are zeros. `num_blocks`: of no use here.
        `chosen`: see `Decoder.step`.
        """
        chosen = [] if chosen is None else chosen
        hidden_BH = torch.zeros(len(token_B), self.architecture.hidden_size, dtype=self.dtype, device=self.device)
        for slot, position in enumerate(position_B.tolist()):
            if not position:
                cache.slots[slot] = None
                continue
            held = cache.slots[slot]
            assert held is not None and held.get_seq_length() == position, (slot, position)
            hidden_BH[slot] = self._read(token_B[slot : slot + 1], held, lora_weights)[0]
            if not chosen:
                chosen += [expert_1K.new_zeros(len(token_B), expert_1K.shape[1]) for expert_1K in self._chosen]
            for expert_BK, expert_1K in zip(chosen, self._chosen, strict=True):
                expert_BK[slot] = expert_1K[0]
        return hidden_BH

    @torch.inference_mode()
    def logits(self, hidden_BH: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        """Return logits, float32 [B, V]; of a row of zeros, an empty slot's, zeros."""
        self._lora_weights = lora_weights
        logit_BV = torch.zeros(len(hidden_BH), self.architecture.vocab_size, device=self.device)
        for slot in hidden_BH.any(dim=-1).nonzero()[:, 0].tolist():
            logit_BV[slot] = self._head(hidden_BH[slot : slot + 1])[0]
        return logit_BV

    def _read(self, token_T: Tensor, cache: DynamicCache, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        """Read tokens behind those that the cache has. Returns their final hidden states, [T, H]."""
        self._lora_weights, self._chosen = lora_weights, []
        found = self._model.base_model(input_ids=token_T[None], past_key_values=cache, use_cache=True)
        hidden_1TH: Tensor = found.last_hidden_state
        return hidden_1TH[0]

    def _beside_tokens(self, table: Any, inputs: tuple[Tensor], output_1TH: Tensor) -> Tensor:
        return with_tokens(output_1TH, inputs[0], self._lora_weights, getattr(table, "embed_scale", 1.0))

    def _linear(self, linear: FusedLinear, x: Tensor) -> Tensor:
        return linear(x, self._lora_weights)

    def _experts(
        self, module: Any, stacks: dict[str, list[FusedLinear]], x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor
    ) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, added up in the order of the experts' numbers."""
        assert not (module.has_bias or module.is_transposed or module.has_post_expert_norm), type(module)
        first = stacks["gate_up_proj" if module.has_gate else "up_proj"]
        total_TH = torch.zeros_like(x_TH, dtype=weight_TK.dtype)
        for number in expert_TK.unique().tolist():
            token_M, choice_M = (expert_TK == number).nonzero(as_tuple=True)
            made = first[number](x_TH[token_M], self._lora_weights)
            made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
            y_MH = stacks["down_proj"][number](made, self._lora_weights)
            total_TH.index_add_(0, token_M, (y_MH * weight_TK[token_M, choice_M, None]).to(total_TH.dtype))
        return total_TH.to(x_TH.dtype)


def _empty_model(folder: Path, a: Architecture, dtype: torch.dtype, device: torch.device) -> Any:
    """Make transformers' model of a folder, its weights undefined; of one with towers, the text model alone."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    config = config.get_text_config(decoder=True)
    if not is_generic(a):
        config.tie_word_embeddings = a.tied
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=None,  # transformers' choice, whatever the folder says
            experts_implementation="eager",
            trust_remote_code=False,
        )
    model.tie_weights()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(tuple(model._keep_in_fp32_modules_strict or ())):
            tensor.data = tensor.float()
    bound_steps(model)
    return model.requires_grad_(False).eval()


def _slices(model: Any, a: Architecture) -> list[TensorSlice]:
    if not is_generic(a):
        return slices_of(a, 1)
    return [TensorSlice(name, name, tuple(p.shape), None, 0, len(p)) for name, p in model.named_parameters()]


def bound_steps(model: Any) -> None:
    """Bound the steps of Mamba-2 from below in all calls: transformers does it only for several tokens at once."""
    for mixer in model.modules():
        if hasattr(mixer, "time_step_limit"):
            mixer.in_proj.register_forward_hook(partial(_with_bounded_steps, mixer))


def _with_bounded_steps(mixer: Any, _: nn.Module, __: Any, made_1TO: Tensor) -> Tensor:
    least = mixer.time_step_limit[0]
    before_softplus = torch.tensor(least, dtype=torch.float64).expm1().log().to(mixer.dt_bias) - mixer.dt_bias
    step_1TN = made_1TO[..., -len(before_softplus) :]
    return torch.cat([made_1TO[..., : -len(before_softplus)], step_1TN.maximum(before_softplus)], dim=-1)


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


def _head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function from final hidden states, [T, H], to logits, float32 [T, V].

    It is the model itself without its layers, because only the model's code knows the caps and factors of its logits.
    """
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _KnownLayers()}
    return lambda hidden_TH: head(inputs_embeds=hidden_TH[None], use_cache=False).logits[0].float()


def _bytes_of(cache: DynamicCache) -> int:
    return sum(tensor.nbytes for tensor in _tensors_of(cache))


def _tensors_of(cache: DynamicCache) -> Iterator[Tensor]:
    """Yield keys and values of layers of attention, and the states of recurrent ones, which are dictionaries."""
    for layer in cache.layers:
        for value in vars(layer).values():
            yield from (t for t in (value.values() if isinstance(value, dict) else (value,)) if isinstance(t, Tensor))
