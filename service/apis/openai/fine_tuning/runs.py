"""Translate a fine-tuning job of OpenAI's clients into a run of ours. Pure: files and models were looked up before."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, ValidationError, WithJsonSchema, model_validator

from longshore.fields import Frozen
from service.apis.errors import validation_problem
from service.inference.published_models import StartingPoint
from service.runs.own_settings import LORA_FIELDS, OwnSettings
from shared.errors import InvalidInput
from shared.grading import Grader
from shared.jobs.losses import AdvantageKind, Objective, Preset
from shared.runs.dataset_runs import DPORun, Format, SFTRun
from shared.runs.requests import MAX_METADATA, MetadataKey, MetadataValue, RLRun, Rollouts, Run, Source, WandbRun

# --- The values of `auto` ---
# Hyperparameters from the number of examples (docs/openai_api.md); also counts examples.

_UNKNOWN_BATCH, _UNKNOWN_EPOCHS, _UNKNOWN_INTERVAL = 8, 3, 10
_LARGEST_BATCH, _MOST_PROMPTS = 64, 32
_FEW, _MANY, _VERY_MANY = 100, 10_000, 50_000
_SEEN, _RL_STEPS, _MOST_EPOCHS = 300, 50, 25
_EVALUATIONS = 10
_LOOKED_AT_BYTES = 32 << 20
# gzip, zstd, zip and Parquet: examples in such files are not counted.
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1")


def batch_size(num_examples: int | None) -> int:
    """Return the power of two nearest to a quarter of the square root of the number, from 1 to 64; 8 if unknown."""
    if num_examples is None:
        return _UNKNOWN_BATCH
    return min(_LARGEST_BATCH, 2 ** max(0, round(math.log2(max(1.0, math.sqrt(num_examples) / 4)))))


def num_epochs(num_examples: int | None) -> int:
    """Return 3; below 100 examples as many as make 300 in all, at most 25; 2 beyond 10,000; 1 beyond 50,000."""
    match num_examples:
        case None:
            return _UNKNOWN_EPOCHS
        case few if few < _FEW:
            return min(_MOST_EPOCHS, math.ceil(_SEEN / max(1, few)))
        case _:
            return 3 if num_examples <= _MANY else 2 if num_examples <= _VERY_MANY else 1


def prompts_per_step(num_prompts: int | None) -> int:
    """Return the largest power of two that is at most the number of prompts, and at most 32; 8 if unknown."""
    if num_prompts is None:
        return _UNKNOWN_BATCH
    return min(_MOST_PROMPTS, 2 ** int(math.log2(max(1, num_prompts))))


def rollout_epochs(num_prompts: int | None, per_step: int) -> int:
    """The number of passes that make 50 steps, at most 25; one for an unknown number of prompts."""
    if num_prompts is None:
        return 1
    return max(1, min(_MOST_EPOCHS, math.ceil(_RL_STEPS * per_step / max(1, num_prompts))))


def evaluation_interval(num_examples: int | None, epochs: float, per_step: int) -> int:
    """Steps between evaluations: a tenth of all; 10 where their number is not known."""
    if num_examples is None:
        return _UNKNOWN_INTERVAL
    return max(1, math.ceil(num_examples * epochs / per_step / _EVALUATIONS))


def count_examples(pieces: Iterable[bytes], num_bytes: int) -> int | None:
    """Count the lines of a JSONL file that are not blank; beyond 32 MiB the number is extrapolated.

    Args:
        pieces: the file from its beginning; only as many as needed are taken.
        num_bytes: the file's size.

    Returns:
        None for a file that does not consist of lines.
    """
    seen, count, rest = 0, 0, b""
    for piece in pieces:
        if not seen and (piece.startswith(_PACKED) or piece.lstrip()[:1] == b"["):
            return None
        seen += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        count += sum(1 for line in lines if line.strip())
        if seen >= _LOOKED_AT_BYTES:
            break
    if seen >= num_bytes:
        return count + bool(rest.strip())
    whole = seen - len(rest)
    return round(count * num_bytes / whole) if whole else None


# --- The request of a fine-tuning job ---
# OpenAI's fields, and ours under `longshore`. `runs.py` makes a run of it.
#
# Unknown fields are refused, since ignoring one would train another model than was asked for.

MAX_SUFFIX = 64


def _automatic(given: Any) -> Any:
    return None if given == "auto" else given


def _auto(kind: str) -> Any:
    return WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": kind}, {"type": "null"}]})


# None: chosen here, by the rules of docs/openai_api.md.
AutoInt = Annotated[int | None, BeforeValidator(_automatic), _auto("integer")]
AutoFloat = Annotated[float | None, BeforeValidator(_automatic), _auto("number")]


def _at_most(most: int, instead: str = "") -> AfterValidator:
    """Return a validator by a bound of OpenAI's, which protects the installation. `instead`: our own setting."""

    def check(given: float | None) -> float | None:
        if given is not None and given > most:
            more = f": for more, give {instead} in `longshore`" if instead else ""
            raise ValueError(f"at most {most}, as at OpenAI{more}")
        return given

    return AfterValidator(check)


