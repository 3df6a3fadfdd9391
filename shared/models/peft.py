"""Adapters in PEFT's files: their configuration, and the modules of a model that they adapt."""

import hashlib
import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from longshore.fields import Sha256
from longshore.training import TARGETS, Lora, ModulePattern, ScalarHead, Target
from shared.errors import InvalidInput
from shared.field_rules import refused_value

# --- PEFT's adapter folder ---
# `adapter_config.json` and `adapter_model.safetensors`. Unsupported features are refused.

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor, before the module's Hugging Face name
HEAD_TENSORS = f"{PREFIX}score.weight", f"{PREFIX}score.bias"  # of a head of scalars, a row for each
_PER: dict[str | None, Literal["token", "sequence"]] = {"TOKEN_CLS": "token", "SEQ_CLS": "sequence"}
_HEADS = "classifier", "score"  # what PEFT calls the heads of these tasks, whichever a model has
_NAMES = "scalars"  # in the metadata of the weights' file: PEFT's configuration has no field for names
EMBEDDING = "embed_tokens"  # the end of the embedding module's name
COPIES = (f"{PREFIX}lm_head.base_layer.weight", f".{EMBEDDING}.base_layer.weight")
"""Ends of names of the model's own weights: PEFT writes them beside adapters of output layer and embeddings."""
DRAWN = (".lora_A.weight", ".lora_embedding_B")  # factors that begin at random; the others begin at zero
NORMS = "magnitude_vector"  # the norms of rows that DoRA trains
Dimension = Literal["rank", "inputs", "outputs"]
_PLAIN: frozenset[Target] = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
)  # a model that has one of these has all; other models have other linears instead

# PEFT excludes these in a model that reads images: linears of its towers have the same names as the decoder's.
_TOWERS = r".*(vision_tower|audio_tower|visual)\..*"

# For mixtures whose experts transformers stacks in memory, PEFT stacks the factors too: gate and up together, with
# twice the rank. In files each expert has its own. For most families PEFT also takes names of linears as these stacks
# and skips other linears with these names, so `target_parameters` lists those. For other families it lists the stacks.
EXPERTS = ".mlp.experts."
MLPS = frozenset({"gate_proj", "up_proj", "down_proj"})
UNREAD = ".mixer.experts."
"""In names of experts that have no adapters: PEFT 0.21 stacks no `up_proj` without a `gate_proj`."""
SHARED = ".mlp.shared_expert."
"""In names of families whose linears PEFT reads by their names as they are."""
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_LINEAR = re.compile(r"mlp\.(?:shared_experts\.)?(gate_proj|up_proj|down_proj)\.weight")
_PAIR = r"experts\.gate_up_proj"

# Fields that do not change the result of a finished adapter. Dropout only matters in training, where the run's setting
# applies; configs of initialisations only matter for initialisations that are refused or already done (see _Config).
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    }
)


# transformers renames the modules of some models as it reads them: what names begin with in files, and in memory.
_RENAMED = (
    *(("backbone.", "model."), ("language_model.model.", "model.language_model.")),
    ("language_model.lm_head", "lm_head"),
)


def module_of(tensor: str) -> str:
    """Return the name of the module that a model's tensor belongs to."""
    module = tensor.rpartition(".")[0]
    for in_files, in_memory in _RENAMED:
        if module.startswith(in_files):
            return in_memory + module.removeprefix(in_files)
    return module


def tensors_of(lora: Lora) -> dict[str, tuple[Dimension, ...]]:
    """Return the dimensions of each tensor of a module's adapter, by the part of its name behind `.lora_`."""
    norms: dict[str, tuple[Dimension, ...]] = {NORMS: ("outputs",)} if lora.dora else {}
    return {"A": ("rank", "inputs"), "B": ("outputs", "rank"), **norms}


