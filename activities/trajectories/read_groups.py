"""Reads trajectory groups: parses and checks them, refuses or drops those that cannot be trained, and counts them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from activities.formats.rows import lines_of
from activities.sampling.routes import RoutesFile
from activities.trajectories.chat_trajectories import BrokenTrajectory, Conversations
from longshore.fields import Frozen
from shared.chat.trajectories import FORMS, ChatTrajectory, SentGroup, SentTrajectory, Trajectory
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.jobs.losses import COMPARE_GROUPS
from shared.runs.requests import RLRun

MAX_TRAJECTORIES = 65_536
_ROUTES = "routes"  # the rule that no run drops trajectories for


class GroupsReport(Frozen):
    """Counts of a step's groups and trajectories. Names without `groups` count trajectories."""

    num_groups: int = 0
    num_trajectories: int = 0
    trained_groups: int = 0
    trained_trajectories: int = 0
    dropped_broken: int = 0
    dropped_single_groups: int = 0
    dropped_equal_groups: int = 0
    equal_reward_groups: int = 0
    dropped_for: dict[str, int] = Field(default_factory=dict)
    turns: dict[str, int] = Field(default_factory=dict)

    @property
    def summary(self) -> str:
        """A sentence on the broken trajectories."""
        reasons = ", ".join(f"{count} {rule}" for rule, count in sorted(self.dropped_for.items()))
        return f"{self.dropped_broken} of {self.num_trajectories} trajectories were left out: {reasons}"


@dataclass(frozen=True)
class Scored:
    """A trajectory as it was read. A broken one has no sequences, but its reward still counts in its group.

    A conversation has several sequences if an answer's prompt does not contain the earlier answers' ids.
    """

    reward: float
    metrics: dict[str, float]
    sequences: tuple[Trajectory, ...]


Group = tuple[Scored, ...]


def sequences_of(group: Group) -> list[Trajectory]:
    """Return all sequences of a group."""
    return [sequence for one in group for sequence in one.sequences]


@dataclass(frozen=True)
class Rules:
    """The run and the model's limits that trajectories are checked against. `policy_version`: at the step's start.

    `conversations` converts those of chat messages; without it they are refused. `routes`: of all trajectories, if the
    trainer takes them.
    """

    run: RLRun
    policy_version: int
    vocab_size: int
    conversations: Conversations | None = None
    routes: RoutesFile | None = None


@dataclass
class GroupsRead:
    """The groups to train, all groups before any was dropped, and counts."""

    groups: list[Group] = field(default_factory=list)
    all_groups: list[Group] = field(default_factory=list)
    report: GroupsReport = field(default_factory=GroupsReport)


def parse_groups(path: Path, name: str) -> Iterator[tuple[str, SentGroup]]:
    """Parse a file's groups. Yields each line's place and group.

    Raises InvalidInput: a line is not a group; names the place in it.
    """
    for place, line in lines_of(path, name):
        try:
            yield place, SentGroup.model_validate_json(line)
        except ValidationError as error:
            raise InvalidInput(first_rule(error, FORMS), place) from None


