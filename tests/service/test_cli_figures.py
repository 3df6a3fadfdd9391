"""What the command line computes for itself: spans of time, how long a run still takes, how a run is shown."""

import io
import time

import pytest
from rich.console import Console

from longshore.dataset_runs import SFTRun
from longshore.events import RunEvent, Saved, Step, Succeeded
from longshore.fields import Fence
from longshore.views import RunView
from service.cli.command import Stop, seconds_of, span
from service.cli.run_output import Bar, Lines, phases, summary, took
from service.runs.views import seconds_left
from workflows.training.run import StepEta


def sft(**changes: object) -> SFTRun:
    return SFTRun.model_validate({"model": "m", "dataset": {"uri": "file:///rows.jsonl"}, **changes})


def step_event(step: int, time: float, metrics: dict[str, float]) -> RunEvent:
    event = Step(seq=step, time=time, step=step, metrics=metrics)
    return RunEvent(cursor="", job_id="000001", fence=Fence(epoch=1), event=event)


def test_spans_are_read_and_written() -> None:
    told = [(0, "0s"), (59.4, "59s"), (60, "1m"), (3599.6, "1h"), (3660, "1h 1m"), (90_000, "1d 1h"), (-1, "0s")]
    assert [(seconds, span(seconds)) for seconds, _ in told] == told
    assert [seconds_of(text, "--every") for text in ("90s", "90m", "6h", "2d")] == [90, 5400, 21_600, 172_800]
    with pytest.raises(Stop, match="--every: '1 day' is no time"):
        seconds_of("1 day", "--every")


def view_of(**changes: object) -> RunView:
    asked = {"run_id": "sft-1", "created_at": 0.0, "run": sft(steps=8, batch_size=2)}
    return RunView.model_validate(asked | changes)


def test_an_end_is_told_by_the_time_between_the_ends_of_steps() -> None:
    pace = StepEta()
    pace.take(1, 1000.0, lease=1)  # whatever it took until then: starting and warming up
    assert pace.end(11, 1) is None, "one step says nothing of how long a step takes"
    pace.take(3, 1020.0, lease=1)
    assert pace.end(11, 1) == pytest.approx(1020 + 8 * 10)
    pace.take(6, 1035.0, lease=1)
    assert pace.end(11, 1) == pytest.approx(1035 + 5 * 7)
    assert pace.end(None, 1) is None and pace.end(6, 1) == 1035.0
    assert pace.end(11, 2) is None, "another worker is waited for"
    for step, ended in ((4, 5000.0), (5, 5002.0), (5, 5090.0)):  # from its checkpoint on, steps are done again
        pace.take(step, ended, lease=2)
    assert pace.end(11, 2) == pytest.approx(5002 + 6 * 2)


def test_time_left_has_the_evaluations_in_it() -> None:
    pace = StepEta()
    pace.take(1, 1050.0, 1, evaluations=1, evaluating_s=40.0)  # one before the first step
    pace.take(3, 1070.0, 1, evaluations=1, evaluating_s=40.0)
    assert pace.end(11, 1) == pytest.approx(1070 + 8 * 10 + 40), "one behind the last step"
    pace.take(5, 1130.0, 1, evaluations=2, evaluating_s=80.0)  # one after step 4
    assert pace.end(11, 1, eval_every=4) == pytest.approx(1130 + 6 * 10 + 2 * 40), "after step 8, and at the end"
    assert pace.end(5, 1, eval_every=4) == pytest.approx(1130 + 40)


def test_a_look_at_a_run_that_has_ended_shows_its_losses_and_no_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(view_of(state="succeeded", phase="done", step=1000, num_steps=1000, started_at=0.0, ended_at=400.0))
    for step in range(1, 1001):
        lines.event(step_event(step, 0.4 * step, {"loss": 1000.0 - step}))
        saved = Saved(seq=1, time=0.4 * step, step=step, path="p", manifest_sha256="0" * 64)
        lines.event(RunEvent(cursor="", job_id="000001", fence=Fence(epoch=1), event=saved))
    lines.event(
        RunEvent(
            cursor="",
            job_id="000001",
            fence=Fence(epoch=1),
            event=Succeeded(seq=2, time=400.0, step=1000, device="held"),
        )
    )
    said = capsys.readouterr().err.splitlines()
    assert 35 <= len(said) <= 45 and "checkpoint" not in "".join(said)
    assert "step 1000: loss 0" in said[-2] and "succeeded" in said[-1]


