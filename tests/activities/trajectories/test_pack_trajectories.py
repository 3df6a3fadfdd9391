"""Groups as units and steps: exact advantages, what cannot be trained, nothing lost, the same for the same input."""

import gzip
import json
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.host_context import HostContext
from activities.records import RecoverRequest, RunRecords, StepRecordRequest
from activities.trajectories.pack_trajectories import (
    GroupsRequest,
    PackedGroups,
    PackTrajectories,
    advantages_of,
    group_mean,
    group_normalized,
    leave_one_out,
    mini_batches,
    sequence_of,
    sequence_rows,
    turn_leave_one_out,
)
from activities.trajectories.read_groups import GroupsRead, Rules, parse_groups, read_groups, sequences_of
from longshore.fields import Artifact, Fence
from longshore.views import CheckpointRef, StepStatus
from shared.chat.trajectories import Trajectory
from shared.errors import InvalidInput
from shared.jobs.packed import Plan, Units
from shared.jobs.prefix_tree import SequenceRow, split_tree
from shared.settings import DownloadSettings, Settings
from shared.storage.artifacts import stage
from tests.activities.groups import group, random_groups, rl_run, trajectory, write_groups


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path,)))


def pack(settings: Settings, uri: str, step: int = 1, key: str = "a", version: int = 0, **run: Any) -> PackedGroups:
    status = StepStatus(step=step, key=key, groups=uri)
    request = GroupsRequest(
        run_id="r1", tenant="default", run=rl_run(**run), step=status, policy_version=version, vocab_size=512
    )
    return PackTrajectories(HostContext(settings)).pack_trajectories(request)


def opened(settings: Settings, packed: PackedGroups) -> tuple[Units, Plan]:
    assert packed.data is not None
    folders = [stage(a, settings.root_path / "cache", settings.s3) for a in (packed.data.units, packed.data.plan)]
    return Units(folders[0]), Plan(folders[1])


def targets_of(units: Units, plan: Plan, step: int) -> list[tuple[Any, ...]]:
    """(context ids, label, advantage, old logprob) of every target of a step, read back through the tables."""
    found = []
    for bin_ in plan.bins(step):
        table = units.read_bin(bin_)
        for n in range(len(table.label_N)):
            context, at = [], int(table.hidden_index_N[n])
            while at >= 0:
                context.append(int(table.token_id_T[at]))
                at = int(table.parent_T[at])
            row = (tuple(context[::-1]), int(table.label_N[n]), table.advantage_N[n], table.old_logprob_N[n])
            found.append(row)
            assert table.weight_N[n] == 1
    return sorted(found)