def name_of(weight: str, kind: str) -> str:
    """Return PEFT's name of an adapter's tensor for a model's weight. Embeddings' A is [rank, tokens]."""
    module = module_of(weight)
    if kind not in ("A", "B"):
        return f"{PREFIX}{module}.lora_{kind}"
    is_linear = module.rpartition(".")[2] != EMBEDDING
    return f"{PREFIX}{module}.lora_" + (f"{kind}.weight" if is_linear else f"embedding_{kind}")


@dataclass(frozen=True)
class ModuleAdapter:
    """An adapter's tensors for one module, by the keys of `tensors_of`."""

    scale: float
    tensors: Mapping[str, NDArray[np.float32]]

    def merged(self, weight_oI: NDArray[np.float32], first_row: int) -> NDArray[np.float32]:
        """Return some rows of the module's weight, from `first_row` on, with the adapter in them."""
        rows = slice(first_row, first_row + len(weight_oI))
        weight_oI = weight_oI + self.scale * (self.tensors["B"][rows] @ self.tensors["A"])
        if (norm_O := self.tensors.get(NORMS)) is not None:
            weight_oI *= (norm_O[rows] / np.linalg.norm(weight_oI, axis=1))[:, None]
        return weight_oI


class _Config(BaseModel):
    """Fields of LoRA and DoRA. PEFT 0.21 has some 31 more, which are refused if they are switched on (_switched_on).

    PEFT's other initialisations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) also change the base model's weights whenever the
    adapter is loaded, and MiCA trains only one matrix.
    """

    model_config = ConfigDict(extra="allow")

    peft_type: Literal["LORA"]
    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...] = Field(min_length=1)
    layers_to_transform: int | tuple[int, ...] | None = None
    layers_pattern: Literal["layers", ""] | tuple[Literal["layers"], ...] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: Literal[True, False, "gaussian", "eva", "orthogonal"] = True
    task_type: str | None = None
    modules_to_save: object = None

    @property
    def per(self) -> Literal["token", "sequence"] | None:
        """The unit that the adapter's head scores; None: `modules_to_save` has no head, or something else."""
        saved = self.modules_to_save
        is_head = isinstance(saved, list) and "score" in saved and all(name in _HEADS for name in saved)
        return _PER.get(self.task_type) if is_head else None


def _switched_on(config: _Config, without_effect: Container[str]) -> list[str]:
    """Return the names of fields that ask for more than plain LoRA, including fields of future versions of PEFT."""
    more = (config.model_extra or {}) | ({"modules_to_save": config.modules_to_save} if config.per is None else {})
    return [
        name
        for name, value in more.items()
        if name not in without_effect and value not in (None, False, "none", {}, [], _TOWERS)
    ]


_OURS = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "layers_to_transform": "layers"}


def config_of(lora: Lora) -> dict[str, object]:
    """The content of `adapter_config.json`, without the training's dropout. Equal adapters have equal contents."""
    config: dict[str, object] = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": lora.target_pattern or [name for name in TARGETS if name in lora.targets],
        "task_type": next((task for task, per in _PER.items() if lora.head and lora.head.per == per), "CAUSAL_LM"),
    }
    more = {
        "modules_to_save": lora.head and ["score"],
        "layers_to_transform": lora.layers and list(lora.layers),
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
    }
    return config | {name: value for name, value in more.items() if value}