class Hyperparameters(Frozen):
    """Hyperparameters of every method."""

    batch_size: Annotated[AutoInt, _at_most(256, "batch_tokens")] = None
    learning_rate_multiplier: AutoFloat = None
    n_epochs: Annotated[AutoInt, _at_most(50, "steps")] = None


class DpoHyperparameters(Hyperparameters):
    beta: Annotated[AutoFloat, _at_most(2)] = None


class ReinforcementHyperparameters(Hyperparameters):
    batch_size: Annotated[AutoInt, _at_most(256)] = None
    compute_multiplier: Annotated[AutoFloat, _at_most(10, "group_size")] = None
    eval_interval: AutoInt = None
    eval_samples: AutoInt = None
    reasoning_effort: Literal["default"] | None = Field(
        default=None, description="templates of open models have no such switch: only `default`"
    )


class Supervised(Frozen):
    hyperparameters: Hyperparameters = Hyperparameters()


class Dpo(Frozen):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class Reinforcement(Frozen):
    grader: Grader
    hyperparameters: ReinforcementHyperparameters = ReinforcementHyperparameters()


class Method(Frozen):
    """The training method. Settings of another method than `type` are refused."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    reinforcement: Reinforcement | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> Self:
        for name in ("supervised", "dpo", "reinforcement"):
            if name != self.type and getattr(self, name) is not None:
                raise ValueError(f"{name} would be ignored: the type is {self.type}")
        if self.type == "reinforcement" and self.reinforcement is None:
            raise ValueError("reinforcement needs its settings: a grader, at least")
        return self


class WandbIntegration(Frozen):
    """The W&B run that a job is written to."""

    type: Literal["wandb"]
    wandb: WandbRun


class LongshoreSettings(OwnSettings):
    """Our own settings, by their native names (docs/api.md); those that are absent have their native defaults.

    Settings that the job's method does not have are refused.
    """

    full: bool | None = Field(default=None, description="train every weight instead of a LoRA adapter")
    batch_tokens: int | None = Field(default=None, description="replaces batch_size")
    steps: int | None = Field(default=None, description="replaces n_epochs")
    learning_rate: float | None = Field(default=None, description="replaces learning_rate_multiplier")
    schedule: Literal["constant", "linear", "cosine"] | None = None
    warmup_steps: int | None = None
    max_lost_fraction: float | None = None
    too_long: Literal["drop", "truncate"] | None = None
    eval_every: int | None = None
    num_samples: int | None = None
    sample_tokens: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int | None = None
    format: Format | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    assistant_turns: Literal["all", "last"] | None = None
    assistant_pattern: str | None = None
    objective: Objective | None = None
    label_smoothing: float | None = None
    gamma: float | None = None
    rpo_alpha: float | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    reference: str | None = None
    algorithm: Preset | None = None
    advantages: AdvantageKind | None = None
    mini_batches: int | None = None
    group_size: int | None = Field(default=None, description="replaces compute_multiplier")
    max_completion_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    redraws: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    off_policy_steps: int | None = None
    sampler_url: str | None = None
    probe_bound: float | None = None
    routing_replay: Literal["on", "off"] | None = None
    max_ungraded_fraction: float | None = None
    target: float | None = Field(
        default=None, description="the job ends when the mean grade of validation prompts reaches this"
    )

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were sent, by name; null counts as absent."""
        return {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}


