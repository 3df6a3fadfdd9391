"""Requests of a run's own rollouts to prompts, sampler and grader, and their metrics: pure functions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from activities.grading.grade import GradeSummary
from activities.sampling.admit import AdmitRequest, BegunPrompts
from activities.sampling.completions import Rows
from activities.sampling.episodes import EpisodePlan
from activities.sampling.sample import PolicySampleRequest, ProveRequest, Sampled
from activities.sampling.samplers import PolicyWeights
from activities.tokenizing.render_prompts import MixPromptsRequest, Prompts, PromptsOfSource, PromptsRequest
from activities.trajectories.group_samples import Drawn, GroupSamplesRequest
from longshore.dataset_runs import Dataset, DatasetSource, TrainedRun, evaluations_by_split, named_sources
from longshore.fields import Artifact
from longshore.losses import COMPARE_GROUPS
from longshore.runs import HeldOut, RLRun, Rollouts, dtype_of
from longshore.training import Dtype, Full, Lora
from longshore.views import CarriedOver, SourceShare, StepStatus, shares
from shared.chat.completions import Sampling
from shared.jobs.bins import shares_of
from shared.jobs.job import LeaseGrant, SamplerKey, SyncTarget, newest_name
from shared.jobs.packed import RouteShape
from shared.models.shape import ModelShape
from shared.runs.start import RLStart, RunStart, Start
from shared.runs.status import Evaluated, Policy, RolloutData
from shared.serving import SamplerPlace
from shared.storage.paths import content_key
from workflows import policies as limits

_EVALUATION = 0  # the step number of evaluations, which sample held-out prompts
# Sequences that a sampler computes at a time. Samples depend on this number, so it must not vary between hosts.
_MOST_SLOTS = 64
_ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


def rollouts_of(run: RLRun) -> Rollouts:
    """Return the rollout settings of a run that makes its own groups."""
    assert run.rollouts is not None
    return run.rollouts


_MOST_EVALUATIONS = 100  # of a run on a dataset, whose history has each of them: up to 300 events


def held_out_start(start: RunStart) -> RLStart:
    """Return the start of an RL run without steps that has the model and the held-out prompts of a run on a dataset.

    Its requests are the evaluations of that run.
    """
    run, given = start.run, start.run.rollouts
    assert given is not None
    held_out = HeldOut(**dict(given.held_out))
    prompts = next(iter(held_out.evaluations.values()))
    rollouts = Rollouts(**{**dict(given), "held_out": held_out, "prompts": prompts, "steps": 0})
    same = {name: getattr(run, name) for name in TrainedRun.model_fields if name != "kind"}
    own = {name: getattr(start, name) for name in (*Start.model_fields, "serves_sampler")}
    return RLStart(run=RLRun(**same, max_tokens=run.max_tokens, rollouts=rollouts), **own)


def too_many_evaluations(run: RLRun, num_steps: int) -> str | None:
    """Return why a run on a dataset cannot evaluate held-out prompts so often; None if it can."""
    every = run.held_out.every_steps if run.held_out else 0
    if not every or num_steps // every <= _MOST_EVALUATIONS:
        return None
    rule = (
        f"{num_steps} steps have {num_steps // every} evaluations, and a run on a dataset {_MOST_EVALUATIONS} at most"
    )
    return f"rollouts.held_out.every_steps: {rule}: set it to {math.ceil(num_steps / _MOST_EVALUATIONS)} or more"


def prompts_request(run: RLRun, source: DatasetSource, dataset: Artifact, model: Artifact) -> PromptsRequest:
    """Request the prompts that are short enough to leave room for an answer."""
    rollouts = rollouts_of(run)
    return PromptsRequest(
        dataset=dataset,
        source=source,
        model=model,
        max_prompt_tokens=run.max_tokens - rollouts.max_completion_tokens,
        max_lost_fraction=rollouts.max_lost_fraction,
    )


def mix_prompts_request(dataset: Dataset, parts: Sequence[Prompts]) -> MixPromptsRequest | None:
    """Return the request that puts the prompts of a mixture's sources together; None without a mixture."""
    if isinstance(dataset, DatasetSource):
        return None
    both = zip(named_sources(dataset), parts, strict=True)
    return MixPromptsRequest(parts=tuple(PromptsOfSource(name=name, prompts=part.prompts) for name, part in both))


