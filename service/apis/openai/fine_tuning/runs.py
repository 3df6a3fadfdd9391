"""Translate a fine-tuning job of OpenAI's clients into a run of ours. Pure: files and models were looked up before."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue, ValidationError

from service.apis.errors import validation_problem
from service.apis.openai.fine_tuning import automatic
from service.apis.openai.fine_tuning.request import (
    Dpo,
    Hyperparameters,
    JobRequest,
    Reinforcement,
    ReinforcementHyperparameters,
    Supervised,
)
from service.inference.named_models import StartingPoint
from service.runs.own_settings import LORA_FIELDS
from shared.errors import InvalidInput
from shared.runs.dataset_runs import DPORun, SFTRun
from shared.runs.requests import RLRun, Run, Source
from shared.runs.rollouts import Rollouts

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
    epochs = _given(chosen.n_epochs, automatic.num_epochs(training.count))
    batch = _given(chosen.batch_size, automatic.batch_size(training.count))
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
            draft.fields["eval_every"] = automatic.evaluation_interval(training.count, epochs, max(1, batch))
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
    batch = _given(chosen.batch_size, automatic.prompts_per_step(training.count))
    epochs = _given(chosen.n_epochs, automatic.rollout_epochs(training.count, max(1, batch)))
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
        interval = _given(chosen.eval_interval, automatic.evaluation_interval(training.count, epochs, max(1, batch)))
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
