"""The sizes of a model that limit its layouts, and the layouts and engines that can hold it."""

import math
from collections.abc import Container
from typing import Literal

from longshore.fields import Frozen
from longshore.layout import EngineName, Layout, broken_rule
from longshore.training import DELTA_NET, LATENT_EXPERTS, LINEARS, Linear, Target
from shared.errors import InvalidInput
from shared.jobs.packed import RouteShape
from shared.models.config import FAMILIES
from shared.models.dense import DenseConfig
from shared.models.families import Block, GptOssConfig, HybridConfig, LatentConfig, MixtureConfig, NemotronHConfig
from shared.models.gemma import Gemma4Config, GemmaConfig
from shared.models.generic import GenericConfig

_MEGATRON_ALONE = (
    *("qwen3_5", "qwen3_5_moe", "gpt_oss", "gemma3", "gemma4"),
    *("deepseek_v3", "glm4_moe_lite", "nemotron_h"),
)
_OF_ATTENTION: tuple[Linear, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_MLP: tuple[Linear, ...] = ("gate_proj", "up_proj", "down_proj")


class DeltaNetShape(Frozen):
    """The sizes of a model's gated delta nets, and for each of its layers whether it is one."""

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int


class BlocksShape(Frozen):
    """What each layer is, of a model whose layers are one block each; groups of heads of its Mamba-2 mixers.

    `has_latents`: experts work in fewer dimensions than the model.
    """

    layers: tuple[Block, ...]
    num_groups: int
    has_latents: bool

    def numbers(self, num_mlps: int) -> dict[Linear, int]:
        """Return how many there are of each linear, if a layer with experts has `num_mlps`."""
        of_mlps, of_latents = self.layers.count("mlp") + num_mlps * self.layers.count("moe"), self.layers.count("moe")
        return {
            **dict.fromkeys(_OF_ATTENTION, self.layers.count("attention")),
            **{"up_proj": of_mlps, "down_proj": of_mlps, "in_proj": self.layers.count("mamba")},
            **dict.fromkeys(LATENT_EXPERTS, of_latents if self.has_latents else 0),
        }


class LayerShape(Frozen):
    """The sizes of a layer of a model whose layers differ. `missing`: linears that other layers have."""

    num_kv_heads: int
    head_dim: int
    ffn_size: int
    missing: tuple[Linear, ...] = ()


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
    has_stacked_experts: bool = False  # stored together: no adapter is beside them
    delta_net: DeltaNetShape | None = None
    layers: tuple[LayerShape, ...] = ()  # empty: all are alike
    needs_one_stage: bool = False  # layers take keys and values of others, or embeddings of their own
    latent_linears: dict[Linear, tuple[int, int]] | None = None  # in the place of attention's: their sizes
    num_dense: int = 0  # layers without experts of a model whose others have them
    blocks: BlocksShape | None = None
    routes: RouteShape | None = None  # None beside experts: the shape was read before they were known
    max_positions: int | None = None  # of a sequence: rope scaling changes longer ones with their length
    is_generic: bool = False  # of no family of ours: which linears there are is not known

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears that a layer or another has."""
        if self.is_generic:
            return LINEARS
        if self.blocks is not None:
            return tuple(name for name, number in self.blocks.numbers(1).items() if number)
        own = {*(self.latent_linears or _OF_ATTENTION), *_OF_MLP, *(DELTA_NET if self.delta_net else ())}
        unseen = _OF_MLP if self.has_stacked_experts and not self.layers else ()  # else an MLP is beside them
        return tuple(name for name in LINEARS if name in own - {*unseen})

    def num_linears(self, targets: Container[Target]) -> int:
        """Count the linears of layers that an adapter is beside. Those of an MLP are there once for each expert."""
        if self.layers:
            own = [name for name in (*_OF_ATTENTION, *_OF_MLP) if name in targets]
            return sum(name not in layer.missing for layer in self.layers for name in own)
        of_layer = self.num_experts + (self.shared_ffn_size > 0) if self.num_experts else 1
        if self.blocks is not None:
            return sum(number for name, number in self.blocks.numbers(of_layer).items() if name in targets)
        num_mlps = of_layer * (self.num_layers - self.num_dense) + self.num_dense
        recurrent = self.delta_net.layers.count(True) if self.delta_net else 0
        chosen = [name for name in self.linears if name in targets]
        of_mlps, of_delta_nets = (sum(name in some for name in chosen) for some in (_OF_MLP, DELTA_NET))
        of_attention = len(chosen) - of_mlps - of_delta_nets
        return of_mlps * num_mlps + of_delta_nets * recurrent + of_attention * (self.num_layers - recurrent)

    def linear_size(self, linear: Target, of: Literal["", "experts", "shared"] = "", layer: int = 0) -> tuple[int, int]:
        """Return the sizes of a linear's input and output; 0: not known. `of`: an MLP that is an expert, or shared."""
        if linear in ("lm_head", "embed_tokens"):
            sizes = self.hidden_size, self.vocab_size
            return sizes if linear == "lm_head" else sizes[::-1]
        if self.is_generic:
            return 0, 0
        if self.layers:
            own = self.layers[layer].model_dump(exclude={"missing"})
            return self.model_copy(update={**own, "layers": ()}).linear_size(linear)
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        ffn = {"": self.ffn_size, "experts": self.expert_ffn_size, "shared": self.shared_ffn_size}[of]
        if self.latent_linears and linear in self.latent_linears:
            return self.latent_linears[linear]
        if self.blocks is not None and linear not in _OF_ATTENTION:
            return 0, 0  # MLPs, shared or not, and experts differ
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
        return 0, 0

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
    stacked = config if isinstance(config, GptOssConfig) else None
    beside = config if isinstance(config, Gemma4Config) and config.enable_moe_block else None
    routed = mixture or beside
    experts = routed or stacked
    hybrid = config if isinstance(config, HybridConfig) else None
    latent = config if isinstance(config, LatentConfig) else None
    gemma = config if isinstance(config, GemmaConfig) else None
    shape = ModelShape(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_experts=experts.num_experts if experts else 0,
        expert_ffn_size=stacked.intermediate_size if stacked else routed.moe_intermediate_size if routed else 0,
        shared_ffn_size=mixture.shared_ffn_size if mixture else 0,
        head_dim=config.size_of_heads,
        is_gated=hybrid is not None,
        has_stacked_experts=bool(stacked or beside),
        delta_net=hybrid and _delta_net(hybrid),
        latent_linears=latent and _latent_linears(latent),
        num_dense=latent.is_dense.count(True) if latent else 0,
        layers=() if gemma is None else _layers(gemma),
        max_positions=config.max_positions,
        is_generic=isinstance(config, GenericConfig),
        needs_one_stage=gemma is not None and gemma.num_kv_shared_layers + gemma.hidden_size_per_layer_input > 0,
        routes=_routes(config),
    )
    return _with_blocks(shape, config) if isinstance(config, NemotronHConfig) else shape


def _with_blocks(shape: ModelShape, config: NemotronHConfig) -> ModelShape:
    without: dict[str, int] = {} if "mlp" in config.blocks else {"ffn_size": 0}
    if "moe" not in config.blocks:
        without |= {"num_experts": 0, "expert_ffn_size": 0}
    shared_ffn_size = config.moe_shared_expert_intermediate_size if "moe" in config.blocks else 0
    blocks = BlocksShape(
        layers=config.blocks, num_groups=config.n_groups, has_latents=config.moe_latent_size is not None
    )
    return shape.model_copy(update={**without, "shared_ffn_size": shared_ffn_size, "blocks": blocks})


def _routes(config: DenseConfig) -> RouteShape | None:
    """Return the experts of a token; None: there are none."""
    if isinstance(config, Gemma4Config) and config.enable_moe_block:
        sizes = config.num_experts, config.top_k_experts
        return RouteShape(num_layers=config.num_hidden_layers, num_experts=sizes[0], per_token=sizes[1])
    if not isinstance(config, MixtureConfig | GptOssConfig):
        return None
    has_experts = (True,) * config.num_hidden_layers
    if isinstance(config, NemotronHConfig):
        has_experts = tuple(block == "moe" for block in config.blocks)
    elif isinstance(config, LatentConfig):
        has_experts = tuple(not is_dense for is_dense in config.is_dense)
    if not any(has_experts):
        return None
    return RouteShape(
        num_layers=has_experts.count(True),
        num_experts=config.num_experts,
        per_token=config.num_experts_per_tok,
        has_experts=() if all(has_experts) else has_experts,
    )


def _latent_linears(config: LatentConfig) -> dict[Linear, tuple[int, int]]:
    num_heads, hidden_size, rank = config.num_attention_heads, config.hidden_size, config.q_lora_rank
    keys, values = num_heads * config.size_of_heads, num_heads * config.v_head_dim
    sizes: dict[Linear, tuple[int, int]] = {
        "kv_a_proj_with_mqa": (hidden_size, config.kv_lora_rank + config.qk_rope_head_dim),
        "kv_b_proj": (config.kv_lora_rank, num_heads * config.qk_nope_head_dim + values),
        "o_proj": (values, hidden_size),
    }
    if rank is None:
        return sizes | {"q_proj": (hidden_size, keys)}
    return sizes | {"q_a_proj": (hidden_size, rank), "q_b_proj": (rank, keys)}


def _layers(config: GemmaConfig) -> tuple[LayerShape, ...]:
    found = []
    for layer in range(config.num_hidden_layers):
        head_dim, num_kv_heads = config.heads_of(layer)
        ffn_size, missing = config.ffn_size_of(layer), config.missing_in(layer)
        found.append(LayerShape(num_kv_heads=num_kv_heads, head_dim=head_dim, ffn_size=ffn_size, missing=missing))
    return tuple(found)


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
    has_mlps = not shape.num_experts or shape.num_dense or shape.blocks or shape.layers
    for name, size in (
        ("attention heads", shape.num_heads),
        ("key/value heads", math.gcd(shape.num_kv_heads, *(layer.num_kv_heads for layer in shape.layers))),
        ("feed-forward size", shape.ffn_size if has_mlps else 0),
        ("channels of its shared expert", shape.shared_ffn_size),
        ("key heads of its delta nets", shape.delta_net.num_key_heads if shape.delta_net else 0),
        ("groups of its Mamba layers", shape.blocks.num_groups if shape.blocks else 0),
    ):
        if size % layout.tp:
            raise InvalidInput(f"tp={layout.tp} does not divide the model's {size} {name}", "layout.tp")
    if layout.sp and layout.tp == 1:
        raise InvalidInput("sp shares tokens out over tensor-parallel ranks: it needs tp of at least 2", "layout.sp")
    if layout.cp > 1 and (shape.delta_net or shape.blocks) is not None:
        message = f"cp={layout.cp} cuts sequences, and the states of this model's recurrent layers are not passed on"
        raise InvalidInput(message, "layout.cp")
    if layout.pp > shape.num_layers:
        message = f"pp={layout.pp} stages need a layer each, the model has {shape.num_layers}"
        raise InvalidInput(message, "layout.pp")
    if layout.pp > 1 and shape.needs_one_stage:
        what = "keys and values that layers share, and embeddings of each layer"
        raise InvalidInput(f"pp={layout.pp}: stages do not pass on {what}", "layout.pp")
    _check_experts(layout, shape, engine)


def check_max_tokens(max_tokens: int | None, shape: ModelShape) -> None:
    """Raise InvalidInput where sequences may be longer than what a model is computed for."""
    if max_tokens is not None and shape.max_positions is not None and max_tokens > shape.max_positions:
        rule = f"by its rope scaling this model is computed for sequences of up to {shape.max_positions}"
        raise InvalidInput(f"max_tokens={max_tokens}: {rule}", "max_tokens")


def _check_experts(layout: Layout, shape: ModelShape, engine: EngineName) -> None:
    if not shape.num_experts:
        for name, degree in (("ep", layout.ep), ("etp", layout.etp)):
            if degree > 1:
                raise InvalidInput(f"{name}={degree}: the model has no experts to split", f"layout.{name}")
        return
    if engine == "fsdp" and layout.tp > 1:
        raise InvalidInput("tp: the engine fsdp splits no experts: use dp, or the engine megatron", "layout.tp")
    if layout.tp > 1 and not layout.sp:
        raise InvalidInput("a model with experts needs sp with tp: each rank routes tokens of its own", "layout.sp")
    if shape.num_experts % layout.ep:
        raise InvalidInput(f"ep={layout.ep} does not divide the model's {shape.num_experts} experts", "layout.ep")
    if layout.etp > 1 and shape.has_stacked_experts:
        raise InvalidInput(f"etp={layout.etp}: this model's experts are stored together and not split", "layout.etp")
    if shape.expert_ffn_size % layout.etp:
        message = f"etp={layout.etp} does not divide the experts' feed-forward size {shape.expert_ffn_size}"
        raise InvalidInput(message, "layout.etp")
    stage = layout.tp * layout.cp * layout.dp
    if stage % (layout.ep * layout.etp):
        message = f"ep * etp = {layout.ep * layout.etp} does not divide tp * cp * dp = {stage}"
        raise InvalidInput(message, "layout.ep")


def check_family(engine: EngineName, family: str) -> None:
    """Raise InvalidInput where an engine cannot train a model family; Megatron's trains every one of FAMILIES.

    That of another family the engine fsdp finds out when it loads the model.
    """
    known = [name for name in FAMILIES if name not in _MEGATRON_ALONE]
    if engine == "fsdp" and family in _MEGATRON_ALONE:
        raise InvalidInput(f"the engine fsdp trains {', '.join(known)}, not {family}: use megatron", "engine")