def held_out_sources(run: RLRun) -> dict[str, DatasetSource]:
    """Return the held-out prompts by the name that each is downloaded under, in the order of `HeldOut.evaluations`."""
    return evaluations_by_split(run.held_out.evaluations if run.held_out else {})


def rollout_data(run: RLRun, prompts: Prompts, held_out: Sequence[Prompts]) -> RolloutData:
    """Return the rendered prompts and the number of train steps: `steps` as set, else by `epochs`, but at least one.

    Args:
        held_out: as `held_out_sources` has them.
    """
    rollouts, num_draws = rollouts_of(run), prompts.num_prompts
    sources: tuple[SourceShare, ...] = ()
    if not isinstance(rollouts.prompts, DatasetSource):
        sources = shares(rollouts.prompts, prompts.num_of_sources)
        _, num_draws = shares_of(sources)
    num_steps = rollouts.steps
    if num_steps is None:
        assert rollouts.epochs is not None
        num_steps = max(1, math.floor(rollouts.epochs * num_draws / rollouts.prompts_per_step))
    names = rollouts.held_out.evaluations if rollouts.held_out else {}
    sets = {name: each.prompts for name, each in zip(names, held_out, strict=True)}
    return RolloutData(
        prompts=prompts.prompts,
        num_steps=num_steps,
        probe=prompts.probe,
        held_out=sets.pop("", None),
        sources=sources,
        held_out_sets=sets,
    )


def sampler_key(start: RLStart, model: Artifact, is_policys: bool = True) -> SamplerKey:
    """Return the key of the sampler process that a run leases. It gets as many threads as the run's worker.

    `is_policys`: it samples from the policy; else it only computes the scores of a reward model.
    """
    run, rollouts, threads = start.run, rollouts_of(start.run), start.threads_per_rank * start.run.layout.world_size
    if not is_policys:
        return SamplerKey(model=model, dtype=dtype_of(run), threads=threads, slots=1, max_model_len=run.max_tokens)
    rank = run.trainable.max_rank if isinstance(run.trainable, Lora) else 0
    return SamplerKey(
        model=model,
        sampler=rollouts.sampler,
        max_lora_rank=rank if rollouts.sampler == "vllm" else 0,
        dtype=dtype_of(run),
        threads=threads,
        slots=min(_MOST_SLOTS, rollouts.prompts_per_step * rollouts.group_size),
        max_model_len=run.max_tokens,
        tells_routes=rollouts.sampler == "vllm" and rollouts.routing_replay == "on",
    )


def policy_of_step(run: RLRun, policies: Sequence[Policy], step: int) -> Policy:
    """Return the policy that a step's prompts are sampled from, the one after `policy_before(step)`."""
    after = policy_before(run, step)
    return next(policy for policy in policies if policy.after_step == after)


def policy_before(run: RLRun, step: int) -> int:
    """Return the step whose policy samples a step's prompts: max(0, step - 1 - off_policy_steps).

    Steps are counted from 1; the policy after step 0 is the initial one.
    """
    return max(0, step - 1 - rollouts_of(run).off_policy_steps)


