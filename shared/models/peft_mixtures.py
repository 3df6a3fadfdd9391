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
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_LINEAR = re.compile(r"mlp\.(?:shared_experts\.)?(gate_proj|up_proj|down_proj)\.weight")
_PAIR = r"experts\.gate_up_proj"


def _of_pairs(rank: int, alpha: float, is_stabilized: bool) -> dict[str, float]:
    """Return rank and alpha of gate and up together, by which their scale is that of each."""
    return {"rank_pattern": 2 * rank, "alpha_pattern": alpha * (math.sqrt(2) if is_stabilized else 2)}


def told(lora: Lora, adapted: Iterable[str]) -> dict[str, Any]:
    """Return what `adapter_config.json` has otherwise than elsewhere for an adapter beside these modules."""
    mlps = [name for name in adapted if ".mlp." in name and name.rpartition(".")[2] in MLPS]
    experts = {name.rpartition(".")[2] for name in mlps if EXPERTS in name}
    if not experts and not any(".mlp.shared_experts." in name for name in mlps):
        return {}
    reads_names = any(SHARED in name for name in mlps)
    has_stacks = reads_names or lora.target_pattern is not None  # a pattern of whole names means no stack
    others = () if reads_names else (name for name in mlps if EXPERTS not in name)
    parameters = {f"mlp.{name.rpartition('.mlp.')[2]}.weight" for name in others}
    if experts and (has_stacks or "down_proj" not in experts):  # without which PEFT finds no gate and up, either
        parameters.add(_DOWN)
    fields: dict[str, Any] = {"lora_dropout": 0.0}  # PEFT loads no stack with dropout
    if "gate_proj" in experts:
        parameters |= {_GATE_UP} if has_stacks else set()
        for field, value in _of_pairs(lora.rank, lora.alpha, lora.rank_stabilized).items():
            if has_stacks or (lora.rank_stabilized and field == "alpha_pattern"):  # else PEFT finds them itself
                fields[field] = {_PAIR: value, **dict(getattr(lora, field))}
    return fields | ({"target_parameters": sorted(parameters)} if parameters else {})


def untold(lora: Mapping[str, Any], names: str | tuple[str, ...], parameters: object) -> tuple[dict[str, Any], bool]:
    """Return fields of a Lora without what `told` adds, and whether the parameters are as it names them."""
    of_pairs = _of_pairs(lora["rank"], lora["alpha"], lora["rank_stabilized"])
    without = {
        field: {k: v for k, v in lora[field].items() if (k, v) != (_PAIR, of_pairs[field])} for field in of_pairs
    }
    named = MLPS if isinstance(names, str) else MLPS.intersection(names)
    own = {_DOWN} if named else set()
    if {"gate_proj", "up_proj"} <= named and all(without[field] != lora[field] for field in of_pairs):
        own.add(_GATE_UP)

    def is_own(parameter: object) -> bool:
        linear = _LINEAR.fullmatch(str(parameter))
        return parameter in own if linear is None else linear[1] in named

    return {**lora, **without}, isinstance(parameters, list) and all(map(is_own, parameters))
