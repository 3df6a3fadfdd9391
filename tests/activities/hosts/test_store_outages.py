"""Jobs whose store is away for a while, or for good."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.records import find_newest
from longshore.fields import Fence
from shared.errors import StoreUnavailable
from shared.storage.files import go_on
from shared.storage.store import Check, LocalStore
from tests.activities.hosts.running_jobs import Running, plan_for, steps, weights
from tests.activities.lease_on_thread import HeldLease, Host
from tests.waiting import wait_until
from tests.workflows.stand_in import read_events
from tests.workflows.stand_in_worker import adapter_bytes


class Leaky(LocalStore):
    """A store that is away while it is told to be. `refused`: how often it was asked for each key meanwhile."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_away = False
        self.refused: Counter[str] = Counter()

    def put_bytes(self, key: str, data: bytes) -> None:
        self._answer(key)
        super().put_bytes(key, data)

    def put_file(self, key: str, path: Path, check: Check = go_on) -> None:
        self._answer(key)
        super().put_file(key, path, check)

    def _answer(self, key: str) -> None:
        if self.is_away:
            self.refused[key] += 1
            raise StoreUnavailable("the store is away")


@pytest.fixture
def leaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Leaky]]:
    monkeypatch.setattr("activities.hosts.run_job._UPLOAD_PAUSE_S", 0.05)
    with Host(tmp_path, step_s=0.02) as host:
        host.store = store = Leaky(tmp_path / "store")
        yield host, store


def test_a_store_that_comes_back_finds_the_job_further_on(leaky: tuple[Host, Leaky], tmp_path: Path) -> None:
    host, store = leaky
    plan = plan_for(host, tmp_path, num_steps=100, every_steps=2, keep=2)
    with HeldLease(host, plan, epoch=1) as lease:
        job = Running(host, lease, plan)
        wait_until(lambda: find_newest(store, "r1").checkpoint, "a checkpoint")
        store.is_away = True
        time.sleep(0.3)  # what had been answered lands
        outputs = host.paths.worker(lease.grant.worker_id).outputs("r1", "000001", Fence(epoch=1))
        before = wait_until(lambda: find_newest(store, "r1").checkpoint, "the last one before")
        time.sleep(1.0)
        assert find_newest(store, "r1").checkpoint == before
        store.is_away = False
        result = job.ended()
        assert (result.outcome, result.step) == ("succeeded", 100)
        assert not outputs.exists()
    assert weights(host, result.checkpoint) == adapter_bytes(7, 100)
    assert steps(read_events(store, "r1")[0]) == list(range(1, 101))


@pytest.mark.deep
def test_a_store_that_stays_away_ends_the_job_without_a_process_left(
    leaky: tuple[Host, Leaky], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.hosts.run_job._PATIENCE_S", 0.5)
    host, store = leaky
    plan = plan_for(host, tmp_path, num_steps=1000)
    lease = HeldLease(host, plan, epoch=1)
    assert lease.grant
    store.is_away = True
    with pytest.raises(StoreUnavailable, match="away"):
        Running(host, lease, plan).ended()
    first, *others = store.refused.values()
    assert first > 1 and set(others) <= {1}, "what waits does not lose patience one by one"
    lease.ended()
    assert host.worker_ids() == []
