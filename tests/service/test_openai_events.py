"""What a run left in the store, as OpenAI's events, statuses and tables."""

import asyncio
from typing import Any

from service.apis.openai.fine_tuning.views import JobEvent, job_events, job_of, metrics_csv, status_of
from service.runs.history import EvaluationMetrics, Histories, Metrics, RunReader, StepMetrics
from service.runs.views import RunView
from shared.jobs.events import Evaluated, Saved, Started, Step, Succeeded
from shared.runs.dataset_runs import SFTRun
from shared.runs.requests import RLRun
from shared.runs.status import PhaseSpan, StepStatus
from shared.settings import S3Settings
from shared.storage.paths import Fence, RunKeys
from shared.storage.store import ObjectStore, open_store
from tests.service.test_openai_translation import CHECK

FIRST, SECOND = Fence(epoch=1), Fence(epoch=2)
RUN = SFTRun(model="m", dataset={"uri": "u"}, steps=3, batch_size=1)  # type: ignore[arg-type]


def view(run_id: str = "sft-1", **changes: Any) -> RunView:
    fields = {"run_id": run_id, "name": "bot", "created_at": 10.0, "run": RUN, "source": {"api": "openai"}}
    return RunView.model_validate(fields | changes)


def put_log(store: ObjectStore, run_id: str, fence: Fence, events: list[Any], name: str = "000001") -> None:
    lines = "".join(event.model_dump_json() + "\n" for event in events)
    store.put_bytes(RunKeys(run_id).log_part(name, fence, events[0].seq), lines.encode())


def started(run_id: str, fence: Fence, when: float = 20) -> Started:
    fields = {"run_id": run_id, "job_id": "000001", "device": "cpu", "world_size": 1, "num_steps": 3}
    return Started(seq=1, time=when, fence=fence, first_step=0, **fields)  # type: ignore[arg-type]


def test_events_do_not_change_places_as_a_run_goes_on(tmp_path: Any) -> None:
    store = open_store(tmp_path.as_uri(), S3Settings())
    histories = Histories(RunReader(store))

    def told(view: RunView) -> list[JobEvent]:
        return job_events(view, asyncio.run(histories.of(view.run_id)))

    put_log(
        store,
        "sft-1",
        FIRST,
        [started("sft-1", FIRST), Step(seq=2, time=21, step=1, metrics={"loss": 2.0, "tokens": 8})],
    )
    timeline = (PhaseSpan(phase="downloading", began=11), PhaseSpan(phase="training", began=20, lease=1))
    going = view(phase="training", timeline=timeline, version=1)
    before = told(going)
    assert [event.message for event in before][::-1] == [
        "Created fine-tuning job: sft-1",
        "Reading the files",
        "training starts at step 0 of 3, 1 rank on cpu",
        "Step 1/3: training loss=2.0000",
    ]
    assert before[0].type == "metrics" and before[0].data["train_loss"] == 2.0
    # The worker is lost; another one repeats the step, and goes on.
    more = [started("sft-1", SECOND, 22), Step(seq=2, time=22, step=1, metrics={"loss": 2.0, "tokens": 8})]
    more += [
        Step(seq=3, time=23, step=2, metrics={"loss": 1.0, "tokens": 6}),
        Saved(seq=4, time=24, step=2, path="p", manifest_sha256="0" * 64),
    ]
    more += [Evaluated(seq=5, time=25, step=2, metrics={"loss": 1.5}), Succeeded(seq=6, time=26, step=2, device="held")]
    put_log(store, "sft-1", SECOND, more)
    done = view(state="succeeded", phase="done", timeline=timeline, version=1, ended_at=30.0)
    after = told(done)
    assert [event.id for event in after[-len(before) :]] == [event.id for event in before]
    assert len({event.id for event in after}) == len(after)
    assert [event.created_at for event in after] == sorted((event.created_at for event in after), reverse=True)
    assert after[1].message == "New fine-tuned model created: bot:v1"
    assert asyncio.run(histories.of(done.run_id)).trained_tokens() == 14, "a step that was repeated counts once"
    assert asyncio.run(histories.of(done.run_id)).saved_at() == {2: 24.0}


