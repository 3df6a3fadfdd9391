"""Pack trajectories: a file of trajectory groups into units, and a plan of optimizer steps of whole groups."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from activities.heartbeats import on_thread
from activities.host_context import OnHost
from activities.records import find_key
from activities.sampling.completions import RoutesFile
from activities.sandbox.child import ask
from activities.sources.download import Download, DownloadRequest
from activities.tokenizing.tokenizer import TokenizerFiles, tokenizer_files
from activities.trajectories.group_samples import completions_of, find_groups
from activities.trajectories.read_groups import (
    Conversations,
    Group,
    GroupsRead,
    GroupsReport,
    PublishedPolicy,
    RememberedAnswers,
    Rules,
    Scored,
    parse_groups,
    read_groups,
    routes_of,
    sequences_of,
)
from longshore.accounts import Room
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact, Frozen
from longshore.losses import AdvantageKind
from longshore.runs import RLRun, RunId, Tenant
from longshore.views import PlanHeader, StepStatus
from shared.chat.episodes import look_up_either
from shared.chat.trajectories import AnswerLookup, Trajectory
from shared.jobs import bins as packing
from shared.jobs.job import PackedData
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, PlanWriter, RouteShape, UnitsWriter
from shared.jobs.prefix_tree import SequenceRow, split_tree
from shared.storage.artifacts import find_artifact, open_artifact, read_record
from shared.storage.files import write_atomically
from shared.storage.paths import content_key, packed, tokenized
from shared.storage.store import ObjectStore, uri_of

# --- Advantages: how much better each trajectory of a group was than could be expected. Pure functions ---
#
# Legend: G trajectories of a group. All in float64. Rewards are finite.

Rewards = NDArray[np.float64]
_EPSILON = 1e-6  # keeps a group of equal rewards at 0, and changes no other by more than it


def group_mean(reward_G: Rewards) -> Rewards:
    """r_i - mean(r): Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2). A bias-free scale, unlike GRPO's."""
    return reward_G - reward_G.mean()


def group_normalized(reward_G: Rewards) -> Rewards:
    """(r_i - mean(r)) / std(r): GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2), std over the whole group."""
    return (reward_G - reward_G.mean()) / (reward_G.std() + _EPSILON)


def leave_one_out(reward_G: Rewards) -> Rewards:
    """r_i - mean of the others: RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, equation 8)."""
    num = len(reward_G)
    return reward_G - (reward_G.sum() - reward_G) / (num - 1)


def turn_leave_one_out(earned: Sequence[Sequence[float]]) -> list[Rewards]:
    """Return the advantage of each answer of each trajectory of a group: G_ik - mean over j != i of G_jk.

    G_ik is what trajectory i earned from answer k on. The mean is over the others that have an answer k; if none has,
    over those of their last answers. Whatever the policy does in answer k or later, the baseline stays: the gradient's
    estimate has no bias, also if the policy chooses how many answers it gives. (A mean of each turn's own rewards taken
    off these would have one: another turn would cost that turn's mean.)
    """
    to_go = [np.cumsum(np.asarray(one, dtype=np.float64)[::-1])[::-1] for one in earned]

    def baseline(own: int, turn: int) -> float:
        others = [one for number, one in enumerate(to_go) if number != own]
        same = [float(one[turn]) for one in others if len(one) > turn]
        return float(np.mean(same or [one[-1] for one in others]))

    return [np.array([value - baseline(own, turn) for turn, value in enumerate(one)]) for own, one in enumerate(to_go)]


def batch_normalized(rewards: Sequence[Rewards]) -> list[Rewards]:
    """(r_i - mean(r)) / std(r) over all groups of the batch: REINFORCE++ (Hu et al. 2025, arXiv:2501.03262, section 3).

    The paper takes the sum of a token's and later tokens' KL off the reward before this. Here a KL is taken off each
    token's own advantage after it (docs/losses.md).
    """
    mean, std = _of_batch(rewards)
    return [(reward_G - mean) / (std + _EPSILON) for reward_G in rewards]


def batch_scaled(rewards: Sequence[Rewards]) -> list[Rewards]:
    """(r_i - mean of its group) / std(r) over all groups of the batch (Liu et al. 2025, arXiv:2508.08221)."""
    _, std = _of_batch(rewards)
    return [group_mean(reward_G) / (std + _EPSILON) for reward_G in rewards]


