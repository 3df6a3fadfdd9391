"""Options of `longshore submit rl` for runs that make their own rollouts, and what they say together."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.exits import USAGE, Stop

Prompts = Annotated[
    str | None,
    typer.Option(help="Prompts as JSONL: a file (uploaded), or a URI. The run samples and grades them itself."),
]
PromptField = Annotated[str | None, typer.Option(help="The field that holds the prompt; else rows are chats.")]
Grader = Annotated[str | None, typer.Option(help="A grader in OpenAI's fields: a JSON file, or the JSON itself.")]
Steps = Annotated[int | None, typer.Option(help="Train steps of the run's own rollouts.")]
PromptEpochs = Annotated[float | None, typer.Option(help="Passes over the prompts, instead of --steps.")]
PromptsPerStep = Annotated[int | None, typer.Option(help="Prompts a step; default 32.")]
GroupSize = Annotated[int | None, typer.Option(help="Samples of each prompt; default 8.")]
MaxCompletionTokens = Annotated[int | None, typer.Option(help="The longest sample; default 256.")]
StopStrings = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends a sample; may be repeated.")]
OffPolicySteps = Annotated[int | None, typer.Option(help="Steps sampled ahead while training; default 0: on-policy.")]
SamplerUrl = Annotated[str | None, typer.Option(help="A server that speaks vLLM's protocol, instead of our sampler.")]
ShuffleRewards = Annotated[
    bool, typer.Option("--shuffle-rewards", help="A control experiment: rewards change places within their groups.")
]
EvalPrompts = Annotated[str | None, typer.Option(help="Held-out prompts, sampled and graded before and after.")]
EvalEvery = Annotated[int | None, typer.Option(help="Train steps from one evaluation to the next, too.")]
EvalSamples = Annotated[int | None, typer.Option(help="Samples of each held-out prompt; default 1.")]
EvalTemperature = Annotated[float | None, typer.Option(help="Default 0: greedy.")]
Target = Annotated[float | None, typer.Option(help="The mean held-out grade at which the run ends.")]


def rollouts_of(given: dict[str, Any], uri_of: Callable[[str, str], str]) -> dict[str, Any] | None:
    """The run's `rollouts`, of the options that were given; None where there is none of them.

    Args:
        uri_of: the URI of a file or URI that was given with an option of this name.
    """
    told = {name: value for name, value in given.items() if value is not None and value is not False}
    if not told:
        return None
    if missing := [name for name in ("prompts", "grader") if name not in told]:
        raise Stop(f"--{missing[0]} is missing: a run that makes its own rollouts has prompts and a grader", USAGE)
    field = {"prompt_field": told.pop("prompt_field", None)}
    held_out = {name.removeprefix("eval_"): told.pop(name) for name in list(told) if name in _HELD_OUT}
    if held_out and "prompts" not in held_out:
        raise Stop("--eval-prompts is missing: without it nothing is evaluated", USAGE)
    told["prompts"] = {"uri": uri_of(told["prompts"], "--prompts"), **field}
    if held_out:
        uri = uri_of(held_out.pop("prompts"), "--eval-prompts")
        held_out = {_FIELDS.get(name, name): value for name, value in held_out.items()}
        told["held_out"] = {"prompts": {"uri": uri, **field}, **held_out}
    return {**told, "grader": grader_of(told["grader"], "--grader")}


_HELD_OUT = ("eval_prompts", "eval_every", "eval_samples", "eval_temperature", "target")
_FIELDS = {"every": "every_steps", "samples": "samples_per_prompt"}


def grader_of(given: str, option: str) -> Any:
    """A grader's fields, not checked: of a JSON file, or of the JSON itself."""
    try:
        text = given if given.lstrip().startswith("{") else Path(given).read_text()
        return json.loads(text)
    except OSError as error:
        raise Stop(f"{option}: {given}: {error.strerror}", USAGE) from None
    except ValueError as error:
        raise Stop(f"{option}: no JSON: {error}", USAGE) from None
