"""What the metrics of several optimizer steps come to."""

import pytest

from activities.hosts.progress import job_metrics
from longshore.losses import PPO, CrossEntropy
from shared.jobs.losses import DPO

STEPS = [
    {
        "loss": 1.0,
        "grad_norm": 3.0,
        "clipped": 1.0,
        "learning_rate": 1e-3,
        "ratio_mean": 1.0,
        "ratio_max": 1.5,
        "kl_old_new": 0.0,
        "clip_high_fraction": 0.0,
        "tokens": 100.0,
        "target_tokens": 30.0,
        "step_s": 2.0,
        "tokens_per_s": 50.0,
        "memory_bytes": 9.0,
    },
    {
        "loss": 2.0,
        "grad_norm": 1.0,
        "clipped": 0.0,
        "learning_rate": 5e-4,
        "ratio_mean": 1.4,
        "ratio_max": 1.2,
        "kl_old_new": 0.4,
        "clip_high_fraction": 0.2,
        "tokens": 20.0,
        "target_tokens": 10.0,
        "step_s": 1.0,
        "tokens_per_s": 20.0,
        "memory_bytes": 7.0,
    },
]
SKIPPED = {"skipped": 1.0, "tokens": 5.0, "target_tokens": 0.0, "ratio_max": 0.0, "step_s": 1.0, "tokens_per_s": 5.0}


def test_a_train_step_is_all_of_its_optimizer_steps():
    """By hand: means over tokens 30 to 10, those of steps one to one, the greatest, the sum, the last."""
    assert job_metrics(PPO(), STEPS) == pytest.approx(
        {
            "loss": 1.5,
            "grad_norm": 2.0,
            "clipped": 0.5,
            "learning_rate": 5e-4,
            "ratio_mean": 1.1,
            "ratio_max": 1.5,
            "kl_old_new": 0.1,
            "clip_high_fraction": 0.05,
            "tokens": 120.0,
            "target_tokens": 40.0,
            "step_s": 3.0,
            "tokens_per_s": 40.0,
            "memory_bytes": 9.0,
        }
    )


def test_one_optimizer_step_is_told_as_it_was():
    assert job_metrics(PPO(), STEPS[:1]) == pytest.approx(STEPS[0])


def test_a_skipped_step_takes_no_part_in_means_but_is_counted():
    whole = job_metrics(PPO(), [*STEPS, SKIPPED])
    assert whole == pytest.approx(
        job_metrics(PPO(), STEPS) | {"skipped": 1.0, "tokens": 125.0, "step_s": 4.0, "tokens_per_s": 125 / 4}
    )
    assert job_metrics(PPO(), [SKIPPED]) == SKIPPED


@pytest.mark.parametrize("loss", [CrossEntropy(), DPO()])
def test_other_jobs_are_told_by_their_newest_step(loss):
    assert job_metrics(loss, STEPS) == STEPS[1]
    assert job_metrics(loss, [*STEPS, SKIPPED]) == STEPS[1] | SKIPPED
    assert job_metrics(loss, [SKIPPED, *STEPS, SKIPPED])["skipped"] == 2, "a run says how many it skipped"


@pytest.mark.parametrize("loss", [CrossEntropy(), PPO()])
def test_no_steps_have_no_metrics(loss):
    assert job_metrics(loss, []) == {}
