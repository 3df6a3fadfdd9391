"""Parses ART's requests for training jobs, and makes runs of them. Settings that have no equivalent are refused."""

from typing import Any

from pydantic import Field, ValidationError

from service.apis.art.job_config import ExperimentalConfig, SentModel, SftConfig
from service.apis.errors import validation_problem
from service.inference.art_models import ArtModel, ModelId
from service.inference.named_models import one_form
from service.runs.own_settings import LORA_FIELDS
from shared.errors import InvalidInput
from shared.runs.dataset_runs import SFTRun
from shared.runs.requests import RLRun, Source

# Conversations of agents are long, and ART's clients cannot say how long.
_MAX_TOKENS = 8192
# Broken conversations are left out, since a single one of thousands would fail the client's step.
_BROKEN = "drop"
# The client's own defaults.
_RL_RATE, _SFT_RATE, _SFT_BATCH = 5e-6, 5e-5, 2
_RL_ALONE = {"temperature", "idle_s", "between_steps", "equal_rewards", "broken"}
_RL_NAMES = {
    "learning_rate": "experimental_config.learning_rate",
    "loss.clip_low": "experimental_config.epsilon",
    "loss.clip_high": "experimental_config.epsilon_high",
    "clip_low": "experimental_config.epsilon",
    "clip_high": "experimental_config.epsilon_high",
}
_SFT_NAMES = {
    "dataset.uri": "training_data_url",
    "learning_rate": "config.learning_rate",
    "learning_rates": "config.learning_rate",
    "steps": "config.learning_rate",
    "batch_size": "config.batch_size",
}
MODEL_LABEL, NAME_LABEL = "art_model", "art_name"
"""Labels of a model's runs, by which they are found."""


class SftRequest(SentModel):
    """`POST /v1/preview/sft-training-jobs`."""

    model_id: ModelId
    training_data_url: str = Field(min_length=1, max_length=2048, description="of a dataset, or wandb-artifact:///")
    config: SftConfig | None = None


class RlRequest(SentModel):
    """`POST /v1/preview/training-jobs` without its groups, which are read one by one."""

    model_id: ModelId
    experimental_config: ExperimentalConfig | None = None


def rl_run(model: ArtModel, config: ExperimentalConfig, adapter: str | None) -> RLRun:
    """The run that takes a model's train steps; steps with another config need another run.

    `adapter`: URI of the adapter that the run starts from.

    Raises InvalidInput: names the client's field and the rule that it breaks.
    """
    try:
        return RLRun.model_validate(
            _common(model, adapter)
            | {"broken": _BROKEN}
            | model.settings.model_dump(include=_RL_ALONE, exclude_none=True)
            | _sizes(model, config.packed_sequence_length)
            | {
                "loss": config.loss,
                "advantages": "group_normalized" if config.divides_by_deviation else "group_mean",
                "learning_rate": _RL_RATE if config.learning_rate is None else config.learning_rate,
            }
        )
    except ValidationError as error:
        raise _named(error, _RL_NAMES) from None


def sft_run(model: ArtModel, url: str, config: SftConfig, adapter: str | None) -> SFTRun:
    """Return the run of one pass over a dataset.

    `adapter`: URI of the adapter that the run starts from.

    Raises InvalidInput: names the client's field and the rule that it breaks.
    """
    try:
        return SFTRun.model_validate(
            _common(model, adapter)
            | {
                "dataset": {"uri": url, "assistant_turns": config.assistant_turns or "all"},
                "batch_size": _SFT_BATCH if config.batch_size is None else config.batch_size,
                "schedule": "constant",
            }
            | _rates(config)
        )
    except ValidationError as error:
        raise _named(error, _SFT_NAMES) from None


def _sizes(model: ArtModel, packed: int | None) -> dict[str, int]:
    """The longest trajectory and a micro-batch's tokens, if the client sets the length of a packed sequence."""
    if packed is None:
        return {}
    return {"max_tokens": min(packed, model.settings.max_tokens or _MAX_TOKENS), "bin_tokens": packed}


def _rates(config: SftConfig) -> dict[str, Any]:
    """Return the fields of one pass at one learning rate, or of a step for each of a list of rates."""
    match config.learning_rate:
        case tuple() as rates:
            return {"steps": len(rates), "learning_rate": max(rates, default=0.0), "learning_rates": rates}
        case rate:
            return {"epochs": 1, "learning_rate": _SFT_RATE if rate is None else rate}


def art_source(model: ArtModel, request: dict[str, Any]) -> Source:
    """The source of a job's run: its request, and the labels used to find the run."""
    labels = {MODEL_LABEL: model.model_id, NAME_LABEL: model.title}
    return Source(api="art", metadata=labels, request=request)


def _common(model: ArtModel, adapter: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": _MAX_TOKENS, "dtype": model.dtype}
    fields |= model.settings.model_dump(exclude={*LORA_FIELDS, *_RL_ALONE}, exclude_none=True)
    return fields | {
        "name": model.published_as,
        "model": one_form(model.base_model),
        "trainable": model.settings.model_dump(include=set(LORA_FIELDS), exclude_none=True) | {"kind": "lora"},
        "initial_adapter": adapter,
    }


def _named(error: ValidationError, names: dict[str, str]) -> InvalidInput:
    """Return an InvalidInput with the client's name of the field, or else the name of the model's setting."""
    problem = validation_problem(error.errors())
    place = (problem.place or "").removeprefix("trainable.")
    name = names.get(place.rstrip(".0123456789"))  # an item of a list has the list's
    return InvalidInput(problem.message, name or f"longshore.{place}".rstrip("."))
