"""Samplers that come late, or that have other weights than the trainer: the run mends, replaces or outlives them."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from activities.records import find_newest
from activities.sampling.client import Sampler
from activities.sampling.samplers import adapter_name
from longshore.runs import RLRun
from shared.chat.completions import SamplerReady
from shared.jobs.job import newest_name
from shared.storage.store import LocalStore
from tests.activities.sampling.injected import write_weights
from tests.depth import one_of
from tests.end_to_end.conftest import LETTERS
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.test_rollouts import hashes_of_versions, steps_of
from tests.end_to_end.victims import a_rank, a_sampler, control_host, kill, sampler_host, signal_all
from tests.megatron_worker.sampler_process import write_adapter

_TRIES = 6
pytestmark = pytest.mark.slow

NUM_STEPS = 10


@pytest.fixture(scope="module")
def rollout_options(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Sampled one step ahead: while a step trains, the next one is drawn."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in range(50))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(
            "submit",
            "rl",
            "--json",
            "--model",
            str(tiny_model),
            "--prompts",
            str(path),
            "--grader",
            json.dumps(LETTERS),
        ),
        *("--steps", str(NUM_STEPS), "--prompts-per-step", "8", "--group-size", "4", "--max-completion-tokens", "32"),
        *("--off-policy-steps", "1", "--loss", "ppo", "--lora-rank", "4", "--learning-rate", "0.01"),
        *("--max-tokens", "80", "--seed", "7"),
    ]


@pytest.fixture(scope="module")
def with_critic(rollout_options: list[str]) -> list[str]:
    critic = ("--critic-value-scale", "running", "--critic-warmup-steps", "1")
    return [*rollout_options, "--algorithm", "ppo", *critic]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, with_critic: list[str]) -> Answer:
    return stack.cli(*with_critic, "--wait")


def _count(stack: Stack, pattern: str) -> int:
    try:
        return sum(1 for _ in (stack.root / "store").glob(pattern))
    except FileNotFoundError:  # a part has gone under the search
        return 0


def sampling(stack: Stack, run_id: str) -> bool:
    return _count(stack, "sampled/*-parts/*.json") > 0


def training(stack: Stack, run_id: str) -> bool:
    return _count(stack, "packed/*/manifest.json") > _count(stack, f"runs/{run_id}/logs/*/*/log.jsonl")


PROOFS = ["samplers come late", "before a proof", "while the next step is drawn"]


def _assert_undisturbed(stack: Stack, run_id: str, undisturbed: Answer) -> None:
    answer = stack.cli("watch", run_id, "--json")
    assert answer.json["status"] == "succeeded", answer
    assert stack.adapter_sha256(answer) == stack.adapter_sha256(undisturbed)
    assert answer.json["policy_version"] == undisturbed.json["policy_version"]
    wait_until(lambda: _count(stack, "sampled/*-parts/*.json") == 0, "parts are gone")


@one_of(PROOFS, "samplers come late")
def test_samplers_come_late_and_are_lost_and_change_nothing(
    fresh_stack: Stack, undisturbed: Answer, with_critic: list[str]
) -> None:
    """Two samplers: the second one comes in the middle of the run, and later one is killed while both draw."""
    for folder in ("sampled", "graded"):  # so that this run draws its own
        shutil.rmtree(fresh_stack.root / "store" / folder, ignore_errors=True)
    run_id = fresh_stack.cli(*with_critic, "--samplers", "2").json["run_id"]
    wait_until(lambda: _count(fresh_stack, f"runs/{run_id}/steps/*.json") >= 1, "a step with one sampler")
    held = control_host(fresh_stack)  # nothing goes on without it
    signal_all(held, signal.SIGSTOP)
    try:
        with fresh_stack.another_host("sampler"):
            wait_until(lambda: _num_grants(fresh_stack, run_id) == 2, "the second sampler is up")
            num_before = _count(fresh_stack, f"runs/{run_id}/steps/*.json")
            signal_all(held, signal.SIGCONT)
            wait_until(
                lambda: (
                    _count(fresh_stack, f"runs/{run_id}/steps/*.json") >= num_before + 3
                    and sampling(fresh_stack, run_id)
                ),
                "samples of a step are drawn by both",
                every_s=0.01,
            )
            kill(fresh_stack, a_sampler)
            _assert_undisturbed(fresh_stack, run_id, undisturbed)
    finally:
        signal_all(held, signal.SIGCONT)
    folder = fresh_stack.root / "store" / "runs" / run_id / "steps"
    steps = [json.loads(path.read_text())["metrics"] for path in sorted(folder.glob("*.json"))]
    assert steps[0]["samplers"] == 1
    both = steps[num_before + 2]  # sampled and trained between the second one's coming and the kill
    assert (both["samplers"], both["sync_used"], both["sync_failed"]) == (2, 1, 0)
    assert all(metrics["probe_difference_max"] < 1e-4 for metrics in steps)


@one_of(PROOFS, "before a proof")
def test_a_sampler_that_has_not_the_trainers_weights_is_mended_or_replaced(
    fresh_stack: Stack, rollout_options: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """Between training and proof another adapter takes the place of the one that was sent, which the store's replaces;
    then other weights below it, which nothing replaces in that sampler.
    """
    options = [*rollout_options, "--off-policy-steps", "0", "--steps", "8"]
    alone = fresh_stack.cli(*options, "--wait")
    for folder in ("packed", "sampled", "graded"):
        shutil.rmtree(fresh_stack.root / "store" / folder)
    wrong = str(write_adapter(tmp_path / "adapter", tiny_model, 1, ("q_proj", "v_proj", "down_proj")))
    other = str(write_weights(tmp_path / "weights", tiny_model, 1))
    with fresh_stack.another_host("sampler"):
        run_id = fresh_stack.cli(*options, "--samplers", "2").json["run_id"]
        with _before_a_proof(fresh_stack, run_id, num_grants=2) as (samplers, name):
            for sampler, _ in samplers:
                sampler.load_adapter(name, wrong)
            kill(fresh_stack, control_host)
        with _before_a_proof(fresh_stack, run_id, num_grants=2) as (samplers, _):
            sampler, model = samplers[-1]
            sampler.load_weights(model, other)
        with _before_a_proof(fresh_stack, run_id, num_grants=2) as (samplers, name):
            for sampler, _ in samplers:
                sampler.load_adapter(name, wrong)
        wait_until(lambda: not _is_training(_activities(fresh_stack, run_id)), "a proof")
        kill(fresh_stack, sampler_host)
        answer = fresh_stack.cli("watch", run_id, "--json")
    assert answer.json["status"] == "succeeded", answer
    assert fresh_stack.adapter_sha256(answer) == fresh_stack.adapter_sha256(alone)
    told = [step["metrics"] for step in steps_of(fresh_stack, run_id)]
    assert next(metrics["sync_reloaded"] for metrics in told if metrics["sync_reloaded"]) == 2
    assert [metrics["sync_given_up"] for metrics in told if metrics["sync_given_up"]] == [1]
    assert _num_grants(fresh_stack, run_id) >= 3


def _activities(stack: Stack, run_id: str) -> list[str]:
    """The names of a run's activities, in the order in which they were asked for."""
    events = stack.history(run_id).events
    return [event.activity_task_scheduled_event_attributes.activity_type.name for event in events]


