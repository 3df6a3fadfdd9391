"""Group samples: make trajectory groups, in the form that clients send, of completions and their grades."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from activities.grading.grade import GRADES, SUMMARY, GradeSummary
from activities.heartbeats import on_thread, stop_if_cancelled
from activities.host_context import OnHost
from activities.sampling.completions import (
    Sample,
    SampledGroup,
    SampledTokens,
    read_sampled_groups,
    routes_starts,
)
from longshore.environments import BROKEN
from longshore.fields import Artifact, Frozen, added
from longshore.grading import SampleGrade
from shared.chat.trajectories import TokenSequence, Trajectory, TrajectoryGroup
from shared.errors import InvalidInput
from shared.jobs import bins as packing
from shared.storage.artifacts import find_artifact, read_record
from shared.storage.paths import content_key, grouped, grouped_report, is_grouped
from shared.storage.store import ObjectStore, uri_of

_VERSION = "groups-3"  # raise it when the same completions and grades would make other groups

GROUPS = "groups.jsonl"
_SHUFFLES = 16  # that are drawn for each group


class Drawn(Frozen):
    """Completions of `sample`, and the grades that `grade` gave its samples."""

    completions: Artifact
    grades: Artifact


class GroupSamplesRequest(Drawn):
    """The samples drawn first, and those drawn again for some groups, which replace the first ones of these groups.

    `tells_equal`: which groups have equal grades is answered. `shuffle_seed`: rewards change places within each group,
    or with `shuffles_steps` among all samples, so that they say nothing of the truth: a control experiment.
    """

    redrawn: tuple[Drawn, ...] = ()
    tells_equal: bool = False
    shuffle_seed: int | None = Field(default=None, ge=0, lt=2**63)
    shuffles_steps: bool = False
    max_ungraded_fraction: float = Field(default=0.1, ge=0, le=1)

    @property
    def rounds(self) -> list[Drawn]:
        return [self, *self.redrawn]

    @property
    def key(self) -> str:
        """The store key, by content: where the bytes came from does not matter."""
        own = self.model_dump_json(include={"shuffle_seed", "max_ungraded_fraction"})
        own += "shuffled as a whole" if self.shuffles_steps else ""
        again = (file.sha256 for one in self.redrawn for file in (one.completions, one.grades))
        return content_key(_VERSION, self.completions.sha256, self.grades.sha256, own, *again)


class SourceCounts(Frozen):
    """A source's prompts in a step, their graded samples, and the sum of these samples' rewards."""

    num_prompts: int = 0
    num_graded: int = 0
    reward: float = 0.0


class GroupsMade(Frozen):
    """Counts of the results. `num_groups`: groups with a graded sample. `num_failed`: those with an episode whose
    environment or verifier broke. `completions`: with their routes.

    `equal_groups`: the numbers of groups whose grades are all the same. `sources`: of a mixture, by their names.
    """

    num_groups: int
    num_trajectories: int
    num_ungraded: int
    num_failed: int = added(0)
    completions: Artifact | None = None
    redrawn: tuple[Artifact, ...] = ()
    equal_groups: tuple[int, ...] = ()
    sources: dict[str, SourceCounts] = added({})

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that cannot be computed from the groups any more."""
        num_samples = self.num_trajectories + self.num_ungraded
        told = {"samples": float(num_samples), "ungraded_share": self.num_ungraded / num_samples}
        if self.num_failed:
            told["failed_groups"] = float(self.num_failed)
        for name, counts in self.sources.items():
            told[f"prompts_{name}"] = float(counts.num_prompts)
            if counts.num_graded:
                told[f"reward_mean_{name}"] = counts.reward / counts.num_graded
        return told

    @property
    def files(self) -> list[Artifact]:
        """The completions, followed by those that were drawn again."""
        return [*([] if self.completions is None else [self.completions]), *self.redrawn]


class Grouped(GroupsMade):
    """`groups` holds `groups.jsonl`, a `TrajectoryGroup` a line, and nothing else."""

    groups: Artifact
    groups_uri: str