def expected_targets(groups: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    found = []
    for one in groups:
        rewards = np.array([t["reward"] for t in one["trajectories"]])
        [advantages] = advantages_of("group_mean", [rewards], [])
        for each, advantage in zip(one["trajectories"], advantages, strict=True):
            for at, is_sampled in enumerate(each["sampled"]):
                if is_sampled:
                    ids, logprob = each["token_ids"], np.float32(each["logprobs"][at])
                    found.append((tuple(ids[:at]), ids[at], np.float32(advantage), logprob))
    return sorted(found)


def test_every_sampled_token_is_a_target_behind_its_own_context(settings: Settings, tmp_path: Path) -> None:
    groups = random_groups(seed=1)
    packed = pack(settings, write_groups(tmp_path / "g.jsonl", *groups), bin_tokens=64)
    units, plan = opened(settings, packed)
    assert packed.num_steps == plan.header.num_steps == 1
    assert targets_of(units, plan, 0) == expected_targets(groups)
    assert packed.metrics["packing_factor"] > 1, "prompts are shared"
    logical = sum(len(t["token_ids"]) for g in groups for t in g["trajectories"])
    assert packed.metrics["packing_factor"] == pytest.approx(logical / int(units.token_offsets[-1]))


def behind_a_system_prompt(groups: list[dict[str, Any]], length: int = 20) -> list[dict[str, Any]]:
    """The groups, each trajectory behind the same ids."""
    ahead = {"token_ids": [7] * length, "sampled": [False] * length, "logprobs": [None] * length}
    return [
        {
            "trajectories": [
                one | {name: ids + one[name] for name, ids in ahead.items()} for one in group["trajectories"]
            ]
        }
        for group in groups
    ]


@pytest.mark.parametrize(("mini_batches", "epochs", "num_prompts"), [(1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 6)])
def test_groups_that_are_always_trained_together_share_a_system_prompt(
    settings: Settings, tmp_path: Path, mini_batches: int, epochs: int, num_prompts: int
) -> None:
    """Where other passes mix the six groups otherwise, each has its own: a sequence is written once."""
    groups = behind_a_system_prompt(random_groups(seed=5, num_groups=6))
    uri = write_groups(tmp_path / "g.jsonl", *groups)
    run = {"max_tokens": 512, "mini_batches": mini_batches, "epochs": epochs}
    packed = pack(settings, uri, **run)
    units, plan = opened(settings, packed)
    found = [row for step in range(mini_batches) for row in targets_of(units, plan, step)]
    assert sorted(found) == expected_targets(groups)
    apart = sum(unit.num_tokens for one in groups for unit in split_tree(rows_in(one), 512))
    assert int(units.token_offsets[-1]) == apart - (6 - num_prompts) * 20
    logical = sum(len(t["token_ids"]) for g in groups for t in g["trajectories"])
    assert packed.metrics["packing_factor"] == pytest.approx(logical / int(units.token_offsets[-1]))


def rows_in(group: dict[str, Any]) -> list[SequenceRow]:
    return [sequence_of(Trajectory.model_validate(one), 0.0) for one in group["trajectories"]]


def test_mini_batches_are_whole_groups_and_every_epoch_has_all_of_them(settings: Settings, tmp_path: Path) -> None:
    groups = random_groups(seed=2, num_groups=5)
    packed = pack(settings, write_groups(tmp_path / "g.jsonl", *groups), mini_batches=2, epochs=3)
    units, plan = opened(settings, packed)
    assert packed.num_steps == 6
    of_group = [expected_targets([one]) for one in groups]
    for epoch in range(3):
        whole = []
        for part in (2 * epoch, 2 * epoch + 1):
            found = targets_of(units, plan, part)
            inside = [rows for rows in of_group if rows[0] in found]
            assert found == sorted(row for rows in inside for row in rows)
            whole += found
        assert sorted(whole) == expected_targets(groups)


def test_epochs_and_policy_versions_are_shuffled_anew() -> None:
    run = rl_run(mini_batches=6, epochs=2)
    orders = [mini_batches(6, run, policy_version) for policy_version in (0, 1)]
    assert orders[0][:6] != orders[0][6:]
    assert orders[0] != orders[1]


def test_a_group_that_fits_no_bin_is_split_into_units_of_one_step(settings: Settings, tmp_path: Path) -> None:
    groups = random_groups(seed=3, num_groups=2, size=12)
    packed = pack(settings, write_groups(tmp_path / "g.jsonl", *groups), max_tokens=24, bin_tokens=24, mini_batches=2)
    units, plan = opened(settings, packed)
    assert units.header.num_units > 2
    assert int(np.diff(units.token_offsets).max()) <= 24
    assert sorted(targets_of(units, plan, 0) + targets_of(units, plan, 1)) == expected_targets(groups)


def test_the_same_groups_are_packed_once_and_to_the_same_bytes(settings: Settings, tmp_path: Path) -> None:
    uri = write_groups(tmp_path / "g.jsonl", *random_groups(seed=4))
    first, again = pack(settings, uri), pack(settings, uri)
    other = pack(settings.model_copy(update={"root": tmp_path / "other"}), uri)
    assert first == again
    assert first.data is not None and other.data is not None
    assert (first.data.units.sha256, first.data.plan.sha256) == (other.data.units.sha256, other.data.plan.sha256)


def test_a_step_whose_file_was_written_over_gets_the_new_groups(settings: Settings, tmp_path: Path) -> None:
    uri = write_groups(tmp_path / "latest.jsonl", group(0.0, 1.0))
    pack(settings, uri, step=1, key="a")
    write_groups(tmp_path / "latest.jsonl", group(0.0, 3.0))
    assert pack(settings, uri, step=2, key="b").metrics["reward_mean"] == 1.5


def test_compressed_groups_are_read(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(group(0.0, 1.0)).encode()))
    assert pack(settings, path.as_uri()).num_steps == 1


