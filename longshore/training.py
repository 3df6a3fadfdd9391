"""Settings of training: an adapter or every weight, the optimizer, a session, what evaluations decide."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError, SchemaValidator, core_schema

from longshore.fields import Frozen, Name, Sha256, added, only, pattern

# --- The parallel layout of one worker: how many ranks, and what each dimension splits ---

Degree = Annotated[int, Field(ge=1, le=4096)]
EngineName = Literal["megatron", "fsdp"]
MAX_WORLD_SIZE = 4096


class Layout(Frozen):
    """Degrees of tensor (tp), pipeline (pp), context (cp), expert (ep) and data (dp) parallelism.

    The world is `tp * pp * cp * dp`, shared out evenly among the hosts of `nodes` machines, which are leased together:
    ranks 0 to n - 1 are on the first. Ranks of a tensor-parallel group are on one machine.
    `sp` (sequence parallelism) lets the tensor-parallel ranks share out the tokens between their linears. Experts are
    laid over the same ranks anew: `ep` ranks share them out, `etp` (expert tensor parallelism) split each, so that
    `ep * etp` divides `tp * cp * dp`. Optimizer state is split over all ranks that hold the same weights.
    """

    tp: Degree = Field(default=1, description="tensor-parallel ranks")
    sp: bool = Field(default=False, description="sequence parallelism: needs tp of at least 2")
    pp: Degree = Field(default=1, description="pipeline stages")
    cp: Degree = Field(default=1, description="context-parallel ranks")
    ep: Degree = Field(default=1, description="expert-parallel ranks")
    etp: Degree = Field(default=1, description="tensor-parallel ranks of each expert")
    dp: Degree = Field(default=1, description="data-parallel ranks")
    nodes: Degree = Field(default=1, description="machines, each with the same number of ranks")

    @model_validator(mode="after")
    def _total_is_bounded(self) -> Self:
        if self.world_size > MAX_WORLD_SIZE:
            raise ValueError(f"tp * pp * cp * dp = {self.world_size:,} ranks; a layout has up to {MAX_WORLD_SIZE:,}")
        if self.world_size % self.nodes:
            raise ValueError(f"nodes={self.nodes} machines cannot share out {self.world_size} ranks evenly")
        if self.ranks_per_node % self.tp:
            raise ValueError(f"tp={self.tp} ranks would lie on several machines: each has {self.ranks_per_node}")
        return self

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def label(self) -> str:
        """A short name, such as `tp2-sp-dp2` or `dp4-nodes2`; `single` for one rank."""
        degrees = self.model_dump()
        parts = [
            "sp" if name == "sp" else f"{name}{degree}"
            for name, degree in degrees.items()
            if degree > 1 or degree is True
        ]
        return "-".join(parts) or "single"


def broken_rule(engine: EngineName, layout: Layout) -> str | None:
    """Return the rule of an engine that a layout breaks, whatever the model; None if it accepts the layout."""
    if engine == "fsdp" and layout != Layout(dp=layout.dp, tp=layout.tp, nodes=layout.nodes):
        return f"the engine fsdp splits data by dp and linears by tp alone: use these, and no {layout.label}"
    return None


class _HasBudget(Protocol):
    @property
    def layout(self) -> Layout: ...

    @property
    def memory_budget_bytes(self) -> int | None: ...


HasBudgetT = TypeVar("HasBudgetT", bound=_HasBudget)


def pipelines_have_bins(budgeted: HasBudgetT) -> HasBudgetT:
    """Validate a model with a layout and a memory budget. Raises ValueError if a pipeline has a memory budget."""
    if budgeted.memory_budget_bytes is not None and budgeted.layout.pp > 1:
        raise ValueError("memory_budget_bytes: a pipeline holds all micro-batches of a step at once; use pp 1")
    return budgeted


# --- Regular expressions for module names, as in PEFT's settings, matched in linear time ---
#
# Python's `re` tries one way after another, and a stranger's pattern can have more ways than there is time for. So a
# pattern is parsed as Python parses it, written again for the engine of pydantic-core (Rust's `regex`, which never
# goes back), and matched there.

MAX_LENGTH = 1000
_MOST_GROUPS = 60  # the parser calls itself for each
_MOST_PARTS = 5000
"""Parts of a pattern with its repeats written out: the engine's memory and its time for a character grow with them."""
# Names are ASCII. The engine's own classes are Unicode; about a hundred of them exceed its memory limit.
_CATEGORIES = {op.CATEGORY_DIGIT: "0-9", op.CATEGORY_SPACE: r"\t-\r\x1c-\x20", op.CATEGORY_WORD: "0-9A-Za-z_"}
_OTHERS = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}
_PLACES = {op.AT_BEGINNING: "^", op.AT_END: "$", op.AT_BOUNDARY: r"(?-u:\b)"}