def lora_of(config: dict[str, Any], place: str, scalars: tuple[str, ...] | None = None) -> Lora:
    """The adapter that an `adapter_config.json` describes.

    `scalars`: the names of its head's scalars, if it has a head; None: a head is not allowed.

    Raises InvalidInput: it asks for anything but plain LoRA on our linears, or has a head that is not allowed.
    """
    try:
        read = _Config.model_validate(config)
    except ValidationError as error:
        raise InvalidInput(refused_value(error), place) from error
    sizes, is_listed = _without_target_parameters(
        {
            **{"rank": read.r, "alpha": read.lora_alpha, "rank_stabilized": read.use_rslora},
            **{"rank_pattern": read.rank_pattern or {}, "alpha_pattern": read.alpha_pattern or {}},
        },
        read.target_modules,
        config.get("target_parameters"),
    )
    if fields := _switched_on(read, _WITHOUT_EFFECT | ({"target_parameters"} if is_listed else set())):
        value = config[fields[0]]
        rule = "only plain LoRA is computed, and what this field asks for would be ignored"
        raise InvalidInput(f"{fields[0]} = {value!r:.80} cannot be used: {rule}", place)
    if read.per is not None and scalars is None:
        rule = f"its head gives scalars ({read.task_type}), and none of a language model is left to write or score with"
        raise InvalidInput(rule, place)
    names, listed = read.target_modules, read.layers_to_transform
    if isinstance(names, tuple):
        names = (*(name for name in TARGETS if name in names), *(name for name in names if name not in TARGETS))
        if any("." in name for name in names):
            names = rf"(.*\.)?({'|'.join(map(re.escape, names))})"  # as PEFT reads the ends of names
    is_pattern = isinstance(names, str) and names != "all-linear"
    try:
        return Lora(
            layers=(listed,) if isinstance(listed, int) else listed or None,
            head=read.per and ScalarHead(names=scalars or ("value",), per=read.per),
            dora=read.use_dora,
            **sizes,
            **{"target_pattern" if is_pattern else "targets": names},
        )
    except ValidationError as error:
        rule = refused_value(error)
        for theirs, ours in {**_OURS, "target_modules": "target_pattern" if is_pattern else "targets"}.items():
            rule = re.sub(rf"^{ours}\b", theirs, rule)
        raise InvalidInput(rule, place) from error


def _of_pairs(rank: int, alpha: float, is_stabilized: bool) -> dict[str, float]:
    """Return rank and alpha for gate and up together that keep the scale of each."""
    return {"rank_pattern": 2 * rank, "alpha_pattern": alpha * (math.sqrt(2) if is_stabilized else 2)}


def _target_parameters(lora: Lora, adapted: Iterable[str]) -> dict[str, Any]:
    """Return the fields of `adapter_config.json` that an adapter of a mixture needs for these modules."""
    mlps = [name for name in adapted if ".mlp." in name and name.rpartition(".")[2] in MLPS]
    experts = {name.rpartition(".")[2] for name in mlps if EXPERTS in name}
    if not experts and not any(".mlp.shared_experts." in name for name in mlps):
        return {}
    reads_names = any(SHARED in name for name in mlps)
    has_stacks = reads_names or lora.target_pattern is not None  # a pattern of whole names means no stack
    others = () if reads_names else (name for name in mlps if EXPERTS not in name)
    parameters = {f"mlp.{name.rpartition('.mlp.')[2]}.weight" for name in others}
    if experts and (has_stacks or "down_proj" not in experts):  # without it PEFT does not find gate and up
        parameters.add(_DOWN)
    fields: dict[str, Any] = {"lora_dropout": 0.0}  # PEFT loads no stack with dropout
    if "gate_proj" in experts:
        parameters |= {_GATE_UP} if has_stacks else set()
        for field, value in _of_pairs(lora.rank, lora.alpha, lora.rank_stabilized).items():
            if has_stacks or (lora.rank_stabilized and field == "alpha_pattern"):  # else PEFT finds them itself
                fields[field] = {_PAIR: value, **dict(getattr(lora, field))}
    return fields | ({"target_parameters": sorted(parameters)} if parameters else {})


def _without_target_parameters(
    lora: Mapping[str, Any], names: str | tuple[str, ...], parameters: object
) -> tuple[dict[str, Any], bool]:
    """Return fields of a Lora without what `_target_parameters` added, and whether these are its parameters."""
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