def test_nothing_to_learn_is_no_step(settings: Settings, tmp_path: Path) -> None:
    packed = pack(settings, write_groups(tmp_path / "g.jsonl", group(1.0, 1.0)))
    assert (packed.data, packed.num_steps) == (None, 0)
    assert packed.metrics["zero_variance_share"] == 1.0


def test_metrics_are_of_all_that_was_sampled(settings: Settings, tmp_path: Path) -> None:
    equal = group(1.0, 1.0, policy_version=0, metrics={"turns": 1.0})
    uri = write_groups(tmp_path / "g.jsonl", equal, group(0.0, 2.0, policy_version=1, metrics={"turns": 4.0}))
    metrics = pack(settings, uri, version=3).metrics
    assert metrics["reward_mean"] == 1.0
    assert metrics["reward_std"] == pytest.approx(np.std([1, 1, 0, 2]))
    assert (metrics["zero_variance_share"], metrics["response_tokens_mean"]) == (0.5, 2.0)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.5, 3.0)
    assert (metrics["trained_trajectories"], metrics["dropped_trajectories"]) == (2.0, 2.0)
    assert metrics["trajectory_turns"] == 2.5


def test_nobody_is_stale_of_whom_no_version_is_known(settings: Settings, tmp_path: Path) -> None:
    metrics = pack(settings, write_groups(tmp_path / "g.jsonl", group(0.0, 2.0)), version=3).metrics
    assert metrics.keys().isdisjoint({"staleness_mean", "staleness_max"})
    mixed = write_groups(tmp_path / "h.jsonl", group(0.0, 2.0), group(0.0, 2.0, policy_version=3))
    assert pack(settings, mixed, version=3, key="b").metrics["staleness_mean"] == 0.0


def test_what_cannot_be_trained_counts_in_the_baseline_and_is_named(settings: Settings, tmp_path: Path) -> None:
    """Left out with its reward, it would leave the others with the mean of the survivors."""
    one = group(0.0, 1.0, 5.0)
    whole = targets_of(*opened(settings, pack(settings, write_groups(tmp_path / "w.jsonl", one))), 0)
    one["trajectories"][2]["logprobs"] = [None] * 5
    packed = pack(settings, write_groups(tmp_path / "g.jsonl", one), key="b", broken="drop")
    assert targets_of(*opened(settings, packed), 0) == [row for row in whole if row[2] != 3.0]
    named = ("broken_trajectories", "dropped_for_missing_logprobs", "reward_mean", "trained_trajectories")
    assert [packed.metrics[name] for name in named] == [1, 1, 2.0, 2]


def test_a_key_that_was_trained_is_found_and_is_not_another_batchs(settings: Settings, tmp_path: Path) -> None:
    uri = write_groups(tmp_path / "g.jsonl", group(0.0, 1.0))
    artifact = Artifact(uri="file:///a", sha256="0" * 64)
    made = {"adapter": artifact.uri, "adapter_sha256": artifact.sha256}
    checkpoint = CheckpointRef(step=1, fence=Fence(epoch=1), artifact=artifact)
    fields = {"step": 1, "key": "a", "groups": uri, "state": "done", "policy_version": 1, "optimizer_step": 1}
    done = StepStatus.model_validate(fields | made | {"checkpoint": checkpoint})
    steps = RunRecords(HostContext(settings))
    steps.record_step(StepRecordRequest(run_id="r1", step=done))
    assert pack(settings, uri, step=9, key="a").trained_before == done
    assert pack(settings, uri, step=1, key="a").trained_before is None, "this is the very step, packed again"
    other = write_groups(tmp_path / "other.jsonl", group(0.0, 1.0))
    with pytest.raises(InvalidInput, match=r"key: it was used for .*g\.jsonl, which made step 1"):
        pack(settings, other, step=9, key="a")
    conflict = done.model_copy(update={"step": 9, "groups": other, "state": "failed", "checkpoint": None})
    steps.record_step(StepRecordRequest(run_id="r1", step=conflict))
    assert pack(settings, uri, step=10, key="a").trained_before == done, "the first one keeps the key"
    recovered = steps.recover_steps(RecoverRequest(run_id="r1"))
    assert (recovered.last_step, recovered.trained) == (9, done)