class ModulePattern:
    """A pattern that a whole name is to match, as in `re.fullmatch`.

    Lookahead is supported only at the pattern's beginning (`^(?!.*vision).*`); backreferences, flags and lookbehind
    are not supported.

    Args:
        is_end: it may follow any prefix that ends with a dot, like the keys of PEFT's patterns.

    Raises ValueError: it is no pattern, too large, or has an unsupported part.
    """

    def __init__(self, expression: str, is_end: bool = False) -> None:
        self.expression = expression
        self._ahead, self._rest = _translated(expression)
        if self._ahead and is_end:
            raise ValueError(f"{_named(op.ASSERT)} is not read in a pattern of ends of names")
        self._begin = r"(?:.*\.)?" if is_end else ""

    @cached_property
    def _whole(self) -> SchemaValidator:
        return _compiled(f"^{self._begin}(?:{self._rest})$")

    def matches(self, name: str) -> bool:
        """Return True if the whole name matches."""
        ahead = (_compiled(f"^(?:{pattern})").isinstance_python(name) == holds for pattern, holds in self._ahead)
        return all(ahead) and self._whole.isinstance_python(name)


@lru_cache(256)
def _compiled(expression: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=expression, regex_engine="rust-regex", strict=True))


@lru_cache(1024)
def _translated(expression: str) -> tuple[tuple[tuple[str, bool], ...], str]:
    """Return the leading lookaheads, each with whether it must match, and the rest."""
    if len(expression) > MAX_LENGTH or expression.count("(") > _MOST_GROUPS:
        raise ValueError(f"a pattern has at most {MAX_LENGTH} characters, and {_MOST_GROUPS} groups")
    try:
        parts = _parser.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression: {error}") from None
    if parts.state.flags & ~re.UNICODE:
        raise ValueError("flags are not read in a pattern")
    rest, ahead, begin, num_parts = list(parts), [], "", 0
    while rest and (rest[0] == (op.AT, op.AT_BEGINNING) or rest[0][0] in (op.ASSERT, op.ASSERT_NOT)):
        kind, value = rest.pop(0)
        if kind == op.AT:
            begin = "^"
        elif value[0] == 1:
            text, size = _written(value[1])
            ahead.append((text, bool(kind == op.ASSERT)))
            num_parts += 1 + size
        else:
            raise ValueError(f"{_named(kind)} is not read in a pattern")
    text, size = _written(rest)
    if num_parts + size > _MOST_PARTS:
        raise ValueError(f"a pattern has at most {_MOST_PARTS} parts with its repeats written out: write it shorter")
    return tuple(ahead), begin + text


def _written(parts: Sequence[tuple[Any, Any]]) -> tuple[str, int]:
    """Return parts of a pattern as the other engine reads them, and their number with repeats written out."""
    found = [_written_part(kind, value) for kind, value in parts]
    return "".join(text for text, _ in found), sum(size for _, size in found)


