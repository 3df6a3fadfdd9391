"""Whatever is killed, the run completes by itself, and its adapter has the bits of an undisturbed run.

Kills at random moments: tests/chaos.
"""

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.dev.connection import Connection
from tests.depth import drawn, one_of
from tests.end_to_end.runs import jsonl
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.victims import (
    Victim,
    a_rank,
    control_host,
    gpu_host,
    halt,
    kill,
    ranks,
    signal_all,
    temporal_server,
    web_service,
)

pytestmark = pytest.mark.slow


# Where in the run: each finds its moment by looking at the worker's folder, as an outsider can.


def _log_lines(stack: Stack, run_id: str) -> list[str]:
    """The log of the run's newest fence, as far as it is written."""
    logs = _found(stack, f"*/outputs/{run_id}/*/*/log.jsonl")
    newest = max(logs, key=lambda log: log.parent.name, default=None)
    return _read(newest).splitlines() if newest else []


def _found(stack: Stack, pattern: str) -> list[Path]:
    """Files of the host's workers; none if a folder vanished under the search."""
    try:
        return list(stack.host_paths.workers.glob(pattern))
    except FileNotFoundError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def before_the_claim(stack: Stack, run_id: str) -> bool:
    return bool(_found(stack, f"*/leases/{run_id}.json"))


def mid_step(stack: Stack, run_id: str) -> bool:
    return sum('"event":"step"' in line for line in _log_lines(stack, run_id)) >= 3


def after_save(stack: Stack, run_id: str) -> bool:
    return any('"event":"saved"' in line for line in _log_lines(stack, run_id))


def at_the_sentinel(stack: Stack, run_id: str) -> bool:
    """On the host, or a moment later in the store alone."""
    carried = (stack.root / "store" / "runs" / run_id / "logs").glob("*/*/log.jsonl")
    lines = [*_log_lines(stack, run_id), *(_read(log) for log in carried)]
    return any('"event":"succeeded"' in line for line in lines)


def between_save_and_manifest(stack: Stack, run_id: str) -> bool:
    """Stop the ranks the moment a checkpoint is being written, and look whether its manifest is still missing."""
    if not _unsealed_checkpoints(stack, run_id):
        return False
    stopped = ranks(stack)
    signal_all(stopped, signal.SIGSTOP)
    if _unsealed_checkpoints(stack, run_id):
        return True
    signal_all(stopped, signal.SIGCONT)
    return False


def _unsealed_checkpoints(stack: Stack, run_id: str) -> list[Path]:
    """Checkpoints grow in the scratch folder of the job, and move with their manifest. One worker: one job."""
    folders = _found(stack, "*/scratch/*/step-*")
    return [f for f in folders if any(_listed(f)) and not (f / "manifest.json").exists()]


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


Point = Callable[[Stack, str], bool]


def _submit(stack: Stack, options: list[str]) -> str:
    return stack.cli(*options).json["run_id"]


def _outcome(stack: Stack, run_id: str) -> Answer:
    """Follow a run to its end; a web service that is down for a moment is the client's to bear."""
    return stack.cli("watch", run_id, "--json")


def _assert_undisturbed(stack: Stack, run_id: str, undisturbed: Answer) -> None:
    answer = _outcome(stack, run_id)
    assert answer.json["status"] == "succeeded", answer
    assert stack.adapter_sha256(answer) == stack.adapter_sha256(undisturbed)
    wait_until(lambda: not list(stack.host_paths.workers.glob("*/scratch/*")), "scratch folders are gone")


POINTS: list[Point] = [before_the_claim, mid_step, between_save_and_manifest, after_save, at_the_sentinel]
KILLED = ["at every point", "around a limit", "of a reward model"]
VICTIMS: list[Victim] = [a_rank, gpu_host, control_host, web_service, temporal_server]


def _kill(stack: Stack, run_id: str, point: Point, victim: Victim) -> None:
    # Looking takes the machine away from the run: only what lasts for milliseconds is looked for all the time.
    every_s = 0.001 if point is between_save_and_manifest else 0.01
    wait_until(lambda: point(stack, run_id), f"{point.__name__} of {run_id}", every_s=every_s)
    kill(stack, victim)
    if point is between_save_and_manifest:
        signal_all(ranks(stack), signal.SIGCONT)


@one_of(KILLED, "at every point")
@pytest.mark.parametrize("turn", drawn(range(len(VICTIMS)), 1))
def test_a_kill_at_every_point_changes_nothing(
    stack: Stack, undisturbed: Answer, sft_options: list[str], turn: int
) -> None:
    """Five kills a run, one at each point. The victims take turns: in five runs each dies at each point."""
    run_id = _submit(stack, sft_options)
    for place, point in enumerate(POINTS):
        _kill(stack, run_id, point, VICTIMS[(turn + place) % len(VICTIMS)])
    _assert_undisturbed(stack, run_id, undisturbed)


