"""Server-driven RL through every process of the real system: sampled, graded, trained and published, to the bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from temporalio.api.history.v1 import HistoryEvent

from benchmarks.one_device import Device
from benchmarks.spans import Receiver, Span, of_run
from longshore.events import Offloaded, parse_event
from longshore.metrics import metric_of
from shared.chat.trajectories import TrajectoryGroup
from tests.depth import drawn
from tests.end_to_end.conftest import ROLLOUT_STEPS, SECRETS
from tests.end_to_end.stack import Stack, wait_until

pytestmark = pytest.mark.slow


def steps_of(stack: Stack, run_id: str) -> list[dict]:
    folder = stack.root / "store" / "runs" / run_id / "steps"
    return [
        json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))
    ]  # a killed host may leave a part of another


def weights(adapter: str) -> bytes:
    return Path(adapter.removeprefix("file://"), "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, rollout_options: list[str]) -> dict:
    return stack.cli(*rollout_options, "--wait").json


def test_it_samples_grades_trains_and_publishes(stack: Stack, undisturbed: dict) -> None:
    assert undisturbed["status"] == "succeeded"
    steps = steps_of(stack, undisturbed["run_id"])
    assert [(step["step"], step["state"], step["policy_version"]) for step in steps] == [
        (n, "done", n) for n in range(ROLLOUT_STEPS + 1)
    ]
    assert steps[-1]["adapter"] == undisturbed["adapter"]
    for step in steps[1:]:
        metrics = step["metrics"]
        assert metrics["trajectories"] == 16
        assert metrics["probe_difference_max"] < 1e-4
        assert {
            *("reward_mean", "reward_std", "truncation_rate", "packing_factor", "grad_norm"),
            *("sampling_seconds", "grading_seconds", "training_seconds", "publishing_seconds"),
        } <= set(metrics)
        assert [name for name in metrics if metric_of(name) is None] == []
    assert [step["step"] for step in steps if "eval_reward_mean" in step["metrics"]] == [0, 2, ROLLOUT_STEPS]


def test_one_trace_leads_from_the_request_to_each_optimizer_step(traces: Receiver, undisturbed: dict) -> None:
    """Every parent is there, and what users wrote is not."""
    run_id = undisturbed["run_id"]

    def whole() -> list[Span] | None:
        """A span is sent when it ends: that of a lease after all that was done in it."""
        spans = of_run(traces.spans(), run_id)
        known = {"", *(span.span for span in spans)}
        is_over = any(span.name == "CompleteWorkflow:RLWorkflow" for span in spans)
        return spans if is_over and all(span.parent in known for span in spans) else None

    spans = wait_until(whole, "the run's trace, with every parent", timeout_s=120)
    by_id = {span.span: span for span in spans}

    def path(span: Span) -> list[str]:
        return [span.name, *(path(by_id[span.parent]) if span.parent else [])]

    paths = [path(span) for span in spans]
    start = ["StartWorkflow:RLWorkflow", "POST /api/v1/runs"]
    activity = ["RunActivity:run_job", "StartActivity:run_job", *start]
    assert paths.count(["optimizer step", "job", *activity]) == ROLLOUT_STEPS
    assert {path[-1] for path in paths} == {start[-1]} and ["RunWorkflow:RLWorkflow", *start] in paths
    # Both of the trace's ends are found by the run's id.
    assert {span.attributes.get("longshore.run") for span in spans if span.name in (start[-1], "job")} == {run_id}
    processes = {span.name: span.process for span in spans}
    assert processes["job"] == processes["RunActivity:sample"] == "longshore-host"
    steps = [span for span in spans if span.name == "optimizer step"]
    assert [span.attributes["longshore.step"] for span in steps] == list(range(1, ROLLOUT_STEPS + 1))
    for span in spans:
        parent = by_id.get(span.parent)
        assert parent is None or span.begin >= parent.begin - 0.05, (span, parent)  # clocks of two libraries
    sent = b"".join(traces.raw)
    assert run_id.encode() in sent
    for text in ("Name ship", "def grade", *SECRETS.values()):
        assert text.encode() not in sent, text


def test_its_work_is_counted_where_it_is_done(stack: Stack, undisturbed: dict) -> None:
    found = stack.metrics()
    host, web = found["host"], found["web"]
    assert host["longshore_steps_total"] >= ROLLOUT_STEPS and host["longshore_trained_tokens_total"] > 0
    assert host["longshore_jobs_total{outcome=succeeded}"] >= ROLLOUT_STEPS and host["longshore_gpu_seconds_total"] > 0
    assert host["longshore_weight_sync_seconds_count"] >= ROLLOUT_STEPS
    assert host["longshore_sampler_proofs_total{outcome=proved}"] >= ROLLOUT_STEPS
    assert web["longshore_http_requests_total{method=POST,route=/api/v1/runs,status=201}"] >= 1
    wait_until(lambda: stack.metrics()["web"].get("longshore_ended_runs{state=succeeded}"), "the run is counted")
    wait_until(lambda: stack.metrics()["web"]["longshore_tenant_gpu_seconds{tenant=default}"] > 0, "its tenant, too")


def test_the_next_step_is_sampled_before_the_last_one_is_published_and_recorded(
    stack: Stack, undisturbed: dict
) -> None:
    """By the time that a step's record is asked for, so are the samples of the next one."""
    told = [
        (event.activity_task_scheduled_event_attributes.activity_type.name, event)
        for event in stack.history(undisturbed["run_id"]).events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    drawn = [_decided_at(event) for name, event in told if name == "sample"]
    recorded = [_decided_at(event) for name, event in told if name == "record_step"]
    assert len(recorded) == ROLLOUT_STEPS + 1
    # Before the record of step 0 one evaluation; of step 1 steps 1 and 2; of step 2 one evaluation and step 3.
    assert [sum(at <= limit for at in drawn) for limit in recorded] == [1, 3, 5, 6]


def _decided_at(event: HistoryEvent) -> int:
    """The workflow task in which an activity was asked for."""
    return event.activity_task_scheduled_event_attributes.workflow_task_completed_event_id


def test_trainer_and_sampler_are_never_on_one_device_together(
    stack: Stack, rollout_options: list[str], undisturbed: dict
) -> None:
    """Colocated, the sampler is seen asleep whenever a job has not offloaded yet; the bits are those of two devices."""
    with Device(stack.root) as device:
        for _ in range(10):  # a busy machine may have the observer look only between the jobs of a run
            shutil.rmtree(stack.root / "store" / "sampled")  # so that this run draws its own
            run = stack.cli(*rollout_options, "--colocate", "--wait").json
            assert run["status"] == "succeeded"
            assert weights(run["adapter"]) == weights(undisturbed["adapter"])
            if device.asleep + device.together and device.awake:
                break
    assert device.asleep and not device.together
    logs = (stack.root / "store" / "runs" / run["run_id"] / "logs").rglob("log.jsonl")
    events = [parse_event(line) for log in logs for line in log.read_bytes().splitlines()]
    assert sum(isinstance(event, Offloaded) for event in events) == ROLLOUT_STEPS
    figures = device.figures(events)
    print(figures)
    assert max(device.awake) > 100_000 and figures["device_peak_mb"] <= 1.05 * figures["larger_alone_mb"]


def test_a_step_ahead_is_sampled_from_the_policy_that_the_rule_names(
    stack: Stack, rollout_options: list[str], undisturbed: dict
) -> None:
    """Off-policy by two: steps 1 to 3 are sampled from the beginning, step 4 from the policy after step 1."""
    ahead = ["--steps", "4", "--off-policy-steps", "2", "--wait"]
    run = stack.cli(*rollout_options, *ahead).json
    steps = steps_of(stack, run["run_id"])[1:]
    assert [_versions(step) for step in steps] == [{0}, {0}, {0}, {1}]
    assert [step["metrics"]["staleness_max"] for step in steps] == [0, 1, 2, 2]
    assert weights(steps[0]["adapter"]) == weights(steps_of(stack, undisturbed["run_id"])[1]["adapter"])


def _versions(step: dict) -> set[int]:
    """The policy versions of the sampled tokens of a step's trajectories."""
    path = Path(step["groups"].removeprefix("file://"))
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    trajectories = [TrajectoryGroup.model_validate(group).trajectories for group in groups]
    return {version or 0 for group in trajectories for one in group for version in one.token_versions}


@pytest.mark.deep
def test_groups_of_equal_grades_are_drawn_again(stack: Stack, rollout_options: list[str]) -> None:
    """The groups whose grades differ at once stay as they are, and others have come to differ."""
    seldom = {"type": "string_check", "name": "has_e", "operation": "like", "reference": "e"}
    graded = ["--steps", "1", "--grader", json.dumps(seldom | {"input": "{{ sample.output_text }}"})]
    once, again = (
        steps_of(stack, stack.cli(*rollout_options, *graded, *more, "--wait").json["run_id"])[-1]
        for more in ([], ["--redraws", "4"])
    )
    assert again["metrics"]["redrawn_groups"] >= once["metrics"]["zero_variance_share"] * 4 > 0
    assert again["metrics"]["zero_variance_share"] < once["metrics"]["zero_variance_share"]
    before, after = (
        [
            json.loads(line)["trajectories"]
            for line in Path(step["groups"].removeprefix("file://")).read_text().splitlines()
        ]
        for step in (once, again)
    )
    is_same = [one == other for one, other in zip(before, after, strict=True)]
    assert is_same == [len({one["reward"] for one in group}) > 1 for group in before]


def test_it_ends_with_the_step_that_reaches_the_target(stack: Stack, rollout_options: list[str]) -> None:
    run = stack.cli(*rollout_options, "--eval-every", "1", "--target", "-1", "--wait").json
    assert run["status"] == "succeeded"
    assert run["policy_version"] == 0
    assert [step["step"] for step in steps_of(stack, run["run_id"])] == [0]


def test_the_best_policy_is_the_newest_version_and_the_run_ends_when_it_gets_no_better(
    stack: Stack, rollout_options: list[str]
) -> None:
    """A grade that falls with every token `e`: at this rate the policy soon repeats one answer."""
    options = [*rollout_options, "--eval-every", "1", "--keep", "best", "--patience", "2", "--publish-every", "3"]
    run = stack.cli(*options, "--steps", "12", "--wait").json
    assert run["status"] == "succeeded", run
    steps = steps_of(stack, run["run_id"])
    grades = {step["step"]: step["metrics"]["eval_reward_mean"] for step in steps if step["step"]}
    best = max(grades, key=grades.__getitem__)
    waited = len(grades) - best
    assert waited == 2 or len(grades) == 12, grades
    assert all(step["adapter"] for step in steps[1:]), "a step that is evaluated is published"
    kept = next(step for step in steps if step["step"] == best)
    assert (run["metrics"]["best_step"], run["metrics"]["best_eval_reward_mean"]) == (best, grades[best])
    assert weights(run["adapter"]) == weights(kept["adapter"])
    newest = max(step["version"] for step in steps[1:])
    assert run["version"] == newest + (best != len(grades))
    [notice] = [each for each in run["notices"] if "are published" in each]
    assert notice == f"the weights after step {best} are published: eval_reward_mean was best there"


def test_the_trainers_weights_reach_the_sampler_without_the_store(
    stack: Stack, rollout_options: list[str], undisturbed: dict
) -> None:
    """Adapters and full weights; from the store they are the same, to the bit."""
    for step in steps_of(stack, undisturbed["run_id"])[1:]:
        assert step["metrics"]["sync_used"] == 1 and step["metrics"]["sync_failed"] == 0
    at = rollout_options.index("--lora-rank")
    full = [
        *rollout_options[:at],
        *rollout_options[at + 2 :],
        "--full",
        "--learning-rate",
        "0.0003",
        "--wait",
        "--timeout",
        "600",
    ]
    full += ["--sync-profile-path", "syncs.json"]
    each = ("--publish-every", "1")
    every_other = {"tcp": each, "delta": ("--publish-every", "2"), "store": ("--publish-every", "2")}
    runs = {backend: stack.cli(*full, "--sync-backend", backend, *how).json for backend, how in every_other.items()}
    published = {}
    for backend, run in runs.items():
        assert run["status"] == "succeeded", run
        steps = steps_of(stack, run["run_id"])[1:]
        assert [step["metrics"]["sync_used"] for step in steps] == [float(backend != "store")] * ROLLOUT_STEPS
        assert all(step["metrics"]["probe_difference_max"] < 1e-4 for step in steps)
        sent = [step["metrics"].get("sync_bytes") for step in steps]
        assert (sent == [None] * ROLLOUT_STEPS) == (backend == "store")
        folders = {step["step"]: Path(step["adapter"].removeprefix("file://")) for step in steps if step["adapter"]}
        published[backend] = {step: (folder / "model.safetensors").read_bytes() for step, folder in folders.items()}
        assert run["version"] == len(folders) and run["adapter"] == steps[-1]["adapter"]
    assert len(set(published["tcp"].values())) == ROLLOUT_STEPS == 3
    last = {2: published["tcp"][2], 3: published["tcp"][3]}
    assert published["delta"] == published["store"] == last, "every other version, and the last"
    for way, transport in (("tcp", "tcp"), ("delta", "shared_memory")):
        profile = (stack.host_paths.profiles / runs[way]["run_id"] / "syncs.json").read_text()
        events = json.loads(profile.rstrip(",\n") + "]")
        assert [e["args"]["version"] for e in events if e["name"] == "commit"] == [*range(1, ROLLOUT_STEPS + 1)]
        assert {event["args"]["transport"] for event in events} == {transport}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and this is about having none")
def test_a_sync_that_the_hosts_cannot_do_ends_the_run_before_a_sampler_starts(
    stack: Stack, rollout_options: list[str]
) -> None:
    options = [*rollout_options, "--sync-backend", "cuda_ipc", "--wait"]
    ended = stack.cli(*options, check=False).json
    assert ended["status"] == "failed" and ended["problem"]["kind"] == "invalid_input"
    assert "cuda_ipc is not possible on this sampler host: cuda_ipc needs cuda" in ended["problem"]["message"]
    assert "possible are auto, store, delta, shared_memory, tcp, collective" in ended["problem"]["message"]
    events = stack.history(ended["run_id"]).events
    assert stack.most_attempts(ended["run_id"]) == 1
    assert not any(event.HasField("workflow_execution_signaled_event_attributes") for event in events), "no grant"


@pytest.mark.deep
@pytest.mark.drawn
@pytest.mark.parametrize("in_flight", drawn(["finish", "continue"], 1))
def test_full_weights_are_sent_while_later_steps_are_sampled(
    stack: Stack, rollout_options: list[str], in_flight: str
) -> None:
    """One step ahead, by sync alone. Each version has one hash, in whichever sample it stands."""
    at = rollout_options.index("--lora-rank")
    run = stack.cli(
        *(*rollout_options[:at], *rollout_options[at + 2 :], "--full", "--learning-rate", "0.0003"),
        *("--steps", "5", "--off-policy-steps", "1", "--sync-in-flight", in_flight, "--publish-every", "5"),
        "--wait",
    ).json
    assert run["status"] == "succeeded" and run["version"] == 1
    steps = steps_of(stack, run["run_id"])[1:]
    assert [step["metrics"]["sync_used"] for step in steps] == [1.0] * 5
    assert [step["adapter"] is None for step in steps] == [True] * 4 + [False]
    for step in steps:
        number, found = step["step"], _versions(step)
        if in_flight == "finish":
            assert found == {max(0, number - 2)}
        else:
            assert found <= {max(0, number - 2), number - 1}, "one behind at most"
        assert step["metrics"]["staleness_max"] <= 1
    hashes_of_versions(stack, run["run_id"])


def hashes_of_versions(stack: Stack, run_id: str) -> dict[int, str]:
    """The hash of the weights that drew each version's tokens, of all samples of a run's steps: there is one."""
    found: dict[int, set[str]] = {}
    drawn = set[str]()
    for step in steps_of(stack, run_id):
        if step["groups"]:
            groups = Path(step["groups"].removeprefix("file://")).read_text().splitlines()
            drawn |= {json.dumps(one["token_ids"]) for line in groups for one in json.loads(line)["trajectories"]}
    for path in (stack.root / "store" / "sampled").glob("*/completions/completions.jsonl"):
        for line in path.read_text().splitlines():
            group = json.loads(line)
            if json.dumps(group["prompt_ids"] + group["samples"][0]["token_ids"]) in drawn:
                for by in group["drawn_by"]:
                    found.setdefault(by["policy_version"], set()).add(by["weights_sha256"])
    assert found and all(len(hashes) == 1 for hashes in found.values()), found
    return {version: hashes.pop() for version, hashes in found.items()}
