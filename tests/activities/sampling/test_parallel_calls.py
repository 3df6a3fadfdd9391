"""Calls on threads: every result, every error, no call that nobody wants, no waiting for one under way."""

import threading
from collections.abc import Iterator

import pytest

from activities.sampling.sample import in_parallel


def test_every_call_is_made_once_by_several_threads() -> None:
    meeting = threading.Barrier(4)  # that four calls are under way at once is the only way through

    def call(number: int) -> int:
        if number < 4:
            meeting.wait(60)
        return number * number

    assert sorted(in_parallel(call, range(100), 4)) == [number * number for number in range(100)]
    assert list(in_parallel(call, [], 4)) == []


@pytest.mark.parametrize("where", ["call", "arguments"])
def test_an_error_is_raised_and_no_new_call_begins(where: str) -> None:
    begun: list[int] = []

    def arguments() -> Iterator[int]:
        for number in range(1000):
            if where == "arguments" and number == 5:
                raise ValueError("five")
            yield number

    def call(number: int) -> int:
        begun.append(number)
        if number == 5:
            raise ValueError("five")
        return number

    with pytest.raises(ValueError, match="five"):
        list(in_parallel(call, arguments(), 1))
    assert begun == list(range(6 if where == "call" else 5))


def test_who_stops_listening_waits_for_nobody() -> None:
    release, taken = threading.Event(), list[int]()

    def call(number: int) -> int:
        taken.append(number)
        if number:
            release.wait(60)
        return number

    results = in_parallel(call, range(100), 3)
    assert next(results) == 0
    results.close()
    num_taken = len(taken)
    assert num_taken <= 4, "three under way, and the one that ended"
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("call"):
            thread.join(60)
    assert len(taken) <= num_taken + 1, "a thread may have taken one when it was told"