def step_samples(
    start: RLStart,
    model: Artifact,
    data: RolloutData,
    policies: Sequence[Policy],
    step: int,
    place: SamplerPlace,
    routes: RouteShape | None = None,
    drawn: Sequence[Drawn] = (),
    groups: tuple[int, ...] | None = None,
) -> PolicySampleRequest:
    """Ask for the samples of a step's prompts. Steps are counted from 1. `policies`: all that are still sampled from.

    Args:
        routes: the expert routes that the trainer replays.
        drawn: samples drawn earlier for this step; `groups`: those to draw again.
    """
    run, rollouts = start.run, rollouts_of(start.run)
    first, count = (step - 1) * rollouts.prompts_per_step, rollouts.prompts_per_step
    rows = Rows(first=first, count=count, seed=run.seed, sources=data.sources)
    policy, size = policy_of_step(run, policies, step), rollouts.group_size
    sampling = Sampling(
        temperature=run.temperature,
        top_p=rollouts.top_p,
        top_k=-1 if rollouts.top_k is None else rollouts.top_k,
        max_tokens=rollouts.max_completion_tokens,
        stop=rollouts.stop,
    )
    episodes = episode_plan(run, rollouts.prompts)
    own = {"prompts": data.prompts, "rows": rows, "group_size": size, "sampling": sampling, "episodes": episodes}
    seed = _seed(run.seed, f"samples {len(drawn)}" if drawn else "samples", step)
    return _samples(start, model, policies, policy, place, seed=seed, routes=routes, groups=groups, **own)


def admit_request(
    start: RLStart, data: RolloutData, step: int, keys: Mapping[int, str], carried: CarriedOver
) -> AdmitRequest:
    """Ask for the prompts that a step trains: the first ones to be complete, oldest first.

    Args:
        keys: of the requests for the samples of steps' prompts, by the steps. `carried`: those that remain.
    """
    size = rollouts_of(start.run).prompts_per_step
    left = ((number, key, carried.of_step(number, size)) for number, key in sorted(keys.items()))
    begun = tuple(BegunPrompts(step=number, key=key, groups=groups) for number, key, groups in left if groups)
    return AdmitRequest(run_id=start.run_id, step=step, prompts=data.prompts, begun=begun, num_groups=size)


def admitted_metrics(run: RLRun, step: int, taken: Sequence[BegunPrompts], carried: CarriedOver) -> dict[str, float]:
    """Return the metrics of the prompts that a step takes. `carried`: what it leaves."""
    lags = [step - 1 - policy_before(run, one.step) for one in taken for _ in one.groups]
    num_late = sum(len(groups) for number, groups in carried.left.items() if number <= step)
    mean = sum(lags) / len(lags)
    return {"group_lag_mean": mean, "group_lag_max": float(max(lags)), "carried_groups": float(num_late)}


def episode_plan(run: RLRun, source: Dataset) -> EpisodePlan | None:
    """Return how samples of these prompts are played, if they are episodes."""
    rollouts = rollouts_of(run)
    if not rollouts.has_episodes:
        return None
    whose = {"environment": rollouts.environment, "agent": rollouts.agent}
    return EpisodePlan(source=source, max_tokens=run.max_tokens, **whose)


def held_out_samples(
    start: RLStart,
    model: Artifact,
    prompts: Artifact,
    policies: Sequence[Policy],
    policy: Policy,
    place: SamplerPlace,
    source: DatasetSource,
) -> PolicySampleRequest:
    """Ask for samples of all held-out prompts, of `source`. The seeds are the same at every evaluation."""
    held_out = rollouts_of(start.run).held_out
    assert held_out is not None
    rollouts, size = rollouts_of(start.run), held_out.samples_per_prompt
    sampling = Sampling(temperature=held_out.temperature, max_tokens=rollouts.max_completion_tokens, stop=rollouts.stop)
    episodes = episode_plan(start.run, source)
    own = {"prompts": prompts, "rows": Rows(), "group_size": size, "sampling": sampling, "episodes": episodes}
    return _samples(start, model, policies, policy, place, seed=_seed(start.run.seed, "samples", _EVALUATION), **own)