def _written_part(kind: Any, value: Any) -> tuple[str, int]:
    match kind:
        case op.LITERAL:
            return _sign(value), 1
        case op.NOT_LITERAL:
            return f"[^{_sign(value)}]", 1
        case op.ANY:
            return ".", 1
        case op.AT if value in _PLACES:
            return _PLACES[value], 1
        case op.IN:
            is_negated = value[0][0] == op.NEGATE
            return f"[{'^' * is_negated}{''.join(_in_class(*item) for item in value[is_negated:])}]", len(value)
        case op.SUBPATTERN if not (value[1] or value[2]):
            text, size = _written(value[3])
            return f"(?:{text})", 1 + size
        case op.BRANCH:
            branches = [_written(branch) for branch in value[1]]
            return f"(?:{'|'.join(text for text, _ in branches)})", 1 + sum(size for _, size in branches)
        case op.MAX_REPEAT | op.MIN_REPEAT:
            least, most, inner = value
            text, size = _written(inner)
            times = max(1, int(least), 0 if most == op.MAXREPEAT else int(most))
            return f"(?:{text}){{{least},{'' if most == op.MAXREPEAT else most}}}", 1 + max(1, size) * times
    raise ValueError(f"{_named(kind)} is not read in a pattern")


def _in_class(kind: Any, value: Any) -> str:
    match kind:
        case op.LITERAL:
            return _sign(value)
        case op.RANGE:
            return f"{_sign(value[0])}-{_sign(value[1])}"
        case _ if value in _OTHERS:
            return f"[^{_CATEGORIES[_OTHERS[value]]}]"
    return f"[{_CATEGORIES[value]}]"


def _sign(code: int) -> str:
    if code > 127:
        raise ValueError("names of modules are ASCII: no other character is read in a pattern")
    return f"\\x{{{code:x}}}"


def _named(kind: Any) -> str:
    names = {op.ASSERT: "looking ahead (but at its beginning) or behind", op.GROUPREF: "a reference to a group"}
    names[op.ASSERT_NOT] = names[op.ASSERT]
    return names.get(kind, str(kind).lower().replace("_", " "))


