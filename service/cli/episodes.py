"""`longshore episode`: gives agents addresses at which they ask a model, runs programs at them, shows what was said.

`longshore episodes` shows those that a run has played in its environment.
"""

import json
import os
import subprocess
from functools import partial
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longshore
from service.cli import command as cli

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longshore import Client
    from longshore.views import DrawnSample, EpisodeTurnView, EpisodeView

_EXAMPLES = """\b
Examples:
  longshore episode run harbour -- claude -p "How many crates are on quay 3?"
  longshore episode run harbour --temperature 0.7 -- python my_agent.py
  longshore episode show ep-…
"""
# Variables that tell agents where the service is. Their keys mean nothing: the address has the episode's secret.
_URLS = {"OPENAI_BASE_URL": "/v1", "OPENAI_API_BASE": "/v1", "ANTHROPIC_BASE_URL": ""}
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_MODELS = (
    *("OPENAI_MODEL", "ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
    *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("SONNET", "OPUS", "HAIKU")),
)
_SETTINGS = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}

app = typer.Typer(rich_markup_mode=None)
episode = cli.group(help="Let agents ask a model at addresses of their own, to be trained on.", epilog=_EXAMPLES)
app.add_typer(episode, name="episode")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A published model, or a base model, by name.")]
EpisodeId = Annotated[str, typer.Argument(metavar="EPISODE", help="The episode's id.")]
Temperature = Annotated[float, typer.Option(help="Of every answer, whatever the agent asks for.")]
MaxTokens = Annotated[int | None, typer.Option(help="Of an answer; the agent may ask for fewer.")]
Lasts = Annotated[str, typer.Option(metavar="TIME", help="Until it ends by itself, such as 90m.")]
Seed = Annotated[int | None, typer.Option(help="Of its answers; by default a random one.")]
_COLUMNS: dict[str, Any] = {
    **{"episode": "episode_id", "model": "model", "state": "state"},
    "turns": lambda one: _num_turns(one),
}


@cli.command(episode)
def begin(
    client: "Client",
    model: Model,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = None,
    lasts: Lasts = "1h",
    seed: Seed = None,
) -> cli.CommandAnswer:
    """Make an episode. Its address is shown only once: an agent's base URL, for OpenAI's clients with /v1 behind it."""
    made = _begun(client, model, temperature, max_tokens, lasts, seed)
    return cli.CommandAnswer(made, lambda: print(made.episode_id, made.url, sep="\n"))


@cli.command(episode, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    client: "Client",
    context: typer.Context,
    model: Model,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = None,
    lasts: Lasts = "1h",
    seed: Seed = None,
) -> cli.CommandAnswer:
    """Run a program as an agent, and end its episode when it ends: longshore episode run MODEL -- PROGRAM …

    The program finds the address and the model in OPENAI_BASE_URL, ANTHROPIC_BASE_URL, OPENAI_MODEL, ANTHROPIC_MODEL
    and the variables of Claude Code. Its output goes to stderr. The exit code is the program's.
    """
    if not context.args:
        raise cli.Stop("name the program behind --: longshore episode run MODEL -- python my_agent.py", cli.USAGE)
    made = _begun(client, model, temperature, max_tokens, lasts, seed)
    names = dict.fromkeys(_MODELS, model) | dict.fromkeys(_KEYS, "episode") | _SETTINGS
    found = {name: f"{made.url}{path}" for name, path in _URLS.items()}
    try:
        code = subprocess.run(context.args, env={**os.environ, **names, **found}, stdout=2, check=False).returncode
    except OSError as error:
        raise cli.Stop(f"{context.args[0]}: {error.strerror}") from error
    finally:
        ended = client.episodes.end(made.episode_id)
    return cli.CommandAnswer(ended, lambda: cli.say(f"{ended.episode_id}: {_num_turns(ended)}"), code=code)


@cli.command(episode)
def ls(client: "Client", limit: Annotated[int, typer.Option(help="At most so many.")] = 20) -> cli.CommandAnswer:
    """List episodes, newest first."""
    found = client.episodes.list(limit)
    return cli.CommandAnswer(found, partial(cli.print_items, found, _COLUMNS))