class JobRequest(Frozen):
    """`POST /v1/fine_tuning/jobs`."""

    model: str = Field(
        min_length=1, max_length=2048, description="a hub id, folder or URI; or the name of a model that you published"
    )
    training_file: str = Field(
        min_length=1, max_length=2048, description="the id of a file with the purpose fine-tune; or a URI of a dataset"
    )
    validation_file: str | None = Field(default=None, min_length=1, max_length=2048)
    method: Method | None = None
    hyperparameters: Hyperparameters | None = Field(
        default=None, description="deprecated: use method.supervised.hyperparameters"
    )
    suffix: str | None = Field(default=None, max_length=MAX_SUFFIX, description="the name to publish the result under")
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    metadata: dict[MetadataKey, MetadataValue] | None = Field(default=None, max_length=MAX_METADATA)
    integrations: tuple[WandbIntegration, ...] | None = Field(default=None, max_length=1)
    longshore: LongshoreSettings = LongshoreSettings()

    @model_validator(mode="after")
    def _one_place_for_hyperparameters(self) -> Self:
        if self.hyperparameters is None or self.method is None:
            return self
        if self.method.type != "supervised" or self.method.supervised is not None:
            raise ValueError("hyperparameters stand in method: those beside it would be ignored")
        return self

    @property
    def how(self) -> Supervised | Dpo | Reinforcement:
        """The method with its settings, from `method` or from the older field for hyperparameters."""
        match self.method:
            case None:
                return Supervised(hyperparameters=self.hyperparameters or Hyperparameters())
            case Method(type="dpo", dpo=dpo):
                return dpo or Dpo()
            case Method(type="reinforcement", reinforcement=Reinforcement() as reinforcement):
                return reinforcement
            case Method(supervised=supervised):
                return supervised or Supervised(hyperparameters=self.hyperparameters or Hyperparameters())


_KEPT_CHECKPOINTS = 3
_GROUP_SIZE = Rollouts.model_fields["group_size"].default
_DATASET_FIELDS = ("format", "prompt_field", "completion_field", "assistant_turns", "assistant_pattern")
_ROLLOUT_FIELDS = (
    "steps",
    "group_size",
    "max_completion_tokens",
    "stop",
    "redraws",
    "top_p",
    "top_k",
    "off_policy_steps",
    "sampler_url",
    "probe_bound",
    "routing_replay",
    "max_ungraded_fraction",
    "max_lost_fraction",
)
# Full fine-tuning moves every weight: its default rate is a tenth of LoRA's.
_FULL_RATE = 0.1


@dataclass(frozen=True)
class Examples:
    """A dataset: its URI, and its number of examples if known."""

    uri: str
    count: int | None = None


@dataclass
class _Draft:
    """A run's fields while they are collected, and the client's names of those that it names differently."""

    fields: dict[str, Any]
    names: dict[str, str]

    def set(self, field: str, value: Any, name: str) -> None:
        self.fields[field] = value
        self.names[field] = name


def run_of_job(
    request: JobRequest, start: StartingPoint, training: Examples, validation: Examples | None
) -> tuple[Run, dict[str, JsonValue]]:
    """Make the run of a job. Returns it, and the hyperparameters that were chosen, in the form for clients.

    Raises InvalidInput: names the client's field and the rule that it breaks.
    """
    place = "hyperparameters" if request.method is None else f"method.{request.method.type}.hyperparameters"
    extra = request.longshore.given
    draft = _Draft(_common(request, start, extra), {"name": "suffix", "initial_adapter": "model"})
    _refuse_both(request.how.hyperparameters, extra, place)
    match request.how:
        case Supervised(hyperparameters=chosen):
            shown = _dataset(draft, chosen, extra, place, training, validation, SFTRun)
            return _made(SFTRun, draft), shown
        case Dpo(hyperparameters=chosen):
            shown = _dataset(draft, chosen, extra, place, training, validation, DPORun)
            if chosen.beta is not None:
                draft.set("beta", chosen.beta, f"{place}.beta")
            run = _made(DPORun, draft)
            return run, {**shown, "beta": run.beta}
        case Reinforcement() as method:
            shown = _reinforcement(draft, method, extra, place, training, validation)
            return _made(RLRun, draft), shown