Linear = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "in_proj", "fc1_latent_proj", "fc2_latent_proj", "input_linear", "output_linear",
    "w1", "w2", "w3",
    "qkv_proj", "gate_up_proj", "c_fc", "c_proj", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h",
]  # fmt: skip
LINEARS: tuple[Linear, ...] = get_args(Linear)
DELTA_NET: tuple[Linear, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""The linears of a gated delta net, which some layers of a hybrid model have in the place of attention."""
LATENT: tuple[Linear, ...] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Linears of multi-head latent attention, in the place of those that make queries, keys and values."""
MAMBA: tuple[Linear, ...] = ("in_proj",)
"""The linears of a Mamba-2 mixer that take adapters: PEFT refuses them beside its `out_proj`."""
LATENT_EXPERTS: tuple[Linear, ...] = ("fc1_latent_proj", "fc2_latent_proj")
"""The linears around experts that work in fewer dimensions than the model."""
Target = Literal[Linear, "lm_head", "embed_tokens"]
TARGETS: tuple[Target, ...] = (*LINEARS, "lm_head", "embed_tokens")
"""What an adapter can be beside: linears of layers, the output layer, and the embeddings of tokens."""
Dtype = Literal["float32", "bfloat16"]
DtypeChoice = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["nf4", "int8", "fp8"]
QUANTIZE_DESCRIPTION = "hold the linears of a lora's frozen base in 4 or 8 bits; they compute in dtype; megatron only"
Recompute = Literal["auto", "on", "off"]
RECOMPUTE_DESCRIPTION = (
    "compute layers again in the backward pass, to save memory; auto: only if the longest example needs it"
)
OptimizerStates = Literal["float32", "8bit"]
STATES_DESCRIPTION = "precision of the optimizer's two moments; 8bit: megatron only"
OptimizerName = Annotated[
    Literal["adamw", "muon"],
    Field(description="muon: Muon for the matrices of layers and adapters, AdamW for the rest (docs/optimizers.md)"),
]
Decay = Annotated[
    Literal["all", "matrices"],
    Field(description="the parameters that weight_decay shrinks; matrices: no norms, biases, embeddings"),
]
LoraPlusRatio = Annotated[
    float, Field(gt=0, le=1000, description="LoRA+: the learning rate of adapters' B matrices, as a multiple of A's")
]
NoiseScale = Annotated[bool, Field(description="report each step's gradient noise scale; only for layouts of dp")]
DTYPE_DESCRIPTION = "precision of weights and activations; auto: bfloat16 if it is fast on the GPU hosts"
_LISTED = BeforeValidator(lambda targets: LINEARS if targets in ("all-linear", ["all-linear"]) else targets)
_SORTED = AfterValidator(lambda layers: layers and tuple(sorted({*layers})))
PAIRED = BeforeValidator(lambda pairs: tuple(pairs.items()) if isinstance(pairs, Mapping) else pairs)


def _pattern(expression: str) -> str:
    ModulePattern(expression)
    return expression


def _pattern_of_ends(expression: str) -> str:
    ModulePattern(expression, is_end=True)
    return expression


_OF_A_PATTERN = Field(min_length=1, max_length=MAX_LENGTH)
Pattern = Annotated[str, _OF_A_PATTERN, AfterValidator(_pattern)]
"""A regular expression over names of modules: Hugging Face's, such as `model.layers.0.self_attn.q_proj`."""
PatternOfEnds = Annotated[str, _OF_A_PATTERN, AfterValidator(_pattern_of_ends)]
"""Such an expression, which the end of a name behind a dot may match, too."""
Rank = Annotated[int, Field(ge=1, le=1024)]
Alpha = Annotated[float, Field(gt=0)]
_MOST_OF_PATTERNS = 10 * MAX_LENGTH
_OF_PATTERNS: dict[str, Any] = {"default": (), "max_length": 32}
MAX_SCALARS = 64


class ScalarHead(Frozen):
    """A head instead of the language model's: a linear from the hidden state after the final norm to named scalars.

    For tokens it is that of transformers' `...ForTokenClassification`, a linear with a bias; for sequences, scored at
    the last token, that of `...ForSequenceClassification`, a linear without one.
    """

    names: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_SCALARS)] = ("value",)
    per: Literal["token", "sequence"] = "token"

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len(set(self.names)) < len(self.names):
            raise ValueError("names: give each scalar its own name")
        return self

    def __str__(self) -> str:
        return f"{len(self.names)} scalar{'s' * (len(self.names) > 1)} a {self.per}"


HEAD_DESCRIPTION = "scalars of the final hidden state, in the place of the language head; absent: that head"


