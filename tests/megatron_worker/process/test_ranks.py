"""How ranks talk: with real ranks, and alone."""

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed as dist

from megatron_worker.process.ranks import (
    CancelledEarly,
    Check,
    Fault,
    JobFailed,
    WorkerRanks,
    everyone,
    fault_of,
    in_background,
)
from shared.errors import CorruptArtifact, DiskFull, InvalidInput, StoreUnavailable
from tests.megatron_worker.launch import on_ranks

T = TypeVar("T")


def fail_on(control: WorkerRanks, ranks: tuple[int, ...]) -> str:
    def action() -> str:
        if control.rank in ranks:
            raise InvalidInput(f"rank {control.rank} cannot", "field")
        return f"done by {control.rank}"

    try:
        return control.agree(action)
    except JobFailed as failed:
        return f"{failed.fault.kind}: {failed.fault.message}"


def check_messages(control: WorkerRanks) -> None:
    for content in (b"", b"x", b"\0" * 100_000):
        assert control.broadcast(content if control.rank == 0 else None) == content
    assert control.total([1, control.rank]) == [2, 1]
    assert control.largest([5 - control.rank]) == [5]


def check_everyone(rank: int) -> None:
    """Values of any length, of JSON and never of pickle."""
    told = ["x" * (1 + 1000 * rank), None, rank / 3, float("inf")]
    assert everyone(2, told) == [["x", None, 0.0, float("inf")], ["x" * 1001, None, 1 / 3, float("inf")]]
    with suppress(TypeError):
        everyone(2, object())
        raise AssertionError("an object is pickled")


def check_agreement(control: WorkerRanks) -> None:
    assert fail_on(control, ()) == f"done by {control.rank}"
    assert fail_on(control, (1,)) == "invalid_input: field: rank 1 cannot"
    assert fail_on(control, (0, 1)) == "invalid_input: field: rank 0 cannot"
    assert fail_on(control, ()) == f"done by {control.rank}", "a fault is not remembered"
    failed = control.agree_on(RuntimeError("everywhere"))
    assert failed.fault.message == "RuntimeError: everywhere"
    control.barrier()


def check_a_fault_of_one_rank(control: WorkerRanks) -> None:
    """Rank 1 fails in a step, rank 0 does not: rank 1 finds out that it is alone, and raises its own error again."""
    if control.rank == 1:
        began = time.monotonic()
        try:
            control.agree_on(ValueError("here alone"), patience=timedelta(seconds=1))
        except ValueError as error:
            assert str(error) == "here alone"
            assert time.monotonic() - began > 0.9, "it waits for the other as long as it may"
            return
        raise AssertionError("a fault of one rank was taken for everybody's")
    time.sleep(1.5)


def drive(control: WorkerRanks, call: Callable[[Check], T], is_cancelled: bool = False) -> tuple[int, T]:
    """How often a call in the background yields, and what it returns. A cancel is known to rank 0."""
    passes, num_passes = in_background(call, control, lambda: control.total([control.rank == 0 and is_cancelled])[0]), 0
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return num_passes, end.value
        num_passes += 1


def check_calls_in_the_background(control: WorkerRanks) -> None:
    """One rank's call takes longer, or fails, or is not waited for any more: all of them come out alike."""

    def slow_on_rank_1(check: Check) -> int:
        time.sleep(0.5 * control.rank)
        return control.rank

    def broken_on_rank_1(check: Check) -> None:
        if control.rank == 1:
            raise InvalidInput("it cannot come", "units")

    def endless(check: Check) -> None:
        try:
            while True:
                check()
                time.sleep(0.01)
        finally:
            ended.set()

    num_passes, rank = drive(control, slow_on_rank_1)
    assert rank == control.rank and num_passes > 1 and control.total([num_passes]) == [2 * num_passes]
    try:
        drive(control, broken_on_rank_1)
    except JobFailed as failed:
        assert failed.fault.message == "units: it cannot come"
    else:
        raise AssertionError("a fault of one rank's call was not told to the other")
    ended = threading.Event()
    try:
        drive(control, endless, is_cancelled=True)
    except CancelledEarly:
        assert ended.wait(60)
    else:
        raise AssertionError("a cancel was not heard")


def check_everything() -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    control = WorkerRanks(dist.PrefixStore("control", store), rank, rank, dist.get_world_size())
    check_messages(control)
    check_everyone(control.rank)
    check_agreement(control)
    check_calls_in_the_background(control)
    check_a_fault_of_one_rank(control)


def test_two_ranks_hear_of_each_others_faults():
    on_ranks(2, check_everything)


def test_a_single_rank_needs_nobody():
    ranks = WorkerRanks(dist.HashStore(), rank=0, local_rank=0, world_size=1)
    assert ranks.broadcast(b"x") == b"x"
    assert ranks.total([3]) == ranks.largest([3]) == [3]
    assert ranks.agree(lambda: 7) == 7
    with pytest.raises(JobFailed, match="no such field"):
        ranks.agree(lambda: (_ for _ in ()).throw(InvalidInput("no such field")))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvalidInput("too long", "data:3"), "invalid_input", "data:3: too long"),
        (CorruptArtifact("torn", "a.bin"), "corrupt_artifact", "a.bin: torn"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "disk_full", "while writing /x"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk_full", "no space is left"),
        (DiskFull("/cache: no space"), "disk_full", "/cache: no space"),
        (StoreUnavailable("s3://b: refused"), "error", "s3://b: refused"),
        (KeyError("x"), "error", "KeyError: 'x'"),
        (JobFailed(Fault(kind="not_finite", message="nan")), "not_finite", "nan"),
    ],
)
def test_errors_become_faults_that_a_user_can_read(error: Exception, kind: str, message: str):
    fault = fault_of(error)
    assert fault.kind == kind
    assert message in fault.message
    assert "Traceback" not in fault.message
