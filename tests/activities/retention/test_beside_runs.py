"""Collections that are killed at every operation of the store, and runs that come at every operation of one."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from activities.host_context import HostContext
from activities.records.run_records import BeginRequest, RunRecords, find_newest
from activities.retention import collect
from shared.limits import RetentionSettings
from shared.runs.start import result_sha256
from shared.runs.status import RunStatus
from shared.settings import Settings
from shared.storage.artifacts import find_artifact
from shared.storage.paths import Fence, RunKeys, model_import, tokenized
from shared.storage.store import LocalStore, ObjectInfo, uri_of
from shared.storage.stored_bytes import CLAIM_S, CLAIMS, BeingDeleted, claim, claiming, mark, use
from tests.activities.retention.stored_runs import DAY_S, STEPS, Writer, damaged, fill, key_of, sizes
from tests.depth import IS_DEEP, drawn

ALL = RetentionSettings(checkpoints_days=1, data_days=1, samples_days=1, logs_days=1, sessions_days=1, models_days=1)
NOTHING_LEFT = ALL.model_copy(update={"checkpoints_kept": 0})
AHEAD_S = 100 * DAY_S
UNIT = tokenized(key_of(1))


class Killed(BaseException):
    """A process that was killed: it does nothing more, not even what it does at its end."""


class Watched(LocalStore):
    """Calls something before each write and deletion, with how many there were before."""

    def __init__(self, root: Path, before: Callable[[int], None]) -> None:
        super().__init__(root)
        self._before = before
        self.num_done = 0
        self._lock = threading.Lock()

    def _next(self) -> None:
        with self._lock:  # a collection has several threads
            self._before(self.num_done)
            self.num_done += 1

    def put_bytes(self, key: str, data: bytes) -> None:
        self._next()
        super().put_bytes(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._next()
        return super().put_if_absent(key, data)

    def put_if_unchanged(self, key: str, data: bytes, seen: ObjectInfo) -> bool:
        self._next()
        return super().put_if_unchanged(key, data, seen)

    def delete(self, key: str) -> None:
        self._next()
        super().delete(key)


def dies_at(number: int) -> Callable[[int], None]:
    def before(done: int) -> None:
        if done >= number:
            raise Killed

    return before


def forget_claims(store: LocalStore) -> None:
    """Let the claims of a killed process be as old as they are when another may take them over."""
    for info in list(store.list(CLAIMS)):
        store.put_bytes(info.key, f"{time.time() - CLAIM_S - 1:.3f}".encode())


def test_of_two_that_find_a_claim_too_old_one_takes_it(tmp_path: Path) -> None:
    """Another takes it between the look and the taking, and has it to its end."""
    others = list[float | None]()

    def take_before(_: int) -> None:
        if not others:
            others.append(None)
            others.append(kept.enter_context(claiming(LocalStore(tmp_path), UNIT)))

    with ExitStack() as kept:
        LocalStore(tmp_path).put_bytes(claim(UNIT), f"{time.time() - CLAIM_S - 1:.3f}".encode())
        store = Watched(tmp_path, lambda number: take_before(number) if number else None)
        with claiming(store, UNIT) as until:
            assert until is None and others[1] is not None
        with claiming(LocalStore(tmp_path), UNIT) as until:
            assert until is None, "it is the other's still"
    assert not list(LocalStore(tmp_path).list(CLAIMS)), "who took it gives it back"


def test_a_claim_that_was_held_for_too_long_is_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another's."""
    store = LocalStore(tmp_path)
    with claiming(store, UNIT) as until:
        assert until is not None
        forget_claims(store)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + CLAIM_S + 1)
    assert [info.key for info in store.list(CLAIMS)] == [claim(UNIT)]


def _left(store: LocalStore) -> set[str]:
    return {key for key in sizes(store) if not key.startswith(("uses/", "records/measured/"))}


@pytest.mark.drawn
def test_killed_at_any_operation_it_is_done_again_and_nothing_is_damaged(tmp_path: Path) -> None:
    now = time.time() + AHEAD_S
    whole = Watched(tmp_path / "whole", lambda _: None)
    runs = fill(whole, 10, now)
    before = _left(whole)
    collect(whole, ALL, is_dry=False, now=now)
    expected = _left(whole)
    needed = {run.run_id for run in runs if run.state in (None, "paused")}
    assert len(expected) < len(before)
    for number in drawn(list(range(0, whole.num_done, 3)), 12):
        store = Watched(tmp_path / f"killed-{number}", dies_at(number))
        fill(LocalStore(store.root), 10, now)
        with pytest.raises(Killed):
            collect(store, ALL, is_dry=False, now=now)
        left = LocalStore(store.root)
        found = _left(left)
        assert not damaged(left), number
        assert {k for k in before if k.split("/")[1] in needed} <= found
        forget_claims(left)
        collect(left, ALL, is_dry=False, now=now)
        assert _left(left) == expected, number


def _an_old_artifact(root: Path, is_on_record: bool) -> Writer:
    writer = Writer(LocalStore(root))
    writer.artifact(UNIT, a=b"a" * 10, b=b"b" * 10)
    if is_on_record:
        writer.put(RunKeys("sft-new").record, "{}")
    return writer