class Lora(Frozen):
    """Low-rank adapters of linears (Hu et al. 2021, arXiv:2106.09685): y += B A x * scale.

    The scale is alpha / rank, or alpha / sqrt(rank) if `rank_stabilized` (Kalajdzievski 2023,
    arXiv:2312.03732). With `dora` each row of W + scale B A is scaled to a trained norm (Liu et al. 2024,
    arXiv:2402.09353). Patterns are PEFT's, and mean what they mean there (shared/models/peft.py).
    """

    kind: Literal["lora"] = "lora"
    rank: Rank = Field(default=16, description="rank of the two factors")
    alpha: Alpha = Field(default=32.0, description="the adapter's output is scaled by alpha / rank")
    targets: Annotated[tuple[Target, ...], _LISTED] = Field(
        default=LINEARS,
        min_length=1,
        description="modules with an adapter, if the model has them; all-linear: all except lm_head and embed_tokens",
    )
    target_pattern: Pattern | None = Field(
        default=None, description="instead of targets: a regular expression for the full names of modules"
    )
    layers: Annotated[tuple[Annotated[int, Field(ge=0, lt=10_000)], ...] | None, _SORTED] = Field(
        default=None, min_length=1, max_length=10_000, description="layers with an adapter, from 0; all if absent"
    )
    rank_pattern: Annotated[tuple[tuple[PatternOfEnds, Rank], ...], PAIRED] = Field(
        **_OF_PATTERNS, description="other ranks, by patterns for the ends of modules' names; the first match counts"
    )
    alpha_pattern: Annotated[tuple[tuple[PatternOfEnds, Alpha], ...], PAIRED] = Field(
        **_OF_PATTERNS, description="other alphas, by the same kind of patterns"
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of the adapters' inputs that a training pass drops"
    )
    rank_stabilized: bool = Field(default=False, description="the scale is alpha / sqrt(rank), as PEFT's use_rslora")
    head: ScalarHead | None = Field(default=None, description=HEAD_DESCRIPTION)

    dora: bool = Field(
        default=False,
        description="train the norms of weights' rows separately from their directions, as PEFT's use_dora",
    )

    @model_validator(mode="after")
    def _targets_are_said_once(self) -> Self:
        if self.target_pattern is not None and (self.targets != LINEARS or self.layers is not None):
            raise ValueError("target_pattern replaces targets and layers: drop them")
        if sum(len(key) for key, _ in (*self.rank_pattern, *self.alpha_pattern)) > _MOST_OF_PATTERNS:
            rule = f"rank_pattern and alpha_pattern have at most {_MOST_OF_PATTERNS:,} characters together"
            raise ValueError(f"{rule}: write them shorter")
        if self.head is not None and "lm_head" in self.targets:
            raise ValueError("targets: the head of the run replaces lm_head; drop one of them")
        return self

    @property
    def max_rank(self) -> int:
        return max((self.rank, *(rank for _, rank in self.rank_pattern)))

    @property
    def why_not_split(self) -> str | None:
        """Why the engine fsdp has no such adapter beside linears that ranks share, if it has none."""
        if self.dropout:
            return "dropout: the engine fsdp has no dropout for split linears; use megatron, or tp=1"
        return "dora: the engine fsdp has no dora for split rows; use megatron, or tp=1" if self.dora else None


class Full(Frozen):
    """Train every weight."""

    kind: Literal["full"] = "full"
    head: ScalarHead | None = Field(default=None, description=HEAD_DESCRIPTION)


Trainable = Annotated[Lora | Full, Field(discriminator="kind")]


class _HasBase(Protocol):
    @property
    def engine(self) -> EngineName: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def trainable(self) -> Lora | Full: ...

    @property
    def quantize_base(self) -> Quantization | None: ...

    @property
    def optimizer_states(self) -> OptimizerStates: ...


HasBaseT = TypeVar("HasBaseT", bound=_HasBase)


def fields_fit_engine(asked: HasBaseT) -> HasBaseT:
    """Validate models that have these fields. Raises ValueError for combinations that an engine does not support."""
    if rule := broken_rule(asked.engine, asked.layout):
        raise ValueError(rule)
    if asked.quantize_base is not None and asked.trainable.kind == "full":
        raise ValueError("quantize_base: quantized weights are frozen; train a lora beside them, or drop quantize_base")
    if rule := storage_not_supported(asked.engine, asked.quantize_base, asked.optimizer_states):
        raise ValueError(rule)
    are_split = asked.engine == "fsdp" and asked.layout.tp > 1
    if are_split and isinstance(asked.trainable, Lora) and (rule := asked.trainable.why_not_split):
        raise ValueError(f"trainable.{rule}")
    return asked


def trains_the_language_head(asked: HasBaseT) -> HasBaseT:
    """Validate models whose loss is of tokens. Raises ValueError for a head of scalars."""
    if (head := asked.trainable.head) is not None:
        raise ValueError(f"trainable.head: what this learns from is of the language head, not of {head}; drop it")
    return asked


def storage_not_supported(engine: EngineName, quantize: Quantization | None, states: OptimizerStates) -> str | None:
    """Return why an engine does not support this storage of weights or moments, field name first; None if it does."""
    if quantize is not None and engine != "megatron":
        return f"quantize_base: the engine {engine} holds weights as they are; use megatron"
    if states != "float32" and engine != "megatron":
        return f"optimizer_states: the engine {engine} holds moments in float32; use megatron"
    return None


