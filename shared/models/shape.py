"""The sizes of a model that limit its layouts, and the layouts and engines that can hold it."""

from longshore.fields import Frozen
from longshore.layout import EngineName, Layout, broken_rule
from longshore.training import Linear
from shared.errors import InvalidInput
from shared.models.config import FAMILIES

_MEGATRON_ALONE = ("qwen3_moe",)


class ModelShape(Frozen):
    """The sizes of a model that limit its layouts, read from a Hugging Face `config.json`."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    num_experts: int = 0
    expert_ffn_size: int = 0
    head_dim: int = 0  # 0: not known

    def linear_size(self, linear: Linear) -> tuple[int, int]:
        """Return the sizes of a linear's input and output; 0: not known."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        ffn = self.expert_ffn_size if self.num_experts else self.ffn_size
        match linear:
            case "q_proj":
                return self.hidden_size, heads
            case "k_proj" | "v_proj":
                return self.hidden_size, kv_heads
            case "o_proj":
                return heads, self.hidden_size
            case "gate_proj" | "up_proj":
                return self.hidden_size, ffn
            case "down_proj":
                return ffn, self.hidden_size


def check_layout(layout: Layout, shape: ModelShape, engine: EngineName = "megatron") -> None:
    """Refuse a layout, or an engine, that cannot hold the model.

    Raises:
        InvalidInput: names the dimension and the rule that it breaks.
    """
    if rule := broken_rule(engine, layout):
        raise InvalidInput(rule, "layout")
    check_family(engine, shape.family)
    for name, size in (
        ("attention heads", shape.num_heads),
        ("key/value heads", shape.num_kv_heads),
        *([] if shape.num_experts else [("feed-forward size", shape.ffn_size)]),
    ):
        if size % layout.tp:
            raise InvalidInput(f"tp={layout.tp} does not divide the model's {size} {name}", "layout.tp")
    if layout.sp and layout.tp == 1:
        raise InvalidInput("sp shares tokens out over tensor-parallel ranks: it needs tp of at least 2", "layout.sp")
    if layout.pp > shape.num_layers:
        message = f"pp={layout.pp} stages need a layer each, the model has {shape.num_layers}"
        raise InvalidInput(message, "layout.pp")
    _check_experts(layout, shape)


def _check_experts(layout: Layout, shape: ModelShape) -> None:
    if not shape.num_experts:
        for name, degree in (("ep", layout.ep), ("etp", layout.etp)):
            if degree > 1:
                raise InvalidInput(f"{name}={degree}: the model has no experts to split", f"layout.{name}")
        return
    if layout.tp > 1 and not layout.sp:
        raise InvalidInput("a model with experts needs sp with tp: each rank routes tokens of its own", "layout.sp")
    if shape.num_experts % layout.ep:
        raise InvalidInput(f"ep={layout.ep} does not divide the model's {shape.num_experts} experts", "layout.ep")
    if shape.expert_ffn_size % layout.etp:
        message = f"etp={layout.etp} does not divide the experts' feed-forward size {shape.expert_ffn_size}"
        raise InvalidInput(message, "layout.etp")
    stage = layout.tp * layout.cp * layout.dp
    if stage % (layout.ep * layout.etp):
        message = f"ep * etp = {layout.ep * layout.etp} does not divide tp * cp * dp = {stage}"
        raise InvalidInput(message, "layout.ep")


def check_family(engine: EngineName, family: str) -> None:
    """Raise InvalidInput where an engine cannot train a model family; Megatron's trains every one of FAMILIES."""
    known = [name for name in FAMILIES if name not in _MEGATRON_ALONE]
    if engine == "fsdp" and family not in known:
        raise InvalidInput(f"the engine fsdp trains {', '.join(known)}, not {family}: use megatron", "engine")