def _of_batch(rewards: Sequence[Rewards]) -> tuple[float, float]:
    """Mean and standard deviation of all rewards; 0 of none."""
    whole = np.concatenate([np.zeros(0), *rewards])
    return (float(whole.mean()), float(whole.std())) if len(whole) else (0.0, 0.0)


def advantages_of(kind: AdvantageKind, rewards: Sequence[Rewards], given: Sequence[Rewards]) -> list[Rewards]:
    """The advantages of every group of a step. `given` is read for that kind alone.

    `leave_one_out` needs groups of two or more.
    """
    match kind:
        case "group_mean":
            return [group_mean(reward_G) for reward_G in rewards]
        case "group_normalized":
            return [group_normalized(reward_G) for reward_G in rewards]
        case "leave_one_out":
            return [leave_one_out(reward_G) for reward_G in rewards]
        case "batch_scaled":
            return batch_scaled(rewards)
        case "group_mean_normalized":  # REINFORCE++'s baseline: the batch's deviation is that from the groups' means
            return batch_normalized([group_mean(reward_G) for reward_G in rewards])
        case "batch_normalized":
            return batch_normalized(rewards)
        case "given":
            return list(given)
        case "none" | "gae":  # a critic's are computed in its training (megatron_worker/critic.py)
            return [np.zeros_like(reward_G) for reward_G in rewards]


_VERSION = "trajectories-5"  # raise it when the same groups give other units or another plan
_REPORT = "report.json"
_RECORDS: TypeAdapter[list[str | None]] = TypeAdapter(list[str | None])
logger = logging.getLogger("longshore.pack_trajectories")


class GroupsRequest(Frozen):
    """Groups to pack for a step of a run. They are checked against `policy_version` and `vocab_size`.

    `model`: the model whose tokenizer and chat template convert trajectories of messages; without it such trajectories
    are refused. `tenant`: whose records of answers are read. `name` and `version`: of the published policy, if any.
    `routes`: of the model's experts, if each trajectory has its own.
    """

    run_id: RunId
    tenant: Tenant
    name: str | None = None
    version: int | None = None
    run: RLRun
    step: StepStatus
    policy_version: int
    vocab_size: int
    model: Artifact | None = None
    routes: RouteShape | None = None
    room: Room = Room()


class PackedGroups(Frozen):
    """Packed data to train; None when no group teaches anything. `trained_before`: the step that had this key."""

    data: PackedData | None = None
    num_steps: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    report_uri: str | None = None
    trained_before: StepStatus | None = None


class StepReport(Frozen):
    """The content of `report.json` beside the units: counts of the groups, and metrics of the policy."""

    groups: GroupsReport
    metrics: dict[str, float]


class PackTrajectories(OnHost):
    """The activity `pack_trajectories`."""

    @on_thread("pack_trajectories")
    def pack_trajectories(self, request: GroupsRequest) -> PackedGroups:
        """Bring, check and pack a step's groups. A key that was trained before is not packed again.

        Raises:
            InvalidInput: the groups cannot be had or trained; names the file, the line, the field and the rule.
            StoreUnavailable: the source or the store cannot be reached now.
        """
        store = self._host.store
        if (before := find_key(store, request.run_id, request.step)) is not None:
            return PackedGroups(trained_before=before)
        # Groups that a client names are downloaded like any data, so that it cannot name other runs' groups.
        made_here = find_groups(store, request.step.groups) if request.run.rollouts is not None else None
        groups = made_here or self._bring(request)
        drawn = completions_of(store, made_here) if made_here is not None and request.routes is not None else []
        # The key contains the tenant, because messages are converted with the records of the tenant's answers.
        own = request.model_dump_json(exclude={"run_id", "step", "room"})
        key = content_key(_VERSION, groups.sha256, own, *(file.sha256 for file in drawn))
        self._host.use(tokenized(key))
        self._host.use(packed(key))
        if find_artifact(store, tokenized(key)) is None or find_artifact(store, packed(key)) is None:
            self._pack(request, groups, drawn, key)
        return _result(store, key)

    def _bring(self, request: GroupsRequest) -> Artifact:
        """Download the groups as an artifact of this step, since clients may overwrite the file for the next step."""
        step = request.step
        split = f"groups-{content_key(str(step.step), step.key, step.groups)}"
        wanted = DownloadRequest(
            run_id=request.run_id,
            tenant=request.tenant,
            split=split,
            source=DatasetSource(uri=step.groups),
            room=request.room,
        )
        return Download(self._host).download(wanted).dataset

    def _pack(self, request: GroupsRequest, groups: Artifact, drawn: Sequence[Artifact], key: str) -> None:
        host = self._host

        def answer(question: bytearray) -> bytes:
            wanted = AnswerLookup.model_validate_json(question)
            return _RECORDS.dump_json(look_up_either(host.store, request.tenant, wanted))

        with host.scratch("pack") as folder:
            _, manifest = open_artifact(groups, host.settings.s3)
            names = tuple(entry.path for entry in manifest.files)
            tokenizer = None if request.model is None else tokenizer_files(host, request.model)
            routes = [host.stage(file) for file in drawn]
            staged = host.stage(groups)
            asked = request, staged, names, tokenizer, folder, routes
            reads = [staged, *routes, *([tokenizer.folder] if tokenizer is not None else [])]
            report = host.confined(pack_groups, *asked, kind="dataset", answer=answer, reads=reads, writes=[folder])
            if report.dropped_broken:
                logger.warning("step %d of %s: %s", request.step.step, request.run_id, report.summary)
            host.keep(tokenized(key), folder / "units")
            host.keep(packed(key), folder / "plan")