def test_what_is_left_is_told_while_it_lies_ahead() -> None:
    view = view_of(phase="training", step=4, num_steps=10, estimated_end=2000.0)
    assert seconds_left(view, 1940.0) == 60
    assert seconds_left(view, 2001.0) is None
    assert seconds_left(view.model_copy(update={"state": "paused"}), 1940.0) is None
    assert seconds_left(view.model_copy(update={"estimated_end": None}), 1940.0) is None


LONG = {"phase": "training", "step": 919, "num_steps": 1900, "started_at": 0.0}
METRICS = {"loss": 0.5165, "grad_norm": 0.2066, "learning_rate": 0.0008112, "tokens_per_s": 12_070.4}


def lines_of(view: RunView, width: int, *events: RunEvent) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False)
    bar = Bar(view, console)
    bar.status(view)
    for event in events:
        bar.event(event)
    console.print(bar)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("phase", ["training", "waiting_for_sampler"])
def test_steps_times_and_loss_are_whole_at_80_columns(phase: str) -> None:
    now = time.time()
    view = view_of(**LONG | {"phase": phase, "started_at": now - 4300, "estimated_end": now + 4000.9})
    [line] = lines_of(view, 80, step_event(920, now, metrics=METRICS))
    step = 920
    assert len(line) <= 80 and "…" not in line and "grad_norm" not in line and "learning_rate" not in line
    for part in (phase.replace("_", " "), "━━", f" {step}/1900", "1h 11m", "1h 6m left", "loss 0.5165"):
        assert part in line, (part, line)
    [wide] = lines_of(view, 140, step_event(920, now, metrics=METRICS))
    assert wide.endswith("loss 0.5165  12,070 tokens/s")
    [narrow] = lines_of(view, 50, step_event(920, now, metrics=METRICS))
    assert f"{step}/1900" in narrow and "left" in narrow and len(narrow) <= 50


def test_an_ended_run_is_not_shown_as_one_that_waits() -> None:
    view = view_of(**LONG | {"state": "failed", "step": 7, "ended_at": 130.0, "metrics": {"loss": 0.5}})
    [line] = lines_of(view, 80, step_event(3, 0.0, metrics=METRICS))
    assert line.startswith("failed ") and " 7/1900  2m 10s  loss 0.5" in line and "queued" not in line


def test_phases_say_for_which_data_and_leave_out_waits_of_a_moment() -> None:
    spans = [("checking", 0, 1, 0)]
    spans += [(phase, 1 + n, 2 + n, 0) for n, phase in enumerate(["downloading", "tokenizing", "packing"] * 2)]
    spans += [("waiting_for_worker", 7, 7.01, 0), ("waiting_for_worker", 7.01, 60, 1), ("training", 60, 90, 1)]
    spans += [("waiting_for_worker", 90, 90.01, 1), ("publishing", 90.01, 91, 1)]
    timeline = [{"phase": phase, "began": began, "ended": ended, "lease": n} for phase, began, ended, n in spans]
    run = sft(steps=8, batch_size=2, eval_dataset={"uri": "file:///eval.jsonl"})
    found = phases(view_of(run=run, timeline=timeline))
    both = [
        f"{phase} ({split})" for split in ("train", "held out") for phase in ("downloading", "tokenizing", "packing")
    ]
    assert [label for label, _, _ in found] == ["checking", *both, "waiting for worker", "training", "publishing"]
    assert found[7] == ("waiting for worker", 7.0, 60.0)
    resumed = [{"phase": "checking", "began": 150.0, "ended": 151.0}]
    again = view_of(run=run, timeline=timeline + resumed, started_at=0.0, ended_at=151.0)
    assert took(again) == "2m 31s, 59s of it stopped"
    assert took(view_of(timeline=timeline, started_at=0.0, ended_at=91.0)) == "1m 31s"


@pytest.mark.parametrize("kind", ["invalid_input", "corrupt_artifact", "not_finite", "sampler_mismatch"])
def test_resume_is_not_offered_where_it_would_fail_the_same_way(kind: str) -> None:
    view = view_of(state="failed", problem={"kind": kind, "message": "train.jsonl:3: no assistant turn"})
    assert "longshore resume" not in summary(view) and "resume would fail the same way" in summary(view)
    assert "longshore resume sft-1" in summary(view.model_copy(update={"problem": None}))