def test_statuses_in_openais_words() -> None:
    phases = ["queued", "downloading", "waiting_for_worker", "training", "publishing"]
    told = [status_of(view(phase=phase)) for phase in phases]
    assert told == ["validating_files", "validating_files", "queued", "running", "running"]
    assert status_of(view(phase="waiting_for_worker", step=3)) == "running", "it never goes back"
    assert [status_of(view(state=state)) for state in ("paused", "failed", "cancelled")] == [
        "paused",
        "failed",
        "cancelled",
    ]


def test_the_error_of_a_job_names_its_file() -> None:
    def param(*phases: str, kind: str = "invalid_input", **changes: Any) -> str | None:
        spans = [{"phase": phase, "began": 0.0} for phase in phases]
        failed = {"state": "failed", "phase": phases[-1], "problem": {"kind": kind, "message": "rows.jsonl:3: no"}}
        error = job_of(view(**failed, timeline=spans, **changes), None).error
        assert error is not None
        return error.param

    assert param("checking", "downloading") == param("downloading", "tokenizing") == "training_file"
    assert param("downloading", "tokenizing", "packing", "downloading", "tokenizing") == "validation_file"
    assert param("checking") is None and param("downloading", "tokenizing", kind="store_unavailable") is None
    assert param("downloading", "tokenizing", "packing", "waiting_for_worker") is None


def test_metrics_as_a_table() -> None:
    metrics = Metrics(
        steps=(StepMetrics(step=1, metrics={"loss": 2.0, "tokens": 8}), StepMetrics(step=2, metrics={"loss": 1.0})),
        evaluations=(
            EvaluationMetrics(step=0, metrics={"loss": 3.0}),
            EvaluationMetrics(step=2, metrics={"loss": 1.5}),
        ),
    )
    assert metrics_csv(metrics).decode().splitlines() == [
        "step,train_loss,valid_loss,train_tokens",
        "0,,3.0,",
        "1,2.0,,8.0",
        "2,1.0,1.5,",
    ]


def test_events_of_train_steps_stand_behind_their_jobs(tmp_path: Any) -> None:
    store = open_store(tmp_path.as_uri(), S3Settings())
    histories = Histories(RunReader(store))

    def told(view: RunView) -> list[JobEvent]:
        return job_events(view, asyncio.run(histories.of(view.run_id)))

    rollouts = {"prompts": {"uri": "u"}, "grader": CHECK, "steps": 2}
    run = RLRun.model_validate({"model": "m", "rollouts": rollouts})

    def record(step: int, **metrics: float) -> None:
        status = StepStatus(step=step, key=str(step), groups="u", state="done", metrics=metrics)
        store.put_bytes(RunKeys("rl-1").step(step), status.model_dump_json().encode())

    def work(step: int, when: float) -> None:
        put_log(store, "rl-1", FIRST, [Step(seq=1, time=when, step=step, metrics={"tokens": 8})], f"{step:06d}")

    record(0, eval_reward_mean=0.25)
    work(1, 21)
    record(1, reward_mean=0.5)
    going = view("rl-1", kind="rl", run=run, phase="training")
    before = told(going)
    work(2, 31)
    record(2, reward_mean=0.75, eval_reward_mean=0.5)
    after = told(going)
    assert [event.id for event in after[-len(before) :]] == [event.id for event in before]
    rewards = [
        (e.data["step"], e.data.get("train_mean_reward"), e.data.get("valid_mean_reward"))
        for e in after[::-1]
        if "Train step" in e.message
    ]
    assert rewards == [(0, None, 0.25), (1, 0.5, None), (2, 0.75, 0.5)]
    assert [e.message.split()[0] for e in after[::-1]] == ["Created", "Train", "Step", "Train", "Step", "Train"]
