"""What a host finds that it lacks, also of ways for weights; when it leaves runs to others, and when it ends."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.hosts import health
from activities.hosts.health import HostCheck, HostHealth, HostUnfit, disk_lacks, missing_packages, trial_lacks
from activities.hosts.lease import check_backend, reasons_here
from shared.errors import HostLeft, InvalidInput, LeaseLost, WorkerLost
from shared.jobs.job import SamplerKey
from shared.settings import Settings
from shared.storage.host_states import HostState, LeasingRole, read_fast_bf16, read_states
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore
from tests.activities.lease_on_thread import HeldLease, HeldSampler, Host
from tests.workflows.stand_in import REPOSITORY, artifact, job_plan

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
        patch.setattr(health.host_states, "WORKER_PACKAGES", ("no-such-package",))
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


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    reasons_here.cache_clear()
    yield
    reasons_here.cache_clear()


def test_a_host_refuses_a_weight_sync_that_it_cannot_do_before_anything_starts(
    tmp_path: Path, without_cuda: None
) -> None:
    plan = job_plan(artifact(LocalStore(tmp_path / "store"), tmp_path / "any", "any", x_json="{}"))
    settings = Settings(root=tmp_path)
    key = SamplerKey(model=plan.model)
    with Host(tmp_path) as host:
        refusals = [
            HeldLease(host, plan, epoch=1, sync_backend="cuda_ipc").ended(),
            HeldSampler(host, settings, key, epoch=1, sync_backend="cuda_ipc").ended(),
            HeldSampler(host, settings, key, epoch=1, sync_backend="collective").ended(),
            HeldLease(host, plan, epoch=1, sync_backend="external").ended(),
            HeldLease(host, plan, epoch=1, sync_backend="external", joins=True).ended(),
            HeldSampler(host, settings, key, epoch=1, sync_backend="external").ended(),
        ]
        assert host.worker_ids() == [] and host.store.head(RunKeys("r1").lease(1)) is None
        assert all(isinstance(error, InvalidInput) for error in refusals), refusals
        assert all("sync.backend" in error.place for error in refusals if isinstance(error, InvalidInput))
        of_worker, of_sampler, unreachable, *external = map(str, refusals)
        no_cuda = "needs cuda, and this is cpu ("
        assert f"cuda_ipc is not possible on this gpu host: cuda_ipc {no_cuda}" in of_worker
        assert of_worker.endswith("; possible are auto, store, delta, shared_memory, tcp, collective")
        assert of_sampler.count("not possible on this sampler host") == 1
        address = "it has no address for weights (LONGSHORE_SAMPLING__WEIGHTS_ADDRESS)"
        assert f"; possible are auto, store, delta, shared_memory; tcp is not: {address}" in of_sampler
        assert f"collective is not possible on this sampler host: {address}" in unreachable
        assert f"; possible are auto, store, delta, shared_memory; cuda_ipc is not: cuda_ipc {no_cuda}" in unreachable
        not_allowed = "its operator has not allowed it (LONGSHORE_EXTERNAL_TRANSPORT)"
        assert all(not_allowed in one for one in external), external
        with HeldLease(host, plan, epoch=1, sync_backend="collective") as lease:
            assert lease.grant.fence.epoch == 1, "the trainer needs no address"


def test_a_transport_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    reasons_here.cache_clear()
    try:
        with pytest.raises(InvalidInput, match=r"ImportError: libcudart.so.13: .*; possible are auto, store, delta;"):
            check_backend("shared_memory", "gpu")
        check_backend("auto", "gpu")
    finally:
        reasons_here.cache_clear()


def test_what_an_operator_allows_is_loaded_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (info := tmp_path / "its_package-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: its-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[longshore.weight_sync]\nits = its_module:ENDS\n")
    was_loaded = tmp_path / "was-loaded"
    source = f"open({str(was_loaded)!r}, 'w')\nraise ImportError('libibverbs.so.1 is not there')\n"
    (tmp_path / "its_module.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    reasons_here.cache_clear()
    try:
        check_backend("tcp", "gpu")
        assert not was_loaded.exists()
        with pytest.raises(InvalidInput, match=r"on this gpu host: ImportError: libibverbs\.so\.1 is not there; "):
            check_backend("external", "gpu", external=True)
        assert was_loaded.exists()
    finally:
        reasons_here.cache_clear()
