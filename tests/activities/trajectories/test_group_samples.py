"""Completions and grades into groups: what was sampled as it was sampled, and no sample lost without a word."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from temporalio.testing import ActivityEnvironment

from activities.grading.grade import GRADES, SUMMARY, Grade, GradeRequest, GradeSummary
from activities.host_context import HostContext
from activities.sampling.completions import RoutesFile, Sample, SampledGroup
from activities.sampling.sample import write_samples
from activities.tokenizing.render_prompts import PromptRow, PromptsFile, write_rows
from activities.trajectories.group_samples import (
    GROUPS,
    Drawn,
    Grouped,
    GroupSamples,
    GroupSamplesRequest,
    find_groups,
    write_groups,
)
from activities.trajectories.pack_trajectories import rollout_metrics
from activities.trajectories.read_groups import GroupsRead, Rules, parse_groups, read_groups, sequences_of
from longshore.fields import Artifact
from longshore.grading import SampleGrade
from shared.errors import InvalidInput
from shared.jobs.packed import RouteShape
from shared.runs.acceptance import parse_grader
from shared.settings import Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore, open_store
from tests.activities.groups import rl_run

NUM_GROUPS, GROUP_SIZE = 3, 8


def groups() -> list[SampledGroup]:
    """Every token and logprob is another one; every second answer was cut off."""
    return [
        SampledGroup(
            group=g,
            row=10 - g,
            place=f"rows.jsonl:{g + 1}",
            prompt_ids=(1, 2, 3 + g),
            policy_version=2,
            samples=tuple(
                Sample(
                    token_ids=(100 + 20 * g + j, 7),
                    logprobs=(-0.1 * (j + 1) - g, -1 / 3),
                    text=f"answer {g}.{j}",
                    finish_reason="length" if j % 2 else "stop",
                )
                for j in range(GROUP_SIZE)
            ),
        )
        for g in range(NUM_GROUPS)
    ]


def grades(*ungraded: int) -> list[SampleGrade]:
    return [
        SampleGrade(place=f"samples.jsonl:{n + 1}", grade=None, error="no number in it")
        if n in ungraded
        else SampleGrade(place=f"samples.jsonl:{n + 1}", grade=n / 10, parts={"style": n / 5, "length": None})
        for n in range(NUM_GROUPS * GROUP_SIZE)
    ]


def redrawn_of(tmp_path: Path, group: SampledGroup, *found: float) -> Drawn:
    """Completions of one group, and their grades, as sealed folders of a store."""
    folders = [tmp_path / f"again-{name}-{group.group}-{found[0]}" for name in ("completions", "samples", "grades")]
    with PromptsFile(tmp_path / "prompts") as prompts:
        write_samples([group], prompts, *folders[:2])
    folders[2].mkdir()
    lines = (SampleGrade(place="", grade=grade).model_dump_json() + "\n" for grade in found)
    (folders[2] / GRADES).write_text("".join(lines))
    store, artifacts = LocalStore(tmp_path / "given"), []
    for folder in (folders[0], folders[2]):
        seal(folder)
        artifacts.append(upload_artifact(store, folder.name, folder))
    return Drawn(completions=artifacts[0], grades=artifacts[1])


def grouped(
    tmp_path: Path, found: list[SampleGrade], drawn: list[SampledGroup] | None = None, **fields: Any
) -> tuple[Grouped, GroupsRead]:
    store = LocalStore(tmp_path / "given")
    folders = {name: tmp_path / name for name in ("completions", "samples", "grades", "prompts")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    write_rows((PromptRow(f"rows.jsonl:{number}", (1,), {}) for number in range(11)), folders["prompts"])
    with PromptsFile(folders["prompts"]) as prompts:
        write_samples(drawn or groups(), prompts, folders["completions"], folders["samples"])
    (folders["grades"] / GRADES).write_text("".join(grade.model_dump_json() + "\n" for grade in found))
    failed = [grade for grade in found if grade.grade is None]
    summary = GradeSummary(
        num_samples=len(found),
        num_graded=len(found) - len(failed),
        num_failed=len(failed),
        mean=None,
        std=None,
        reasons=tuple(f"{grade.place}: {grade.error}" for grade in failed[:2]),
    )
    (folders["grades"] / SUMMARY).write_text(summary.model_dump_json())
    artifacts = {}
    for name in ("completions", "grades"):
        seal(folders[name])
        artifacts[name] = upload_artifact(store, f"{name}-{len(failed)}-{len(found)}", folders[name])
    settings = Settings(root=tmp_path / "machine")
    request = GroupSamplesRequest(**artifacts, **fields)
    result: Grouped = ActivityEnvironment().run(GroupSamples(HostContext(settings)).group_samples, request)
    path = stage(result.groups, tmp_path / "cache", settings.s3) / GROUPS
    rules = Rules(rl_run(max_tokens=16), policy_version=2, vocab_size=512)
    return result, read_groups(parse_groups(path, GROUPS), rules)


def test_a_trajectory_is_what_was_sampled_with_its_grade(tmp_path: Path) -> None:
    result, read = grouped(tmp_path, grades())
    assert (result.num_groups, result.num_trajectories, result.num_ungraded) == (NUM_GROUPS, 24, 0)
    for drawn, made in zip(groups(), read.groups, strict=True):
        for j, (sample, one) in enumerate(zip(drawn.samples, sequences_of(made), strict=True)):
            assert one.token_ids == (*drawn.prompt_ids, *sample.token_ids)
            assert one.sampled == (False, False, False, True, True)
            assert one.logprobs == (None, None, None, *sample.logprobs)
            assert (one.reward, one.policy_version) == ((drawn.group * GROUP_SIZE + j) / 10, 2)
            assert (one.finish_reason, one.metrics) == (sample.finish_reason, {"style": 2 * one.reward})
    metrics = rollout_metrics(read, 0, policy_version=2)
    assert metrics["truncation_rate"] == 0.5
    assert metrics["trajectory_style"] == pytest.approx(2 * metrics["reward_mean"])


def test_shuffled_rewards_stay_in_their_group_and_leave_their_answers(tmp_path: Path) -> None:
    _, true = grouped(tmp_path, grades(3))
    _, shuffled = grouped(tmp_path, grades(3), shuffle_seed=5)
    _, again = grouped(tmp_path, grades(3), shuffle_seed=5)
    _, other = grouped(tmp_path, grades(3), shuffle_seed=6)
    assert shuffled.groups == again.groups != other.groups
    orders = []
    for ours, theirs in zip(shuffled.groups, true.groups, strict=True):
        assert [one.token_ids for one in sequences_of(ours)] == [one.token_ids for one in sequences_of(theirs)]
        assert [one.metrics for one in ours] == [one.metrics for one in theirs]
        rewards, truth = [one.reward for one in ours], [one.reward for one in theirs]
        assert rewards != truth and sorted(rewards) == sorted(truth)
        orders.append(tuple(truth.index(reward) for reward in rewards))
    assert len(set(orders)) == NUM_GROUPS, "every group has an order of its own"


def test_shuffled_rewards_say_nothing_of_the_true_ones(tmp_path: Path) -> None:
    """By chance alone the sum of these correlations is 0.6 or more in every second step."""
    _, true = grouped(tmp_path, grades())
    shown = []
    for seed in range(8):
        _, shuffled = grouped(tmp_path, grades(), shuffle_seed=seed)
        pairs = [[[one.reward for one in group] for group in read.groups] for read in (shuffled, true)]
        shown.append(sum(np.corrcoef(ours, theirs)[0, 1] for ours, theirs in zip(*pairs, strict=True)))
    assert max(map(abs, shown)) < 0.2, shown


def test_rewards_that_are_shuffled_in_the_step_say_nothing_of_groups_either(tmp_path: Path) -> None:
    """Where a critic, or the batch's mean, is what they are compared with, a group's mean alone tells a good prompt."""
    _, true = grouped(tmp_path, grades(3))
    _, shuffled = grouped(tmp_path, grades(3), shuffle_seed=5, shuffles_steps=True)
    truth, rewards = ([one.reward for group in read.groups for one in group] for read in (true, shuffled))
    assert rewards != truth and sorted(rewards) == sorted(truth)
    assert abs(np.corrcoef(rewards, truth)[0, 1]) < 0.1
    means = [[np.mean([one.reward for one in group]) for group in read.groups] for read in (true, shuffled)]
    assert max(means[1]) - min(means[1]) < 0.5 * (max(means[0]) - min(means[0]))


def test_samples_without_a_grade_are_left_out_and_counted(tmp_path: Path) -> None:
    result, read = grouped(tmp_path, grades(2, *range(8, 16)), max_ungraded_fraction=0.5)
    assert (result.num_groups, result.num_trajectories, result.num_ungraded) == (2, 15, 9)
    assert result.metrics == {"samples": 24.0, "ungraded_share": 9 / 24}
    assert [len(group) for group in read.all_groups] == [7, 8]
    assert [one.token_ids[3] for one in sequences_of(read.groups[0])] == [100 + j for j in range(8) if j != 2]
    with pytest.raises(InvalidInput) as refused:
        grouped(tmp_path, grades(2, *range(8, 16)), max_ungraded_fraction=0.37)
    assert str(refused.value) == (
        "grader: 9 of 24 samples have no grade, more than max_ungraded_fraction 0.37; "
        "first: samples.jsonl:3: no number in it; samples.jsonl:9: no number in it"
    )
    with pytest.raises(InvalidInput, match=r"24 of 24 samples have no grade, which is all of them"):
        grouped(tmp_path, grades(*range(24)), max_ungraded_fraction=1)


@pytest.mark.parametrize(("num_grades", "what"), [(23, "fewer"), (25, "more")])
def test_grades_of_other_samples_are_never_trained(tmp_path: Path, num_grades: int, what: str) -> None:
    found = [*grades(), SampleGrade(place="samples.jsonl:25", grade=1.0)][:num_grades]
    with pytest.raises(AssertionError, match=what):
        grouped(tmp_path, found)


def test_a_repeat_reads_nothing_and_the_file_is_known_by_its_uri(tmp_path: Path) -> None:
    result, _ = grouped(tmp_path, grades())
    settings = Settings(root=tmp_path / "machine")
    request = GroupSamplesRequest(
        completions=Artifact(uri="s3://away/c", sha256=_sha(tmp_path / "completions")),
        grades=Artifact(uri="s3://away/g", sha256=_sha(tmp_path / "grades")),
    )
    assert ActivityEnvironment().run(GroupSamples(HostContext(settings)).group_samples, request) == result
    store = open_store(settings.store, settings.s3)
    assert find_groups(store, result.groups_uri) == result.groups
    for other in (result.groups.uri, f"{store.uri}/uploads/{GROUPS}", f"{store.uri}/grouped/../x/groups/{GROUPS}"):
        assert find_groups(store, other) is None
    assert not list((tmp_path / "machine" / "scratch").iterdir())


def _sha(folder: Path) -> str:
    import hashlib

    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def test_parts_of_a_multi_grader_become_metrics(tmp_path: Path) -> None:
    check = {"type": "string_check", "operation": "like", "input": "{{ sample.output_text }}"}
    grader = parse_grader(
        {
            "type": "multi",
            "name": "both",
            "graders": {
                "one": {**check, "name": "1", "reference": "1."},
                "two": {**check, "name": "2", "reference": ".2"},
            },
            "calculate_output": "one + 2 * two",
        }
    )
    grouped(tmp_path, grades())  # writes the samples
    seal(tmp_path / "samples")
    settings = Settings(root=tmp_path / "machine")
    store = LocalStore(tmp_path / "given")
    samples = upload_artifact(store, "samples", tmp_path / "samples")
    graded = ActivityEnvironment().run(Grade(HostContext(settings)).grade, GradeRequest(samples=samples, grader=grader))
    completions = upload_artifact(store, "completions", tmp_path / "completions")
    request = GroupSamplesRequest(completions=completions, grades=graded.grades)
    made = ActivityEnvironment().run(GroupSamples(HostContext(settings)).group_samples, request)
    lines = Path(made.groups_uri.removeprefix("file://")).read_text().splitlines()
    one = json.loads(lines[1])["trajectories"][2]
    assert (one["reward"], one["metrics"]) == (3.0, {"one": 1.0, "two": 1.0})


def test_what_was_drawn_again_takes_the_place_of_equal_grades(tmp_path: Path) -> None:
    """Group 1 is drawn twice more: its last samples count, with their routes; the others are as they were."""
    equal = [
        grade.model_copy(update={"grade": 0.5}) if 8 <= number < 16 else grade for number, grade in enumerate(grades())
    ]
    first, read = grouped(tmp_path, equal, tells_equal=True)
    assert (first.equal_groups, read.report.dropped_equal_groups) == ((1,), 1)
    assert grouped(tmp_path, equal)[0].equal_groups == (), "nobody asks"

    def again(number: int) -> SampledGroup:
        samples = (
            Sample(token_ids=(200 + number + j, 7), logprobs=(-1.0, -2.0), text="", finish_reason="stop")
            for j in range(GROUP_SIZE)
        )
        return groups()[1].model_copy(update={"samples": tuple(samples)})

    rounds = (redrawn_of(tmp_path, again(0), *[0.25] * GROUP_SIZE), redrawn_of(tmp_path, again(50), *[0.0] * 7, 1.0))
    once, _ = grouped(tmp_path, equal, tells_equal=True, redrawn=rounds[:1])
    assert once.equal_groups == (1,)
    twice, read = grouped(tmp_path, equal, tells_equal=True, redrawn=rounds)
    assert (twice.equal_groups, twice.num_trajectories) == ((), 24)
    assert [[one.token_ids[3] for one in sequences_of(group)] for group in read.groups] == [
        [100 + j for j in range(8)],
        [250 + j for j in range(8)],
        [140 + j for j in range(8)],
    ]
    assert len({result.groups.sha256 for result in (first, once, twice)}) == 3


def test_routes_of_what_was_drawn_again_lie_behind_the_first(tmp_path: Path) -> None:
    def with_routes(group: SampledGroup, byte: bytes) -> SampledGroup:
        samples = tuple(sample.model_copy(update={"routes": byte}) for sample in group.samples)
        return group.model_copy(update={"samples": samples, "prompt_routes": byte * 3})

    grouped(tmp_path, grades())  # writes the prompts
    [first, again] = (
        redrawn_of(tmp_path, with_routes(groups()[1], byte), *given)
        for byte, given in ((b"\1", [0.5] * GROUP_SIZE), (b"\2", [0.0] * 7 + [1.0]))
    )
    folders = [tuple(Path(file.uri.removeprefix("file://")) for file in dict(one).values()) for one in (first, again)]
    request = GroupSamplesRequest(**dict(first), redrawn=(again,))
    write_groups(folders, request, tmp_path)
    [line] = (tmp_path / GROUPS).read_text().splitlines()
    shape = RouteShape(num_layers=1, num_experts=4, per_token=1)
    file = RoutesFile([completions for completions, _ in folders], shape)
    for one in json.loads(line)["trajectories"]:
        found = file.of_sequence(one["token_ids"], 3, tuple(one["routes"]))
        assert found.ravel().tolist() == [2] * 5
    with pytest.raises(InvalidInput, match="of another sequence"):
        RoutesFile([folders[0][0]], shape).of_sequence(one["token_ids"], 3, tuple(one["routes"]))


def test_prompts_and_rewards_of_a_step_are_told_by_source(tmp_path: Path) -> None:
    """Of what is trained in the end: grades of groups that were drawn again replace the first."""
    found = [group.model_copy(update={"source": name}) for group, name in zip(groups(), ("a", "b", "a"), strict=True)]
    lost = [grade.model_copy(update={"grade": None, "error": "none"}) for grade in grades()[8:16]]
    told, _ = grouped(tmp_path, [*grades()[:8], *lost, *grades()[16:]], found, max_ungraded_fraction=0.5)
    mean = sum(n / 10 for n in (*range(8), *range(16, 24))) / 16
    assert told.metrics == {"samples": 24, "ungraded_share": 1 / 3, "prompts_a": 2, "prompts_b": 1,
        "reward_mean_a": pytest.approx(mean)}  # fmt: skip
    again = redrawn_of(tmp_path, found[2], *[3.0] * 8)
    told, _ = grouped(tmp_path, grades(), found, redrawn=(again,))
    assert told.metrics["reward_mean_a"] == pytest.approx((sum(n / 10 for n in range(8)) + 24) / 16)
    assert told.metrics["prompts_a"] == 2
    (tmp_path / "alone").mkdir()
    assert set(grouped(tmp_path / "alone", grades())[0].metrics) == {"samples", "ungraded_share"}