def write_config(folder: Path, lora: Lora, tensors: Iterable[str]) -> None:
    """Write `adapter_config.json` for an adapter with these tensors."""
    adapted = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    config = config_of(lora) | {"lora_dropout": lora.dropout} | _target_parameters(lora, adapted)
    if any(".language_model." in name for name in adapted):
        config["exclude_modules"] = _TOWERS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def metadata_of(lora: Lora) -> dict[str, str]:
    """Return the metadata of an adapter's weights, apart from the format."""
    return {} if lora.head is None else {_NAMES: json.dumps(lora.head.names)}


def scalar_names(metadata: Mapping[str, str], num: int) -> tuple[str, ...]:
    """Return the names of a head's scalars from its file's metadata; their numbers, if PEFT has written the file."""
    return tuple(json.loads(metadata.get(_NAMES, "[]")) or map(str, range(num)))


def _scalars(weights: Path) -> tuple[str, ...]:
    try:
        with safe_open(weights, "np") as file:
            return scalar_names(file.metadata() or {}, file.get_slice(HEAD_TENSORS[0]).get_shape()[0])
    except (OSError, SafetensorError):
        return ()  # the reader of the weights will report the error


def read_config(folder: Path, expected: Lora | None = None, may_have_head: bool = False) -> Lora:
    """Return the LoRA configuration of a folder's adapter.

    `may_have_head`: allow a head of scalars, as an `expected` adapter with one does.

    Raises InvalidInput: it is missing, unreadable, asks for anything but plain LoRA on our linears, or differs from
    `expected`.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput(f"the adapter is missing: no {CONFIG}", str(folder)) from error
    except ValueError as error:
        raise InvalidInput(f"not valid JSON: {error}", str(path)) from error
    may_have_head = may_have_head or (expected is not None and expected.head is not None)
    found = lora_of(config, str(path), _scalars(folder / WEIGHTS) if may_have_head else None)
    if expected is not None:
        check_same(found, expected, str(folder))
    return found


def content_sha256(lora: Lora, weights_sha256: Sha256) -> Sha256:
    """Identify an adapter's content: a hash of its configuration and of the hash of its weights' file."""
    return hashlib.sha256(f"{json.dumps(config_of(lora))} {weights_sha256}".encode()).hexdigest()


def check_same(found: Lora, expected: Lora, place: str, in_order: bool = False) -> None:
    """Raises InvalidInput if an adapter's rank, scale or targets differ from the expected ones.

    Targets that the model's family does not have are ignored: see `shared.models.peft.with_own_targets`. So is
    the order of patterns unless `in_order`, since PEFT sorts them when it saves: `check_order` checks if it matters.
    """
    theirs, ours = (lora.model_dump(exclude={"kind", "targets", "dropout", "head"}) for lora in (found, expected))
    for field in () if in_order else ("rank_pattern", "alpha_pattern"):
        theirs[field], ours[field] = sorted(theirs[field]), sorted(ours[field])
    theirs["head"], ours["head"] = str(found.head or "of language"), str(expected.head or "of language")
    for name in theirs:
        if theirs[name] != ours[name]:
            raise InvalidInput(f"the adapter's {name} is {theirs[name]}, {ours[name]} is asked for", place)
    # They fit if both may be the same modules of some model: if one has linears of several families, as the default
    # has; missing tensors are then found by name. Every model has an output layer and embeddings.
    ends: set[Target] = {"lm_head", "embed_tokens"}
    one, other = {*found.targets}, {*expected.targets}
    smaller, larger = sorted((one - ends, other - ends), key=len)
    if ends & (one ^ other) or not (smaller == larger or smaller < larger > _PLAIN):
        wanted = f"{sorted(expected.targets)} is asked for"
        raise InvalidInput(f"the adapter's targets is {sorted(found.targets)}, {wanted}", place)


def not_in_vllm(lora: Lora) -> str | None:
    """Return why vLLM does not serve such an adapter, if it does not."""
    if lora.dora:
        return "vllm serves no adapters with trained norms: drop trainable.dora, or sample with own"
    if EMBEDDING in lora.targets:
        return "adapters of embed_tokens were never tried with vllm: leave them out, or sample with own"
    return None


# --- The modules of a model that an adapter adapts, and the rank and scale of each ---
# Decided by names, as in PEFT.

OUTPUT = "lm_head"
"""The module of the output layer, which is no layer's: PEFT takes it whatever `layers_to_transform` says."""