class _OfAnyOptimizer(Frozen):
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    decay: Decay = "all"
    clip_norm: float = Field(default=1.0, ge=0)
    lora_plus_ratio: LoraPlusRatio = 1.0
    noise_scale: NoiseScale = False


class Adam(_OfAnyOptimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); `clip_norm` bounds the global gradient norm, 0 for none."""

    kind: Literal["adamw"] = "adamw"


class Muon(_OfAnyOptimizer):
    """Muon (Jordan et al. 2024) for matrices of layers and adapters, and AdamW, by the betas and eps, for the rest.

    `scale`, in torch's words, of the orthogonal step of a matrix: 0.2 sqrt(max(rows, columns)), the size of AdamW's
    (Liu et al. 2025, arXiv:2502.16982), or sqrt(max(1, rows / columns)).
    """

    kind: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0, lt=1)
    nesterov: bool = True
    newton_schulz_steps: int = Field(default=5, ge=1, le=20)
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"


Optimizer = Annotated[Adam | Muon, Field(discriminator="kind")]


def check_optimizer(optimizer: Optimizer, engine: EngineName, layout: Layout, trainable: Lora | Full) -> None:
    """Raise ValueError if a setting would do nothing, or cannot be computed."""
    if optimizer.lora_plus_ratio != 1 and trainable.kind == "full":
        raise ValueError("lora_plus_ratio: full training has no B matrices; train a lora, or drop lora_plus_ratio")
    if not optimizer.noise_scale:
        return
    if layout.dp < 2 or layout.dp != layout.world_size or layout.ep > 1:
        raise ValueError("noise_scale: it compares gradients of data-parallel ranks; ask for a layout of dp alone")
    if engine == "fsdp" and trainable.kind == "full":
        raise ValueError("noise_scale: the engine fsdp sums gradients of whole models in its backward; use megatron")


OTHER_BASE_DESCRIPTION = "take adapters that were made on another base than the one that they are put on here"
ModelUri = Annotated[
    str, Field(min_length=1, max_length=2048, description="a folder, file:// or s3:// URI, hub id or published name")
]


class SessionRun(Frozen):
    """A session: a slot that a client trains itself, command by command, until it closes the session.

    A session without commands gives its worker back after a while, and leases another one at its next command.
    """

    kind: Literal["session"] = "session"
    schema_version: Literal[1] = 1
    name: Name | None = Field(
        default=None, description="the name under which adapters are published; the session's id if absent"
    )
    model: ModelUri
    trainable: Trainable = Lora()
    initial_adapter: str | None = Field(default=None, description="a published adapter to continue from: URI or name")
    allow_other_base: bool = Field(default=False, description=OTHER_BASE_DESCRIPTION)
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest sequence; tokens of a micro-batch")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of fresh adapter weights")
    engine: EngineName = Field(default="megatron", description="the training engine; fsdp: only layouts of dp and tp")
    layout: Layout = Layout()
    dtype: DtypeChoice = Field(default="auto", description=DTYPE_DESCRIPTION)
    quantize_base: Quantization | None = Field(default=None, description=QUANTIZE_DESCRIPTION)
    optimizer_states: OptimizerStates = Field(default="float32", description=STATES_DESCRIPTION)
    recompute: Recompute = Field(default="auto", description=RECOMPUTE_DESCRIPTION)
    idle_s: float = Field(default=60.0, ge=0, le=86_400, description="seconds until an idle worker is returned")
    save_after_s: float = Field(
        default=30.0, gt=0, le=86_400, description="seconds of commands after which the state is saved automatically"
    )
    keep_states: int = Field(
        default=32,
        ge=1,
        le=1000,
        description="how many of the newest states of save_state are kept; load_state names one",
    )
    gap_s: float = Field(
        default=600.0, gt=0, le=86_400, description="seconds that a command waits for earlier commands before it fails"
    )

    _fields_fit_engine = model_validator(mode="after")(fields_fit_engine)

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if self.initial_adapter is not None and self.trainable.kind == "full":
            raise ValueError("full training cannot continue from an adapter: drop initial_adapter, or train a lora")
        return self


# --- What a run does with its evaluations ---

EvaluationMetric = Annotated[
    str,
    Field(
        pattern=r"^eval_[a-z0-9_-]+$",
        max_length=128,
        description="a metric of the run's evaluations; more is better if its name has reward or accuracy",
    ),
]
Evaluations = dict[int, dict[str, float]]
"""By step, the values of the metrics that decide."""


def more_is_better(metric: str) -> bool:
    """Return True if a metric's name has `reward` or `accuracy`: otherwise, as of a loss, less is better."""
    return "reward" in metric or "accuracy" in metric