def pack_groups(
    request: GroupsRequest,
    groups: Path,
    names: tuple[str, ...],
    tokenizer: TokenizerFiles | None,
    folder: Path,
    drawn: Sequence[Path] = (),
) -> GroupsReport:
    """Read and pack the named files of a step's groups: units and plan into folders below `folder`.

    Called in a confined process, it asks its caller for records of answers.

    `drawn`: the folders of the samples that they were made from, if those have routes.

    Raises InvalidInput: as `parse_groups` and `read_groups` do.
    """
    answers = RememberedAnswers(lambda wanted: _RECORDS.validate_json(ask(wanted.model_dump_json().encode())))
    policy = PublishedPolicy(request.policy_version, request.name, request.version, request.run.publish_every)
    routes = RoutesFile(drawn, request.routes) if drawn and request.routes is not None else None
    with Conversations(request.model, tokenizer, answers, policy) as conversations:
        rules = Rules(request.run, request.policy_version, request.vocab_size, conversations, routes)
        parsed = (found for name in names for found in parse_groups(groups / name, name))
        read = read_groups(parsed, rules)
    return write_step(read, request, folder / "units", folder / "plan", routes).groups


def write_step(
    read: GroupsRead, request: GroupsRequest, units: Path, plan: Path, routes: RoutesFile | None = None
) -> StepReport:
    """Write units, plan and report of a step's groups into two folders, without their manifests."""
    run, bin_tokens = request.run, request.run.bin_tokens or request.run.max_tokens
    rows = sequence_rows(read.groups, run, routes)
    steps = mini_batches(len(rows), run, request.policy_version)
    sets = sharing_sets(steps, len(rows))
    trees = [split_tree([row for group in each for row in rows[group]], bin_tokens) for each in sets]
    writer = UnitsWriter(units, (*TOKEN_COLUMNS, *TARGET_COLUMNS), request.routes if routes is not None else None)
    for unit in (unit for of_set in trees for unit in of_set):
        writer.append(**unit.columns())
    writer.close()
    tokens_U = np.array([unit.num_tokens for of_set in trees for unit in of_set], dtype=np.int64)
    planned = PlanWriter(plan, bin_tokens)
    for bins in plan_steps(steps, sets, [len(of_set) for of_set in trees], tokens_U, bin_tokens):
        planned.append_step(bins)
    planned.close(tokens_U)
    report = StepReport(groups=read.report, metrics=rollout_metrics(read, int(tokens_U.sum()), request.policy_version))
    write_atomically(units / _REPORT, report.model_dump_json(indent=1).encode(), is_durable=False)
    return report


def sequence_rows(groups: Sequence[Group], run: RLRun, routes: RoutesFile | None = None) -> list[list[SequenceRow]]:
    """Return the sequences of every group, with advantages that are computed from the rewards of all these groups.

    The rewards of broken trajectories count, too: they were sampled from the policy like the others.
    """
    rewards = [np.array([one.reward for one in group]) for group in groups]
    sent = [[one.sequences[0].advantage if one.sequences else None for one in group] for group in groups]
    given = [np.array([advantage or 0.0 for advantage in group]) for group in sent]
    if run.credit == "turn":
        by_answer = [turn_leave_one_out([one.earned for one in group]) for group in groups]
    else:
        advantages = advantages_of(run.advantages, rewards, given)
        by_answer = [
            [np.full(len(one.earned), a) for one, a in zip(group, advantage_G, strict=True)]
            for group, advantage_G in zip(groups, advantages, strict=True)
        ]
    return [
        [row for one, by in zip(group, by_answer_G, strict=True) for row in _rows(one, by, run, routes)]
        for group, by_answer_G in zip(groups, by_answer, strict=True)
    ]


