"""Run by the launcher on two ranks: what the ranks agree on, and what they find out when one of them fails alone."""

import sys
import time
from datetime import timedelta

from megatron_worker.process.faults import JobFailed
from megatron_worker.process.ranks import WorkerRanks, connect
from shared.errors import InvalidInput


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


def main() -> int:
    with connect() as control:
        check_messages(control)
        check_agreement(control)
        check_a_fault_of_one_rank(control)
    print("agreed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