class EarlyStop(Frozen):
    """Ends a run whose evaluations no longer get better."""

    metric: EvaluationMetric | None = Field(
        default=None, description="absent: eval_loss, or eval_reward_mean if only held-out prompts are evaluated"
    )
    patience: int = Field(ge=1, le=1000, description="the run ends after this many evaluations without a better value")


class Watched(Frozen):
    """What a run's evaluations decide. That before the first step does not count: there is nothing to publish yet."""

    keep: Literal["last", "best"] = Field(
        default="last", description="the weights that are published: the last, or those of the best evaluation"
    )
    best_by: EvaluationMetric | None = Field(
        default=None, description="the metric of keep best; absent: that of early_stop"
    )
    early_stop: EarlyStop | None = Field(
        default=None, description="ends the run when its evaluations no longer get better"
    )

    @property
    def usual_metric(self) -> str:
        """The metric that decides if none is named."""
        return "eval_loss"

    @property
    def keeps_by(self) -> str | None:
        """The metric that decides which weights are kept; None: the last weights are published."""
        chosen = self.best_by or (self.early_stop.metric if self.early_stop else None)
        return (chosen or self.usual_metric) if self.keep == "best" else None

    @property
    def stops_by(self) -> str | None:
        """The metric that ends the run; None: nothing does."""
        return (self.early_stop.metric or self.usual_metric) if self.early_stop else None

    @property
    def watched(self) -> set[str]:
        """The metrics that every evaluation must have."""
        return {name for name in (self.keeps_by, self.stops_by) if name is not None}

    def with_evaluation(self, known: Evaluations, step: int, metrics: Mapping[str, float]) -> Evaluations:
        """Return the evaluations that later decisions need: the best one, and those that patience counts."""
        found = {**known, step: {name: metrics[name] for name in sorted(self.watched)}}
        best, stop = self.best(found), _best(found, self.stops_by) if self.stops_by else None
        return {step: found[step] for step in sorted(found) if step == best or (stop is not None and step >= stop)}

    def best(self, evaluations: Evaluations) -> int | None:
        """Return the step of the best evaluation, the first of equal ones; None without any, or if none is kept."""
        return _best(evaluations, self.keeps_by) if self.keeps_by and evaluations else None

    def is_over(self, evaluations: Evaluations) -> bool:
        """Return True if the last `patience` evaluations were no better than one before them."""
        if self.early_stop is None or not self.stops_by or not evaluations:
            return False
        best = _best(evaluations, self.stops_by)
        return sum(step > best for step in evaluations) >= self.early_stop.patience

    def decided(self, step: int, num_steps: int, best: int | None) -> tuple[str, ...]:
        """Say what the evaluations decided, for the run's user.

        Args:
            step: the one after which the run ended, of `num_steps`. `best`: that of the best evaluation, if kept.
        """
        said = []
        if step < num_steps and self.early_stop is not None:
            patience = f"{self.early_stop.patience} evaluation{'s' * (self.early_stop.patience > 1)}"
            said.append(f"the run ended after step {step} of {num_steps}: {self.stops_by} got no better in {patience}")
        if best is not None:
            said.append(f"the weights after step {best} are published: {self.keeps_by} was best there")
        return tuple(said)

    @model_validator(mode="after")
    def _the_best_is_kept(self) -> Self:
        if self.best_by is not None and self.keep != "best":
            raise ValueError("best_by is the metric of keep best: set keep, or drop it")
        return self