def _rows(one: Scored, advantages: Rewards, run: RLRun, routes: RoutesFile | None) -> Iterator[SequenceRow]:
    """Yield a trajectory's sequences. `advantages`: of its answers, in the order of the sequences."""
    is_cut, first = _is_cut(one), 0
    for each, ends in zip(one.sequences, one.answers, strict=True):
        own, first = advantages[first : first + len(ends)], first + len(ends)
        by_token = np.repeat(own, np.diff([-1, *ends[:-1], len(each.token_ids) - 1]))
        row = sequence_of(each, by_token, routes, is_trained=run.truncated != "mask" or not is_cut)
        if run.critic is not None:
            *before, last = one.earned[first - len(ends) : first]
            rewards = [*before, math.fsum((last, *one.earned[first:]))]  # its last state also earned what came later
            row = _for_critic(row, dict(zip(ends, rewards, strict=True)), each, run.truncated == "bootstrap" and is_cut)
        yield row


def _for_critic(row: SequenceRow, earned: dict[int, float], one: Trajectory, goes_on: bool) -> SequenceRow:
    """Return a sequence with rewards instead of advantages.

    `one.token_rewards` of tokens that were not sampled count for the previous sampled one. With `goes_on`, the last of
    several sampled tokens is not trained: its state's value replaces the rewards after the cut (critic.py).

    Args:
        earned: the rewards of the answers, by the places of their last tokens.
    """
    sampled = np.flatnonzero(row.target_mask)
    last, weight, rewards = sampled[-1], row.weight.copy(), np.zeros_like(row.advantage)
    if goes_on and len(sampled) > 1:
        weight[last], last = 0, sampled[-2]
    for place, value in enumerate(one.token_rewards or ()):
        before = sampled[sampled <= min(place, last)]
        rewards[before[-1] if len(before) else sampled[0]] += value
    for place, value in earned.items():
        rewards[min(place, last)] += value
    return replace(row, weight=weight, advantage=rewards)


def _is_cut(one: Scored) -> bool:
    """True if the sampler's limit ended a trajectory."""
    return bool(one.sequences) and one.sequences[-1].finish_reason == "length"


def sequence_of(
    one: Trajectory, advantage: float | Rewards, routes: RoutesFile | None = None, is_trained: bool = True
) -> SequenceRow:
    """Return a trajectory's columns. Sampled tokens are targets of weight 1; their old logprobs are the sampler's.

    `advantage`: of all tokens, or of each. `is_trained`: False for weights of 0.
    """
    sampled_L = np.array(one.sampled, dtype=bool)
    length = len(one.token_ids)
    return SequenceRow(
        token_ids=np.array(one.token_ids, dtype=np.int64),
        target_mask=sampled_L,
        weight=(sampled_L & is_trained).astype(np.float32),
        advantage=np.full(length, advantage, dtype=np.float32),
        old_logprob=np.array([p or 0.0 for p in one.logprobs], dtype=np.float32),
        ref_logprob=np.zeros(length, dtype=np.float32),
        routes=routes_of(one, routes) if routes is not None else None,
    )


def mini_batches(num_groups: int, run: RLRun, policy_version: int) -> list[tuple[int, ...]]:
    """Return the groups of every optimizer step: each epoch shuffles all groups and cuts them into even parts.

    `policy_version`: the one that the steps begin from. The shuffles depend only on it and on the run's seed, so they
    are the same after failed steps or when the run is resumed.
    """
    steps: list[tuple[int, ...]] = []
    for epoch in range(run.epochs if num_groups else 0):
        order = packing.epoch_order(num_groups, run.seed, policy_version * run.epochs + epoch)
        parts = np.array_split(order, min(run.mini_batches, num_groups))
        steps += [tuple(sorted(part.tolist())) for part in parts]
    return steps


def sharing_sets(steps: Sequence[tuple[int, ...]], num_groups: int) -> list[tuple[int, ...]]:
    """Return sets of groups whose sequences are put into trees together, to store common prefixes once.

    A set is a mini-batch if its groups are never trained with others; otherwise each group is a set. Either way every
    sequence is stored once, and scored once by the models that are frozen for the job.
    """
    distinct = sorted(set(steps))
    if sum(len(each) for each in distinct) == num_groups:
        return distinct
    return [(group,) for group in range(num_groups)]


