"""Commands of reinforcement learning: start a run, hand it train steps, finish it."""

import json
import secrets
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import rollout_options as own
from service.cli.commands.runs import RunId, Timeout
from service.cli.commands.submit import (
    BinTokens,
    ClipNorm,
    DataParallel,
    DtypeName,
    Engine,
    EngineChoice,
    IdempotencyKey,
    InitialAdapter,
    LayoutLabel,
    LearningRate,
    LoraAlpha,
    LoraRank,
    LoraTargets,
    Model,
    Name,
    TensorParallel,
    Wait,
    dataset_uri,
    layout_of,
    lora_of,
    model_uri,
    start_run,
    usage,
)
from service.cli.connection import Json, connect, wants_json
from service.cli.exits import FAILED, NOT_FINISHED, USAGE, Stop
from service.cli.output.render import outcome, print_json, say

if TYPE_CHECKING:
    from shared.runs.requests import RLRun
    from shared.runs.status import StepStatus

_LONG_POLL_S = 10.0


class AlgorithmName(StrEnum):
    reinforce = "reinforce"
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    gspo = "gspo"
    cispo = "cispo"


class AdvantagesName(StrEnum):
    group_mean = "group_mean"
    group_normalized = "group_normalized"
    leave_one_out = "leave_one_out"
    batch_normalized = "batch_normalized"
    given = "given"


class EqualRewards(StrEnum):
    drop = "drop"
    keep = "keep"


class Broken(StrEnum):
    refuse = "refuse"
    drop = "drop"


class Between(StrEnum):
    offload = "offload"
    keep = "keep"


def register(app: typer.Typer, submit: typer.Typer) -> None:
    """Add the commands to an app, and `rl` to those of `submit`."""
    submit.command()(rl)
    app.command()(step)
    app.command(name="finish")(finish_run)


def rl(
    context: typer.Context,
    model: Model,
    algorithm: Annotated[
        AlgorithmName | None, typer.Option(help="Loss and advantages as a paper has them; see docs/losses.md.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="reinforce, ppo, cispo, gspo or dro; or a JSON object with `kind` and its fields. With --algorithm: "
            "fields that differ from the paper's. ppo without either."
        ),
    ] = None,
    advantages: Annotated[
        AdvantagesName | None, typer.Option(help="Instead of --algorithm's; group_mean without either.")
    ] = None,
    name: Name = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    lora_targets: LoraTargets = None,
    initial_adapter: InitialAdapter = None,
    equal_rewards: Annotated[EqualRewards, typer.Option(help="Groups whose rewards are all the same.")] = (
        EqualRewards.drop
    ),
    broken: Annotated[Broken, typer.Option(help="Steps with trajectories that cannot be trained.")] = Broken.refuse,
    max_staleness: Annotated[int | None, typer.Option(help="Policy versions a trajectory may be behind.")] = None,
    mini_batches: Annotated[int, typer.Option(help="Optimizer steps a pass over a step's groups.")] = 1,
    epochs: Annotated[int, typer.Option(help="Passes over a step's groups.")] = 1,
    learning_rate: LearningRate = 1e-5,
    warmup: Annotated[int, typer.Option(help="Optimizer steps of linear warm-up.")] = 0,
    weight_decay: float = 0.0,
    clip_norm: ClipNorm = 1.0,
    max_tokens: Annotated[int, typer.Option(help="The longest trajectory.")] = 2048,
    bin_tokens: BinTokens = None,
    seed: int = 0,
    engine: Engine = EngineChoice.megatron,
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    layout: LayoutLabel = None,
    dtype: DtypeName = DtypeName.float32,
    between_steps: Annotated[Between, typer.Option(help="What a waiting worker does with the device.")] = (
        Between.offload
    ),
    idle: Annotated[float, typer.Option(help="Seconds until a worker without a step is given back.")] = 60.0,
    prompts: own.Prompts = None,
    prompt_field: own.PromptField = None,
    grader: own.Grader = None,
    steps: own.Steps = None,
    prompt_epochs: own.PromptEpochs = None,
    prompts_per_step: own.PromptsPerStep = None,
    group_size: own.GroupSize = None,
    max_completion_tokens: own.MaxCompletionTokens = None,
    stop: own.StopStrings = None,
    off_policy_steps: own.OffPolicySteps = None,
    sampler_url: own.SamplerUrl = None,
    shuffle_rewards: own.ShuffleRewards = False,
    eval_prompts: own.EvalPrompts = None,
    eval_every: own.EvalEvery = None,
    eval_samples: own.EvalSamples = None,
    eval_temperature: own.EvalTemperature = None,
    target: own.Target = None,
    temperature: Annotated[float, typer.Option(help="That trajectories are sampled at.")] = 1.0,
    wait: Wait = False,
    timeout: Timeout = None,
    idempotency_key: IdempotencyKey = None,
    as_json: Json = False,
) -> None:
    """Start a reinforcement-learning run: on its own rollouts with --prompts, else it waits for `longshore step`."""
    if timeout is not None and not wait:
        raise Stop("--timeout goes with --wait", USAGE)
    if wait and prompts is None:
        raise Stop("--wait goes with --prompts: a run without them waits for you", USAGE)
    rollouts = {
        "prompts": prompts,
        "prompt_field": prompt_field,
        "grader": grader,
        "steps": steps,
        "epochs": prompt_epochs,
        "prompts_per_step": prompts_per_step,
        "group_size": group_size,
        "max_completion_tokens": max_completion_tokens,
        "stop": stop or None,
        "off_policy_steps": off_policy_steps,
        "sampler_url": sampler_url,
        "shuffle_rewards": shuffle_rewards,
        "eval_prompts": eval_prompts,
        "eval_every": eval_every,
        "eval_samples": eval_samples,
        "eval_temperature": eval_temperature,
        "target": target,
    }
    fields = {
        "temperature": temperature,
        "name": name,
        "model": model_uri(model),
        "trainable": lora_of(lora_rank, lora_alpha, lora_targets),
        "initial_adapter": initial_adapter,
        **_objective(algorithm, loss, advantages),
        "equal_rewards": equal_rewards.value,
        "broken": broken.value,
        "max_staleness": max_staleness,
        "mini_batches": mini_batches,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "warmup_steps": warmup,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "max_tokens": max_tokens,
        "bin_tokens": bin_tokens,
        "seed": seed,
        "engine": engine.value,
        "layout": layout_of(layout, tp, dp),
        "dtype": dtype.value,
        "between_steps": between_steps.value,
        "idle_s": idle,
    }
    # Every option is checked before a file is sent anywhere.
    _checked(fields | {"rollouts": own.rollouts_of(rollouts, lambda uri, option: uri)})
    with connect(context, patience_s=20) as client:
        sent = own.rollouts_of(rollouts, lambda uri, option: dataset_uri(client, uri, option))
        run = _checked(fields | {"rollouts": sent})
        start_run(
            context, client, run, idempotency_key, wait=wait, timeout_s=timeout, as_json=wants_json(context, as_json)
        )