def _best(evaluations: Evaluations, metric: str) -> int:
    sign = -1 if more_is_better(metric) else 1

    def rank(step: int) -> tuple[bool, float, int]:
        value = sign * evaluations[step][metric]
        return math.isnan(value), 0.0 if math.isnan(value) else value, step

    return min(evaluations, key=rank)


# --- Weight sync of runs and jobs: how a trainer's weights get to the samplers of its run ---

Transport = Literal["shared_memory", "tcp", "collective", "cuda_ipc", "external"]
OVER_TCP: tuple[Transport, ...] = ("tcp", "collective", "external")
"""Transports whose samplers are reached at an address."""
_Backend = Literal["auto", "store", "delta", Transport]


def _possible(value: object) -> object:
    """Refuse an unknown backend, and name the known ones."""
    if (names := get_args(_Backend)) and value in names:
        return value
    raise PydanticCustomError("not_possible", "no such backend: possible are {names}", {"names": ", ".join(names)})


SyncBackend = Annotated[_Backend, BeforeValidator(_possible)]
PROFILE_PATH = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,3}$"


class WeightSync(Frozen):
    """How a run's samplers get the weights of each step.

    `store`: samplers load the published weights; every other backend falls back to this. `shared_memory`: the trainer's
    process hands the weights over on one machine. `tcp`: it sends them to samplers on other machines whose hosts have
    an address for it. `collective`: it broadcasts them to those; by NCCL on CUDA, by gloo on the CPU. `cuda_ipc`: from
    one CUDA device's memory, on one machine. `external`: by a package that is installed on both hosts, if their
    operators allow it. `delta`: like auto, but only changed elements are sent; each trainer rank keeps a copy of its
    weights for that. `auto`: shared_memory if trainer and samplers are on one machine, else tcp if there is an address,
    else store.
    """

    backend: SyncBackend = Field(default="auto", description="how samplers get a step's weights")
    bucket_bytes: int = Field(
        default=512 << 20, ge=1 << 10, le=4 << 30, description="bytes sent at a time; two such buffers are allocated"
    )
    in_flight: Literal["finish", "continue"] = Field(
        default="finish",
        description="samples in progress when weights change: finish with the old ones, or continue with the new ones",
    )

    profile_path: str | None = pattern(
        PROFILE_PATH,
        "a relative path of letters, digits and ._-, of at most four parts, none of which begins with a dot or a dash",
        default=None,
        description="a trace of each sync's phases, in `profiles/<run>/` below the root of the trainer's host; other "
        "ranks than 0 write files of their own beside it",
    )


class SyncOutcome(Frozen):
    """The result of a sync. `digest`: of the weights that were sent, absent if no sampler took them. `problems`: the
    errors of samplers that did not get them, by socket. `transport`: the one used. `profile_problem`: why there is no
    trace.

    `num_bytes` were sent to each sampler, of `weight_bytes`. `blocked_s`: seconds that the trainer waited;
    `duration_s`: until the last sampler had the weights. `made_room`: the optimizer's state was on the host meanwhile.
    """

    version: int
    digest: Sha256 | None
    num_bytes: int
    weight_bytes: int
    blocked_s: float
    duration_s: float
    problems: dict[str, str] = Field(default_factory=dict)
    transport: Transport | None = None
    profile_problem: str | None = None
    made_room: bool = added(False)


SamplerKind = Annotated[
    Literal["own", "vllm"],
    only("own", "vllm", words="a sampler is own or vllm; sglang, which needs a GPU here, was never tried"),
]
"""The program of a sampler that a host starts: Longshore's own, or a vLLM server."""
