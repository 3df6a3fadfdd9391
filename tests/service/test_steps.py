"""The train steps of an RL run as the API lists them, and as the command line tells of them."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from activities.host_context import HostContext
from activities.records import RunRecords, StepRecordRequest
from longshore.events import Event, Started, Step, Succeeded
from longshore.fields import Fence
from longshore.views import Problem, StepStatus
from service.cli.run_output import step_line
from shared.storage.paths import RunKeys
from tests.service.conftest import LONGSHORE, Service, sft
from tests.waiting import wait_until

FENCE = Fence(epoch=1)


@pytest.fixture
def run_id(api: httpx.Client) -> Iterator[str]:
    """An RL run that waits. It is finished afterwards, if it was not."""
    answer = api.post("/runs/rl", json={"model": "org/tiny"})
    assert answer.status_code == 201, answer.text
    found = answer.json()["run_id"]
    wait_until(lambda: api.get(f"/runs/{found}").json()["phase"] == "waiting_for_groups", "the run waits")
    yield found
    api.post(f"/runs/{found}/finish")


def put(service: Service, run_id: str, number: int, **changes: Any) -> StepStatus:
    """A step on record, as the real activity writes it."""
    given = {"key": f"k{number}", "groups": f"file:///groups/{number}.jsonl", "state": "done", "policy_version": number}
    step = StepStatus(step=number, **given | changes)
    RunRecords(HostContext(service.settings)).record_step(StepRecordRequest(run_id=run_id, step=step))
    return step


def put_log(service: Service, run_id: str, number: int) -> None:
    """The log of a step's job: its beginning, an optimizer step, its end."""
    job_id = f"{number:06d}"
    common = {"run_id": run_id, "job_id": job_id, "fence": FENCE, "device": "cpu", "world_size": 1}
    events: list[Event] = [
        Started(seq=1, time=1.0, first_step=number - 1, num_steps=number, **common),
        Step(seq=2, time=2.0, step=number, metrics={"loss": -0.5 * number}),
        Succeeded(seq=3, time=3.0, step=number, device="released"),
    ]
    lines = "".join(event.model_dump_json() + "\n" for event in events)
    service.store.put_bytes(RunKeys(run_id).log(job_id, FENCE), lines.encode())


