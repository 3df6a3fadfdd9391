"""transformers' model for a folder, its parameters sharded in groups: one for each layer, one for the rest.

Shape suffixes: T tokens of a bin, N targets, H hidden size, V vocabulary.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from longshore.training import LINEARS, Layout
from megatron_worker.engine import Batch
from megatron_worker.families import check_lengths
from megatron_worker.fsdp.adapter import (
    add_split_adapter,
    counted_once,
    on_rank,
    put_adapters_beside,
    scalar_head,
    slice_of,
    split_by_plan,
    split_dimension,
    stacked_slices,
)
from megatron_worker.fsdp.optimizer import Ranks
from megatron_worker.head.scalar import LmHeadLora
from megatron_worker.lora import Adapter, LinearLora
from megatron_worker.mixers.tree_attention import attend_forest, plan_forest
from shared.errors import InvalidInput
from shared.families import read_config
from shared.families.architecture import Attention
from shared.families.model_slices import shape_of
from shared.families.tensor_slices import Linear, TensorSlice
from shared.models.peft import EMBEDDING, OUTPUT, module_of
from shared.models.shape import check_layout

# --- Our attention in transformers' models, by their attention interface ---
# Over the forest of a bin, within windows.
#
# The model's mask determines the tokens that a layer attends to. It is read once, when the model is loaded: a mask
# function then returns the window in place of a mask, and each attention module remembers it.
#
# Shape suffixes: T tokens of a bin; H query heads, G key/value heads, D size of a head.

ATTENTION = "longshore"
DISCOVER_WINDOWS = "longshore asks for windows"
_WITHOUT_EFFECT = frozenset(
    {"dropout", "is_causal", "output_attentions", "position_ids", "sliding_window", "use_cache"}  # of a whole sequence
)
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Of a layer's module from its queries, [T, H, D], keys and values, [T, G, D], to what queries attend to, [T, H, D]."""
ATTEND: ContextVar[Attend] = ContextVar("how the tokens that are computed attend")


def attentions_of(causal_lm: Any, zero_1: Tensor) -> dict[nn.Module, Attention]:
    """Ask a model's layers of attention what they compute, by a token. Raises InvalidInput if we do not compute it."""
    causal_lm.config._attn_implementation = DISCOVER_WINDOWS
    causal_lm.base_model(input_ids=zero_1[None], position_ids=zero_1[None], use_cache=False)
    causal_lm.config._attn_implementation = ATTENTION
    asked = {module: vars(module).get("attention_asked") for module in causal_lm.modules()}
    found = {module: attention for module, attention in asked.items() if attention is not None}
    if not found:
        raise InvalidInput("no layer of it attends by transformers' attention interface", "model")
    return found


def _attend(
    module: Any,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as the context says: [1, T, H, D], and no weights."""
    factor = 1.0 if scaling is None else scaling * query_1HTD.shape[-1] ** 0.5
    if abs(factor - 1) > 1e-6:
        query_1HTD = query_1HTD * factor
    query_THD, key_TGD, value_TGD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1GTD, value_1GTD))
    return ATTEND.get()(module, query_THD, key_TGD, value_TGD)[None], None


def _ask(
    module: Any,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Remember sizes and window. Raises InvalidInput if `_attend` would compute something else."""
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise InvalidInput(f"its attention takes {unknown[0]}, which is not computed", "engine")
    if attention_mask is not None and not isinstance(attention_mask, int):
        raise InvalidInput("it makes a mask of its own", "engine")
    if value_1GTD.shape[-1] != query_1HTD.shape[-1]:
        raise InvalidInput("its values are of another size than its keys", "engine")
    heads = query_1HTD.shape[1], key_1GTD.shape[1], query_1HTD.shape[-1]
    module.attention_asked = Attention(*heads, rope=None, window=attention_mask)
    return query_1HTD.transpose(1, 2), None


def _window_of(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, use_vmap: bool = False, **_: Any
) -> int | None:
    """Return a mask's window; None: all tokens before. Raises InvalidInput if the mask is anything else."""
    size = local_size or 4096
    zero_1, key_K = torch.zeros(1, dtype=torch.int64), torch.arange(3 * size)
    query_Q1 = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size + 1, 3 * size - 2])[:, None]
    is_near = key_K > query_Q1 - (local_size or 3 * size)
    is_seen = None if use_vmap else mask_function(zero_1, zero_1, query_Q1, key_K)
    if is_seen is None or not torch.equal(is_seen, (key_K <= query_Q1) & is_near):
        raise InvalidInput("its layers attend to other tokens than those before, or than a window of them", "engine")
    return local_size