def _samples(
    start: RLStart, model: Artifact, policies: Sequence[Policy], policy: Policy, place: SamplerPlace, **own: Any
) -> PolicySampleRequest:
    """Ask for samples of a policy. `own`: the fields that differ between train steps and evaluations."""
    run = start.run
    # The versions that a sampler may have sampled from before it failed their proof. With `carry_over` others join
    # and leave `policies` while prompts are sampled: those that count for the key are then newer ones alone.
    continues, carries = rollouts_of(run).weight_sync.in_flight != "finish", rollouts_of(run).carry_over
    counted = [one for one in policies if continues and (not carries or one.version > policy.version)]
    refuted = {one.version: one.num_refuted for one in counted}
    return PolicySampleRequest(
        run_id=start.run_id,
        model=model,
        dtype=dtype_of(run),
        place=place,
        refuted=tuple(version for version, number in refuted.items() for _ in range(number)),
        **dict(_weights_of(run, policies, policy, model)),
        **own,
    )


def _weights_of(run: RLRun, policies: Sequence[Policy], policy: Policy, model: Artifact | None = None) -> PolicyWeights:
    """Return the weights that a sampler loads to serve a policy.

    Args:
        policies: all that are still sampled from.
        model: the model before any training.
    """
    is_full = isinstance(run.trainable, Full)
    stored, kind = policy.checkpoint or policy.adapter, "weights" if is_full else "adapter"
    kept = tuple(one.checkpoint or one.adapter for one in policies) if not is_full else ()
    return PolicyWeights(
        adapter=None if is_full else stored,
        weights=stored or model if is_full else None,
        keep=tuple(one for one in kept if one is not None),
        synced=policy.synced,
        policy_version=policy.version,
        is_checkpoint=policy.checkpoint is not None,
        in_place=kind if rollouts_of(run).weight_sync.in_flight == "continue" else None,
    )


def sync_target(start: RLStart, version: int, grants: Sequence[LeaseGrant]) -> SyncTarget | None:
    """Return where the trainer sends a version of the policy; None if samplers load it from the store.

    Full weights replace the ones before. If sampling is one step ahead, the samples in progress are the last that need
    the old weights, and the next step cannot be trained before they end, so the trainer may as well wait for them.
    Further ahead, a version in between may be needed next, and the sampler would have to hold one copy of the model for
    each version.
    """
    rollouts = start.run.rollouts
    found = [(one.weights_socket, one.weights_address) for one in grants if one.weights_socket is not None]
    if rollouts is None or not found or rollouts.weight_sync.backend == "store" or rollouts.colocate:
        return None
    plan = rollouts.weight_sync
    return SyncTarget(
        sockets=tuple(socket for socket, _ in found),
        addresses=tuple(address for _, address in found),
        version=version,
        backend=plan.backend,
        bucket_bytes=plan.bucket_bytes,
        profile_path=plan.profile_path,
        name=newest_name(start.run_id) if plan.in_flight == "continue" else None,
        waits=rollouts.off_policy_steps <= 1,
    )


def too_small_a_bucket(run: RLRun, shape: ModelShape) -> str | None:
    """Return why a model's full weights do not fit a run's buckets, judged by its shape alone; None if they do."""
    rollouts = rollouts_of(run)
    plan = rollouts.weight_sync
    if not isinstance(run.trainable, Full) or rollouts.sampler != "own":
        return None
    if plan.backend == "store" or rollouts.colocate:
        return None
    row_bytes = max(shape.hidden_size, shape.ffn_size, shape.expert_ffn_size) * _ITEM_BYTES[dtype_of(run)]
    if row_bytes <= plan.bucket_bytes:
        return None
    return f"rollouts.weight_sync.bucket_bytes: rows of this model have {row_bytes} bytes: a bucket holds one at least"