def read_groups(parsed: Iterable[tuple[str, SentGroup]], rules: Rules) -> GroupsRead:
    """Check every trajectory, and keep the trainable ones.

    Raises InvalidInput: there is no group; or one is broken and the run does not drop those.
    """
    read, counts, reasons = GroupsRead(), dict.fromkeys(GroupsReport.model_fields, 0), dict[str, int]()
    del counts["dropped_for"], counts["turns"]
    for place, group in parsed:
        counts["num_groups"] += 1
        counts["num_trajectories"] += len(group.trajectories)
        if counts["num_trajectories"] > MAX_TRAJECTORIES:
            raise InvalidInput(f"a step has at most {MAX_TRAJECTORIES:,} trajectories", place)
        if rules.conversations is not None:
            rules.conversations.prepare(group.trajectories)
        scored = tuple(_scored(place, group, rules, reasons))
        num_whole = sum(bool(one.sequences) for one in scored)
        counts["dropped_broken"] += len(group.trajectories) - num_whole
        if not scored:
            continue
        read.all_groups.append(scored)
        if (reason := _nothing_to_learn(scored, rules.run)) is not None:
            counts["equal_reward_groups"] += reason != "dropped_single_groups"
            if reason in counts:
                counts[reason] += 1
                continue
        if num_whole:
            read.groups.append(scored)
    if not counts["num_groups"]:
        raise InvalidInput("there is no trajectory group: send one JSON object per line", "groups")
    counts["trained_groups"] = len(read.groups)
    counts["trained_trajectories"] = sum(bool(one.sequences) for group in read.groups for one in group)
    turns = dict(rules.conversations.counts) if rules.conversations is not None else {}
    read.report = GroupsReport(**counts, dropped_for=reasons, turns=turns)
    return read


def _scored(place: str, group: SentGroup, rules: Rules, reasons: dict[str, int]) -> Iterator[Scored]:
    """Yield the trajectories of a group. A broken one has no sequences; without a finite reward it is left out."""
    for number, sent in enumerate(group.trajectories):
        try:
            yield _shaped(Scored(sent.reward, sent.metrics, _read(sent, rules)), rules.run)
        except BrokenTrajectory as fault:
            if rules.run.broken == "refuse" or fault.rule == _ROUTES:
                raise InvalidInput(fault.message, f"{place}: trajectories.{number}.{fault.field}") from fault
            reasons[fault.rule] = reasons.get(fault.rule, 0) + 1
            if math.isfinite(sent.reward):
                yield Scored(sent.reward, sent.metrics, ())


def _shaped(one: Scored, run: RLRun) -> Scored:
    """Take the penalty of a long answer off its reward, and keep it as a metric.

    With b buffer tokens before the limit of L: p * min(1, (tokens - (L - b)) / b) if that is positive (DAPO: Yu et
    al. 2025, arXiv:2503.14476, eq. 13).
    """
    if run.overlong is None:
        return one
    tokens = sum(sum(each.sampled) for each in one.sequences)
    beyond = tokens - (run.longest_answer - run.overlong.buffer_tokens)
    penalty = run.overlong.penalty * min(1.0, max(0.0, beyond / run.overlong.buffer_tokens))
    return Scored(one.reward - penalty, one.metrics | {"overlong_penalty": penalty}, one.sequences)


def _read(sent: SentTrajectory, rules: Rules) -> tuple[Trajectory, ...]:
    """The sequences of token ids of a trajectory. Raises BrokenTrajectory when it cannot be trained."""
    sequences: tuple[Trajectory, ...]
    if not isinstance(sent, ChatTrajectory):
        sequences = (sent,)
    elif rules.conversations is None:
        raise BrokenTrajectory("messages", "messages", "trajectories of token ids alone are taken here")
    else:
        sequences = rules.conversations.trajectories_of(sent, rules.run.max_tokens)
    for one in sequences:
        _check(one, rules)
    return sequences