class GroupSamples(OnHost):
    """The activity `group_samples`."""

    @on_thread("group_samples")
    def group_samples(self, request: GroupSamplesRequest) -> Grouped:
        """Make groups. Raises InvalidInput, with the first reasons, if too many samples have no grade."""
        store, key = self._host.store, request.key

        def write(folder: Path) -> None:
            rounds = [(self._host.stage(one.completions), self._host.stage(one.grades)) for one in request.rounds]
            made = write_groups(rounds, request, folder)
            store.put_bytes(grouped_report(key), made.model_dump_json(indent=1).encode())

        groups = self._host.made_once(grouped(key), "groups", write)
        made = read_record(store, grouped_report(key), GroupsMade)
        if not request.tells_equal:
            made = made.model_copy(update={"equal_groups": ()})
        return Grouped(groups=groups, groups_uri=f"{groups.uri}/{GROUPS}", **made.model_dump())


def write_groups(rounds: Sequence[tuple[Path, Path]], request: GroupSamplesRequest, folder: Path) -> GroupsMade:
    """Stream completions and grades into a folder with `groups.jsonl`, without a manifest.

    `rounds`: folders of completions and of their grades; later ones take precedence.

    Raises InvalidInput: more samples have no grade than the run allows, or none has one.
    """
    num_groups = num_trajectories = num_ungraded = num_failed = 0
    equal_groups: list[int] = []
    sources: dict[str, SourceCounts] = {}
    first, *later = (_read_round(*each) for each in rounds)
    starts = routes_starts([completions for completions, _ in rounds])
    latest = {
        group.group: (group, graded, starts[number]) for number, one in enumerate(later, 1) for group, graded in one
    }
    shown = 0.0  # of the truth by shuffled rewards
    whole = _shuffled_step(rounds[0], request.shuffle_seed) if request.shuffles_steps else None
    with (folder / GROUPS).open("wb") as file:
        for each in first:
            drawn, graded, start = latest.get(each[0].group, (*each, 0))
            if any(sample.course is not None and sample.course.end in BROKEN for sample in drawn.samples):
                num_failed, graded = num_failed + 1, []  # without it the others' baseline would be a biased one
            num_ungraded += len(drawn.samples) - len(graded)
            if drawn.source:
                before = sources.get(drawn.source, SourceCounts())
                sources[drawn.source] = SourceCounts(
                    num_prompts=before.num_prompts + 1,
                    num_graded=before.num_graded + len(graded),
                    reward=before.reward + math.fsum(reward for *_, reward in graded),
                )
            if graded:
                num_groups += 1
                num_trajectories += len(graded)
                equal_groups += [drawn.group] if len({reward for *_, reward in graded}) == 1 else []
                if whole is not None:
                    graded = [(*each[:2], next(whole)) for each in graded]
                elif request.shuffle_seed is not None:
                    graded, shown = _shuffled(graded, request.shuffle_seed, drawn.group, shown)
                group = TrajectoryGroup(
                    trajectories=tuple(_trajectory(drawn, *each, start) for each in graded),
                    metadata={"place": drawn.place, "row": drawn.row},
                )
                file.write(group.model_dump_json(exclude_defaults=True).encode() + b"\n")
    made = GroupsMade(
        num_groups=num_groups,
        num_trajectories=num_trajectories,
        num_ungraded=num_ungraded,
        num_failed=num_failed,
        completions=request.completions,
        redrawn=tuple(one.completions for one in request.redrawn),
        equal_groups=tuple(equal_groups),
        sources=sources,
    )
    _refuse_ungraded(made, request.max_ungraded_fraction, rounds[0][1])
    return made


def _read_round(completions: Path, grades: Path) -> Iterator[tuple[SampledGroup, "_Graded"]]:
    """Pair each group's samples with their grades, which are in the same order. Asserts that the counts are equal."""
    with (grades / GRADES).open("rb") as file:
        told = map(SampleGrade.model_validate_json, file)
        for group in read_sampled_groups(completions):
            stop_if_cancelled()
            found = list(zip(group.samples, told, strict=False))
            assert len(found) == len(group.samples), "there are fewer grades than samples"
            yield group, [(sample, grade, grade.grade) for sample, grade in found if grade.grade is not None]
        assert next(told, None) is None, "there are more grades than samples"


_Graded = list[tuple[Sample, SampleGrade, float]]  # samples that have a grade, in order, and their rewards


