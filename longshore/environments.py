"""Environments: a policy plays episodes of several turns in them. What users write, and how an episode ends."""

import re
from typing import Any, Literal, NotRequired, Protocol, TypedDict, get_args

from pydantic import Field, JsonValue, field_validator

from longshore.fields import Frozen
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


EndReason = Literal[
    "completed", "turn_limit", "token_limit", "context_limit", "step_limit", "environment_broke"
]  # fmt: skip
"""Why an episode ended. The policy can cause all of them except the last, and earns what it had earned until then:

- completed: the environment said `done`.
- turn_limit: it had `max_turns` answers.
- token_limit: an answer reached `max_completion_tokens`. The environment does not see it.
- context_limit: the conversation leaves no room for an answer within `max_tokens`, or cut one off.
- step_limit: a step took more time or memory, or returned more, than it may. The state before it is scored.
- environment_broke: the environment raised an error, or returned what it must not. Its whole group is not trained.
"""
END_REASONS: tuple[EndReason, ...] = get_args(EndReason)


class Course(Frozen):
    """How an episode went. `messages`: those behind the row's, answers and observations.

    `reward`: the sum of the environment's rewards; None if there are none, for the reason `error`. `turn_rewards`: the
    part of each answer; what `score` adds is the last one's. `num_kept`: later turns whose prompts begin with the ids
    that were drawn before.
    """

    end: EndReason
    messages: tuple[dict[str, JsonValue], ...]
    turn_rewards: tuple[float, ...]
    reward: float | None = None
    error: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    num_kept: int = 0

    @property
    def num_turns(self) -> int:
        return len(self.turn_rewards)