def published_name(suffix: str | None) -> str | None:
    """Make the name of published adapters from a job's suffix: in lower case, with dashes for other characters.

    Raises InvalidInput: nothing is left of it.
    """
    if not suffix:
        return None
    name = re.sub(r"[^a-z0-9._-]+", "-", suffix.lower())
    name = name.lstrip("-._")[:63]
    if not name:
        raise InvalidInput("a suffix has at least one letter or digit", "suffix")
    return name


def openai_source(request: JobRequest, hyperparameters: dict[str, JsonValue]) -> Source:
    """The source of a job's run: its request, to be shown again."""
    kept: dict[str, JsonValue] = {
        "model": request.model,
        "training_file": request.training_file,
        "validation_file": request.validation_file,
        "suffix": request.suffix,
        "hyperparameters": hyperparameters,
    }
    wandb = request.integrations[0].wandb if request.integrations else None
    return Source(api="openai", metadata=request.metadata or {}, wandb=wandb, request=kept)


def _common(request: JobRequest, start: StartingPoint, extra: dict[str, Any]) -> dict[str, Any]:
    """Fields that all runs have; the rest of `extra` belongs to some kinds of runs."""
    fields: dict[str, Any] = {
        "name": published_name(request.suffix),
        "model": start.model,
        "initial_adapter": start.initial_adapter,
        "trainable": _trainable(start, extra),
    }
    if request.seed is not None:
        fields["seed"] = request.seed
    return fields


def _trainable(start: StartingPoint, extra: dict[str, Any]) -> dict[str, Any]:
    lora = {name: extra.pop(name) for name in LORA_FIELDS if name in extra}
    if extra.pop("full", False):
        if lora:
            raise InvalidInput("full training has no adapter, whose settings these would be", "longshore")
        return {"kind": "full"}
    before = start.lora.model_dump(include=set(LORA_FIELDS)) if start.lora else {}
    return {"kind": "lora", **before, **lora}


def _refuse_both(chosen: Hyperparameters, extra: Mapping[str, Any], place: str) -> None:
    """Raise InvalidInput for a setting that is given twice, in OpenAI's field and in ours."""
    pairs = {
        "learning_rate": "learning_rate_multiplier",
        "batch_tokens": "batch_size",
        "steps": "n_epochs",
        "group_size": "compute_multiplier",
    }
    for ours, theirs in pairs.items():
        if ours in extra and getattr(chosen, theirs, None) is not None:
            raise InvalidInput(f"{theirs} and longshore.{ours} say one thing: give one of them", f"{place}.{theirs}")


def _dataset(
    draft: _Draft,
    chosen: Hyperparameters,
    extra: dict[str, Any],
    place: str,
    training: Examples,
    validation: Examples | None,
    kind: type[SFTRun] | type[DPORun],
) -> dict[str, JsonValue]:
    """Fill in a run on a dataset; returns the hyperparameters as they were chosen."""
    reading = {name: extra.pop(name) for name in _DATASET_FIELDS if name in extra}
    draft.set("dataset", {"uri": training.uri, **reading}, "training_file")
    epochs = _given(chosen.n_epochs, num_epochs(training.count))
    batch = _given(chosen.batch_size, batch_size(training.count))
    shown: dict[str, JsonValue] = {**_rate(draft, chosen, extra, place, kind)}
    if "steps" not in extra:
        draft.set("epochs", epochs, f"{place}.n_epochs")
        shown["n_epochs"] = epochs
    if "batch_tokens" not in extra:
        draft.set("batch_size", batch, f"{place}.batch_size")
        shown["batch_size"] = batch
    if validation is not None:
        draft.set("eval_dataset", {"uri": validation.uri, **reading}, "validation_file")
        if {"steps", "batch_tokens"}.isdisjoint(extra) and training.count is not None:
            draft.fields["eval_every"] = evaluation_interval(training.count, epochs, max(1, batch))
    draft.fields["keep_checkpoints"] = _KEPT_CHECKPOINTS
    draft.fields.update(extra)
    return shown


