"""What becomes of trajectories that cannot be trained: refused with place and rule, or dropped and counted."""

from pathlib import Path
from typing import Any

import pytest

from activities.trajectories.read_groups import GroupsRead, Rules, parse_groups, read_groups, sequences_of
from shared.errors import InvalidInput
from tests.activities.groups import group, rl_run, trajectory, write_groups

NAN = float("nan")
BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "nan_reward": ({"reward": NAN}, "reward", "it is nan; a reward is a finite number"),
    "short_logprobs": ({"logprobs": [None, -1.0]}, "logprobs", "it has 2 entries for 5 token_ids"),
    "short_sampled": ({"sampled": [False, True]}, "sampled", "it has 2 entries for 5 token_ids"),
    "missing_logprobs": ({"logprobs": [None, None, None, -1.0, None]}, "logprobs", "1 sampled tokens have none"),
    "positive_logprob": ({"logprobs": [None, None, None, -1.0, 0.5]}, "logprobs", "finite, and at most 0"),
    "first_sampled": (
        {"sampled": [True, False, False, True, True], "logprobs": [-1.0, None, None, -1.0, -1.0]},
        "sampled",
        "nothing stands before it",
    ),
    "nothing_sampled": ({"sampled": [False] * 5}, "sampled", "nothing to train"),
    "vocabulary": ({"token_ids": [1, 2, 3, 5, 512]}, "token_ids", "0 to 511"),
    "too_long": ({**trajectory(prompt=80)}, "token_ids", "max_tokens is 64"),
    "stale": ({"policy_version": 1}, "policy_version", "1 is 3 behind 4; max_staleness is 2"),
    "future": ({"policy_version": 5}, "policy_version", "5 does not exist yet"),
    "ignored_advantage": ({"advantage": 1.0}, "advantage", "it would be ignored"),
}


def read(path: Path, *groups: dict[str, Any], **run: Any) -> GroupsRead:
    write_groups(path, *groups)
    rules = Rules(rl_run(max_staleness=2, **run), policy_version=4, vocab_size=512)
    return read_groups(parse_groups(path, path.name), rules)


def with_one_broken(changes: dict[str, Any]) -> dict[str, Any]:
    good = group(0.0, 1.0, 0.5, policy_version=4)["trajectories"]
    return {"trajectories": [good[0], trajectory(2.0, policy_version=4) | changes, *good[1:]]}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trajectory_is_refused_with_place_and_rule(tmp_path: Path, name: str) -> None:
    changes, field, rule = BROKEN[name]
    with pytest.raises(InvalidInput) as caught:
        read(tmp_path / "rows.jsonl", group(0.0, 1.0, policy_version=4), with_one_broken(changes))
    assert caught.value.place == f"rows.jsonl:2: trajectories.1.{field}"
    assert rule in caught.value.message


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trajectory_is_dropped_and_counted(tmp_path: Path, name: str) -> None:
    found = read(tmp_path / "rows.jsonl", with_one_broken(BROKEN[name][0]), broken="drop")
    [group] = found.groups
    assert [one.reward for one in sequences_of(group)] == [0.0, 1.0, 0.5]
    reward = BROKEN[name][0].get("reward", 2.0)
    scored = [0.0, 1.0, 0.5] if name == "nan_reward" else [0.0, reward, 1.0, 0.5]
    assert [one.reward for one in group] == scored, "what is compared are all rewards that were given"
    assert (found.report.num_trajectories, found.report.dropped_broken) == (4, 1)
    assert list(found.report.dropped_for.values()) == [1]


def test_groups_that_say_nothing_are_dropped_and_counted(tmp_path: Path) -> None:
    equal, single, good = (
        group(1.0, 1.0, policy_version=4),
        group(1.0, policy_version=4),
        group(0.0, 1.0, policy_version=4),
    )
    found = read(tmp_path / "rows.jsonl", equal, single, good)
    report = found.report
    assert len(found.groups) == 1
    assert (report.dropped_equal_groups, report.dropped_single_groups, report.trained_trajectories) == (1, 1, 2)
    assert (report.num_groups, report.num_trajectories, report.equal_reward_groups) == (3, 5, 1)


def test_equal_rewards_can_be_kept_for_what_else_the_loss_learns(tmp_path: Path) -> None:
    found = read(tmp_path / "rows.jsonl", group(1.0, 1.0, policy_version=4), equal_rewards="keep")
    assert len(found.groups) == 1
    assert (found.report.equal_reward_groups, found.report.dropped_equal_groups) == (1, 0)


def test_a_group_of_one_is_whole_where_the_batch_is_compared(tmp_path: Path) -> None:
    one = group(1.0, policy_version=4)
    assert len(read(tmp_path / "rows.jsonl", one, advantages="batch_normalized").groups) == 1


def test_given_advantages_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"trajectories\.0\.advantage: the run's advantages are given"):
        read(tmp_path / "rows.jsonl", group(1.0, policy_version=4), advantages="given")
    assert read(tmp_path / "rows.jsonl", group(1.0, policy_version=4, advantage=0.5), advantages="given").groups


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("[1]", "Input should be an object"),
        ('{"trajectories": []}', "trajectories"),
        ('{"trajectories": [{"token_ids": [1]}]}', "trajectories.0.sampled: this field is required"),
        ('{"trajectories": 3, "x": 1}', "trajectories"),
        ("{", "Invalid JSON"),
    ],
)
def test_a_line_that_is_no_group_is_refused(tmp_path: Path, line: str, rule: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(InvalidInput, match=rule) as caught:
        list(parse_groups(path, path.name))
    assert caught.value.place == "rows.jsonl:2"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no trajectory group"):
        read(tmp_path / "rows.jsonl")


def test_long_answers_lose_reward_by_how_near_the_limit_they_are(tmp_path: Path) -> None:
    """With a limit of 64 and 20 tokens before it: nothing up to 44, half of the penalty at 54, all of it from 64 on."""
    lengths = [10, 44, 54, 63]
    longer = {"trajectories": [trajectory(1.0, prompt=1, answer=(5,) * num, policy_version=4) for num in lengths]}
    overlong = {"buffer_tokens": 20, "penalty": 0.5}
    [rewards] = read(tmp_path / "rows.jsonl", longer, overlong=overlong).groups
    assert [one.reward for one in rewards] == pytest.approx([1.0, 1.0, 0.75, 1 - 0.5 * 19 / 20])
    assert rewards[2].metrics["overlong_penalty"] == 0.25
    with pytest.raises(ValueError, match="at most 64 tokens"):
        rl_run(overlong={"buffer_tokens": 65})
