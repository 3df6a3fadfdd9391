"""Adapters of mixtures whose experts transformers stacks in memory: what PEFT is told besides the names of linears.

The weights' file has each expert's factors under the names of the model's own file. PEFT stacks them as transformers
stacks the experts: gate and up together, of twice the rank. For most families it reads the linears' names so, too, and
then leaves out other linears of these names: those are told by `target_parameters`. For the others stacks are.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from longshore.training import Lora

EXPERTS = ".mlp.experts."
MLPS = frozenset({"gate_proj", "up_proj", "down_proj"})
UNREAD = ".mixer.experts."
"""In names of experts that have no adapters: PEFT 0.21 stacks no `up_proj` without a `gate_proj`."""
SHARED = ".mlp.shared_expert."
"""In names of families whose linears PEFT reads by their names as they are."""
_STACKS = {"mlp.experts.gate_up_proj": {"gate_proj", "up_proj"}, "mlp.experts.down_proj": {"down_proj"}}
_LINEAR = re.compile(r"mlp\.(?:shared_experts\.)?(gate_proj|up_proj|down_proj)\.weight")
_PAIR = r"experts\.gate_up_proj"


def _of_pairs(rank: int, alpha: float, is_stabilized: bool) -> dict[str, float]:
    """Return rank and alpha of gate and up together, by which their scale is that of each."""
    return {"rank_pattern": 2 * rank, "alpha_pattern": alpha * (math.sqrt(2) if is_stabilized else 2)}


def told(lora: Lora, adapted: Iterable[str]) -> dict[str, Any]:
    """Return fields of `adapter_config.json` for an adapter beside these modules, as far as they differ."""
    mlps = [name for name in adapted if ".mlp." in name and name.rpartition(".")[2] in MLPS]
    if not any(part in name for name in mlps for part in (EXPERTS, ".mlp.shared_experts.")):
        return {}
    experts = {name.rpartition(".")[2] for name in mlps if EXPERTS in name}
    reads_names = any(SHARED in name for name in mlps)
    has_stacks = reads_names or lora.target_pattern is not None  # a pattern of whole names means no stack
    parameters = {stack for stack, parts in _STACKS.items() if has_stacks and parts <= experts}
    if not reads_names:
        parameters |= {f"mlp.{name.rpartition('.mlp.')[2]}.weight" for name in mlps if EXPERTS not in name}
    fields: dict[str, Any] = {"lora_dropout": 0.0}  # PEFT loads no stack with dropout
    if parameters:
        fields["target_parameters"] = sorted(parameters)
    of_pairs = _of_pairs(lora.rank, lora.alpha, lora.rank_stabilized) if "gate_proj" in experts else {}
    for field, value in of_pairs.items():
        if has_stacks or (field, lora.rank_stabilized) == ("alpha_pattern", True):
            fields[field] = {_PAIR: value, **dict(getattr(lora, field))}  # the first that matches counts
    return fields


def untold(lora: Mapping[str, Any], names: str | tuple[str, ...], parameters: object) -> tuple[dict[str, Any], bool]:
    """Return fields of a Lora without what `told` adds, and whether the parameters are as it names them."""
    of_pairs = _of_pairs(lora["rank"], lora["alpha"], lora["rank_stabilized"])
    has_pairs = all(lora[field].get(_PAIR) == value for field, value in of_pairs.items())
    own = {field: {k: v for k, v in lora[field].items() if (k, v) != (_PAIR, own)} for field, own in of_pairs.items()}

    def is_own(parameter: object) -> bool:
        linear = _LINEAR.fullmatch(str(parameter))
        parts = {linear[1]} if linear else _STACKS.get(str(parameter), set())
        is_named = isinstance(names, str) or parts <= {*names}
        return bool(parts) and is_named and (has_pairs or "gate_up" not in str(parameter))

    return {**lora, **own}, isinstance(parameters, list) and all(map(is_own, parameters))
