"""Translate a fine-tuning job of OpenAI's clients into a run of ours. Pure: files and models were looked up before."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, WithJsonSchema, model_validator

from longshore.dataset_runs import DatasetSource, DPORun, SFTRun
from longshore.fields import Frozen
from longshore.grading import Grader
from longshore.runs import MAX_METADATA, HeldOut, MetadataKey, MetadataValue, RLRun, Rollouts, Run, Source, WandbRun
from longshore.training import Lora
from service.apis.errors import made
from service.inference.published_models import LORA_FIELDS, StartingPoint, settings_of
from shared.errors import InvalidInput

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
# OpenAI's fields, and ours under `longshore`.
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


# Fields that the job's own ones set, or that are models of their own.
_JOBS_OWN = {
    *("kind", "schema_version", "name", "model", "initial_adapter", "trainable", "seed", "dataset", "eval_dataset"),
    "eval_datasets",
    *("epochs", "batch_size", "beta", "rollouts", "loss", "critic"),
}
_ROLLOUTS_OWN = {"epochs", "prompts", "grader", "prompts_per_step", "held_out"}


_settings: Any = settings_of(
    {
        Lora: set(LORA_FIELDS),
        **{kind: kind.model_fields.keys() - _JOBS_OWN for kind in (SFTRun, DPORun, RLRun)},
        DatasetSource: DatasetSource.model_fields.keys() - {"uri"},
        Rollouts: Rollouts.model_fields.keys() - _ROLLOUTS_OWN,
        HeldOut: {"target"},
    }
)


class LongshoreSettings(_settings):
    """Our own settings: the fields of the method's run, of its adapter, its dataset and its rollouts (docs/runs.md).

    Absent ones have their native defaults. Settings that the job's method does not have are refused. `steps` replaces
    n_epochs, `batch_tokens` batch_size, `learning_rate` learning_rate_multiplier, `group_size` compute_multiplier. The
    job ends when the mean grade of validation prompts reaches `target`.
    """

    full: bool | None = Field(default=None, description="train every weight instead of a LoRA adapter")
    # Checked with the run: of an algorithm's loss they may have some fields alone.
    loss: dict[str, JsonValue] | None = Field(default=None, description="the loss of a reinforcement job")
    critic: dict[str, JsonValue] | None = Field(default=None, description="the critic of a reinforcement job")


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
# Full fine-tuning moves every weight: its default rate is a tenth of LoRA's.
_FULL_RATE = 0.1


@dataclass(frozen=True)
class Examples:
    """A dataset: its URI, and its number of examples if known."""

    uri: str
    count: int | None = None


_KINDS: dict[type, Any] = {Supervised: SFTRun, Dpo: DPORun, Reinforcement: RLRun}
# The client's names of a run's fields: those that the job sets, and hyperparameters of its method.
_NAMES = {
    "name": "suffix",
    "initial_adapter": "model",
    "dataset": "training_file",
    "eval_dataset": "validation_file",
    "rollouts.prompts": "training_file",
    "rollouts.grader": "method.reinforcement.grader",
    "rollouts.held_out.prompts": "validation_file",
}
_HYPERPARAMETERS = {
    "learning_rate": "learning_rate_multiplier",
    "epochs": "n_epochs",
    "batch_size": "batch_size",
    "beta": "beta",
    "rollouts.epochs": "n_epochs",
    "rollouts.prompts_per_step": "batch_size",
    "rollouts.held_out.every_steps": "eval_interval",
    "rollouts.held_out.samples_per_prompt": "eval_samples",
}
# Settings, and the hyperparameters that they replace.
_INSTEAD = {
    "learning_rate": "learning_rate_multiplier",
    "batch_tokens": "batch_size",
    "steps": "n_epochs",
    "group_size": "compute_multiplier",
}


def run_of_job(
    request: JobRequest, start: StartingPoint, training: Examples, validation: Examples | None
) -> tuple[Run, dict[str, JsonValue], Mapping[str, str]]:
    """Make the run of a job. Returns it; the hyperparameters that were chosen, in the form for clients; and the
    client's names of fields of the run, for `client_place`.

    Raises InvalidInput: names the client's field and the rule that it breaks.
    """
    place = "hyperparameters" if request.method is None else f"method.{request.method.type}.hyperparameters"
    how, given = request.how, request.longshore.given
    chosen = how.hyperparameters
    for ours, theirs in _INSTEAD.items():
        if ours in given and getattr(chosen, theirs, None) is not None:
            raise InvalidInput(f"{theirs} and longshore.{ours} say one thing: give one of them", f"{place}.{theirs}")
    names = _NAMES | {field: f"{place}.{name}" for field, name in _HYPERPARAMETERS.items() if field not in given}
    kind: type[SFTRun] | type[DPORun] | type[RLRun] = _KINDS[type(how)]
    fields: dict[str, Any] = {
        "name": published_name(request.suffix),
        "model": start.model,
        "initial_adapter": start.initial_adapter,
        "trainable": _trainable(start, given),
    }
    fields |= {} if request.seed is None else {"seed": request.seed}
    shown: dict[str, JsonValue] = {}
    if "learning_rate" not in given:
        shown["learning_rate_multiplier"] = multiplier = _given(chosen.learning_rate_multiplier, 1.0)
        is_full = fields["trainable"]["kind"] == "full"
        fields["learning_rate"] = (
            multiplier * kind.model_fields["learning_rate"].default * (_FULL_RATE if is_full else 1)
        )
    match how:
        case Reinforcement():
            fields["rollouts"], of_kind = _rollouts(how, given, training, validation, place)
        case _:
            dataset, of_kind = _dataset(chosen, given, training, validation)
            fields |= dataset
    run = made(kind, fields | given, names)
    of_kind |= {"beta": run.beta} if isinstance(run, DPORun) else {}
    return run, shown | of_kind, names


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
    kept = request.model_dump(include={"model", "training_file", "validation_file", "suffix"})
    wandb = request.integrations[0].wandb if request.integrations else None
    return Source(
        api="openai", metadata=request.metadata or {}, wandb=wandb, request=kept | {"hyperparameters": hyperparameters}
    )


def _trainable(start: StartingPoint, given: dict[str, Any]) -> dict[str, Any]:
    lora = _taken(given, Lora)
    if given.pop("full", False):
        if lora:
            raise InvalidInput("full training has no adapter, whose settings these would be", "longshore")
        return {"kind": "full"}
    before = start.lora.model_dump(include=set(LORA_FIELDS)) if start.lora else {}
    return {"kind": "lora", **before, **lora}


def _dataset(
    chosen: Hyperparameters, given: dict[str, Any], training: Examples, validation: Examples | None
) -> tuple[dict[str, Any], dict[str, JsonValue]]:
    """Return the fields of a run on a dataset, and the hyperparameters that were chosen."""
    reading = _taken(given, DatasetSource)
    epochs = _given(chosen.n_epochs, num_epochs(training.count))
    batch = _given(chosen.batch_size, batch_size(training.count))
    fields: dict[str, Any] = {"dataset": {"uri": training.uri, **reading}, "keep_checkpoints": _KEPT_CHECKPOINTS}
    shown: dict[str, JsonValue] = {}
    if "steps" not in given:
        fields["epochs"] = shown["n_epochs"] = epochs
    if "batch_tokens" not in given:
        fields["batch_size"] = shown["batch_size"] = batch
    if isinstance(chosen, DpoHyperparameters) and chosen.beta is not None:
        fields["beta"] = chosen.beta
    if validation is not None:
        fields["eval_dataset"] = {"uri": validation.uri, **reading}
        if {"steps", "batch_tokens"}.isdisjoint(given) and training.count is not None:
            fields["eval_every"] = evaluation_interval(training.count, epochs, max(1, batch))
    return fields, shown


def _rollouts(
    method: Reinforcement, given: dict[str, Any], training: Examples, validation: Examples | None, place: str
) -> tuple[dict[str, Any], dict[str, JsonValue]]:
    """Return the rollouts of a run, and the hyperparameters that were chosen."""
    chosen = method.hyperparameters
    reading = _taken(given, DatasetSource)
    fields = _taken(given, Rollouts)
    batch = _given(chosen.batch_size, prompts_per_step(training.count))
    epochs = _given(chosen.n_epochs, rollout_epochs(training.count, max(1, batch)))
    multiplier = _given(chosen.compute_multiplier, 1.0)
    shown: dict[str, JsonValue] = {"batch_size": batch, "compute_multiplier": multiplier}
    if "steps" not in fields:
        fields["epochs"] = shown["n_epochs"] = epochs
    fields.setdefault("group_size", max(2, round(_GROUP_SIZE * multiplier)))
    fields |= {"prompts": {"uri": training.uri, **reading}, "grader": method.grader, "prompts_per_step": batch}
    if validation is None:
        unused = [f"{place}.{name}" for name in ("eval_interval", "eval_samples") if getattr(chosen, name) is not None]
        unused += ["longshore.target"] if "target" in given else []
        if unused:
            raise InvalidInput("there is no validation_file, so nothing would be evaluated", unused[0])
        return fields, shown
    interval = _given(chosen.eval_interval, evaluation_interval(training.count, epochs, max(1, batch)))
    samples = _given(chosen.eval_samples, 1)
    fields["held_out"] = {
        "prompts": {"uri": validation.uri, **reading},
        "every_steps": interval,
        "samples_per_prompt": samples,
        "temperature": given.get("temperature", 1.0) if samples > 1 else 0.0,
        "target": given.pop("target", None),
    }
    return fields, shown | {"eval_interval": interval, "eval_samples": samples}


def _taken(given: dict[str, Any], model: type[Frozen]) -> dict[str, Any]:
    """Take the settings that are fields of a model out of those that are left."""
    return {name: given.pop(name) for name in model.model_fields if name in given}


def _given(value: Any, automatic_value: Any) -> Any:
    """Return a value; if it is None, the automatic one (0 is a value)."""
    return automatic_value if value is None else value
