"""transformers' model for a folder, its parameters sharded in groups: one for each layer, one for the rest.

Shape suffixes: T tokens of a bin, N targets, H hidden size, V vocabulary; in attention H query heads, G key/value
heads, D size of a head.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from megatron_worker.engine import Batch
from megatron_worker.families import read_architecture
from megatron_worker.families.rope import check_lengths
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.fsdp.adapter import FsdpAdapter, add_adapter
from megatron_worker.fsdp.ranks import Ranks
from megatron_worker.head.beside import BesideHead
from megatron_worker.mixers.tree_attention import Forest, attend_forest, plan_forest
from shared.models.lora_modules import OUTPUT
from shared.models.shape import check_family

Head = Callable[[Tensor, Tensor], dict[str, Tensor]]
_ATTENTION = "longshore"

Forests = Mapping[int | None, Forest]


def _attend(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    forests: Forests,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from each token to itself and its ancestors: [1, T, H, D], and no weights.

    transformers' models pass keywords that they do not know on to the attention: so the bin's `forests`, one for each
    window of the model's layers, get here.
    """
    assert attention_mask is None
    if abs((factor := scaling * query_1HTD.shape[-1] ** 0.5) - 1) > 1e-6:
        query_1HTD = query_1HTD * factor
    query_THD, key_TGD, value_TGD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1GTD, value_1GTD))
    return attend_forest(query_THD, key_TGD, value_TGD, forests[sliding_window])[None], None


# Without a mask function of the same name transformers makes no mask.
AttentionInterface.register(_ATTENTION, _attend)


class _Headed(nn.Module):
    """The model and a function of its hidden states as one module, so that FSDP has gathered the output embedding."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm: Any = causal_lm

    def forward(
        self, token_id_T: Tensor, position_T: Tensor, forests: Forests, hidden_index_N: Tensor, head: Head
    ) -> dict[str, Tensor]:
        hidden_1TH = self.causal_lm.model(
            input_ids=token_id_T[None], position_ids=position_T[None], use_cache=False, forests=forests
        ).last_hidden_state
        return head(hidden_1TH[0].index_select(0, hidden_index_N), self.causal_lm.lm_head.weight)


class FsdpModel:
    """The model, its weights frozen until trained.

    Attributes:
        slices: every tensor under its Hugging Face name, split along its first dimension.
        parameters: by those names, as FSDP holds them.
        shards: by those names, this rank's own. Their storages are all that the model keeps between two forwards.
    """

    def __init__(self, folder: Path, ranks: Ranks, dtype: torch.dtype) -> None:
        self.architecture = read_architecture(folder)
        check_family("fsdp", self.architecture.family)
        self._ranks, self._dtype = ranks, dtype
        headed = _Headed(_on_meta(folder, dtype))
        self._root = _shard(headed, ranks)
        self._root.to_empty(device=ranks.device)
        _make_rotary(headed.causal_lm, ranks.device)
        names = {name.removeprefix("causal_lm."): p for name, p in self._root.named_parameters()}
        self.parameters: dict[str, nn.Parameter] = names
        self.slices = [TensorSlice(name, name, tuple(p.shape), 0, 0, p.shape[0]) for name, p in names.items()]
        with torch.no_grad():
            self.shards = {name: p.to_local() for name, p in names.items()}
        self._linears = _linears(headed.causal_lm)
        self._adapter: FsdpAdapter | None = None
        for name, linear in self._linears.items():
            linear.register_forward_hook(self._beside(name))

    def _beside(self, name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
        def add(_: nn.Module, inputs: tuple[Tensor], output_1TO: Tensor) -> Tensor:
            return output_1TO if self._adapter is None else add_adapter(self._adapter, name, inputs[0], output_1TO)

        return add

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of every linear that LoRA can adapt, in model order."""
        sizes = {name: (linear.out_features, linear.in_features) for name, linear in self._linears.items()}
        return sizes | {OUTPUT: (self.architecture.vocab_size, self.architecture.hidden_size)}

    def beside_head(self, hidden_NH: Tensor) -> BesideHead | None:
        """Return what an adapter adds at the output layer, if one is beside it."""
        return None if self._adapter is None else self._adapter.beside_head(hidden_NH)

    def set_adapter(self, adapter: FsdpAdapter | None) -> None:
        self._adapter = adapter

    def settle(self) -> None:
        """Run a first forward with all weights trainable, since FSDP decides in it how gradients are reduced."""
        self._require_grad(True)
        zero_1 = torch.zeros(1, dtype=torch.int64, device=self._ranks.device)
        with torch.no_grad():
            self._root(
                zero_1, zero_1, self._planned(zero_1 - 1), zero_1[:0], lambda hidden_NH, _: {"hidden_NH": hidden_NH}
            )
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

        Collective. Raises InvalidInput, before any collective, when a tree's tokens do not stand depth first, or a
        sequence is too long.
        """
        check_lengths(batch.position_T, self.architecture.max_positions)
        forests = self._planned(batch.parent_T)
        found: dict[str, Tensor] = self._root(batch.token_id_T, batch.position_T, forests, batch.hidden_index_N, head)
        return found

    def _planned(self, parent_T: Tensor) -> Forests:
        windows = self.architecture.windows
        return {window: plan_forest(parent_T, self._dtype, window=window) for window in windows}


def _on_meta(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model's modules without any weight. Only transformers' code is run: none from the folder."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=_ATTENTION, trust_remote_code=False
        )
    # Bins have no padding: the id that a tokenizer pads with is trained as any other, where transformers would not.
    model.model.embed_tokens.padding_idx = None
    return model.eval()


def _shard(headed: _Headed, ranks: Ranks) -> Any:
    """Shard the parameters: they are gathered for one layer at a time, and freed at once."""
    # Sums, never means, in float32 whatever the weights are in.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in headed.causal_lm.model.layers:
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=True)
    root: Any = fully_shard(headed, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _make_rotary(causal_lm: Any, device: torch.device) -> None:
    """Make the rotary frequencies, which are no weights: no file has them, and `to_empty` leaves them undefined."""
    decoder = causal_lm.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=causal_lm.config).to(device)


def _linears(causal_lm: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in causal_lm.named_modules()
        if isinstance(module, nn.Linear) and name.endswith("_proj")
    }
