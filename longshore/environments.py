"""Environments and agents: a policy plays episodes of several turns. What users write, and how an episode ends."""

import re
from typing import Any, Literal, NotRequired, Protocol, Self, TypedDict, get_args

from pydantic import Field, JsonValue, field_validator, model_validator

from longshore.fields import Frozen, added
from longshore.grading import sane_source

Observation = str | list[dict[str, Any]] | None
"""Messages that the policy reads next. A text is the result of the answer's call if it has exactly one; else it is a
user's message. None: no message.
"""


class Answer(TypedDict):
    """A turn of the policy: its text, and the calls of the row's tools with their arguments parsed."""

    content: str
    tool_calls: list[dict[str, Any]]


class Step(TypedDict):
    """What an environment says to an answer. The rewards of all steps are added up, and none is 0, but an episode that
    the environment ends must have one. The last value of each of the `metrics` counts.
    """

    observation: NotRequired[Observation]
    reward: NotRequired[float]
    done: NotRequired[bool]
    metrics: NotRequired[dict[str, float]]


class Environment(Protocol):
    """A class named `Environment` with these two calls. It must be a function of row, seed and answers alone: after a
    kill its episode is played again with the answers that were drawn.

    It may also define `score(self) -> float`, which is called at the end of every episode, however it ends, and added
    to the rewards.
    """

    def reset(self, item: dict[str, Any], seed: int) -> Observation:
        """Begin an episode for a row of the prompts. The observation is put after the row's messages.

        All samples of a prompt have one seed, so that they begin in the same way.
        """

    def step(self, answer: Answer) -> Step: ...


class PythonEnvironment(Frozen):
    """Source that defines a class `Environment`. It runs in the graders' sandbox, a process for each episode."""

    type: Literal["python"] = "python"
    source: str = Field(description="Python source of a class Environment with reset and step (docs/agents.md)")
    max_turns: int = Field(default=16, ge=1, le=256, description="most answers of an episode")

    @field_validator("source")
    @classmethod
    def _defines_a_class(cls, source: str) -> str:
        if not re.search(r"\bEnvironment\b", sane_source(source)):
            raise ValueError("the source must define a class Environment with reset(item, seed) and step(answer)")
        return source


class Agent(Frozen):
    """A program that asks the policy by itself, as OpenAI's or Anthropic's API, in a box for each sample.

    Or a server of the installation's that plays episodes so.

    A row of the prompts may have `files`, which are put into `folder` before, and `tests`, which are put into /tests
    when the agent has ended: texts, or `{"base64": ...}`, by their paths. The reward is what the verifier leaves in
    /logs/verifier/reward.txt or reward.json, as in Harbor's tasks.

    For a server, a row has `task_data`, a task of its task set, whose reward counts.
    """

    command: str | None = Field(
        default=None, description='a shell\'s command line, such as codex exec "$PROMPT" (docs/agents.md)'
    )
    server: str | None = added(
        None,
        pattern=r"^[\w.-]{1,64}$",
        description="instead of a command: the name of an env server of verifiers, of those that the operator names",
    )
    verifier: str | None = Field(
        default=None, description="a command line that writes the reward; if absent, bash /tests/test.sh of the row"
    )
    folder: str = Field(
        default="/work", pattern=r"^/[\w./-]{1,200}$", description="where both run, unless a row says it"
    )
    max_turns: int = Field(default=64, ge=1, le=1024, description="most answers that it gets")
    time_s: float = Field(default=1800.0, gt=0, le=86_400, description="seconds of an episode")
    verifier_time_s: float = Field(default=600.0, gt=0, le=86_400, description="seconds of its verifier")

    @field_validator("command", "verifier")
    @classmethod
    def _can_be_sent(cls, command: str | None) -> str | None:
        if command is not None and ("\0" in sane_source(command) or not command.strip()):
            raise ValueError("a command line is a text without null characters, and is not empty")
        return command

    @model_validator(mode="after")
    def _plays_in_one_way(self) -> Self:
        if (self.command is None) == (self.server is None):
            raise ValueError("give exactly one of command and server")
        for name in ("verifier", "folder"):
            if self.server is not None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: the server's task set has its own: drop it")
        return self


_URLS = {"OPENAI_BASE_URL": "/v1", "OPENAI_API_BASE": "/v1", "ANTHROPIC_BASE_URL": ""}
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_MODELS = (
    *("OPENAI_MODEL", "ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
    *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("SONNET", "OPUS", "HAIKU")),
)


def agent_variables(url: str, model: str) -> dict[str, str]:
    """Return the variables that tell the clients of OpenAI and Anthropic, and Claude Code, whom to ask.

    Their keys mean nothing: an episode's address is its own.
    """
    urls = {name: url + path for name, path in _URLS.items()}
    names = dict.fromkeys(_MODELS, model) | dict.fromkeys(_KEYS, "episode")
    return urls | names | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


EndReason = Literal[
    "completed", "turn_limit", "token_limit", "context_limit", "step_limit", "time_limit", "agent_failed",
    "environment_broke", "verifier_broke",
]  # fmt: skip
"""Why an episode ended. The policy can cause all of them except the last two, and earns what it had earned until then:

- completed: the environment said `done`, or the agent has ended by itself.
- turn_limit: it had `max_turns` answers.
- token_limit: an answer reached `max_completion_tokens`. The environment does not see it.
- context_limit: the conversation leaves no room for an answer within `max_tokens`, or cut one off.
- step_limit: a step took more time or memory, or returned more, than it may. The state before it is scored.
- time_limit: the agent took more than `time_s`.
- agent_failed: the agent ended with an error, or took too much memory.
- environment_broke: the environment raised an error, or returned what it must not, or its server failed. Its whole
  group is not trained.
- verifier_broke: the verifier, or the task set, left no reward. Its whole group is not trained.
"""
BROKEN: tuple[EndReason, ...] = ("environment_broke", "verifier_broke")
"""The reasons that the policy cannot have caused."""
END_REASONS: tuple[EndReason, ...] = get_args(EndReason)


class Course(Frozen):
    """How an episode went. `messages`: those behind the row's, answers and observations.

    `reward`: the sum of the environment's rewards; None if there are none, for the reason `error`. `turn_rewards`: the
    part of each answer; what `score` adds is the last one's. `num_kept`: later turns whose prompts begin with the ids
    that were drawn before. `output`: the end of what an agent's program and its verifier have printed.
    """

    end: EndReason
    messages: tuple[dict[str, JsonValue], ...]
    turn_rewards: tuple[float, ...]
    reward: float | None = None
    error: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    num_kept: int = 0
    output: str = added("")

    @property
    def num_turns(self) -> int:
        return len(self.turn_rewards)
