"""Commands of a session and their results: a client trains a slot by sending commands, which are done one by one."""

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from longshore.fields import Artifact, Frozen, pattern
from longshore.losses import CrossEntropy, Distillation, PolicyLoss, SquaredError
from longshore.training import Adam, Optimizer

CHECKPOINT_NAME = r"[a-z0-9][a-z0-9-]{0,62}:step-[0-9]{1,8}"
"""Of the state of a run after step n, or of a session after command n."""
MAX_DATA = 65_536
MAX_TOP_K = 128
MAX_ANSWER = 1_000_000
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Effect = Literal["nothing", "slot", "saved_state"]
"""What a command changes, which every class of commands says.

`nothing`: a worker that goes on from a saved state does not do it again. `slot`: gradients or weights; its own error
drops the gradients accumulated so far. `saved_state`: its result waits until the state that it saves is in the store.
"""


class Datum(Frozen):
    """One sequence. The lists have one entry for each token except the first, which cannot be predicted.

    The tokens themselves are scored, or with `labels` other ids at their positions: another token than the one that
    follows, or a teacher's likeliest ones with its probabilities as weights.
    """

    tokens: tuple[TokenId, ...] = Field(min_length=2, description="token ids")
    weights: tuple[Finite, ...] | None = Field(
        default=None, description="of each token except the first; 0: not scored. 1 each if absent"
    )
    advantages: tuple[Finite, ...] | None = Field(
        default=None, description="per-token values that a policy loss learns from"
    )
    value_targets: tuple[Finite, ...] | None = Field(
        default=None, description="target of a head's scalar at the state before each token except the first"
    )
    logprobs: tuple[Finite, ...] | None = Field(default=None, description="the sampler's log-probabilities, in nats")
    ref_logprobs: tuple[Finite, ...] | None = Field(
        default=None, description="the reference model's log-probabilities, for a KL term"
    )

    labels: tuple[Annotated[tuple[TokenId, ...], Field(max_length=MAX_TOP_K)], ...] | None = Field(
        default=None, description="ids to score at the position of each token except the first: none, one, or several"
    )
    label_weights: tuple[tuple[Finite, ...], ...] | None = Field(
        default=None, description="of each label; 0: not scored. 1 each if absent"
    )

    @property
    def num_scored(self) -> int:
        """The most that can be scored: the labels, or the tokens but the first."""
        return len(self.tokens) - 1 if self.labels is None else sum(map(len, self.labels))

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.advantages is not None and self.value_targets is not None:
            raise ValueError("value_targets are of a head of scalars, advantages of the language head: drop one")
        for name in ("weights", "advantages", "value_targets", "logprobs", "ref_logprobs", "labels"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.tokens) - 1:
                wanted = f"{len(self.tokens) - 1} for {len(self.tokens)} tokens: one for each but the first"
                raise ValueError(f"{name} has {len(given)} entries, it must have {wanted}")
        return self

    @model_validator(mode="after")
    def _labels_have_their_own_weights(self) -> Self:
        if self.labels is None:
            if self.label_weights is not None:
                raise ValueError("label_weights belong to labels: the tokens themselves have weights")
            return self
        for name in ("weights", "advantages", "value_targets", "logprobs", "ref_logprobs"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is of the tokens themselves: a datum with labels has label_weights alone")
        sizes = [len(each) for each in self.labels]
        if self.label_weights is not None and [len(each) for each in self.label_weights] != sizes:
            raise ValueError("label_weights must have one number for each label, nested as labels are")
        return self


Data = Annotated[tuple[Datum, ...], Field(min_length=1, max_length=MAX_DATA)]


class _Options(Frozen):
    share_prefixes: bool = Field(
        default=False, description="sequences with a common prefix are computed as a tree: less work, other bits"
    )
    temperature: float = Field(default=1.0, gt=0, le=10, description="sampling temperature: logits are divided by it")


class _OnData(_Options):
    data: Data

    @model_validator(mode="after")
    def _trees_score_their_tokens(self) -> Self:
        if self.share_prefixes and any(datum.labels is not None for datum in self.data):
            raise ValueError("share_prefixes: sequences with labels are not computed as trees")
        return self


class ForwardOptions(_Options):
    """A `forward` without its data."""

    effect: ClassVar[Effect] = "nothing"
    kind: Literal["forward"] = "forward"
    entropy: bool = Field(
        default=False, description="entropy of the distribution that each scored token came from, in nats"
    )
    top_k: int = Field(
        default=0, ge=0, le=MAX_TOP_K, description="also report this many of the most likely tokens at each place"
    )
    adapter: bool = Field(default=True, description="false: use the base without the adapter, as for a reference")
    score_all: bool = Field(default=False, description="also the tokens and labels whose weight is 0")

    def check_answer(self, num_scored: int) -> None:
        """Raise ValueError if the answer for `num_scored` tokens would be too long."""
        if (numbers := num_scored * 2 * self.top_k) > MAX_ANSWER:
            raise ValueError(f"top_k: {numbers:,} numbers would be answered, {MAX_ANSWER:,} at most: send less at once")


class Forward(ForwardOptions, _OnData):
    """Score the tokens that have a weight, or all. Changes nothing."""

    @model_validator(mode="after")
    def _answer_is_bounded(self) -> Self:
        self.check_answer(sum(datum.num_scored for datum in self.data))
        return self


SessionLoss = Annotated[CrossEntropy | PolicyLoss | SquaredError | Distillation, Field(discriminator="kind")]


class ForwardBackwardOptions(_Options):
    """A `forward_backward` without its data."""

    effect: ClassVar[Effect] = "slot"
    kind: Literal["forward_backward"] = "forward_backward"
    loss: SessionLoss = CrossEntropy()


class ForwardBackward(ForwardBackwardOptions, _OnData):
    """Add the gradients of the loss's sum over the data to what has been accumulated. A loss of your own: forward, then
    cross_entropy with weights that are the negative of your loss's derivative by each log-probability.
    """

    @model_validator(mode="after")
    def _has_what_the_loss_needs(self) -> Self:
        if isinstance(self.loss, CrossEntropy):
            return self
        if isinstance(self.loss, SquaredError):
            if self.loss.scalar is None:
                raise ValueError("loss.scalar: say which of the head's scalars")
            if (
                lacks := next((n for n, datum in enumerate(self.data) if datum.value_targets is None), None)
            ) is not None:
                raise ValueError(f"data[{lacks}].value_targets: the loss {self.loss.kind} needs them")
            return self
        if isinstance(self.loss, Distillation):
            if self.loss.teacher != "base" or self.loss.tokens != "all":
                raise ValueError(
                    "loss: a session's teacher is its base, by whole distributions (tokens all); of another send the "
                    "likeliest ids as labels, with its probabilities as label_weights, and cross_entropy"
                )
            return self
        if self.loss.old == "trainer":
            raise ValueError("loss.old: a session has no beginning to score by; send your own log-probabilities")
        if self.loss.kl and self.loss.kl.model != "base":
            raise ValueError("loss.kl.reference: send the reference's log-probabilities as ref_logprobs")
        needed = ["advantages", "logprobs", *(["ref_logprobs"] if self.loss.kl else [])]
        for number, datum in enumerate(self.data):
            if datum.labels is not None:
                raise ValueError(f"data[{number}].labels: a policy loss is of the tokens themselves; use cross_entropy")
            for name in needed:
                if getattr(datum, name) is None:
                    raise ValueError(f"data[{number}].{name}: the loss {self.loss.kind} needs it")
            if any(weight < 0 for weight in datum.weights or ()):
                raise ValueError(f"data[{number}].weights: a policy loss weighs by 0 or more")
        return self


class OptimStep(Frozen):
    """Make one optimizer step: divide the accumulated gradients, clip them, update the weights, zero the gradients."""

    effect: ClassVar[Effect] = "slot"
    kind: Literal["optim_step"] = "optim_step"
    learning_rate: float = Field(ge=0, le=10)
    optimizer: Optimizer = Adam()
    denominator: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="divisor of the gradients; the sum of weights since the last step if absent",
    )