def _use_it(writer: Writer) -> bool:
    """Do as an activity of a run does: mark, look, make. False: it has to wait."""
    try:
        use(writer.store, UNIT, "sft-new", "execution")
    except BeingDeleted:
        return False
    if find_artifact(writer.store, UNIT) is None:
        writer.artifact(UNIT, a=b"a" * 10, b=b"b" * 10)
    return True


@pytest.mark.parametrize("is_on_record", [True, False], ids=["on record", "on its way to be"])
def test_a_run_that_comes_at_any_moment_has_what_it_uses_and_it_stays(tmp_path: Path, is_on_record: bool) -> None:
    """At each operation of a collection that deletes what it needs: it waits, finds it whole, or makes it anew."""
    now, outcomes = time.time() + AHEAD_S, list[bool]()
    undisturbed = Watched(tmp_path / "alone", lambda _: None)
    _an_old_artifact(undisturbed.root, is_on_record)
    collect(undisturbed, ALL, is_dry=False, now=now)
    assert find_artifact(undisturbed, UNIT) is None
    for number in range(undisturbed.num_done):
        writer = _an_old_artifact(tmp_path / str(number), is_on_record)

        def come(done: int, writer: Writer = writer, number: int = number) -> None:
            if done == number:
                outcomes.append(_use_it(writer))

        collect(Watched(tmp_path / str(number), come), ALL, is_dry=False, now=now)
        assert outcomes[-1] or _use_it(writer), "the claim was given back"
        collect(LocalStore(tmp_path / str(number)), ALL, is_dry=False, now=now)
        assert find_artifact(writer.store, UNIT) is not None, number
        assert not damaged(LocalStore(tmp_path / str(number))), number
    assert set(outcomes) == {True, False}


def test_a_run_that_came_and_published_during_a_collection_keeps_its_model(tmp_path: Path) -> None:
    """It began after all was counted, and has ended before the collection comes to the model that it trained."""
    writer, model = Writer(LocalStore(tmp_path)), model_import(key_of(1))
    writer.artifact(model, weights=b"w")
    writer.put(RunKeys("sft-old").record, "{}")
    writer.put(mark(model, "sft-old", "e"), b"")
    writer.put(RunKeys("sft-old").result, RunStatus(run_id="sft-old", state="failed", ended_at=0.0).model_dump_json())

    def come(done: int) -> None:
        if done == 0:  # the first claim
            use(writer.store, model, "sft-new", "e")
            writer.put(RunKeys("sft-new").record, "{}")
            plan = {"plan": {"model": {"uri": uri_of(writer.store, model), "sha256": "0" * 64}}}
            writer.put(RunKeys("sft-new").job("000001", Fence(epoch=1)), json.dumps(plan))
            end = RunStatus(run_id="sft-new", state="succeeded", adapter="file:///v1", ended_at=time.time())
            writer.put(RunKeys("sft-new").result, end.model_dump_json())

    report = collect(Watched(tmp_path, come), ALL, is_dry=False, now=time.time() + AHEAD_S)
    assert find_artifact(writer.store, model) is not None and report.num_withdrawn == 1
    assert not [row for row in collect(writer.store, ALL, is_dry=True).freed if row.what == "models"]


def _resume(host: HostContext, ended: str | None) -> str:
    """Begin a run again as its workflow does. `ended`: the hash of the result that it goes on from."""
    request = BeginRequest(run_id=RUN, start_id="ab", execution="e-2", resumed=True, goes_on_from=ended)
    try:
        return "refused" if RunRecords(host).begin(request).refusal else "resumed"
    except BeingDeleted:
        return "waits"


RUN = f"sft-{2:017d}"  # of `fill`: it failed two days ago


@pytest.mark.drawn
def test_a_run_that_is_resumed_at_any_moment_has_its_checkpoint_or_is_refused(tmp_path: Path) -> None:
    now, outcomes = time.time() + AHEAD_S, list[str]()
    undisturbed = Watched(tmp_path / "alone", lambda _: None)
    fill(LocalStore(undisturbed.root), 4, now)
    collect(undisturbed, NOTHING_LEFT, is_dry=False, now=now)
    assert find_newest(undisturbed, RUN).checkpoint is None
    for number in drawn(list(range(undisturbed.num_done)), 16):
        root = tmp_path / str(number)
        host = HostContext(Settings(root=root, store_uri=(root / "store").as_uri()))
        fill(LocalStore(root / "store"), 4, now)
        ended = result_sha256(host.store, RUN)

        def come(done: int, host: HostContext = host, ended: str | None = ended, number: int = number) -> None:
            if done == number:
                outcomes.append(_resume(host, ended))

        collect(Watched(root / "store", come), NOTHING_LEFT, is_dry=False, now=now)
        if (outcome := outcomes[-1]) == "waits":  # as Temporal tries again, with the same start
            outcome = _resume(host, ended)
        if outcome == "resumed":
            checkpoint = find_newest(host.store, RUN).checkpoint
            assert checkpoint is not None and checkpoint.step == STEPS[-1], number
        else:
            assert (outcome, result_sha256(host.store, RUN)) == ("refused", ended), "its end stands again"
        assert not damaged(LocalStore(root / "store"))
    assert not IS_DEEP or set(outcomes) == {"resumed", "waits", "refused"}
