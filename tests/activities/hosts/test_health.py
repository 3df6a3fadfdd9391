"""What a host finds that it lacks; when it leaves runs to others, and when it ends."""

import sys
from pathlib import Path

import pytest

from activities.hosts import health
from activities.hosts.health import HostCheck, HostHealth, HostUnfit, disk_lacks, missing_packages, trial_lacks
from shared.errors import HostLeft, InvalidInput, LeaseLost, WorkerLost
from shared.storage.host_states import HostState, LeasingRole, read_fast_bf16, read_states
from shared.storage.store import LocalStore

DIED = WorkerLost("the worker process ended with exit code 1")


def trial(program: str, timeout_s: float = 60.0) -> tuple[str, ...]:
    return trial_lacks([sys.executable, "-c", program], {}, timeout_s)


def test_packages_that_are_missing_are_named() -> None:
    assert missing_packages(("pydantic", "no-such-package")) == (
        "no-such-package is not installed: pip install no-such-package",
    )


def test_a_disk_that_cannot_be_written_or_is_nearly_full_is_told(tmp_path: Path) -> None:
    assert disk_lacks(tmp_path / "new") == ()
    (tmp_path / "file").touch()
    [told] = disk_lacks(tmp_path / "file" / "root")
    assert told.startswith("the disk of LONGSHORE_ROOT cannot be written: ")
    [told] = disk_lacks(tmp_path, least_bytes=1 << 60)
    assert told.endswith(f" MiB free, and {1 << 40} are the least")


def test_a_trial_that_fails_dies_or_hangs_is_told() -> None:
    assert trial("""print("noise"); print('[]')""") == ()
    assert trial("""print('["cuda:1 fails"]')""") == ("cuda:1 fails",)
    [told] = trial("import os; os.kill(os.getpid(), 9)")
    assert told == "a tiny pass on its devices ended with signal 9"
    [told] = trial("raise SystemExit('no driver')")
    assert told == "a tiny pass on its devices ended with exit code 1: no driver"
    [told] = trial("import time; time.sleep(60)", timeout_s=0.3)
    assert told == "a tiny pass on its devices did not end within 0.3 s"


def test_devices_are_tried_after_a_loss_and_at_the_next_start_if_something_was_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = HostCheck("gpu", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(health, "WORKER_PACKAGES", ("no-such-package",))
        assert len(check.at_start()) == 1 and not list(tmp_path.glob("failed-*"))
        assert len(check()) == 1 and list(tmp_path.glob("failed-*"))
    assert check.at_start() == (), "this machine can work"
    assert not list(tmp_path.glob("failed-*")), "its devices were tried"


class Yard:
    """Hosts of one store."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)

    def host(self, name: str, *lacks: str, shape: str = "cpu", role: LeasingRole = "gpu", bf16=True, num_warm=0):
        """A host that will find that it lacks something."""
        state = HostState(role=role, shape=shape, name=name, queue=f"host-{name}", seen_at=0.0, fast_bf16=bf16)
        host = HostHealth(self.store, state, lambda: lacks, num_warm)
        host.beat()
        return host


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


def test_of_hosts_without_a_lease_a_number_stays_and_the_others_leave(yard: Yard) -> None:
    def left(*hosts: HostHealth) -> list[str]:
        for host in hosts:
            host.beat()
        return [host.state.name for host in hosts if host.is_idle(0.0)]

    hosts = first, second, third = [yard.host(name, num_warm=1) for name in ("a", "b", "c")]
    assert left(*hosts) == ["b", "c"]
    with first.offered():
        assert left(*hosts) == ["c"], "the first is at work, so that the second stays"
    assert left(*hosts) == ["b", "c"]
    for host in (first, second):
        host.retire()
    assert left(third) == []
    assert left(yard.host("d", shape="other")) == ["d"], "none is to stay there"


def test_a_host_is_checked_after_a_loss_and_ends_if_it_lacks_something(yard: Yard) -> None:
    good, bad = yard.host("good"), yard.host("bad", "cuda:0 fails")
    bad.examine()  # nothing was lost yet
    for host in (good, bad):
        host.lost(DIED, at_start=True)
    good.examine()
    with pytest.raises(HostUnfit, match="this gpu host lacks what it needs: cuda:0 fails"):
        bad.examine()
    for host in (good, bad):
        host.retire()
    [left] = read_states(yard.store, "cpu")
    assert (left.name, left.lacks) == ("bad", ("cuda:0 fails",)), "users see why, for a while"
    good = yard.host("good")
    assert not good.has_others()


def test_losses_at_the_start_make_a_host_rest_ever_longer_until_a_step_is_done(yard: Yard) -> None:
    def rests(host: HostHealth, num: int) -> list[float]:
        found = []
        for _ in range(num):
            host.lost(DIED, at_start=True)
            found.append(host.rest_s())
        return found

    bad = yard.host("bad")
    assert bad.rest_s() == 0
    assert rests(bad, 5) == [10, 20, 40, 60, 60], "nobody else would take the runs"
    yard.host("good")
    assert bad.rest_s() == 160 and rests(bad, 3) == [320, 600, 600]
    bad.worked()
    bad.lost(DIED, at_start=False)
    assert bad.rest_s() == 0 and bad.is_doubtful


@pytest.mark.parametrize("error", [LeaseLost("its host was killed"), HostLeft("the host is shutting down")])
def test_what_is_lost_outside_a_process_counts_against_no_host(yard: Yard, error: WorkerLost) -> None:
    host = yard.host("host")
    host.lost(error, at_start=True)
    assert (host.rest_s(), host.is_doubtful) == (0, False)


def test_a_loss_has_the_host_leave_its_queue_before_its_lease_ends(yard: Yard) -> None:
    host, left = yard.host("host"), []
    host._leave_queue = lambda: left.append(True)  # type: ignore[method-assign]
    with pytest.raises(WorkerLost), host.offered():
        host.lost(DIED, at_start=True)
        raise DIED
    assert left == [True]
    host.examine()
    with pytest.raises(InvalidInput), host.offered():
        raise InvalidInput("of the run alone")
    assert left == [True]


def test_bfloat16_is_fast_in_a_shape_where_it_is_so_on_all_its_gpu_hosts(yard: Yard) -> None:
    yard.host("sampler", role="sampler", bf16=False)
    assert read_fast_bf16(yard.store, "cpu") is None, "runs train on GPU hosts"
    fast = yard.host("fast")
    assert read_fast_bf16(yard.store, "cpu") is True
    slow = yard.host("slow", bf16=False)
    assert read_fast_bf16(yard.store, "cpu") is False
    fast.beat()
    yard.host("another")
    yard.host("elsewhere", shape="other")
    assert (read_fast_bf16(yard.store, "cpu"), read_fast_bf16(yard.store, "other")) == (False, True)
    slow.retire()
    fast.beat()
    assert read_fast_bf16(yard.store, "cpu") is True
    fast.retire()
    assert read_fast_bf16(yard.store, "cpu") is True, "what comes when no host is up is trained on such a one"


def test_a_host_that_has_left_is_not_in_the_store_again_by_a_beat_that_was_under_way(yard: Yard) -> None:
    leaving = yard.host("leaving")
    leaving.retire()
    leaving.beat()
    assert read_states(yard.store, "cpu") == ()
