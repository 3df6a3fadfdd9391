"""What weights can travel by is asked of a host before it starts anything for a run that names one way."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.hosts.lease import check_backend, reasons_here
from shared.errors import InvalidInput
from shared.jobs.job import SamplerKey
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore
from tests.activities.lease_on_thread import HeldLease, HeldSampler, Host
from tests.workflows.stand_in import REPOSITORY, artifact, job_plan


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