def test_cut_answers_can_count_in_their_group_without_being_trained(settings: Settings, tmp_path: Path) -> None:
    one = group(0.0, 1.0)
    one["trajectories"][1]["finish_reason"] = "length"
    uri = write_groups(tmp_path / "g.jsonl", one)
    weights = []
    for truncated in ("train", "mask"):
        units, _ = opened(settings, pack(settings, uri, truncated=truncated, key=truncated))
        sampled = sum(map(sum, (each["sampled"] for each in one["trajectories"])))
        assert len(units.columns["weight"]) == sampled
        advantage = set(units.columns["advantage"][units.columns["weight"] > 0].tolist())
        weights.append((int(units.columns["weight"].sum()), advantage))
    kept = sum(one["trajectories"][0]["sampled"])
    assert weights == [(sampled, {-0.5, 0.5}), (kept, {-0.5})], "the mean of the group is that of both"


def test_a_critics_tokens_have_rewards(settings: Settings, tmp_path: Path) -> None:
    """A trajectory's at its last sampled token; those of other tokens at the sampled one before; none at the first."""
    dense = {
        "token_ids": [5, 6, 7, 8, 9, 10, 11],
        "sampled": [False, False, True, True, False, True, True],
        "logprobs": [None, None, -1.0, -1.0, None, -1.0, -1.0],
        "token_rewards": [0.5, 0.0, 0.25, 0.0, 2.0, 0.0, 4.0],
        "reward": 8.0,
    }
    cut = {name: values for name, values in dense.items() if name != "token_rewards"} | {"finish_reason": "length"}
    short = {"token_ids": [5, 6, 12], "sampled": [False, False, True], "logprobs": [None, None, -1.0]}
    short |= {"reward": 3.0, "finish_reason": "length"}
    sent = [{"trajectories": [dense]}, {"trajectories": [cut]}, {"trajectories": [short]}]
    uri = write_groups(tmp_path / "g.jsonl", *sent)
    run = {"advantages": "gae", "critic": {}, "epochs": 1}
    whole, _ = opened(settings, pack(settings, uri, **run))
    ahead, _ = opened(settings, pack(settings, uri, **run, truncated="bootstrap"))
    for units, ends in ((whole, [[0, 0, 0, 8], [3]]), (ahead, [[0, 0, 8, 0], [3]])):
        rewards = units.columns["advantage"].tolist()
        assert rewards == [0.75, 2.0, 0.0, 12.0, *ends[0], *ends[1]]
    assert whole.columns["weight"].tolist() == [1.0] * 9
    assert ahead.columns["weight"].tolist() == [1, 1, 1, 1, 1, 1, 1, 0, 1], "what was cut first is no end of it"


@pytest.mark.parametrize(
    ("rewards", "critic", "rule"),
    [
        ([0.0, 0.0, 1.0], None, "they are a critic's to read"),
        ([0.0, 1.0], {}, "it has 2 entries for 3 token_ids"),
        ([0.0, 0.0, float("inf")], {}, "rewards are finite numbers"),
    ],
)
def test_rewards_of_tokens_that_nobody_can_read_are_refused(
    settings: Settings, tmp_path: Path, rewards: list[float], critic: dict[str, Any] | None, rule: str
) -> None:
    one = {"token_ids": [5, 6, 12], "sampled": [False, False, True], "logprobs": [None, None, -1.0], "reward": 1.0}
    uri = write_groups(tmp_path / "g.jsonl", {"trajectories": [one | {"token_rewards": rewards}]})
    run = {} if critic is None else {"advantages": "gae", "critic": critic}
    with pytest.raises(InvalidInput, match=rule):
        pack(settings, uri, **run)


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
    "turns": ({"turn_rewards": [1.0, 2.0]}, "turn_rewards", "2 entries for 1 answers"),
    "turn": ({"turn_rewards": [float("inf")]}, "turn_rewards", "all of them finite numbers"),
    "branch": (
        {"branches": [{"token_ids": [1], "sampled": [False], "logprobs": [None]}]},
        "sampled",
        "nothing to train",
    ),
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
def test_a_broken_trajectory_is_refused_with_place_and_rule_or_dropped_and_counted(tmp_path: Path, name: str) -> None:
    changes, field, rule = BROKEN[name]
    with pytest.raises(InvalidInput) as caught:
        read(tmp_path / "rows.jsonl", group(0.0, 1.0, policy_version=4), with_one_broken(changes))
    assert caught.value.place == f"rows.jsonl:2: trajectories.1.{field}"
    assert rule in caught.value.message
    found = read(tmp_path / "rows.jsonl", with_one_broken(changes), broken="drop")
    [left] = found.groups
    assert [one.reward for one in sequences_of(left)] == [0.0, 1.0, 0.5]
    scored = [0.0, 1.0, 0.5] if name == "nan_reward" else [0.0, changes.get("reward", 2.0), 1.0, 0.5]
    assert [one.reward for one in left] == scored, "what is compared are all rewards that were given"
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