def _is_training(names: list[str]) -> bool:
    """Whether the last job's policy is still to be proved."""
    return "run_job" in names and "prove_adapter" not in names[::-1][: names[::-1].index("run_job")]


@contextmanager
def _before_a_proof(stack: Stack, run_id: str, num_grants: int) -> Iterator[tuple[list[tuple[Sampler, str]], str]]:
    """Hold a run when a step is trained whose policy no sampler has proved yet, and wait for so many samplers' grants.

    Yields clients of its samplers, each with the model's name there, and the policy's name.
    """
    wait_until(lambda: not _is_training(_activities(stack, run_id)), "the proof of the step before")
    held, names = wait_until(lambda: control_host(stack), "a control host"), list[str]()
    store = LocalStore(stack.root / "store")

    def is_held() -> bool:
        wait_until(lambda: _is_training(_activities(stack, run_id)), "a job")
        signal_all(held, signal.SIGSTOP)
        names[:] = _activities(stack, run_id)
        if _is_training(names):
            return True
        signal_all(held, signal.SIGCONT)
        return False

    try:
        wait_until(is_held, "a step before its proof", every_s=0.01)
        num_jobs = names.count("run_job")
        wait_until(lambda: _count(stack, f"runs/{run_id}/logs/*/*/log.jsonl") == num_jobs, "the end of its job")
        wait_until(lambda: _num_grants(stack, run_id) >= num_grants, "samplers")
        checkpoint = find_newest(store, run_id).checkpoint
        assert checkpoint is not None
        with _samplers(stack) as samplers:
            yield samplers, adapter_name(run_id, checkpoint.artifact)
    finally:
        signal_all(held, signal.SIGCONT)


@contextmanager
def _samplers(stack: Stack) -> Iterator[list[tuple[Sampler, str]]]:
    """Clients of all samplers, each with the model's name there."""
    with ExitStack() as clients:
        samplers = list[tuple[Sampler, str]]()
        for path in stack.host_paths.workers.glob("*/ready"):
            if b"api_key" in (said := path.read_bytes()):
                ready = SamplerReady.model_validate_json(said)
                sampler = Sampler(ready.url, ready.api_key, socket_path=ready.socket)
                samplers.append((clients.enter_context(sampler), ready.model))
        yield samplers