def plan_steps(
    steps: Sequence[tuple[int, ...]],
    sets: Sequence[tuple[int, ...]],
    num_units: Sequence[int],
    tokens_U: NDArray[np.int64],
    bin_tokens: int,
) -> Iterable[list[list[int]]]:
    """Plan the bins of every optimizer step.

    Args:
        steps: the groups of each step.
        sets: sets of groups with common units. A step has all groups of a set, or none.
        num_units: of each set, whose units are consecutive.
    """
    ends = list(accumulate(num_units))
    units_of = {each[0]: range(end - num, end) for each, end, num in zip(sets, ends, num_units, strict=True)}
    for groups in steps:
        units = [unit for group in groups for unit in units_of.get(group, ())]
        bins = packing.pack_bins(tokens_U[units].tolist(), bin_tokens)
        yield [[units[place] for place in each] for each in bins]


def rollout_metrics(read: GroupsRead, packed_tokens: int, policy_version: int) -> dict[str, float]:
    """Return metrics of the policy that sampled the groups, over all trajectories with a reward, also dropped ones.

    Metrics of tokens are over the trajectories that have token ids.
    """
    report = read.report
    everyone = [one for group in read.all_groups for one in group]
    whole = [one for one in everyone if one.sequences]
    trained = [each for group in read.groups for each in sequences_of(group)]
    metrics: dict[str, float] = {
        "groups": report.num_groups,
        "trained_groups": report.trained_groups,
        "trajectories": report.num_trajectories,
        "trained_trajectories": report.trained_trajectories,
        "dropped_trajectories": report.num_trajectories - report.trained_trajectories,
        "broken_trajectories": report.dropped_broken,
        **{f"dropped_for_{rule}": count for rule, count in report.dropped_for.items()},
        **report.turns,
    }
    if everyone:
        reward = np.array([one.reward for one in everyone])
        spread = [np.std([one.reward for one in group]) for group in read.all_groups]
        metrics |= {"reward_mean": float(reward.mean()), "reward_std": float(reward.std())}
        metrics["reward_spread_mean"] = float(np.mean(spread))
        metrics["zero_variance_share"] = report.equal_reward_groups / len(read.all_groups)
    if whole:
        lengths = np.array([sum(sum(each.sampled) for each in one.sequences) for one in whole])
        num_tokens = sum(len(each.token_ids) for one in whole for each in one.sequences)
        metrics |= {"prompt_tokens": num_tokens - lengths.sum(), "response_tokens": lengths.sum()}
        metrics |= {"response_tokens_mean": float(lengths.mean()), "response_tokens_max": float(lengths.max())}
    versions = Counter(version for one in whole for each in one.sequences for version in each.token_versions)
    if behind := {policy_version - version: count for version, count in versions.items() if version is not None}:
        mean = np.average(list(behind), weights=list(behind.values()))
        metrics |= {"staleness_mean": float(mean), "staleness_max": max(behind)}
        metrics["stale_token_share"] = 1 - behind.get(0, 0) / sum(behind.values())
    if ends := [end for one in whole if (end := one.sequences[-1].finish_reason) is not None]:
        metrics["truncation_rate"] = ends.count("length") / len(ends)
    if packed_tokens:
        metrics["packing_factor"] = sum(len(one.token_ids) for one in trained) / packed_tokens
    for name in sorted({name for one in everyone for name in one.metrics}):  # those that clients sent
        sent = [one.metrics[name] for one in everyone if name in one.metrics]
        metrics[f"trajectory_{name}"] = float(np.mean(sent))
    return {name: float(value) for name, value in metrics.items()}


def _result(store: ObjectStore, key: str) -> PackedGroups:
    report = read_record(store, f"{tokenized(key)}/{_REPORT}", StepReport)
    header = read_record(store, f"{packed(key)}/plan.json", PlanHeader)
    units, plan = find_artifact(store, tokenized(key)), find_artifact(store, packed(key))
    assert units is not None and plan is not None
    return PackedGroups(
        data=PackedData(units=units, plan=plan) if header.num_steps else None,
        num_steps=header.num_steps,
        metrics=report.metrics,
        report_uri=uri_of(store, f"{tokenized(key)}/{_REPORT}"),
    )
