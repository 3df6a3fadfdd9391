"""Which results of a session keep their scores, and how many bytes its tenant is said to store."""

from pathlib import Path

import pytest

from longshore.commands import MAX_ANSWER, CommandProblem, CommandResult, TokenScores
from shared.runs.events import MOST_SCORED_BYTES, SessionResults
from shared.runs.start import MAX_WAITING
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore
from shared.storage.stored_bytes import Ledger


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
        SessionResults(store, "acme", "session-a", most=3).put(number, result(number))
    assert scored(store, range(1, 8)) == [5, 6, 7]
    old = stored(store, 1)
    assert (old.number, old.kind, old.metrics, old.data, old.expired) == (1, "forward", {"tokens": 3.0}, None, True)


def test_the_newest_results_keep_their_scores_by_bytes_which_the_tenant_stores(store: LocalStore) -> None:
    results, size = SessionResults(store, "acme", "session-a", most_bytes=3 * len(result(1))), len(result(1))
    for number in range(1, 8):
        results.put(number, result(number))
        assert Ledger(store, "acme").count().num_bytes == size * min(number, 3)
    assert scored(store, range(1, 8)) == [5, 6, 7]
    results.put(8, result(8, scores=2500))
    assert scored(store, range(1, 9)) == [8]
    results.delete_scores()
    assert scored(store, range(1, 9)) == []
    assert Ledger(store, "acme").count().num_bytes == 0


def test_small_results_and_long_messages_stay_as_they_are(store: LocalStore) -> None:
    results = SessionResults(store, "acme", "session-a", most=1)
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
