"""Trajectories: the tokens sampled for a prompt, and their reward. One group per line of JSONL.

Token ids are trained as they were sampled. Chat messages can be given instead if rendering them gives exactly the
sampled ids, which is checked.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, JsonValue, Tag

from longshore.fields import Frozen
from shared.chat.completions import SamplerAnswer


class Trajectory(Frozen):
    """One sampled sequence: prompt, answers and tool results in the order in which the model saw them.

    `sampled`, `logprobs`, `token_ids`, `token_rewards` and `policy_versions` have one length L. `logprobs` are the
    sampler's, in nats; they are read only where `sampled` is true. `routes`: for a run's own samples, the positions of
    the prompt's and the other tokens' experts in the routes file (activities/sampling/routes.py).
    """

    token_ids: tuple[int, ...] = Field(min_length=1, description="L ids, including the prompt")
    sampled: tuple[bool, ...] = Field(description="which of the ids the policy sampled: those are trained")
    logprobs: tuple[float | None, ...] = Field(description="null for ids that were not sampled")
    reward: float
    advantage: float | None = Field(default=None, description="only with advantages `given`")
    token_rewards: tuple[float, ...] | None = Field(
        default=None, description="a reward per id, besides `reward` at the end; only with a critic"
    )
    policy_version: int | None = Field(
        default=None, ge=0, description="of the adapter that sampled it; 0: the run's beginning; null: unknown"
    )
    policy_versions: tuple[Annotated[int, Field(ge=0)] | None, ...] | None = Field(
        default=None, description="per id, null for ids that were not sampled; if absent, policy_version for all"
    )
    finish_reason: Literal["stop", "length"] | None = Field(default=None, description="length: it was cut off")
    metrics: dict[str, float] = Field(default_factory=dict, description="averaged over the step, and reported")
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="stored with it, not used")
    routes: tuple[int, int] | None = None

    @property
    def token_versions(self) -> list[int | None]:
        """The version of the policy that sampled each sampled id; None if it is unknown."""
        if self.policy_versions is None:
            return [self.policy_version] * sum(self.sampled)
        return [one for one, is_sampled in zip(self.policy_versions, self.sampled, strict=True) if is_sampled]


class SentTokenLogprob(SamplerAnswer):
    """A token as in chat completions: its text, its bytes if the server knows them, and its logprob in nats.

    A text `token_id:123` gives the id itself; vLLM writes that on request.
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
    """How an assistant's turn was sampled: the fields of a chat completion's choice other than the message.

    `answer_id`: the id of this installation's completion in which the turn was choice number `index`. The store keeps
    the token ids of that completion.
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
    tools: tuple[dict[str, JsonValue], ...] | None = Field(default=None, description="the tools in the model's prompt")


class ChatTrajectory(Frozen):
    """One sampled conversation, as a client of chat completions has it.

    Assistant turns with `logprobs` or an `answer_id` count as sampled: messages that also have those fields (and
    `token_ids`), or whole choices as the server returned them. All other messages are context. Before training the
    conversation is converted to token ids: sampled ids, each after the ids of the prompt it was sampled with.
    """

    messages: tuple[dict[str, JsonValue], ...] = Field(
        min_length=1, validation_alias=AliasChoices("messages", "messages_and_choices")
    )
    tools: tuple[dict[str, JsonValue], ...] | None = Field(default=None, description="the tools in the model's prompt")
    additional_histories: tuple[ChatHistory, ...] = Field(
        default=(), description="further conversations with the same reward: a sub-agent's, or after a summary"
    )
    own_answers: bool = Field(
        default=False, description="train only stored answers of the run's own policy; others are context"
    )
    reward: float
    advantage: float | None = Field(default=None, description="only with advantages `given`")
    policy_version: int | None = Field(
        default=None,
        ge=0,
        validation_alias=AliasChoices("policy_version", "initial_policy_version"),
        description="of the adapter that sampled its first turn; a stored answer's version overrides it",
    )
    model_version: int | None = Field(
        default=None, ge=0, description="the published adapter's version, if there is no policy_version"
    )
    final_policy_version: int | None = Field(default=None, description="not used: the first turn's version counts")
    metrics: dict[str, float] = Field(default_factory=dict, description="averaged over the step, and reported")
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="stored with it, not used")
    logs: tuple[str, ...] = Field(default=(), description="not used")

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
    exceptions: tuple[JsonValue, ...] = Field(default=(), description="failed rollouts; not used")
    metrics: dict[str, JsonValue] = Field(default_factory=dict, description="of the whole group; not used")
    logs: tuple[str, ...] = Field(default=(), description="not used")


class TrajectoryGroup(Frozen):
    """The trajectories of one prompt; their rewards are compared with each other."""

    trajectories: tuple[Trajectory, ...] = Field(min_length=1)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