def groups_request(run: RLRun, drawn: Sequence[Drawn], step: int) -> GroupSamplesRequest:
    """The request for a step's trajectory groups, made of all samples drawn for it and their grades."""
    rollouts = rollouts_of(run)
    return GroupSamplesRequest(
        **dict(drawn[0]),
        redrawn=tuple(drawn[1:]),
        tells_equal=len(drawn) <= rollouts.redraws,
        shuffle_seed=_seed(run.seed, "rewards", step) if rollouts.shuffle_rewards else None,
        shuffles_steps=rollouts.shuffle_rewards and run.advantages not in COMPARE_GROUPS,
        max_ungraded_fraction=rollouts.max_ungraded_fraction,
    )


def is_evaluated(run: RLRun, step: int, is_last: bool) -> bool:
    """Return True if held-out prompts are evaluated after a step, counted from 1."""
    held_out = rollouts_of(run).held_out
    return held_out is not None and (is_last or held_out.is_due(step))


def may_end_with(run: RLRun, step: int) -> bool:
    """Return True if the run may end with the evaluation after a step."""
    held_out = rollouts_of(run).held_out
    may_end = held_out is not None and (held_out.target is not None or held_out.early_stop is not None)
    return may_end and is_evaluated(run, step, is_last=False)


def ends_with(run: RLRun, step: StepStatus, evaluated: Evaluated) -> bool:
    """True when a step's held-out reward reaches the target, or the evaluations no longer get better."""
    held_out = run.held_out
    if held_out is None:
        return False
    is_at_target = held_out.target is not None and step.metrics.get("eval_reward_mean", -math.inf) >= held_out.target
    return is_at_target or held_out.is_over(evaluated.known)


def proof(
    start: RLStart,
    data: RolloutData,
    policies: Sequence[Policy],
    policy: Policy,
    logprobs: Sequence[float],
    place: SamplerPlace,
) -> ProveRequest:
    """The request that a sampler prove which policy it serves: it must give the trainer's log-probs of the probe."""
    return ProveRequest(
        run_id=start.run_id,
        probe=data.probe,
        logprobs=tuple(logprobs),
        bound=rollouts_of(start.run).probe_bound or limits.PROBE_BOUND[dtype_of(start.run)],
        place=place,
        **dict(_weights_of(start.run, policies, policy)),
    )


def held_out_metrics(found: Mapping[str, tuple[Sampled, GradeSummary]]) -> dict[str, float]:
    """Return the metrics of a policy's held-out samples and their grades, by the names of the prompts.

    With names, `eval_reward_mean` is the mean of all of them together.
    """
    metrics = dict[str, float]()
    graded_samples, reward = 0, 0.0
    for name, (sampled, graded) in found.items():
        told = {
            "samples": float(graded.num_samples),
            "ungraded": float(graded.num_failed),
            "truncation_rate": sampled.num_cut_off / sampled.num_samples,
            "response_tokens_mean": sampled.num_tokens / sampled.num_samples,
        }
        if graded.mean is not None and graded.std is not None:
            told |= {"reward_mean": graded.mean, "reward_std": graded.std}
            graded_samples, reward = graded_samples + graded.num_graded, reward + graded.num_graded * graded.mean
        told |= sampled.metrics
        prefix = f"eval_{name}_" if name else "eval_"
        metrics |= {prefix + metric: value for metric, value in told.items()}
    return ({"eval_reward_mean": reward / graded_samples} if graded_samples else {}) | metrics


def held_out_fields(found: Mapping[str, tuple[Sampled, GradeSummary]]) -> dict[str, Any]:
    """Return what a step's status says of held-out prompts, by their names; nothing without any."""
    if not found:
        return {}
    samples = {f"eval_{name}".removesuffix("_"): sampled.samples.uri for name, (sampled, _) in found.items()}
    return {"metrics": held_out_metrics(found), "samples": samples}


def _seed(seed: int, what: str, step: int) -> int:
    """Derive the seed of one step and one use of chance in it: 62 bits."""
    return int(content_key("rollouts-1", str(seed), what, str(step))[:16], 16) >> 2