def _check(one: Trajectory, rules: Rules) -> None:
    """Raises BrokenTrajectory with the first rule that it breaks."""
    run, length = rules.run, len(one.token_ids)
    for name in ("sampled", "logprobs", "token_rewards", "policy_versions"):
        column = getattr(one, name)
        if column is not None and (found := len(column)) != length:
            raise BrokenTrajectory(name, "length", f"it has {found} entries for {length} token_ids")
    if length > run.max_tokens:
        raise BrokenTrajectory("token_ids", "too_long", f"{length} tokens; max_tokens is {run.max_tokens}")
    if not 0 <= min(one.token_ids) <= max(one.token_ids) < rules.vocab_size:
        rule = f"ids lie in 0 to {rules.vocab_size - 1}, the model's own"
        raise BrokenTrajectory("token_ids", "vocabulary", rule)
    if not any(one.sampled):
        raise BrokenTrajectory("sampled", "nothing_sampled", "no token was sampled: there is nothing to train")
    if one.sampled[0]:
        rule = "the first token cannot be sampled: nothing stands before it"
        raise BrokenTrajectory("sampled", "first_sampled", rule)
    if not math.isfinite(one.reward):
        raise BrokenTrajectory("reward", "reward", f"it is {one.reward}; a reward is a finite number")
    _check_logprobs(one)
    _check_advantage(one, run)
    if one.token_rewards is not None and run.critic is None:
        raise BrokenTrajectory("token_rewards", "reward", "they are a critic's to read, and the run has none")
    if not all(map(math.isfinite, one.token_rewards or ())):
        raise BrokenTrajectory("token_rewards", "reward", "rewards are finite numbers")
    _check_version(one, rules)
    _check_routes(one, rules)


def _check_logprobs(one: Trajectory) -> None:
    sampled = [p for p, is_sampled in zip(one.logprobs, one.sampled, strict=True) if is_sampled]
    if None in sampled:
        rule = f"{sampled.count(None)} sampled tokens have none: the trainer's are compared with the sampler's"
        raise BrokenTrajectory("logprobs", "missing_logprobs", rule)
    if not all(p is None or (math.isfinite(p) and p <= 0) for p in sampled):
        raise BrokenTrajectory("logprobs", "logprobs", "logprobs of sampled tokens are finite, and at most 0")


def _check_advantage(one: Trajectory, run: RLRun) -> None:
    if run.advantages != "given" and one.advantage is not None:
        raise BrokenTrajectory("advantage", "advantage", f"the run computes {run.advantages}: it would be ignored")
    if run.advantages == "given" and (one.advantage is None or not math.isfinite(one.advantage)):
        raise BrokenTrajectory("advantage", "advantage", "the run's advantages are given: a finite number")


def _check_version(one: Trajectory, rules: Rules) -> None:
    # Without a version it may be from the run's beginning.
    versions, bound = [version or 0 for version in one.token_versions], rules.run.max_staleness
    field = "policy_version" if one.policy_versions is None else "policy_versions"
    if (newest := max(versions)) > rules.policy_version:
        message = f"{newest} does not exist yet: the newest is {rules.policy_version}"
        raise BrokenTrajectory(field, "future", message)
    oldest, behind = min(versions), rules.policy_version - min(versions)
    if bound is not None and behind > bound:
        message = f"{oldest} is {behind} behind {rules.policy_version}; max_staleness is {bound}"
        raise BrokenTrajectory(field, "stale", message)


def _check_routes(one: Trajectory, rules: Rules) -> None:
    if rules.routes is None and one.routes is not None:
        raise BrokenTrajectory(
            "routes", _ROUTES, "they are taken of a run's own samples alone, of a mixture of experts"
        )
    if rules.routes is not None:
        try:
            routes_of(one, rules.routes)
        except InvalidInput as error:
            raise BrokenTrajectory("routes", _ROUTES, error.message) from error


def routes_of(one: Trajectory, routes: RoutesFile) -> NDArray[np.integer]:
    """Return the experts of a trajectory's tokens, [L, layers, experts of a token]. Raises InvalidInput without any."""
    if one.routes is None:
        raise InvalidInput("it has none, and the trainer is to take the sampler's experts", "routes")
    return routes.of_sequence(one.token_ids, one.sampled.index(True), one.routes)


def _nothing_to_learn(group: Group, run: RLRun) -> str | None:
    """Return why a group's advantages are all 0, as the name of a count, or `kept` if the run keeps it; else None."""
    if run.advantages not in COMPARE_GROUPS:
        return None
    if len(group) == 1:
        return "dropped_single_groups"
    if len({one.reward for one in group}) == 1:
        return "dropped_equal_groups" if run.equal_rewards == "drop" else "kept"
    return None
