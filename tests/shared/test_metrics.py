"""The table of metrics: its page and its names. Tests of jobs and steps hold what they report to it."""

from pathlib import Path

from longshore.metrics import _ELSEWHERE, METRICS, _page, metric_of

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == _page(), "python -m longshore.metrics > docs/metrics.md"


def test_a_name_is_its_own_metric_or_one_of_several() -> None:
    for name, metric in (("loss", "loss"), ("eval_loss", "eval_loss"), ("eval_sums_loss", "eval_*")):
        assert metric_of(name) is METRICS[metric]
    assert metric_of("dropped_for_routes") is METRICS["dropped_for_*"] and metric_of("trajectory_length") is not None
    assert metric_of("lost") is None and metric_of("losses") is None
    assert not _ELSEWHERE.keys() - METRICS.keys()