@dataclass(frozen=True)
class LoraSize:
    """The adapter of one module: y += B A x * scale with A of [rank, inputs]."""

    rank: int
    scale: float


def check_order(found: Lora, expected: Lora, modules: Iterable[str], place: str) -> None:
    """Raise InvalidInput if the different order of two adapters' patterns makes a difference for some module."""
    one, other = AdaptedModules(found), AdaptedModules(expected)
    if (found.rank_pattern, found.alpha_pattern) != (expected.rank_pattern, expected.alpha_pattern):
        for module in modules:
            if (theirs := one.of(module)) != (ours := other.of(module)) and theirs and ours:
                rule = f"of the adapter's patterns the first that matches {module} says {theirs}, of the run's {ours}"
                raise InvalidInput(f"{rule}: name them in the adapter's order", place)


class AdaptedModules:
    """An adapter's settings by names of modules, such as `model.layers.0.self_attn.q_proj`."""

    def __init__(self, lora: Lora) -> None:
        self.lora = lora
        self._whole = None if lora.target_pattern is None else ModulePattern(lora.target_pattern)
        self._ranks = [(ModulePattern(key, is_end=True), rank) for key, rank in lora.rank_pattern]
        self._alphas = [(ModulePattern(key, is_end=True), alpha) for key, alpha in lora.alpha_pattern]
        self.unused = {pattern for pattern, _ in (*self._ranks, *self._alphas)}

    def of(self, module: str) -> LoraSize | None:
        """Return a module's adapter, if it has one."""
        if not self._is_targeted(module):
            return None
        rank = int(self._first(self._ranks, module, self.lora.rank))
        alpha = self._first(self._alphas, module, self.lora.alpha)
        return size_of(self.lora, rank, alpha)

    def _is_targeted(self, module: str) -> bool:
        if self._whole is not None:
            return self._whole.matches(module)
        if _last(module) not in self.lora.targets or UNREAD in module:
            return False
        return module == OUTPUT or self.lora.layers is None or layer_of(module) in self.lora.layers

    def _first(self, pairs: Sequence[tuple[ModulePattern, float]], module: str, otherwise: float) -> float:
        found = next((pair for pair in pairs if pair[0].matches(module)), None)
        self.unused.discard(found and found[0])
        return otherwise if found is None else found[1]


def size_of(lora: Lora, rank: int, alpha: float) -> LoraSize:
    """Return the size of an adapter with this rank and alpha."""
    return LoraSize(rank, alpha / (math.sqrt(rank) if lora.rank_stabilized else rank))


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def layer_of(module: str) -> int | None:
    """Return the number of the layer that a module is in."""
    return next((int(part) for part in module.split(".")[2:-1] if part.isdecimal()), None)


def with_own_targets(lora: Lora, linears: Container[str]) -> Lora:
    """Return an adapter's settings with only the targets that a model has, as PEFT does.

    Raises InvalidInput: the model has none of the targets.
    """
    if lora.target_pattern is not None:
        return lora
    targets = tuple(name for name in TARGETS if name in lora.targets and (name in linears or name == OUTPUT))
    if not targets:
        raise InvalidInput(f"this model has no linear {' or '.join(lora.targets)}", "targets")
    return lora.model_copy(update={"targets": targets})