REWARDS = st.lists(st.integers(-1000, 1000).map(lambda n: n / 8), min_size=2, max_size=12)


def exact_std(values: list[Fraction]) -> float:
    mean = sum(values) / len(values)
    return float(sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5


@given(REWARDS)
def test_group_mean_is_the_distance_from_the_mean(rewards: list[float]) -> None:
    exact = [Fraction(r) for r in rewards]
    expected = [float(r - sum(exact) / len(exact)) for r in exact]
    assert group_mean(np.array(rewards)) == pytest.approx(expected, abs=1e-10)


@given(REWARDS)
def test_group_normalized_is_in_units_of_the_standard_deviation(rewards: list[float]) -> None:
    exact = [Fraction(r) for r in rewards]
    std, mean = exact_std(exact), sum(exact) / len(exact)
    expected = [float(r - mean) / (std + 1e-6) for r in exact]  # GRPO's own constant
    assert group_normalized(np.array(rewards)) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(REWARDS)
def test_leave_one_out_compares_with_the_others_alone(rewards: list[float]) -> None:
    exact = [Fraction(r) for r in rewards]
    expected = [float(r - sum(exact[:i] + exact[i + 1 :]) / (len(exact) - 1)) for i, r in enumerate(exact)]
    assert leave_one_out(np.array(rewards)) == pytest.approx(expected, abs=1e-9)


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_batch_normalized_has_mean_0_and_spread_1_over_all_groups(groups: list[list[float]]) -> None:
    found = np.concatenate(advantages_of("batch_normalized", [np.array(g) for g in groups], []))
    exact = [Fraction(r) for g in groups for r in g]
    std, mean = exact_std(exact), sum(exact) / len(exact)
    assert found == pytest.approx([float(r - mean) / (std + 1e-6) for r in exact], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["group_mean", "group_normalized", "leave_one_out"])
def test_equal_rewards_say_nothing(kind) -> None:
    [found] = advantages_of(kind, [np.full(5, 0.3)], [])
    assert found == pytest.approx(np.zeros(5), abs=1e-9)


def _plays(most: int) -> list[tuple[tuple[bool, ...], tuple[float, ...]]]:
    """All episodes of a policy that chooses in each state whether to go on, and what each of its answers earns.

    To go on earns 1 in the first state and 0.5 in later ones; to stop earns 2 in the first state, and 0 in later ones.
    """
    stopped = [
        (
            (True,) * goes_on + (False,),
            (*(1.0 if turn == 0 else 0.5 for turn in range(goes_on)), 2.0 * (not goes_on)),
        )
        for goes_on in range(most)
    ]
    whole = ((True,) * most, tuple(1.0 if turn == 0 else 0.5 for turn in range(most)))
    return [*stopped, whole]


def _baseline_of_each_turn(earned: list[tuple[float, ...]]) -> list[np.ndarray]:
    """Take the mean of the others' rewards of each turn off one's own, and add up: what others do, with its bias."""

    def mean(own: int, turn: int) -> float:
        others = [one[turn] for number, one in enumerate(earned) if number != own and len(one) > turn]
        return float(np.mean(others)) if others else 0.0

    less = [[value - mean(own, turn) for turn, value in enumerate(one)] for own, one in enumerate(earned)]
    return [np.cumsum(one[::-1])[::-1] for one in less]


def test_credit_of_turns_has_no_bias_if_the_policy_chooses_how_many_there_are() -> None:
    """All groups of three episodes of up to three turns, with their probabilities: the estimate's mean is the gradient
    of the expected reward, to rounding. The policy goes on with p = sigmoid(theta); d log p / d theta is 1 - p, or -p.
    """
    go, most, size = 0.6, 3, 3
    plays = _plays(most)

    def probability(choices: tuple[bool, ...], p: float = go) -> float:
        return float(np.prod([p if goes_on else 1 - p for goes_on in choices]))

    def expected(theta: float) -> float:
        p = 1 / (1 + np.exp(-theta))
        return sum(probability(choices, p) * sum(earned) for choices, earned in plays)

    theta, h = np.log(go / (1 - go)), 1e-5
    gradient = (expected(theta + h) - expected(theta - h)) / (2 * h)

    def estimate(credit: Any) -> float:
        total = 0.0
        for episodes in product(plays, repeat=size):
            advantages = credit([earned for _, earned in episodes])
            scores = [[1 - go if goes_on else -go for goes_on in choices] for choices, _ in episodes]
            mean = np.mean([np.dot(score, a) for score, a in zip(scores, advantages, strict=True)])
            total += float(np.prod([probability(choices) for choices, _ in episodes])) * float(mean)
        return total

    assert estimate(turn_leave_one_out) == pytest.approx(gradient, abs=1e-9)
    assert abs(estimate(_baseline_of_each_turn) - gradient) > 0.05 * abs(gradient)


def test_answers_are_credited_with_what_was_earned_from_them_on(tmp_path: Path) -> None:
    two = {
        "sampled": [False, True, False, True, True],
        "token_ids": [1, 2, 3, 4, 5],
        "logprobs": [None, -1, None, -1, -1],
    }
    group = {
        "trajectories": [
            two | {"reward": 5.0, "turn_rewards": [1.0, 3.0]},  # the rest, 1, is the last answer's
            two | {"reward": 2.0, "turn_rewards": [2.0, 0.0], "branches": []},
            {"token_ids": [1, 6], "sampled": [False, True], "logprobs": [None, -1], "reward": 4.0},
        ]
    }
    run = rl_run(advantages="leave_one_out", credit="turn")
    path = tmp_path / "groups.jsonl"
    write_groups(path, group)
    read = read_groups(parse_groups(path, path.name), Rules(run, policy_version=0, vocab_size=512))
    rows = sequence_rows(read.groups, run)
    assert [row.advantage.tolist() for row in rows[0]] == [
        [2.0, 2.0, 4.0, 4.0, 4.0],  # 5 - (2 + 4) / 2, and 4 - 0
        [-2.5, -2.5, -4.0, -4.0, -4.0],
        [0.5, 0.5],
    ]


def test_given_advantages_are_taken_as_they_are() -> None:
    [found] = advantages_of("given", [np.array([9.0, 9.0])], [np.array([0.25, -4.0])])
    assert found.tolist() == [0.25, -4.0]


def test_groups_are_compared_within_themselves() -> None:
    found = advantages_of("group_mean", [np.array([0.0, 2.0]), np.array([10.0, 14.0])], [])
    assert [a.tolist() for a in found] == [[-1.0, 1.0], [-2.0, 2.0]]


def test_a_batch_scales_what_groups_compare() -> None:
    groups = [np.array([0.0, 2.0]), np.array([10.0, 14.0, 12.0])]
    whole = np.concatenate(groups)
    scaled = np.concatenate(advantages_of("batch_scaled", groups, []))
    centred = np.array([-1.0, 1.0, -2.0, 2.0, 0.0])
    np.testing.assert_allclose(scaled, centred / whole.std(), rtol=1e-6)
    normalized = np.concatenate(advantages_of("group_mean_normalized", groups, []))
    np.testing.assert_allclose(normalized, centred / centred.std(), rtol=1e-6)
