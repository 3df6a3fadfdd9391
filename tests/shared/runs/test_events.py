"""Events read back from the store: order, cursors, and the change from pieces to the whole log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import InvalidInput
from shared.jobs.events import Step
from shared.runs.events import EventCursor, read_run_events
from shared.storage.paths import Fence, RunKeys
from shared.storage.store import LocalStore, ObjectInfo
from tests.workflows.stand_in import read_events

KEYS = RunKeys("r1")
FIRST, SECOND = Fence(epoch=1), Fence(epoch=2)


def line(seq: int, step: int) -> bytes:
    return Step(seq=seq, time=1.0, step=step, metrics={"loss": 1 / step}).model_dump_json().encode() + b"\n"


def put_parts(store: LocalStore, fence: Fence, *parts: list[int]) -> None:
    for steps in parts:
        store.put_bytes(KEYS.log_part("000001", fence, steps[0]), b"".join(line(s, s) for s in steps))


def steps_of(events) -> list[int]:
    return [event.step for event in events]


def test_a_run_without_a_log_has_no_events(tmp_path: Path) -> None:
    assert read_events(LocalStore(tmp_path), "r1") == ([], EventCursor())


def test_pieces_are_read_in_order_and_a_cursor_gives_only_what_is_new(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put_parts(store, FIRST, [1, 2], [3])
    events, cursor = read_events(store, "r1")
    assert steps_of(events) == [1, 2, 3]
    assert read_events(store, "r1", cursor) == ([], cursor)
    put_parts(store, FIRST, [4, 5])
    assert steps_of(read_events(store, "r1", cursor)[0]) == [4, 5]


def test_a_cursor_of_pieces_holds_for_the_whole_log(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put_parts(store, FIRST, [1, 2], [3])
    _, cursor = read_events(store, "r1", limit=2)
    store.put_bytes(KEYS.log("000001", FIRST), b"".join(line(s, s) for s in (1, 2, 3, 4)))
    assert steps_of(read_events(store, "r1", cursor)[0]) == [3, 4], "the whole log counts, beside pieces too"
    store.delete(KEYS.log_part("000001", FIRST, 1))
    store.delete(KEYS.log_part("000001", FIRST, 3))
    assert steps_of(read_events(store, "r1", cursor)[0]) == [3, 4]


def test_later_fences_come_after_earlier_ones(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put_parts(store, SECOND, [1, 2])
    store.put_bytes(KEYS.log("000001", FIRST), line(1, 7) + line(2, 8))
    found, cursor = read_run_events(store, "r1")
    assert [(item.fence.epoch, item.event.step) for item in found] == [(1, 7), (1, 8), (2, 1), (2, 2)]
    assert read_events(store, "r1", cursor)[0] == []


def test_reading_one_event_at_a_time_by_each_ones_own_cursor_gives_the_same(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put_parts(store, FIRST, [1, 2], [3])
    put_parts(store, SECOND, [1], [2, 3])
    all_at_once, _ = read_run_events(store, "r1")
    one_by_one = []
    text = None
    while found := read_run_events(store, "r1", EventCursor.parse(text), limit=1)[0]:
        one_by_one += found
        text = found[0].cursor
    assert one_by_one == all_at_once
    assert len(all_at_once) == 6


def test_a_long_log_is_read_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.runs.events._READ_BYTES", 100)
    store = LocalStore(tmp_path)
    store.put_bytes(KEYS.log("000001", FIRST), b"".join(line(s, s) for s in range(1, 200)))
    assert steps_of(read_events(store, "r1")[0]) == list(range(1, 200))


class CountingStore(LocalStore):
    num_lists = 0

    def list(self, prefix: str):
        self.num_lists += 1
        return super().list(prefix)


def test_a_log_in_many_pieces_is_listed_once(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    put_parts(store, FIRST, *([step] for step in range(1, 50)))
    assert steps_of(read_events(store, "r1")[0]) == list(range(1, 50))
    assert store.num_lists == 1


def test_pieces_that_go_while_they_are_read_are_found_in_the_whole_log(tmp_path: Path) -> None:
    class ClosingStore(LocalStore):
        """The job ends between the first piece's reading and the second's."""

        def get_bytes(self, key: str) -> bytes:
            data = super().get_bytes(key)
            super().put_bytes(KEYS.log("000001", FIRST), b"".join(line(s, s) for s in (1, 2, 3)))
            for seq in (1, 2):
                super().delete(KEYS.log_part("000001", FIRST, seq))
            return data

    store = ClosingStore(tmp_path)
    put_parts(store, FIRST, [1], [2])
    assert steps_of(read_events(store, "r1")[0]) == [1, 2, 3]


class ReplacingStore(LocalStore):
    """A job ends while its log is listed first: folders are read one after another, and what is deleted is not seen."""

    has_listed = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.has_listed:
            yield from super().list(prefix)
            return
        self.has_listed = True
        log, first = KEYS.log("000001", FIRST), KEYS.log_part("000001", FIRST, 1)
        super().put_bytes(log, b"".join(line(s, s) for s in (1, 2, 3)))
        super().delete(first)
        yield from (info for info in super().list(prefix) if info.key != log)


@pytest.mark.parametrize("num_read", [0, 1, 2])
@pytest.mark.parametrize("others", [[], [SECOND]])
def test_pieces_that_go_while_they_are_listed_are_found_in_the_whole_log(
    tmp_path: Path, num_read: int, others: list[Fence]
) -> None:
    store = LocalStore(tmp_path)
    put_parts(store, FIRST, [1], [2], [3])
    _, cursor = read_events(store, "r1", limit=num_read) if num_read else ([], EventCursor())
    for fence in others:
        put_parts(store, fence, [7])
    found = steps_of(read_events(ReplacingStore(tmp_path), "r1", cursor)[0])
    assert found == [1, 2, 3][num_read:] + [7] * len(others)


@pytest.mark.parametrize("text", ["x", "a/b", "a/b/c", "a/b/-1"])
def test_a_wrong_cursor_is_the_users_mistake(text: str) -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        EventCursor.parse(text)