@one_of(PROOFS, "while the next step is drawn")
def test_what_was_drawn_under_weights_that_fail_the_proof_is_drawn_again(
    fresh_stack: Stack, rollout_options: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """With `continue`: another adapter is what the next step is drawn by, instead of what the trainer then sends."""
    wrong = str(write_adapter(tmp_path / "adapter", tiny_model, 1, ("q_proj", "v_proj", "down_proj")))

    def draw_by_another(run_id: str, version: int) -> bool:
        with _samplers(fresh_stack) as [(sampler, _)]:
            sampler.update_weights(newest_name(run_id), version, wrong, is_adapter=True)
        wait_until(lambda: _num_sampled(fresh_stack) == version + 1, "samples by the wrong adapter")
        return len(_hashes_of(fresh_stack, version)) == 1

    run_id, version = _while_the_next_step_is_drawn(fresh_stack, rollout_options, draw_by_another)
    answer = fresh_stack.cli("watch", run_id, "--json")
    assert answer.json["status"] == "succeeded", answer
    told = [step["metrics"] for step in steps_of(fresh_stack, run_id)]
    assert sum(metrics["sync_given_up"] for metrics in told) == told[version - 1]["sync_given_up"] == 1
    assert _num_grants(fresh_stack, run_id) == 2
    hashes_of_versions(fresh_stack, run_id)
    assert len(_hashes_of(fresh_stack, version)) == 2, "nothing was at stake"


def _hashes_of(stack: Stack, version: int) -> set[str]:
    """The hashes of the weights that have drawn stored samples as this version."""
    drawn = (stack.root / "store" / "sampled").glob("*/completions/completions.jsonl")
    by = [one for path in drawn for line in path.read_text().splitlines() for one in json.loads(line)["drawn_by"]]
    return {one["weights_sha256"] for one in by if one["policy_version"] == version}


def _num_sampled(stack: Stack) -> int:
    """The number of steps whose samples are all drawn."""
    return _count(stack, "sampled/*/samples/manifest.json")


def _while_the_next_step_is_drawn(
    stack: Stack, rollout_options: list[str], act: Callable[[str, int], bool]
) -> tuple[str, int]:
    """Hold the trainer of a run before it sends a version, and `act` while the step after it is sampled. Returns both.

    Where a run is too fast to be caught there, or for what `act` would do (it says so), the same is run again.
    """
    for _ in range(_TRIES):
        for folder in ("packed", "sampled", "graded"):
            shutil.rmtree(stack.root / "store" / folder, ignore_errors=True)
        longer = ("--steps", "8", "--max-completion-tokens", "160", "--max-tokens", "256")  # so long is it to be caught
        run_id = stack.cli(*rollout_options, *longer, "--sync-in-flight", "continue").json["run_id"]
        held = wait_until(lambda: a_rank(stack), "a trainer")
        try:
            if (version := _caught(stack, run_id, held)) is not None and act(run_id, version):
                return run_id, version
        finally:
            signal_all(held, signal.SIGCONT)
        stack.cli("watch", run_id)
    raise AssertionError(f"{_TRIES} runs were too fast")


def _caught(stack: Stack, run_id: str, held: list[psutil.Process]) -> int | None:
    """Stop a run's trainer as `_while_the_next_step_is_drawn` says. Returns None if the run ended first."""

    def has_ended() -> bool:
        return (stack.root / "store" / "runs" / run_id / "result.json").exists()

    while True:
        wait_until(lambda: has_ended() or training(stack, run_id), "a step", every_s=0.005)
        if has_ended():
            return None
        signal_all(held, signal.SIGSTOP)
        version = 1 + _count(stack, f"runs/{run_id}/steps/*.json")
        with _samplers(stack) as samplers:
            cards = [sampler.models().get(newest_name(run_id)) for sampler, _ in samplers]
        is_before = cards and cards[0] is not None and (cards[0].policy_version or 0) == version - 1
        if is_before and _num_sampled(stack) == version:
            return version
        signal_all(held, signal.SIGCONT)
        time.sleep(0.01)


def test_a_run_ends_when_no_sampler_has_the_trainers_weights(fresh_stack: Stack, rollout_options: list[str]) -> None:
    """Within a bound that no two programs keep, even loaded anew and started anew."""
    given = dict(zip(rollout_options[3::2], rollout_options[4::2], strict=True))
    rollouts = {
        "prompts": {"uri": Path(given["--prompts"]).as_uri()},
        "grader": LETTERS,
        "steps": 3,
        "prompts_per_step": 4,
    }
    rollouts |= {"group_size": 4, "max_completion_tokens": 12, "probe_bound": 1e-30}
    run = {"kind": "rl", "model": given["--model"], "rollouts": rollouts, "max_tokens": 80}
    with fresh_stack.client() as client:
        run_id = client.runs.submit(RLRun.model_validate(run), "never proved").run_id
    ended = fresh_stack.cli("watch", run_id, "--json", check=False)
    assert ended.json["status"] == "failed" and ended.json["problem"]["kind"] == "sampler_mismatch", ended
    assert "no sampler is left: 2 were given up; of the last one: token " in ended.json["problem"]["message"]
    assert "after it was loaded anew from the store" in ended.json["problem"]["message"]
    assert _num_grants(fresh_stack, run_id) == 2


def _num_grants(stack: Stack, run_id: str) -> int:
    """How often a sampler was leased for a run."""
    events = stack.history(run_id).events
    names = [event.workflow_execution_signaled_event_attributes.signal_name for event in events]
    return names.count("sampler_leased")
