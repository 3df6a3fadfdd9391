"""Kills and a cut link in each phase of the weight sync of a run's own rollouts: not a bit of the run changes.

The trainer broadcasts full weights to a sampler at an address. It is held where a phase begins (held_phases/), so that
each kill is where it says. The suite draws some; `make test-deep` has every process in every phase, in a quarter of an
hour.
"""

import ctypes
import os
import shutil
import socket
from pathlib import Path

import psutil
import pytest

from tests.depth import drawn
from tests.end_to_end.stack import Answer, Stack, wait_until
from tests.end_to_end.test_rollouts import steps_of
from tests.end_to_end.victims import (
    Victim,
    a_rank,
    gpu_host,
    kill,
    launcher,
    ranks,
    sampler,
    sampler_host,
    web_service,
)

pytestmark = [pytest.mark.slow, pytest.mark.drawn]


def link(stack: Stack) -> list[psutil.Process]:
    """No victim: the connections between trainer and sampler are cut, while both live."""
    raise AssertionError


# Nothing has been said yet; samplers are asked; a bucket travels; all have been sent; nothing is committed yet; the
# samplers have committed, which the trainer has not said yet.
PHASES = ("prepare", "connect", "send 1", "settle", "commit", "finalize")
VICTIMS: tuple[Victim, ...] = (a_rank, launcher, sampler, sampler_host, gpu_host, web_service)
ALL = [(phase, victim) for phase in PHASES for victim in VICTIMS] + [(phase, link) for phase in PHASES[2:5]]
# What is lost while a bucket travels is always tried, as the store has to step in there.
KILLS = drawn(ALL, 2, always=[("send 1", link)])


@pytest.fixture(scope="module")
def full_options(rollout_options: list[str]) -> list[str]:
    at = rollout_options.index("--lora-rank")
    return [
        *(*rollout_options[:at], *rollout_options[at + 2 :], "--full", "--learning-rate", "0.0003"),
        *("--steps", str(len(KILLS) + 2), "--publish-every", "5", "--eval-every", "1000", "--dp", "2"),
        *("--sync-backend", "collective", "--sync-bucket-bytes", str(1 << 16)),
    ]


@pytest.mark.timeout(3600)
def test_kills_in_every_phase_of_a_sync_change_nothing(fresh_stack: Stack, full_options: list[str]) -> None:
    alone = fresh_stack.cli(*full_options, "--wait")
    for folder in ("sampled", "graded"):  # so that the second run draws and grades its own
        shutil.rmtree(fresh_stack.root / "store" / folder)
    run_id = fresh_stack.cli(*full_options).json["run_id"]
    run = fresh_stack.root / "store" / "runs" / run_id
    for phase, victim in KILLS:
        num_steps = disturb(fresh_stack, phase, victim, run)
        # The rest of that sync comes to later phases without who was killed.
        wait_until(lambda n=num_steps: num_done(run) > n or is_over(run), "the end of the disturbed step")
    answer = fresh_stack.cli("watch", run_id, "--json")
    assert answer.json["status"] == "succeeded", answer
    assert last_model(answer) == last_model(alone)
    disturbed, undisturbed = (steps_of(fresh_stack, one)[1:] for one in (run_id, alone.json["run_id"]))
    assert all(step["metrics"]["sync_used"] == 1 for step in undisturbed)
    used = [step["metrics"].get("sync_used") for step in disturbed]
    print(f"weights came by the sync: {used}")
    assert not all(used), "the store was needed, or nothing was disturbed"
    for ours, theirs in zip(disturbed, undisturbed, strict=True):
        assert ours["metrics"]["probe_difference_max"] < 1e-4
        assert ours["metrics"]["grad_norm"] == theirs["metrics"]["grad_norm"]
        assert ours["metrics"]["reward_mean"] == theirs["metrics"]["reward_mean"]


def num_done(run: Path) -> int:
    return len(list(run.glob("steps/*.json")))


def is_over(run: Path) -> bool:
    return (run / "result.json").exists()


def disturb(stack: Stack, phase: str, victim: Victim, run: Path) -> int:
    """Returns how many steps had been done then."""
    folder = stack.root / "held"
    (folder / "hold.tmp").write_text(phase)
    (folder / "hold.tmp").rename(folder / "hold")
    held = folder / "held"
    wait_until(lambda: held.exists() or is_over(run), f"a sync comes to {phase}", every_s=0.01)
    assert held.exists(), f"the run ended, and no sync came to {phase}"
    num_steps = num_done(run)
    print(f"in {phase}: ", end="")
    if victim is link:
        cut(stack)
    else:
        kill(stack, victim)
    held.unlink()
    return num_steps


def last_model(answer: Answer) -> bytes:
    return Path(answer.json["adapter"].removeprefix("file://"), "model.safetensors").read_bytes()


def cut(stack: Stack) -> None:
    """Shut all TCP connections between trainers and samplers, by duplicates of the trainers' sockets."""

    def found() -> list[tuple[int, int]] | None:
        theirs = {connection.laddr for one in sampler(stack) for connection in one.net_connections("tcp")}
        links = [
            (rank.pid, connection.fd)
            for rank in ranks(stack)
            for connection in rank.net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED and connection.raddr in theirs
        ]
        return links if len(links) >= 2 else None

    cut_ones = [duplicate(*one) for one in wait_until(found, "the trainer's link to the sampler, and the group's")]
    print(f"cutting {len(cut_ones)} connections")
    for one in cut_ones:
        one.shutdown(socket.SHUT_RDWR)
        one.close()


def duplicate(pid: int, descriptor: int) -> socket.socket:
    """Another process's socket, by the system call pidfd_getfd."""
    process = os.pidfd_open(pid)
    try:
        copied = ctypes.CDLL(None, use_errno=True).syscall(438, process, descriptor, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return socket.socket(fileno=copied)
    finally:
        os.close(process)
