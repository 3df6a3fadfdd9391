"""Events read back from the store, in order and by cursors; results of sessions, and the bytes that they store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from longshore.commands import MAX_ANSWER, CommandProblem, CommandResult, TokenScores
from longshore.events import Step
from longshore.fields import Fence
from shared.errors import InvalidInput
from shared.runs.events import MOST_SCORED_BYTES, EventCursor, SessionResults, read_run_events
from shared.runs.start import MAX_WAITING
from shared.storage.paths import RunKeys
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


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def result(number: int, scores: int = 1000) -> bytes:
    data = (TokenScores(logprobs=(-0.5,) * scores),)
    return CommandResult(number=number, kind="forward", metrics={"tokens": 3.0}, data=data).model_dump_json().encode()


def stored(store: LocalStore, number: int) -> CommandResult:
    return CommandResult.model_validate_json(store.get_bytes(RunKeys("session-a").command_result(number)))


def scored(store: LocalStore, numbers: range) -> list[int]:
    return [number for number in numbers if not stored(store, number).expired]


def test_the_newest_results_keep_their_scores_by_number(store: LocalStore) -> None:
    """Whoever has put them: a new object of each call stands for a new host of the session's worker."""
    for number in range(1, 8):
        SessionResults(store, "session-a", most=3).put(number, result(number))
    assert scored(store, range(1, 8)) == [5, 6, 7]
    old = stored(store, 1)
    assert (old.number, old.kind, old.metrics, old.data, old.expired) == (1, "forward", {"tokens": 3.0}, None, True)


def test_the_newest_results_keep_their_scores_by_bytes(store: LocalStore) -> None:
    results = SessionResults(store, "session-a", most_bytes=3 * len(result(1)))
    for number in range(1, 8):
        results.put(number, result(number))
    assert scored(store, range(1, 8)) == [5, 6, 7]
    results.put(8, result(8, scores=2500))
    assert scored(store, range(1, 9)) == [8]
    assert results.delete_scores()
    assert scored(store, range(1, 9)) == []


def test_small_results_and_long_messages_stay_as_they_are(store: LocalStore) -> None:
    results = SessionResults(store, "session-a", most=1)
    long = CommandResult(number=1, kind="forward", problem=CommandProblem(kind="error", message="x" * 3000))
    for number, data in (
        (1, long.model_dump_json().encode()),
        (2, result(2, scores=3)),
        (3, result(3)),
        (4, result(4)),
    ):
        results.put(number, data)
    assert stored(store, 1) == long
    assert scored(store, range(1, 5)) == [1, 2, 4]


def test_a_client_that_reads_results_as_they_come_loses_no_scores() -> None:
    """The largest: 200,000 tokens in a body, with log-probability and entropy each, and its two likeliest."""
    scored, number, token = 200_000, len("-12.345678901234567,"), len("151935,")
    largest = 2 * scored * number + 4 * scored * (number + token) // 2
    assert 4 * scored <= MAX_ANSWER < 8 * scored
    assert MAX_WAITING * largest < MOST_SCORED_BYTES
