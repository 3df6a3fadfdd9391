"""Groups of a mini-batch that begin alike, in trees together: the step is the one that groups apart would make."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.trajectories.pack_trajectories import GroupsRequest, sequence_rows, sharing_sets, write_step
from activities.trajectories.read_groups import Group, GroupsRead, GroupsReport, Scored
from longshore.losses import CISPO, GSPO, PPO, Loss
from longshore.runs import RLRun
from longshore.views import StepStatus
from megatron_worker.losses import loss_function
from megatron_worker.training.batches import to_batch
from shared.chat.trajectories import Trajectory
from shared.jobs.packed import Plan, Units
from shared.jobs.prefix_tree import split_tree
from tests.activities.groups import rl_run
from tests.megatron_worker.rows import VOCAB_SIZE
from tests.megatron_worker.test_policy_megatron import fresh, gradient
from tests.megatron_worker.trees import as_batch

LOSSES: dict[str, Loss] = {
    "ppo": PPO(aggregation="sequence_mean"),
    "gspo": GSPO(clip_low=0.1, clip_high=0.1),
    "cispo": CISPO(aggregation="constant_length", constant=16),
}
BIN_TOKENS = 160


def groups_with_a_system_prompt(num_groups: int = 6, size: int = 4) -> list[Group]:
    """48 tokens of a system prompt, 12 of a question, answers of 6 to 12; logprobs near those of an untrained model."""
    random = np.random.default_rng(5)

    def ids(count: int) -> list[int]:
        return [int(i) for i in random.integers(3, VOCAB_SIZE, count)]

    def one(prompt: list[int]) -> Trajectory:
        answer = ids(int(random.integers(6, 13)))
        logprobs = [-math.log(VOCAB_SIZE) + float(p) for p in random.normal(scale=0.1, size=len(answer))]
        return Trajectory(
            token_ids=(*prompt, *answer),
            sampled=(*[False] * len(prompt), *[True] * len(answer)),
            logprobs=(*[None] * len(prompt), *logprobs),
            reward=float(random.normal()),
        )

    system = ids(48)
    prompts = [system + ids(12) for _ in range(num_groups)]
    return [tuple(scored(one(prompt)) for _ in range(size)) for prompt in prompts]


def scored(one: Trajectory) -> Scored:
    return Scored(one.reward, {}, (one,))


def run_of() -> RLRun:
    return rl_run(max_tokens=BIN_TOKENS)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_of_shared_trees_is_the_step_of_groups_apart(model: Path, tmp_path: Path, name: str) -> None:
    groups, run = groups_with_a_system_prompt(), run_of()
    step = StepStatus(step=1, key="a", groups="file:///groups.jsonl")
    request = GroupsRequest(run_id="r1", tenant="default", run=run, step=step, policy_version=0, vocab_size=VOCAB_SIZE)
    read = GroupsRead(groups=groups, all_groups=groups, report=GroupsReport(num_groups=len(groups)))
    write_step(read, request, tmp_path / "units", tmp_path / "plan")
    with Units(tmp_path / "units") as units:
        plan = Plan(tmp_path / "plan")
        bins = [to_batch(units.read_bin(each), torch.device("cpu")) for each in plan.bins(0)]
        shared_tokens = int(units.token_offsets[-1])
    apart = [split_tree(rows, BIN_TOKENS) for rows in sequence_rows(groups, run)]
    apart_tokens = sum(unit.num_tokens for trees in apart for unit in trees)
    print(f"tokens packed: {shared_tokens} shared, {apart_tokens} apart")
    assert shared_tokens < apart_tokens - 2 * 48
    assert len(bins) > 1, "trees of several bins, so that the cut between them is tried too"
    engine, loss = fresh(model), loss_function(LOSSES[name])
    shared_loss, shared = gradient(engine, loss, bins)
    apart_loss, by_group = gradient(engine, loss, [as_batch(trees) for trees in apart])
    distance, largest = float((shared - by_group).norm() / by_group.norm()), float((shared - by_group).abs().max())
    print(f"{name}: gradient {distance:.1e} by norm, {largest:.1e} at most; loss {abs(shared_loss - apart_loss):.1e}")
    assert by_group.abs().max() > 1e-3
    assert largest <= 1e-6
    assert distance <= 2e-6  # 8e-7 measured
    assert shared_loss == pytest.approx(apart_loss, abs=1e-6)


def test_groups_share_only_while_no_other_mini_batch_has_them() -> None:
    assert sharing_sets([(0, 2), (1, 3)], 4) == [(0, 2), (1, 3)]
    assert sharing_sets([(0, 1, 2), (0, 1, 2)], 3) == [(0, 1, 2)], "further epochs train the same set"
    assert sharing_sets([(0, 2), (1, 3), (0, 1), (2, 3)], 4) == [(0,), (1,), (2,), (3,)]
    assert sharing_sets([], 0) == []
