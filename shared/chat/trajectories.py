"""Trajectories: what was sampled for a prompt, token by token, and how good it was. One group a line of JSONL.

Token ids are trained as they were sampled. A conversation of chat messages can stand for them where rendering it gives
those very ids again, which is checked.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, JsonValue, Tag

from longshore.fields import Frozen
from shared.chat.completions import SamplerAnswer


class Trajectory(Frozen):
    """One sampled sequence: prompt, answers and tool results in the order in which the model saw them.

    `sampled`, `logprobs`, `token_ids`, `token_rewards` and `policy_versions` have one length L. `logprobs` are the
    sampler's, in nats; they are read only where `sampled` is true. `routes`: of a run's own samples, the places of the
    prompt's and the other tokens' experts in the file beside these (activities/sampling/routes.py).
    """

    token_ids: tuple[int, ...] = Field(min_length=1, description="L ids, prompt and all")
    sampled: tuple[bool, ...] = Field(description="which of the ids the policy sampled: those are trained")
    logprobs: tuple[float | None, ...] = Field(description="null beside what was not sampled")
    reward: float
    advantage: float | None = Field(default=None, description="with advantages `given` alone")
    token_rewards: tuple[float, ...] | None = Field(
        default=None, description="of each id, beside `reward`, which is of the end; with a critic alone"
    )
    policy_version: int | None = Field(
        default=None, ge=0, description="of the adapter that sampled it; 0 is the run's beginning; null: nobody knows"
    )
    policy_versions: tuple[Annotated[int, Field(ge=0)] | None, ...] | None = Field(
        default=None, description="of each id, null beside what was not sampled; without it all are policy_version's"
    )
    finish_reason: Literal["stop", "length"] | None = Field(default=None, description="length: its end was cut off")
    metrics: dict[str, float] = Field(default_factory=dict, description="averaged over the step, and reported")
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="kept beside it, read by nobody")
    routes: tuple[int, int] | None = None

    @property
    def token_versions(self) -> list[int | None]:
        """The version of the policy that drew each sampled id; None where nobody knows."""
        if self.policy_versions is None:
            return [self.policy_version] * sum(self.sampled)
        return [one for one, is_sampled in zip(self.policy_versions, self.sampled, strict=True) if is_sampled]


class SentTokenLogprob(SamplerAnswer):
    """A token as chat completions name it: by its text, its bytes where the server knows them, and its logprob in nats.

    A text `token_id:123` is the id itself, as vLLM writes it when it is asked to.
    """

    token: str
    logprob: float
    bytes: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = None


class SentChoiceLogprobs(SamplerAnswer):
    """The tokens of an answer in order: in `content`, or in `refusal` if the model refused to answer."""

    content: tuple[SentTokenLogprob, ...] | None = None
    refusal: tuple[SentTokenLogprob, ...] | None = None

    @property
    def tokens(self) -> tuple[SentTokenLogprob, ...]:
        return self.content or self.refusal or ()


class SampledTurn(SamplerAnswer):
    """The record of how an assistant's turn was sampled: the fields beside the message in a chat completion's choice.

    `answer_id`: the id of the completion of this installation that the turn was choice number `index` of. The store
    keeps the token ids of that completion.
    """

    logprobs: SentChoiceLogprobs | None = None
    token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    finish_reason: str | None = None
    answer_id: str | None = None
    index: int = Field(default=0, ge=0)


class ChatHistory(Frozen):
    """A conversation of a trajectory that has several."""

    messages: tuple[dict[str, JsonValue], ...] = Field(
        min_length=1, validation_alias=AliasChoices("messages", "messages_and_choices")
    )
    tools: tuple[dict[str, JsonValue], ...] | None = Field(default=None, description="that the model was told of")


class ChatTrajectory(ChatHistory):
    """One sampled conversation, as a client of chat completions has it.

    Assistant turns with `logprobs` or an `answer_id` count as sampled: messages with those fields (and `token_ids`)
    beside their own, or whole choices as the server gave them. All other messages are context. Before training the
    conversation is turned into a token form: the sampled ids, each after the ids of the prompt it was sampled with.
    """

    additional_histories: tuple[ChatHistory, ...] = Field(
        default=(), description="further conversations, which have its reward: a sub-agent's, or after a summary"
    )
    own_answers: bool = Field(
        default=False, description="train remembered answers of the run's own policy alone; others are context"
    )
    reward: float
    advantage: float | None = Field(default=None, description="with advantages `given` alone")
    policy_version: int | None = Field(
        default=None,
        ge=0,
        validation_alias=AliasChoices("policy_version", "initial_policy_version"),
        description="of the adapter that sampled its first turn; what is remembered of an answer goes before",
    )
    model_version: int | None = Field(
        default=None, ge=0, description="the same as the published adapter's version, where there is no policy_version"
    )
    final_policy_version: int | None = Field(default=None, description="read by nobody: the first turn's counts")
    metrics: dict[str, float] = Field(default_factory=dict, description="averaged over the step, and reported")
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="kept beside it, read by nobody")
    logs: tuple[str, ...] = Field(default=(), description="read by nobody")

    @property
    def histories(self) -> tuple[ChatHistory, ...]:
        """All of its conversations, the first one first."""
        return ChatHistory(messages=self.messages, tools=self.tools), *self.additional_histories


def _form_of(trajectory: Any) -> str:
    names = trajectory if isinstance(trajectory, dict) else ()
    is_chat = isinstance(trajectory, ChatTrajectory) or "messages" in names or "messages_and_choices" in names
    return "chat" if is_chat else "tokens"


FORMS = ("tokens", "chat")
"""Tags of the two kinds of trajectories. They occur in the locations of pydantic's errors."""
SentTrajectory = Annotated[
    Annotated[Trajectory, Tag("tokens")] | Annotated[ChatTrajectory, Tag("chat")], Discriminator(_form_of)
]


class SentGroup(Frozen):
    """A group as a client sends it; `TrajectoryGroup` is one."""

    trajectories: tuple[SentTrajectory, ...] = Field(min_length=1)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    exceptions: tuple[JsonValue, ...] = Field(default=(), description="rollouts that failed: read by nobody")
    metrics: dict[str, JsonValue] = Field(default_factory=dict, description="of the whole group: read by nobody")
    logs: tuple[str, ...] = Field(default=(), description="read by nobody")


class TrajectoryGroup(Frozen):
    """The trajectories of one prompt, whose rewards are compared with each other."""

    trajectories: tuple[Trajectory, ...] = Field(min_length=1)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