def page(api: httpx.Client, run_id: str, **query: int) -> dict[str, Any]:
    answer = api.get(f"/runs/{run_id}/steps", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_steps_are_listed_in_pages_in_order(api, service: Service, run_id: str) -> None:
    assert page(api, run_id) == {"steps": [], "has_more": False, "next": None}
    steps = [put(service, run_id, number, metrics={"reward_mean": number / 8}) for number in range(40)]
    first = page(api, run_id, limit=20)
    assert [StepStatus.model_validate(step) for step in first["steps"]] == steps[:20]
    assert (first["has_more"], first["next"]) == (True, 19)
    rest = page(api, run_id, after=first["next"], limit=20)
    assert [StepStatus.model_validate(step) for step in rest["steps"]] == steps[20:]
    assert (rest["has_more"], rest["next"]) == (False, 39)
    assert rest["steps"][3] == api.get(f"/runs/{run_id}/steps/23").json()

    assert page(api, run_id, after=39) == {"steps": [], "has_more": False, "next": 39}
    put(service, run_id, 40)
    assert [step["step"] for step in page(api, run_id, after=39)["steps"]] == [40]
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after": -1}, {"after": "v1"}):
        assert api.get(f"/runs/{run_id}/steps", params=wrong).status_code == 422, wrong


@pytest.fixture
def trained(service: Service, run_id: str) -> str:
    """A run with every kind of step on record."""
    rewards = {"reward_mean": 0.41249, "reward_std": 0.3, "response_tokens_mean": 87.6}
    training = {"kl_old_new": 0.00123, "ratio_mean": 1.002}
    put(service, run_id, 0, metrics={"eval_reward_mean": 0.25})
    for number in (1, 2):
        put_log(service, run_id, number)
    metrics = rewards | training | {"training_seconds": 31.4, "publishing_seconds": 2.04}
    put(service, run_id, 1, version=1, metrics=metrics | {"entropy": 1.0})
    put(service, run_id, 2, version=2, metrics=metrics | {"eval_reward_mean": 0.5531})
    put(service, run_id, 3, policy_version=2, state="skipped", metrics={"reward_mean": 1.0, "reward_std": 0.0})
    problem = Problem(kind="invalid_input", message="groups.jsonl:1: [rewards] must be finite")
    put(service, run_id, 4, policy_version=2, state="failed", problem=problem)
    put(service, run_id, 5, key="k1", policy_version=1, version=1, same_as=1, metrics=metrics)
    return run_id


LINES = [
    "train step 0: held-out 0.25",
    "train step 1: reward 0.412 ± 0.3, published v1",
    "train step 2: reward 0.412 ± 0.3, held-out 0.553, published v2",
    "train step 3: skipped, reward 1 ± 0",
    "train step 4: failed, groups.jsonl:1: [rewards] must be finite",
    "train step 5: the key of step 1 again: not trained twice",
]


HEADER = "train step reward out tokens KL ratio train/publish".split()


def test_metrics_have_both_kinds_of_steps(api, service: Service, trained: str) -> None:
    found = api.get(f"/runs/{trained}/metrics").json()
    assert [(row["step"], row["metrics"]) for row in found["steps"]] == [(1, {"loss": -0.5}), (2, {"loss": -1.0})]
    rows = found["train_steps"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4], "the same key again measured nothing"
    assert rows[1]["metrics"]["entropy"] == 1.0
    assert service.cli("metrics", trained, "--json").json == found
    shown = service.cli("metrics", trained).stdout.splitlines()
    assert [line.split() for line in shown[:3]] == [["step", "loss"], ["1", "-0.5"], ["2", "-1"]]
    header = [line.split() for line in shown[3:6]]
    assert header == [["seconds:"], ["held-", "sample/grade/"], HEADER]
    assert shown[8].split() == "2 0.412±0.3 0.553 88 0.0012 1.002 -/-/31/2.0".split()


def test_a_table_tells_what_rewards_do(service: Service, trained: str) -> None:
    lines = service.cli("steps", trained).stdout.splitlines()
    assert lines[2].split() == ["step", "state", "policy", *HEADER[2:]]
    assert [line.split() for line in lines[3:]] == [
        ["0", "done", "0", "0.25"],
        "1 done 1 0.412±0.3 88 0.0012 1.002 -/-/31/2.0".split(),
        "2 done 2 0.412±0.3 0.553 88 0.0012 1.002 -/-/31/2.0".split(),
        "3 skipped 2 1±0".split(),
        "4 failed 2 groups.jsonl:1: [rewards] must be finite".split(),
        "5 done 1 0.412±0.3 88 0.0012 1.002 -/-/31/2.0 the key of step 1 again: not trained twice".split(),
    ]


def test_what_was_left_out_of_a_step_is_named_by_reason(service: Service, run_id: str) -> None:
    lost = {"trajectories": 32.0, "broken_trajectories": 21.0, "dropped_for_differs": 20.0, "dropped_for_too_long": 1.0}
    put(service, run_id, 1, version=1, metrics=lost | {"reward_mean": 0.5})
    put(service, run_id, 2, version=2, metrics=lost | {"broken_trajectories": 0.0})
    words = "21 of 32 trajectories could not be trained: differs 20, too_long 1"
    lines = service.cli("steps", run_id).stdout.splitlines()
    assert [line.endswith(words) for line in lines[-2:]] == [True, False]
    step = StepStatus(step=1, key="k", groups="g", state="done", version=1, metrics=lost)
    assert step_line(step) == f"train step 1: published v1, {words}"


def test_json_has_every_step_whole(api, service: Service, trained: str) -> None:
    assert service.cli("steps", trained, "--json").json == page(api, trained)["steps"]
    for number in range(6, 130):
        put(service, trained, number)
    assert [step["step"] for step in service.cli("steps", trained, "--json").json] == list(range(130))


def test_a_run_without_steps_says_so(service: Service, api, run_id: str) -> None:
    answer = service.cli("steps", run_id)
    assert (answer.code, answer.stdout, answer.stderr) == (0, "", f"no step of {run_id} has ended yet\n")
    assert service.cli("steps", run_id, "--json").json == []
    other = api.post("/runs/sft", json=sft()).json()["run_id"]
    refused = service.cli("steps", other)
    assert refused.code == 2 and f"longshore metrics {other}" in refused.stderr, refused
    assert service.cli("steps", "rl-none").code == 102


@contextmanager
def started(service: Service, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A command under way, whose output the block reads line by line."""
    process = subprocess.Popen(
        [LONGSHORE, *arguments],
        env=service.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_steps_are_followed_to_the_end(api, service: Service, trained: str) -> None:
    with started(service, "steps", trained, "--follow") as following:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in LINES] == [line + "\n" for line in LINES]
        put(service, trained, 6, version=3)
        assert following.stdout.readline() == "train step 6: published v3\n"
        put(service, trained, 7)
        api.post(f"/runs/{trained}/finish")
        out, said = following.communicate(timeout=300)
    assert (following.returncode, out, said) == (0, "train step 7: done\n", "")
    lines = service.cli("steps", trained, "--follow", "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == page(api, trained)["steps"]


def test_watching_tells_each_step_behind_its_own_job(api, service: Service, trained: str) -> None:
    """Of steps that stood before, and of those that come; an optimizer step's own line may be left out."""
    with started(service, "watch", trained, "--json") as watching:
        assert watching.stderr is not None
        begun = [f"run {trained}", "waiting for groups", LINES[0]]
        for job, step in enumerate(LINES[1:3], 1):
            begun += [f"training starts at step {job - 1} of {job}, 1 rank on cpu", f"training succeeded at step {job}"]
            begun.append(step)
        begun += LINES[3:]
        assert [_said(watching) for _ in begun] == begun
        put_log(service, trained, 6)
        put(service, trained, 6, version=3, metrics={"reward_mean": 0.75})
        put_log(service, trained, 7)
        put(service, trained, 7, version=4, metrics={"reward_mean": 0.875})
        assert [_said(watching) for _ in range(5)] == [
            "training starts at step 5 of 6, 1 rank on cpu",
            "training succeeded at step 6",
            "train step 6: reward 0.75, published v3",
            "training starts at step 6 of 7, 1 rank on cpu",
            "training succeeded at step 7",
        ]
        api.post(f"/runs/{trained}/finish")
        out, said = watching.communicate(timeout=300)
    assert watching.returncode == 0
    assert said == "train step 7: reward 0.875, published v4\n"
    answer = json.loads(out)
    got = service.cli("get", trained, "--json").json
    assert answer == {name: value for name, value in got.items() if name != "run"}
    again = service.cli("watch", trained).stderr.splitlines()
    assert [line for line in again if line.startswith("train step")] == [
        *LINES,
        "train step 6: reward 0.75, published v3",
        "train step 7: reward 0.875, published v4",
    ]


def _said(process: "subprocess.Popen[str]") -> str:
    """The next line on stderr, without its time; lines of optimizer steps are passed over."""
    assert process.stderr is not None
    while True:
        line = process.stderr.readline().rstrip("\n")
        line = line.partition("Z ")[2] if line.startswith("1970-") else line
        if not line.startswith("step "):
            return line
