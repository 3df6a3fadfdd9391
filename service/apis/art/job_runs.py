"""From a model of ART and what its client says of a job to a run of ours. Pure."""

from typing import Any

from pydantic import ValidationError

from service.apis.art.job_request import ExperimentalConfig, SftConfig
from service.apis.errors import describe
from service.inference.art_models import ArtModel
from shared.errors import InvalidInput
from shared.runs.requests import RLRun, SFTRun, Source

# Conversations of agents are long, and ART's clients cannot say how long.
_MAX_TOKENS = 8192
# A conversation that does not give again what was sampled is left out: one of a thousand would refuse a client's step.
_BROKEN = "drop"
# The client's own defaults, for whoever leaves them out.
_RL_RATE, _SFT_RATE, _SFT_BATCH = 5e-6, 5e-5, 2
_LORA = {"rank", "alpha", "targets"}
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
    "batch_size": "config.batch_size",
}
MODEL_LABEL, NAME_LABEL = "art_model", "art_name"
"""Labels of a model's runs, by which they are found."""


def rl_run(model: ArtModel, config: ExperimentalConfig, adapter: str | None) -> RLRun:
    """The run that takes a model's train steps; steps with another config need another run.

    Args:
        adapter: URI of the adapter that the run goes on from.

    Raises:
        InvalidInput: names the client's field and the rule that it breaks.
    """
    try:
        return RLRun.model_validate(
            _common(model, adapter)
            | {"broken": _BROKEN}
            | model.settings.model_dump(include=_RL_ALONE, exclude_none=True)
            | {
                "loss": config.loss,
                "advantages": "group_mean" if config.scale_rewards is False else "group_normalized",
                "learning_rate": _RL_RATE if config.learning_rate is None else config.learning_rate,
            }
        )
    except ValidationError as error:
        raise _named(error, _RL_NAMES) from None


def sft_run(model: ArtModel, url: str, config: SftConfig, adapter: str | None) -> SFTRun:
    """One pass over a dataset.

    Args:
        adapter: URI of the adapter that the run goes on from.

    Raises:
        InvalidInput: names the client's field and the rule that it breaks.
    """
    rate = config.rate
    try:
        return SFTRun.model_validate(
            _common(model, adapter)
            | {
                "dataset": {"uri": url},
                "epochs": 1,
                "batch_size": _SFT_BATCH if config.batch_size is None else config.batch_size,
                "learning_rate": _SFT_RATE if rate is None else rate,
                "schedule": "constant",
            }
        )
    except ValidationError as error:
        raise _named(error, _SFT_NAMES) from None


def source_of(model: ArtModel, request: dict[str, Any]) -> Source:
    """The source of a job's run: its request, and labels by which the run is found."""
    labels = {MODEL_LABEL: model.model_id, NAME_LABEL: model.title}
    return Source(api="art", metadata=labels, request=request)


def _common(model: ArtModel, adapter: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": _MAX_TOKENS}
    fields |= model.settings.model_dump(exclude=_LORA | _RL_ALONE, exclude_none=True)
    return fields | {
        "name": model.published_as,
        "model": model.base_model,
        "trainable": model.settings.model_dump(include=_LORA, exclude_none=True) | {"kind": "lora"},
        "initial_adapter": adapter,
    }


def _named(error: ValidationError, names: dict[str, str]) -> InvalidInput:
    """An InvalidInput with the client's name of the field; a field without one is a setting of the model's."""
    problem = describe(error.errors())
    place = (problem.place or "").removeprefix("trainable.")
    return InvalidInput(problem.message, names.get(place) or f"longshore.{place}".rstrip("."))