def step(
    context: typer.Context,
    run_id: RunId,
    groups: Annotated[str, typer.Argument(help="Trajectory groups as JSONL: a file (uploaded), or a URI.")],
    key: Annotated[
        str | None, typer.Option(help="The same key trains once, however often it is sent; else each call is a step.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the step's end.")] = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Train one file of trajectory groups, and publish the policy's next version.

    Exit codes: 0 done (or queued, without --wait), 2 usage, 100 failed, 101 not finished within --timeout.
    """
    if timeout is not None and not wait:
        raise Stop("--timeout goes with --wait", USAGE)
    end = None if timeout is None else time.monotonic() + timeout
    with connect(context, patience_s=20) as client:
        uri = dataset_uri(client, groups, "groups")
        key = key or f"cli-{secrets.token_hex(16)}"
        found = client.train_step(run_id, key, uri)
        while wait and not found.is_final and (end is None or time.monotonic() < end):
            left = _LONG_POLL_S if end is None else min(_LONG_POLL_S, max(0.0, end - time.monotonic()))
            found = client.step(run_id, found.step, left)
            if found.key != key:  # it was resumed meanwhile, and the number is another's
                raise Stop("the run ended before this step, and was resumed: send it again", FAILED)
    if wants_json(context, as_json):
        print_json(found.model_dump(mode="json"))
    else:
        print(_words(found))
    if found.state == "failed":
        raise typer.Exit(FAILED)
    if wait and not found.is_final:
        raise typer.Exit(NOT_FINISHED)


def finish_run(context: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """Tell an RL run that no more steps come: it ends after those that wait."""
    with connect(context) as client:
        view = client.finish(run_id)
    if wants_json(context, as_json):
        print_json(outcome(view))
    else:
        say(f"{run_id} ends when its steps are done")


def _words(step: "StepStatus") -> str:
    from service.runs.views import dropped

    words = f"step {step.step}: {step.state}"
    if step.state == "done":
        words += f", policy version {step.policy_version}, published: {step.adapter}"
    if step.problem is not None:
        words += f": {step.problem.message}"
    if lost := dropped(step.metrics):
        words += f"; {lost}"
    return words


def _objective(algorithm: AlgorithmName | None, loss: str | None, advantages: AdvantagesName | None) -> dict[str, Any]:
    """What is given of the three; the rest has its defaults."""
    given = {
        "algorithm": algorithm and algorithm.value,
        "loss": None if loss is None else _loss(loss),
        "advantages": advantages and advantages.value,
    }
    return {name: value for name, value in given.items() if value is not None}


def _loss(given: str) -> dict[str, Any]:
    if not given.lstrip().startswith("{"):
        return {"kind": given}
    try:
        loss: dict[str, Any] = json.loads(given)
    except ValueError as error:
        raise Stop(f"--loss: no JSON: {error}", USAGE) from None
    return loss


def _checked(fields: dict[str, Any]) -> "RLRun":
    from pydantic import ValidationError

    from shared.runs.requests import RLRun

    try:
        return RLRun.model_validate(fields)
    except ValidationError as error:
        raise usage(error) from None