@cli.command(episode)
def show(client: "Client", episode_id: EpisodeId) -> cli.CommandAnswer:
    """Show what was said in an episode: of each turn what was new in the question, and the answer."""
    turns = client.episodes.turns(episode_id)
    return cli.CommandAnswer(turns, partial(_print_turns, turns))


cli.by_id(
    *(episode, "end", EpisodeId, lambda client, id: client.episodes.end(id)),
    lambda id, ended: cli.say(f"{id}: {_num_turns(ended)}"),
    "End an episode, so that it can be trained.",
)


_PLAYED: dict[str, Any] = {
    **{"number": "number", "group": "group", "tokens": "num_tokens"},
    "turns": lambda one: str(one.episode.num_turns if one.episode else 1),
    "reward": lambda one: "" if one.episode is None or one.episode.reward is None else f"{one.episode.reward:g}",
    "end": lambda one: one.finish_reason if one.episode is None else one.episode.end,
    "error": lambda one: shorten((one.episode and one.episode.error) or "", 80),
}


@cli.command(app)
def episodes(
    client: "Client",
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    step: Annotated[int | None, typer.Option(help="Of this train step; by default the newest.")] = None,
    of: Annotated[str, typer.Option(help="train, or of evaluations eval or eval_NAME.")] = "train",
    failed: Annotated[bool, typer.Option("--failed", help="Only those without a reward.")] = False,
    number: Annotated[int | None, typer.Option(help="Show what was said in this one.", min=0)] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=256)] = 32,
) -> cli.CommandAnswer:
    """List the episodes, or other samples, of a step of a run that draws its own; with --number show one."""
    if step is None:
        with_samples = [one.step for one in client.runs.steps(run_id).steps if of in one.samples]
        if not with_samples:
            raise cli.Stop(f"no step of {run_id} has samples of {of}", cli.FAILED, "give --of eval, or wait for a step")
        step = with_samples[-1]
    only = {"first": number, "limit": 1} if number is not None else {"limit": limit}
    found = client.runs.samples(run_id, step, of, failed=failed, **only)
    if number is None:
        return cli.CommandAnswer(found, partial(cli.print_items, found, _PLAYED))
    return cli.CommandAnswer(found, partial(_print_samples, found))


def _print_samples(found: "Sequence[DrawnSample]") -> None:
    for one in found:
        print(f"--- item: {json.dumps(one.item, ensure_ascii=False)}")
        if one.episode is None:
            print(one.text)
            continue
        earned = iter(one.episode.turn_rewards)
        for message in one.episode.messages:
            worth = f" ({next(earned, 0.0):g})" if message.get("role") == "assistant" else ""
            print(f"{message.get('role', '?')}{worth}: {_said(message)}")
        told = f"no reward: {one.episode.error}" if one.episode.reward is None else f"reward {one.episode.reward:g}"
        print(f"--- {one.episode.end}, {told}")


def _begun(
    client: "Client", model: str, temperature: float, max_tokens: int | None, lasts: str, seed: int | None
) -> "EpisodeView":
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    asked = {"model": model, "sampling": sampling, "lasts_s": cli.seconds_of(lasts, "--lasts"), "seed": seed}
    return client.episodes.begin(cli.checked(longshore.EpisodeRequest, asked))


def _num_turns(one: "EpisodeView") -> str:
    if one.end is None:
        return ""
    side = f", and {one.end.num_side_turns} that are not trained" if one.end.num_side_turns else ""
    return f"{one.end.num_turns} turns{side}"


def _print_turns(turns: "Sequence[EpisodeTurnView]") -> None:
    numbers = {turn.answer_id: number for number, turn in enumerate(turns, 1)}
    for number, turn in enumerate(turns, 1):
        after = f", after turn {numbers.get(turn.after, '?')}" if turn.after else ""
        kept = " by its ids" if turn.continues else ""
        side = ", not trained" if turn.is_side else ""
        print(f"--- turn {number}{after}{kept}{side}: {turn.num_tokens} tokens, {turn.finish_reason}")
        for message in (*turn.messages, turn.answer):
            print(f"{message.get('role', '?')}: {_said(message)}")


def _said(message: dict[str, Any]) -> str:
    calls = (f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ())
    return "\n".join(filter(None, (str(message.get("content") or ""), *calls)))
