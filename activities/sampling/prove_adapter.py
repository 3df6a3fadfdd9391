"""Prove an adapter: the sampler's logprobs of a probe against those of the trainer that made the adapter."""

from pydantic import Field, model_validator
from temporalio import activity

from activities.host_context import HostContext, beating
from activities.sampling.adapters import refusal, use_adapter
from activities.sampling.samplers import Samplers
from shared.contract import Artifact, Frozen
from shared.errors import InvalidInput, SamplerMismatch
from shared.runs.requests import RunId
from shared.runs.serving import SamplerPlace


class ProveRequest(Frozen):
    """The trainer's log-probabilities of a probe with an adapter on, and the bound on a sampler's difference.

    `probe`: L token ids. `logprobs`: L - 1, the trainer's, in nats, of probe[1:]. `adapter`: absent, the model alone.
    `keep`: adapters of this run that other requests need now.
    """

    run_id: RunId
    adapter: Artifact | None
    probe: tuple[int, ...] = Field(min_length=2)
    logprobs: tuple[float, ...]
    bound: float = Field(gt=0, description="in nats, of any one token")
    place: SamplerPlace
    keep: tuple[Artifact, ...] = ()

    @model_validator(mode="after")
    def _one_each(self) -> "ProveRequest":
        if len(self.logprobs) != len(self.probe) - 1:
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.probe)} tokens: one for each but the first")
        return self


class Proved(Frozen):
    """`max_difference`: of the sampler's logprobs and the trainer's, in nats."""

    max_difference: float


class ProveAdapter:
    """The activity `prove_adapter`."""

    def __init__(self, host: HostContext, samplers: Samplers) -> None:
        self._host = host
        self._samplers = samplers

    @activity.defn(name="prove_adapter")
    def prove_adapter(self, request: ProveRequest) -> Proved:
        """Load the adapter and compare. Asked every time: it says what the sampler serves now.

        Raises:
            SamplerMismatch: a token's logprob differs by more than the bound, so the sampler has other weights.
            InvalidInput: the server refuses the adapter or the probe.
            SamplerUnavailable, WorkerLost: there is no sampler at this place now.
        """
        with beating(), self._samplers.open(request.place) as opened:
            model = use_adapter(opened, request.run_id, request.adapter, request.keep, self._host)
            try:
                told = opened.client.score(model, request.probe)
            except InvalidInput as error:
                raise refusal(opened.client, model, error, "probe") from error
        return Proved(max_difference=compare(told, request.logprobs, request.probe, request.bound))


def compare(sampler: tuple[float, ...], trainer: tuple[float, ...], probe: tuple[int, ...], bound: float) -> float:
    """The largest difference, in nats. Raises SamplerMismatch where it is beyond the bound, or no number."""
    differences = [abs(one - other) for one, other in zip(sampler, trainer, strict=True)]
    worst = max(range(len(differences)), key=lambda at: _order(differences[at]))
    if not differences[worst] <= bound:
        raise SamplerMismatch(
            f"token {worst + 1} of the probe (id {probe[worst + 1]}) has the logprob {sampler[worst]:.6g} in the "
            f"sampler, {trainer[worst]:.6g} in the trainer: {differences[worst]:.3g} apart, and the bound is {bound:g}"
        )
    return differences[worst]


def _order(difference: float) -> float:
    """NaN is worse than any number."""
    return difference if difference == difference else float("inf")