class SaveState(Frozen):
    """Make weights and optimizer state durable, as of the last optimizer step."""

    effect: ClassVar[Effect] = "saved_state"
    kind: Literal["save_state"] = "save_state"
    publish: bool = Field(default=False, description="publish the trained weights as the session's next version")


class LoadState(Frozen):
    """Go on from a saved state in place of the session's own: weights, and with `optimizer` its moments and step count.

    Gradients accumulated so far are dropped. The state is one of this session, or of another session or run of the
    tenant, that trains the same shape on the same base. `save_state` says in `step` which state it saved.
    """

    effect: ClassVar[Effect] = "saved_state"
    kind: Literal["load_state"] = "load_state"
    state: Annotated[str, pattern(f"^{CHECKPOINT_NAME}$", "a state's name: <session or run>:step-<n>")]
    optimizer: bool = Field(default=True, description="false: moments and step count begin at zero")


StoredAsSent = OptimStep | SaveState
"""Commands whose file is the JSON that a client sends."""
Asked = Annotated[Forward | ForwardBackward | StoredAsSent | LoadState, Field(discriminator="kind")]
"""The commands that a client may send. The service stores LoadState as LoadStored; the rest others make."""
_KINDS: tuple[Any, ...] = get_args(get_args(Asked)[0])
EFFECTS: dict[str, Effect] = {asked.model_fields["kind"].default: asked.effect for asked in _KINDS}
"""By a command's kind."""


class TokenScores(Frozen):
    """The scores of one datum's tokens, or labels, that have a weight: in their order, float32 in nats; null: NaN.

    Where the slot has a head of scalars, they are its `values` at the states before those tokens, and nothing else.
    """

    logprobs: tuple[float | None, ...] = ()
    values: tuple[tuple[float | None, ...], ...] | None = None
    entropies: tuple[float | None, ...] | None = None
    top_ids: tuple[tuple[int, ...], ...] | None = None
    top_logprobs: tuple[tuple[float | None, ...], ...] | None = None


class CommandProblem(Frozen):
    """Why a command failed. `not_finite` and `error` drop the gradients accumulated so far; nothing else is changed.

    A `dropped` command was never done, because a command with a lower number did not arrive in time.
    """

    kind: Literal["invalid_input", "not_finite", "error", "dropped"]
    message: str


class CommandResult(Frozen):
    """The result of a command: the `metrics` of a loss or step, and scores for each datum in the command's order."""

    number: int
    kind: str
    problem: CommandProblem | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    data: tuple[TokenScores, ...] | None = None
    expired: bool = Field(
        default=False,
        description="the scores were deleted, because there are too many newer ones or the session ended long ago",
    )
    step: int | None = Field(
        default=None, description="for save_state and load_state: the number of the last command in the state"
    )
    adapter: Artifact | None = Field(
        default=None, description="the published artifact: an adapter, or a model after `full`"
    )
    version: int | None = Field(default=None, description="its version under the session's name")