def _reinforcement(
    draft: _Draft,
    method: Reinforcement,
    extra: dict[str, Any],
    place: str,
    training: Examples,
    validation: Examples | None,
) -> dict[str, JsonValue]:
    chosen = method.hyperparameters
    reading = {name: extra.pop(name) for name in _DATASET_FIELDS if name in extra}
    rollouts: dict[str, Any] = {name: extra.pop(name) for name in _ROLLOUT_FIELDS if name in extra}
    batch = _given(chosen.batch_size, prompts_per_step(training.count))
    epochs = _given(chosen.n_epochs, rollout_epochs(training.count, max(1, batch)))
    multiplier = _given(chosen.compute_multiplier, 1.0)
    shown: dict[str, JsonValue] = {
        **_rate(draft, chosen, extra, place, RLRun),
        "batch_size": batch,
        "compute_multiplier": multiplier,
    }
    if "steps" not in rollouts:
        rollouts["epochs"] = shown["n_epochs"] = epochs
    rollouts.setdefault("group_size", max(2, round(_GROUP_SIZE * multiplier)))
    rollouts |= {"prompts": {"uri": training.uri, **reading}, "grader": method.grader, "prompts_per_step": batch}
    if validation is not None:
        interval = _given(chosen.eval_interval, evaluation_interval(training.count, epochs, max(1, batch)))
        samples = _given(chosen.eval_samples, 1)
        shown |= {"eval_interval": interval, "eval_samples": samples}
        temperature = extra.get("temperature", 1.0) if samples > 1 else 0.0
        rollouts["held_out"] = {
            "prompts": {"uri": validation.uri, **reading},
            "every_steps": interval,
            "samples_per_prompt": samples,
            "temperature": temperature,
            "target": extra.pop("target", None),
        }
    else:
        _refuse_without_validation(chosen, extra, place)
    draft.fields["rollouts"] = rollouts
    draft.names |= {
        "rollouts.prompts": "training_file",
        "rollouts.grader": "method.reinforcement.grader",
        "rollouts.prompts_per_step": f"{place}.batch_size",
        "rollouts.epochs": f"{place}.n_epochs",
        "rollouts.held_out.prompts": "validation_file",
        "rollouts.held_out.every_steps": f"{place}.eval_interval",
        "rollouts.held_out.samples_per_prompt": f"{place}.eval_samples",
    }
    draft.fields.update(extra)
    return shown


def _refuse_without_validation(chosen: ReinforcementHyperparameters, extra: Mapping[str, Any], place: str) -> None:
    given = [f"{place}.{name}" for name in ("eval_interval", "eval_samples") if getattr(chosen, name) is not None]
    given += ["longshore.target"] if "target" in extra else []
    if given:
        raise InvalidInput("there is no validation_file, so nothing would be evaluated", given[0])


def _rate(
    draft: _Draft, chosen: Hyperparameters, extra: Mapping[str, Any], place: str, kind: type[SFTRun | DPORun | RLRun]
) -> dict[str, JsonValue]:
    """Set the learning rate: the native default of the kind of run, times the multiplier."""
    if "learning_rate" in extra:
        return {}
    multiplier = _given(chosen.learning_rate_multiplier, 1.0)
    is_full = draft.fields["trainable"]["kind"] == "full"
    rate = kind.model_fields["learning_rate"].default * (_FULL_RATE if is_full else 1.0)
    draft.set("learning_rate", multiplier * rate, f"{place}.learning_rate_multiplier")
    return {"learning_rate_multiplier": multiplier}


def _given(value: Any, automatic_value: Any) -> Any:
    """Return a value; if it is None, the automatic one (0 is a value)."""
    return automatic_value if value is None else value


def _made(kind: Any, draft: _Draft) -> Any:
    fields = {name: value for name, value in draft.fields.items() if value is not None}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problem = validation_problem(error.errors())
        raise InvalidInput(problem.message, _place(problem.place, draft.names)) from None


def _place(place: str | None, names: Mapping[str, str]) -> str:
    """Return the client's name of a run's field: its own, or below `longshore`."""
    if place is None:
        return "longshore"
    known = [name for name in names if place == name or place.startswith(f"{name}.")]
    if known:
        longest = max(known, key=len)
        return names[longest] + place[len(longest) :]
    for prefix in ("trainable.", "rollouts.held_out.", "rollouts.", "dataset."):
        place = place.removeprefix(prefix)
    return f"longshore.{place}"