@one_of(KILLED, "of a reward model")
def test_kills_change_nothing_of_a_reward_model(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    """Its head included, which is no other run's: a kill of the worker in the middle of a step, then of its host."""
    rows = [{"prompt": f"Ship {n}?", "chosen": f"{n} z" * 2, "rejected": f"{n} crates"} for n in range(64)]
    options = [
        *(
            "submit",
            "reward",
            "--json",
            "--model",
            str(tiny_model),
            "--dataset",
            str(jsonl(tmp_path / "rows.jsonl", rows)),
        ),
        *("--steps", "40", "--batch-size", "16", "--max-tokens", "256", "--checkpoint-every", "10", "--seed", "7"),
        *("--lora-rank", "4", "--learning-rate", "0.01"),
    ]
    undisturbed = stack.cli(*options, "--wait")
    run_id = _submit(stack, options)
    _kill(stack, run_id, mid_step, a_rank)
    _kill(stack, run_id, after_save, gpu_host)
    _assert_undisturbed(stack, run_id, undisturbed)


def test_cancel_frees_the_worker_and_resume_gives_the_same_bits(
    stack: Stack, undisturbed: Answer, sft_options: list[str]
) -> None:
    run_id = _submit(stack, sft_options)
    wait_until(lambda: mid_step(stack, run_id), "mid-step", every_s=0.01)
    halt(stack, run_id, "cancel")
    ended = stack.cli("watch", run_id, "--json", check=False)
    assert ended.code == 103 and ended.json["steps"] < 60, "it was stopped before its last step"
    checkpoints = stack.cli("checkpoints", run_id, "--json").json
    assert checkpoints
    stack.cli("resume", run_id)
    _assert_undisturbed(stack, run_id, undisturbed)


# Beside the GPU host, which dies before it hears of the limit.
LIMIT_KILLS: list[tuple[str, Victim]] = drawn(
    [
        ("is set", web_service),
        *(("holds", victim) for victim in (control_host, temporal_server, web_service)),
        *(("is raised", victim) for victim in (web_service, control_host)),
    ],
    2,
)


@one_of(KILLED, "around a limit")
def test_a_spending_limit_holds_whatever_is_killed(stack: Stack, undisturbed: Answer, sft_options: list[str]) -> None:
    """Kills as the limit is set, while it holds, and as it is raised: no step beyond it, no step lost."""
    key = _asked(stack, "POST", "/tenants", {"tenant": "thrifty", "title": "Thrifty"})["key"]["key"]
    theirs = Stack(stack.root, {"LONGSHORE_API_KEY": key})
    run_id = _submit(theirs, sft_options)

    def view() -> dict[str, Any]:
        return _asked(stack, "GET", f"/runs/{run_id}", key=key)

    def paused() -> dict[str, Any] | None:
        return found if (found := view())["state"] == "paused" else None

    def kill_as_it(does: str) -> None:
        for victim in [victim for moment, victim in LIMIT_KILLS if moment == does]:
            kill(stack, victim)

    wait_until(lambda: mid_step(stack, run_id), "mid-step", every_s=0.01)
    signal_all(ranks(stack), signal.SIGSTOP)  # or the run might end before the limit reaches it
    _asked(stack, "PUT", "/tenants/thrifty/quotas", {"spending": 1e-6})
    kill_as_it("is set")
    wait_until(lambda: view()["paused_by"], "the limit reaches the run")
    kill(stack, gpu_host)
    held = wait_until(paused, "the limit pauses it")
    assert held["paused_by"].startswith("quota spending: thrifty's runs of the last 30 days cost") and held["step"] < 60
    kill_as_it("holds")
    assert paused() == held
    again = theirs.cli("resume", run_id, check=False)
    assert again.code != 0 and "quota spending" in again.stderr, again
    _asked(stack, "PUT", "/tenants/thrifty/quotas", {})
    kill_as_it("is raised")
    wait_until(lambda: not paused(), "it goes on")
    _assert_undisturbed(theirs, run_id, undisturbed)


def _asked(stack: Stack, method: str, path: str, body: object = None, key: str | None = None) -> dict[str, Any]:
    """What the service answers, as soon as it is there: its operator, or whose key it is."""
    connection = Connection.read(stack.root)
    assert connection is not None
    headers = {"authorization": f"Bearer {key or connection.api_key}"}

    def answer() -> httpx.Response | None:
        with suppress(httpx.TransportError):
            address = f"{connection.api_url}/api/v1{path}"
            return httpx.request(method, address, json=body, headers=headers, timeout=60, trust_env=False)
        return None

    found = wait_until(answer, f"{method} {path}")
    assert found.is_success, found.text
    told: dict[str, Any] = found.json()
    return told
