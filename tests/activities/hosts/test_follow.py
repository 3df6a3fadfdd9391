"""The log reader: whole lines alone, in order, from where it stopped; and what metrics of several steps come to."""

from pathlib import Path

import pytest

from activities.hosts.run_job import JobMetrics, LogReader
from longshore.events import Step
from longshore.losses import DPO, PPO, CrossEntropy


def line(seq: int) -> bytes:
    return Step(seq=seq, time=1.0, step=seq, metrics={"loss": 0.5}).model_dump_json().encode() + b"\n"


def test_a_log_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    assert LogReader(tmp_path / "log.jsonl").read() == []


def test_half_a_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    whole = line(1) + line(2)
    reader = LogReader(path)
    seen: list[int] = []
    kept = b""
    for end in range(1, len(whole) + 1):  # the writer is seen after every single byte
        path.write_bytes(whole[:end])
        found = reader.read()
        seen += [each.event.seq for each in found]
        kept += b"".join(each.data for each in found)
        assert reader.offset == len(line(1)) * (end >= len(line(1))) + len(line(2)) * (end == len(whole))
    assert seen == [1, 2] and kept == whole


def test_a_gap_in_seq_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(line(1) + line(3))
    with pytest.raises(ValueError, match="event 3 follows event 1"):
        LogReader(path).read()


def test_a_line_that_is_no_event_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "nonsense"}\n')
    with pytest.raises(ValueError, match="nonsense"):
        LogReader(path).read()


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
    assert JobMetrics(PPO(), STEPS).combined() == pytest.approx(
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
    assert JobMetrics(PPO(), STEPS[:1]).combined() == pytest.approx(STEPS[0])


def test_a_skipped_step_takes_no_part_in_means_but_is_counted():
    whole = JobMetrics(PPO(), [*STEPS, SKIPPED]).combined()
    assert whole == pytest.approx(
        JobMetrics(PPO(), STEPS).combined() | {"skipped": 1.0, "tokens": 125.0, "step_s": 4.0, "tokens_per_s": 125 / 4}
    )
    assert JobMetrics(PPO(), [SKIPPED]).combined() == SKIPPED


@pytest.mark.parametrize("loss", [CrossEntropy(), DPO()])
def test_other_jobs_are_told_by_their_newest_step(loss):
    assert JobMetrics(loss, STEPS).combined() == STEPS[1]
    assert JobMetrics(loss, [*STEPS, SKIPPED]).combined() == STEPS[1] | SKIPPED
    assert JobMetrics(loss, [SKIPPED, *STEPS, SKIPPED]).combined()["skipped"] == 2, "a run says how many it skipped"


@pytest.mark.parametrize("loss", [CrossEntropy(), PPO()])
def test_no_steps_have_no_metrics(loss):
    assert JobMetrics(loss, []).combined() == {}