AttentionInterface.register(ATTENTION, _attend)  # without a mask function of the same name transformers makes no mask
AttentionInterface.register(DISCOVER_WINDOWS, _ask)
AttentionMaskInterface.register(DISCOVER_WINDOWS, _window_of)


Head = Callable[[Tensor, Tensor], dict[str, Tensor]]
Computed = Callable[[Any], dict[str, Tensor]]


class _Headed(nn.Module):
    """The model, to compute something with it as a forward of FSDP, which gathers the embeddings before it."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm: Any = causal_lm

    def forward(self, compute: Computed) -> dict[str, Tensor]:
        return compute(self.causal_lm)


def final_states(causal_lm: Any, token_id_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
    """Return a bin's hidden states behind the final norm, [T, H]."""
    before = ATTEND.set(attend)
    try:
        found = causal_lm.base_model(input_ids=token_id_T[None], position_ids=position_T[None], use_cache=False)
    finally:
        ATTEND.reset(before)
    states_1TH: Tensor = found.last_hidden_state
    return states_1TH[0]


class FsdpModel:
    """The model, its weights frozen until trained.

    Attributes:
        slices: every tensor under its Hugging Face name, split along its first dimension; an expert's on one rank.
        parameters: by the names that slices give them, as FSDP holds them.
        shards: by those names, this rank's own; a stack of experts as one matrix. Their storages are all that the model
            keeps between two forwards.
        windows: of its layers of attention, known once it is settled.
        logit_divisor: the hidden states' products with the output embedding are divided by it.
    """

    def __init__(self, folder: Path, ranks: Ranks, dtype: torch.dtype) -> None:
        config = read_config(folder, any_family=True)
        check_layout(Layout(tp=ranks.tp_size, dp=ranks.dp_size), shape_of(config), "fsdp")
        self.architecture = config.architecture()
        self._ranks, self.dtype, self.device = ranks, dtype, ranks.device
        self.windows: frozenset[int | None] = frozenset()
        headed = _Headed(_on_meta(folder, dtype, None if self.architecture.is_generic else self.architecture.tied))
        self._styles = {self._adapted(name): s for name, s in split_by_plan(headed.causal_lm, ranks).items()}
        splits = {name: split_dimension(p) for name, p in headed.named_parameters()}
        self._root = _shard(headed, ranks)
        self.layers: list[Any] = [m for m in headed.causal_lm.modules() if isinstance(m, FSDPModule)]
        self._root.to_empty(device=ranks.device)
        _make_buffers(headed.causal_lm, is_bounded=not self.architecture.is_generic)
        config = headed.causal_lm.config.to_dict()
        self.logit_divisor: float = (config.get("logits_scaling") or 1.0) / (config.get("logit_scale") or 1.0)
        self.parameters: dict[str, nn.Parameter] = {}
        self.shards: dict[str, Tensor] = {}
        self.slices: list[TensorSlice] = []
        for full_name, p in self._root.named_parameters():
            name = self._in_files(full_name.removeprefix("causal_lm."))
            shape, local = tuple(p.shape), p.detach().to_local()
            if ".experts." in name:
                self.slices += stacked_slices(name, shape, ranks.size)
                name, local = on_rank(name, ranks.rank), local.flatten(0, 1)
            else:
                self.slices.append(slice_of(name, p, splits[full_name]))
            self.parameters[name], self.shards[name] = p, local
        self._adapter: Adapter | None = None
        modules = {self._adapted(name): module for name, module in headed.causal_lm.named_modules()}
        linears = {n: m for n, m in modules.items() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in LINEARS}
        tables = {n: m for n, m in modules.items() if isinstance(m, nn.Embedding) and n.endswith(f".{EMBEDDING}")}
        sizes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
        for name, module in {**linears, **tables}.items():
            module.register_forward_hook(self._beside(name))
        for name, experts in headed.causal_lm.named_modules():
            if name.endswith(".experts"):
                sizes |= put_adapters_beside(name, experts, lambda: self._adapter)
        sizes |= {name: (table.embedding_dim, table.num_embeddings) for name, table in tables.items()}
        sizes |= {OUTPUT: (self.architecture.vocab_size, self.architecture.hidden_size)}
        # What LoRA can adapt, in model order. Adapters are whole on every rank.
        weights = {name: TensorSlice(f"{name}.weight", "", size, None, 0, size[0]) for name, size in sizes.items()}
        self.linears = [Linear(name, "whole", (weight,)) for name, weight in weights.items()]

    def _in_files(self, name: str) -> str:
        """Return the name that files give a tensor of the decoder. Files may put the decoder into a larger model."""
        a = self.architecture
        return a.output_name if name == f"{OUTPUT}.weight" else re.sub(r"^model\.", f"{a.tensor_prefix}.", name)

    def _adapted(self, module: str) -> str:
        """Return what PEFT calls a module of the decoder."""
        return module_of(self._in_files(f"{module}.weight"))

    def _lora(self, module: str) -> LinearLora | None:
        """Return the active adapter of a module, if it has one."""
        return None if self._adapter is None else self._adapter.linears.get(module)

    def _beside(self, name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
        def add(module: Any, inputs: tuple[Tensor], output_1TO: Tensor) -> Tensor:
            if (lora := self._lora(name)) is None:
                return output_1TO
            if isinstance(module, nn.Embedding):
                own = counted_once(lora, self._ranks)
                return output_1TO + own.of_tokens(inputs[0], getattr(module, "embed_scale", 1.0))
            if self._ranks.tp_size > 1:
                style = self._styles.get(name)
                return add_split_adapter(lora, style, inputs[0], output_1TO, module.weight, self._ranks)
            return lora.added(output_1TO, inputs[0], module.weight, module.bias)

        return add

    def beside_head(self, hidden_NH: Tensor) -> LmHeadLora | None:
        """Return what the adapter of the output layer adds there, if there is one."""
        lora = self._lora(OUTPUT)
        return None if lora is None else counted_once(lora, self._ranks).beside_head(hidden_NH)

    def values(self, hidden_NH: Tensor) -> Tensor:
        """Return the scalars of the active slot's head for some targets, [N, L]."""
        head = None if self._adapter is None else scalar_head(self._adapter, self._ranks)
        assert head is not None, "the slot has no head of scalars"
        return head.values(hidden_NH)

    def set_adapter(self, adapter: Adapter | None) -> None:
        self._adapter = adapter

    def warm_up(self) -> None:
        """Run a first forward with all weights trainable, since FSDP decides in it how gradients are reduced.

        Raises InvalidInput if we do not support the attention.
        """
        self._require_grad(True)
        zero_1 = torch.zeros(1, dtype=torch.int64, device=self.device)

        def ask(causal_lm: Any) -> dict[str, Tensor]:
            self.windows = frozenset(each.window for each in attentions_of(causal_lm, zero_1).values())
            return {}

        with torch.no_grad():
            self.run(ask)
        self._require_grad(False)

    def forget(self) -> None:
        """Free what an interrupted pass has left: gathered weights, and gradients that were not reduced. Collective."""
        if hasattr(self._root, "reset_iter_state"):  # missing in torch 2.11
            self._root.reset_iter_state()
        modules: list[Any] = [m for m in self._root.modules() if isinstance(m, FSDPModule)]
        for module in modules:
            module.unshard()  # what is not reduced is the gathered weight's, not the shard's
            for parameter in module.parameters():
                parameter.grad = None
            module.reshard()

    def _require_grad(self, required: bool) -> None:
        for parameter in self.parameters.values():
            parameter.requires_grad_(required)

    def forward(self, batch: Batch, head: Head) -> dict[str, Tensor]:
        """Call `head` on the targets' hidden states, [N, H] after the norm, and the output embedding, [V, H].

        An empty bin computes a token without a target, as a model cannot be run on nothing.

        Collective. Raises InvalidInput, before any collective, if a tree's tokens are not in depth-first order, or a
        sequence is too long.
        """
        if batch.is_empty:
            zero_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
            batch = replace(batch, token_id_T=zero_1, position_T=zero_1, parent_T=zero_1 - 1)
        check_lengths(batch.position_T, self.architecture.max_positions)
        forests = {window: plan_forest(batch.parent_T, self.dtype, window=window) for window in self.windows}

        def attend(module: Any, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
            return attend_forest(query_THD, key_TGD, value_TGD, forests[module.attention_asked.window])

        def compute(causal_lm: Any) -> dict[str, Tensor]:
            states_TH = final_states(causal_lm, batch.token_id_T, batch.position_T, attend)
            return head(states_TH.index_select(0, batch.hidden_index_N), causal_lm.lm_head.weight)

        return self.run(compute)

    def run(self, compute: Computed) -> dict[str, Tensor]:
        """Call a function of transformers' model while what is in no layer is gathered. Collective."""
        found: dict[str, Tensor] = self._root(compute)
        return found


def _on_meta(folder: Path, dtype: torch.dtype, tied: bool | None) -> Any:
    """Return the model's modules without any weight. Only transformers' code is run: none from the folder.

    `tied`: whether the embeddings are tied, for our families, whose decoder alone is built; None for other families.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if tied is not None:
        config = config.get_text_config(decoder=True)
        config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, experts_implementation="eager", trust_remote_code=False
        )
    # Bins have no padding: the tokenizer's padding id is trained as any other, which transformers would not do.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def _shard(headed: _Headed, ranks: Ranks) -> Any:
    """Shard the parameters: they are gathered for one layer at a time, and freed at once."""
    # Sums, never means, in float32 whatever the weights are in.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    how: Any = {"mesh": ranks.mesh["dp"], "mp_policy": policy, "reshard_after_forward": True}
    for layer in _layers(headed.causal_lm):  # along the dimension that tensor parallelism has split
        fully_shard(layer, shard_placement_fn=split_dimension, **how)
    root: Any = fully_shard(headed, **how)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _layers(causal_lm: Any) -> list[nn.Module]:
    kinds = causal_lm._no_split_modules or ()
    found = {name: module for name, module in causal_lm.named_modules() if type(module).__name__ in kinds}
    if not found:
        raise InvalidInput("transformers does not say which of its modules are layers", "model")
    return [module for name, module in found.items() if not any(name.startswith(f"{outer}.") for outer in found)]


@torch.no_grad()
def _make_buffers(causal_lm: Any, is_bounded: bool) -> None:
    """Compute buffers such as rotary frequencies: no file has them, and `to_empty` leaves them undefined.

    `is_bounded`: sequences so long that they change the frequencies are refused (`check_lengths`).

    Raises InvalidInput if transformers does not, or computes frequencies by the longest sequence of a bin.
    """
    for name, module in causal_lm.named_modules():
        buffers, own = [b for b in module.buffers(recurse=False) if b.is_floating_point()], dict(module._parameters)
        if not buffers:
            continue
        for buffer in buffers:
            buffer.fill_(torch.nan)
        nowhere = {key: p if p is None else nn.Parameter(p.to_local().to("meta"), False) for key, p in own.items()}
        module._parameters.update(nowhere)  # its weights stay as they are
        causal_lm._init_weights(module)
        module._parameters.update(own)
        if module._buffers.keys() - module._non_persistent_buffers_set or any(b.isnan().any() for b in buffers):
            raise InvalidInput(f"{name} has values that are no weights and that transformers does not make", "model")
        kinds = getattr(module, "rope_type", "")
        if not is_bounded and {"dynamic", "longrope"} & ({kinds} if isinstance(kinds, str) else {*kinds.values()}):
            raise InvalidInput("rotary frequencies that depend on the longest sequence are not computed", "model")


# --- The probe of a model of an unknown family ---
# Our forward of a bin against transformers' forward of each sequence.
#
# Shape suffixes: T tokens, N targets, V vocabulary.

_FLOAT32_BOUND = 1e-5
"""Of the largest difference, by the largest log-probability (by 1 where that is smaller)."""
_BFLOAT16_BOUND = 0.05
"""Of the differences' root mean square, by the log-probabilities' standard deviation."""
_OF_ITS_CODE = (AttributeError, LookupError, NotImplementedError, StrictDataclassError, TypeError, ValueError)


@contextmanager
def refusing(family: str) -> Iterator[None]:
    """Name the family in every refusal of the block, and refuse if transformers' code does not take our calls."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{family} cannot be trained by the engine fsdp: {error.message}", "model") from error
    except _OF_ITS_CODE as error:
        rule = f"transformers' model does not take what is needed: {error!r:.200}"
        raise InvalidInput(f"{family} cannot be trained by the engine fsdp: {rule}", "model") from error


@torch.no_grad()
def probe(model: FsdpModel) -> float:
    """Compare log-probabilities of a bin of ours with those of each of its sequences alone. Collective.

    Returns:
        The difference in nats: the largest in float32, the root mean square in bfloat16.

    Raises:
        InvalidInput: they differ by more than the bounds above.
    """
    batch, sequences = _bin(model.architecture.vocab_size, model.device)

    def head(hidden_NH: Tensor, weight_VH: Tensor) -> dict[str, Tensor]:
        return {"logprob": _picked(hidden_NH @ weight_VH.t() / model.logit_divisor, batch.label_N)}

    ours_N = model.forward(batch, head)["logprob"]
    theirs_N = torch.cat([_alone(model, token_id_T) for token_id_T in sequences])
    error_N = ours_N - theirs_N
    if model.dtype == torch.float32:
        found, bound = float(error_N.abs().max()), _FLOAT32_BOUND * max(1.0, float(theirs_N.abs().max()))
    else:
        found, bound = float(error_N.square().mean().sqrt()), _BFLOAT16_BOUND * float(theirs_N.std())
    if not found <= bound:
        what = "log-probabilities of packed sequences differ from those of transformers' model of each alone"
        raise InvalidInput(f"{what} by {found:.1e} nats, and {bound:.1e} is allowed", "model")
    return found


def _picked(logit_NV: Tensor, label_N: Tensor) -> Tensor:
    return logit_NV.float().log_softmax(-1).gather(1, label_N[:, None])[:, 0]


def _bin(vocab_size: int, device: torch.device) -> tuple[Batch, list[Tensor]]:
    """Return a bin of a sequence, and of two that share their beginning; and the three, each whole."""
    first, shared, one, other = (list(range(*edges)) for edges in ((0, 20), (20, 44), (44, 60), (60, 69)))
    token_id_T = torch.arange(1, 70, device=device) * 7919 % vocab_size
    sequences = first, shared + one, shared + other
    parent, position = [-1] * 69, [0] * 69
    for places in sequences:
        for number, (before, place) in enumerate(zip([-1, *places], places, strict=False)):
            parent[place], position[place] = before, number
    index_N = torch.tensor([place for places in sequences for place in places[:-1]], device=device)
    label_N = token_id_T[torch.tensor([place for places in sequences for place in places[1:]], device=device)]
    position_T, parent_T = (torch.tensor(column, device=device) for column in (position, parent))
    batch = Batch.to_score(token_id_T, position_T, parent_T, index_N, label_N)
    return batch, [token_id_T[places] for places in sequences]


def _alone(model: FsdpModel, token_id_T: Tensor) -> Tensor:
    """Return the log-probabilities of a sequence's tokens but the first as transformers computes them."""

    def compute(causal_lm: Any) -> dict[str, Tensor]:
        causal_lm.config._attn_implementation = "eager"
        logit_TV = causal_lm(input_ids=token_id_T[None], use_cache=False).logits[0, :-1]
        causal_lm.config._attn_implementation = ATTENTION
        return {"logprob": _picked(logit_TV, token_id_T[1:])}

    return model.run(compute)["logprob"]