def _shuffled_step(drawn: tuple[Path, Path], seed: int | None) -> Iterator[float]:
    """Yield a step's rewards in another order. If advantages compare no group, only the mean shows the true rewards."""
    true = [(sample, grade, reward) for _, graded in _read_round(*drawn) for sample, grade, reward in graded]
    shuffled, _ = _shuffled(true, seed or 0, 0, 0.0)
    return (reward for *_, reward in shuffled)


def _shuffled(graded: _Graded, seed: int, group: int, shown: float) -> tuple[_Graded, float]:
    """Return a group with its rewards in other places, and the sum of all groups' correlations with the true ones.

    It takes the one of several shuffles that brings the sum closest to zero. Random shuffles of 50 groups of 8 sum to a
    twentieth of the true correlation or more, in either direction, and a run learns this.
    """
    true_G = np.array([reward for _, _, reward in graded])
    apart_G = true_G - true_G.mean()
    square = float(apart_G @ apart_G) or 1.0
    orders = [packing.epoch_order(len(graded), seed, group * _SHUFFLES + number) for number in range(_SHUFFLES)]
    sums = [shown + float(apart_G @ apart_G[order_G]) / square for order_G in orders]
    best = min(range(_SHUFFLES), key=lambda number: abs(sums[number]))
    rewards = true_G[orders[best]].tolist()
    return [(*each[:2], reward) for each, reward in zip(graded, rewards, strict=True)], sums[best]


def _trajectory(
    group: SampledGroup, sample: Sample, grade: SampleGrade, reward: float, routes_start: int
) -> Trajectory:
    def sequence(prompt_ids: tuple[int, ...], prompt_block: int | None, one: SampledTokens) -> dict[str, Any]:
        num_prompt, versions = len(prompt_ids), one.policy_versions
        if prompt_block is None or one.block is None:
            routes = None
        else:
            routes = routes_start + prompt_block, routes_start + one.block
        return {
            "token_ids": prompt_ids + one.token_ids,
            "sampled": (False,) * num_prompt + tuple(logprob is not None for logprob in one.logprobs),
            "logprobs": (None,) * num_prompt + one.logprobs,
            "policy_versions": (None,) * num_prompt + versions if versions else None,
            "finish_reason": one.finish_reason,
            "routes": routes,
        }

    course, metrics = sample.course, {name: value for name, value in grade.parts.items() if value is not None}
    earned = course.turn_rewards if course is not None and course.reward == reward else None
    return Trajectory(
        reward=reward,
        policy_version=group.policy_version,
        turn_rewards=earned,
        branches=tuple(TokenSequence(**sequence(one.prompt_ids, one.prompt_block, one)) for one in sample.branches),
        metrics=(course.metrics if course is not None else {}) | metrics,
        metadata={"end": course.end} if course is not None else {},
        **sequence(group.prompt_ids, group.prompt_block, sample),
    )


def _refuse_ungraded(made: GroupsMade, max_fraction: float, grades: Path) -> None:
    num_samples = made.num_trajectories + made.num_ungraded
    if made.num_trajectories and made.num_ungraded <= max_fraction * num_samples:
        return
    summary = GradeSummary.model_validate_json((grades / SUMMARY).read_bytes())
    rule = f"more than max_ungraded_fraction {max_fraction:g}" if made.num_trajectories else "which is all of them"
    raise InvalidInput(
        f"{made.num_ungraded} of {num_samples} samples have no grade, {rule}; first: {'; '.join(summary.reasons)}",
        "grader",
    )


def find_groups(store: ObjectStore, uri: str) -> Artifact | None:
    """Return the artifact of groups that this activity made, by the URI of their file; None for any other URI."""
    key = uri.removeprefix(f"{store.uri}/").removesuffix(f"/{GROUPS}")
    is_ours = is_grouped(key) and uri == f"{uri_of(store, key)}/{GROUPS}"
    return find_artifact(store, key) if is_ours else None


def completions_of(store: ObjectStore, groups: Artifact) -> list[Artifact]:
    """Return the completions that this activity's groups were made of, in the order of their routes."""
    key = groups.uri.removesuffix("/groups").rpartition("/")[2]
    return read_record(store, grouped_report(key), GroupsMade).files
