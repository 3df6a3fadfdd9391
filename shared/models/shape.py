"""The sizes of a model that limit its layouts, and the layouts and engines that can hold it."""

from collections.abc import Container

from longshore.fields import Frozen
from longshore.layout import EngineName, Layout, broken_rule
from longshore.training import DELTA_NET, Linear, Target
from shared.errors import InvalidInput
from shared.models.config import FAMILIES, DenseConfig, HybridConfig, HybridMixtureConfig, MixtureConfig

_MEGATRON_ALONE = ("qwen3_moe", "qwen3_5", "qwen3_5_moe")
_OF_ATTENTION: tuple[Linear, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_MLP: tuple[Linear, ...] = ("gate_proj", "up_proj", "down_proj")


class DeltaNetShape(Frozen):
    """The sizes of a model's gated delta nets, and for each of its layers whether it is one."""

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int


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
    shared_ffn_size: int = 0  # of the expert that all tokens go to
    head_dim: int = 0  # 0: not known
    is_gated: bool = False  # attention: q_proj has a gate for each query
    delta_net: DeltaNetShape | None = None

    def num_linears(self, targets: Container[Target]) -> int:
        """Count the linears of layers that an adapter is beside. Those of an MLP are there once for each expert."""
        num_mlps = self.num_experts + (self.shared_ffn_size > 0) if self.num_experts else 1
        of_mlps = sum(name in targets for name in _OF_MLP) * num_mlps * self.num_layers
        recurrent = self.delta_net.layers.count(True) if self.delta_net else 0
        of_delta_nets = sum(name in targets for name in DELTA_NET) * recurrent
        return of_mlps + of_delta_nets + sum(name in targets for name in _OF_ATTENTION) * (self.num_layers - recurrent)

    def linear_size(self, linear: Linear, is_shared: bool = False) -> tuple[int, int]:
        """Return the sizes of a linear's input and output; 0: not known. `is_shared`: of the shared expert."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        ffn = self.expert_ffn_size if self.num_experts else self.ffn_size
        ffn = self.shared_ffn_size if is_shared else ffn
        if linear in DELTA_NET:
            return self._size_in_delta_net(linear)
        match linear:
            case "q_proj":
                return self.hidden_size, heads * (2 if self.is_gated else 1)
            case "k_proj" | "v_proj":
                return self.hidden_size, kv_heads
            case "o_proj":
                return heads, self.hidden_size
            case "gate_proj" | "up_proj":
                return self.hidden_size, ffn
            case "down_proj":
                return ffn, self.hidden_size
        raise AssertionError(linear)

    def _size_in_delta_net(self, linear: Linear) -> tuple[int, int]:
        if (delta := self.delta_net) is None:
            return 0, 0
        keys, values = delta.num_key_heads * delta.key_size, delta.num_value_heads * delta.value_size
        outputs = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
        if linear == "out_proj":
            return values, self.hidden_size
        return self.hidden_size, outputs.get(linear, delta.num_value_heads)


def shape_of(config: DenseConfig) -> ModelShape:
    mixture = config if isinstance(config, MixtureConfig) else None
    hybrid = config if isinstance(config, HybridConfig) else None
    return ModelShape(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_experts=mixture.num_experts if mixture else 0,
        expert_ffn_size=mixture.moe_intermediate_size if mixture else 0,
        shared_ffn_size=config.shared_expert_intermediate_size if isinstance(config, HybridMixtureConfig) else 0,
        head_dim=config.size_of_heads,
        is_gated=hybrid is not None,
        delta_net=hybrid and _delta_net(hybrid),
    )


def _delta_net(config: HybridConfig) -> DeltaNetShape:
    return DeltaNetShape(
        layers=config.is_recurrent,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim,
    )


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
        ("channels of its shared expert", shape.shared_ffn_size),
        ("key heads of its delta nets", shape.delta_net.num_key_heads if shape.delta_net else 0),
    ):
        if size % layout.tp:
            raise InvalidInput(f"tp={layout.tp} does not divide the model's {size} {name}", "layout.tp")
    if layout.sp and layout.tp == 1:
        raise InvalidInput("sp shares tokens out over tensor-parallel ranks: it needs tp of at least 2", "layout.sp")
    if layout.cp > 1 and shape.delta_net is not None:
        message = f"cp={layout.cp} cuts sequences, and the states of this model's recurrent layers are not passed on"
        raise InvalidInput(message, "layout.cp")
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