def beside(lora: Lora, modules: Mapping[str, bool], is_new: bool = False) -> Lora:
    """Check an adapter's settings against a model. Returns them as `with_own_targets`.

    Args:
        modules: names of all of the model's modules with a weight, and whether each can be adapted.
        is_new: the adapter is trained from scratch, and PEFT must be able to load the result.

    Raises:
        InvalidInput: the model has no such modules, or lacks a layer or a match of a pattern; or a pattern matches a
            module that cannot be adapted; or PEFT would leave something out.
    """
    modules = {**{name: takes and UNREAD not in name for name, takes in modules.items()}, OUTPUT: True}  # also if tied
    linears = {_last(name) for name, takes_adapter in modules.items() if takes_adapter}
    if EMBEDDING in lora.targets and EMBEDDING not in linears:
        raise InvalidInput(f"this model's embeddings are not called {EMBEDDING}, and take no adapter", "targets")
    lora = with_own_targets(lora, linears)
    adapted = AdaptedModules(lora)
    above = {".".join(parts[:n]) for parts in (name.split(".") for name in modules) for n in range(1, len(parts))}
    sizes = {name: adapted.of(name) for name in {*modules, *above}}
    found = [name for name, size in sizes.items() if size is not None]
    if others := sorted(name for name in found if not modules.get(name)):
        raise InvalidInput(f"the pattern means {others[0]}, too, which takes no adapter", "target_pattern")
    if lora.dora and (without := sorted(name for name in found if layer_of(name) is None or ".experts." in name)):
        raise InvalidInput(f"DoRA is of linears of layers, experts' excepted, and not of {without[0]}", "dora")
    if lacking := sorted(set(lora.layers or ()) - {layer_of(name) for name in found}):
        raise InvalidInput(f"this model has nothing to adapt in layer {lacking[0]}", "layers")
    if not found:
        raise InvalidInput("this model has no linear of that name", "trainable")
    if lora.head is not None and OUTPUT in found:
        raise InvalidInput("the pattern means lm_head, and a head of its own stands in its place", "target_pattern")
    if adapted.unused:
        unused = min(pattern.expression for pattern in adapted.unused)
        raise InvalidInput(f"no module with an adapter has a name like that: {unused}", "trainable")
    if is_new and any(EXPERTS in name for name in modules):
        _check_mixture(lora, {name: sizes[name] for name in modules if ".mlp." in name and _last(name) in MLPS})
    return lora


def _check_mixture(lora: Lora, sizes: Mapping[str, LoraSize | None]) -> None:
    """Refuse an adapter of a mixture's MLPs that PEFT would not load unchanged. PEFT stacks a layer's experts.

    `sizes`: the adapter's size for each linear of the MLPs, by name; None: not adapted.
    """
    place = "targets" if lora.target_pattern is None else "target_pattern"
    adapted = {name: size for name, size in sizes.items() if size is not None}
    if other := next((name for name, size in adapted.items() if size != size_of(lora, lora.rank, lora.alpha)), None):
        rule = "PEFT has the adapter's own rank and alpha there: leave MLPs out of rank_pattern and alpha_pattern"
        raise InvalidInput(f"{other} is of a mixture: {rule}", "trainable")
    if lora.dora and (other := next((name for name in adapted if SHARED not in name), None)):
        raise InvalidInput(f"PEFT has no DoRA beside MLPs of such a mixture, as {other} is", "dora")
    kinds = {_last(name) for name in adapted}
    stacks = {(layer_of(name), _last(name) == "down_proj") for name in adapted if EXPERTS in name}
    whole = {name for name in sizes if EXPERTS in name and (layer_of(name), _last(name) == "down_proj") in stacks}
    if len(kinds & {"gate_proj", "up_proj"}) == 1 or whole - {*adapted}:
        rule = "gate_proj and up_proj go together, and a layer's experts"
        raise InvalidInput(f"PEFT stacks MLPs of a mixture: {rule}, or leave them out", place)
    if adapted and not any(EXPERTS in name or SHARED.rstrip(".") in name for name in adapted):
        raise InvalidInput("only dense MLPs of a mixture are meant: add a layer with experts, or leave them out", place)
