"""What a host tells its workers of the sampler that answers questions: who it is, that it is another one, or nobody."""

import stat
from concurrent.futures import Future
from pathlib import Path

import pytest

from activities.hosts import run_job
from activities.hosts.run_job import JobSyncs, TrainerSyncs
from longshore.fields import Fence
from longshore.training import Full, Lora
from shared.jobs.job import AnyPlan, LeaseGrant, SessionPlan, SyncAccess
from shared.storage.store import LocalStore
from tests.workflows.stand_in import artifact, job_plan


class Finder:
    """Gives the answers that it is told to, a question each."""

    def __init__(self, *answers: LeaseGrant | None) -> None:
        self.answers, self.num_asked = list(answers), 0

    def __call__(self, plan: AnyPlan) -> "Future[LeaseGrant | None]":
        self.num_asked += 1
        found = Future[LeaseGrant | None]()
        found.set_result(self.answers.pop(0) if self.answers else None)
        return found


def grant(socket: Path | None, address: str | None = None) -> LeaseGrant:
    return LeaseGrant(
        fence=Fence(epoch=1),
        host_queue="queue",
        worker_id="w",
        weights_socket=str(socket) if socket else None,
        weights_address=address,
    )


@pytest.fixture
def session(tmp_path: Path) -> SessionPlan:
    model = artifact(LocalStore(tmp_path / "store"), tmp_path / "any", "any", x_json="{}")
    return SessionPlan(run_id="s1", job_id="000001", model=model, trainable=Lora(rank=4), max_tokens=64)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_job, "_PAUSE_S", -1.0)


def syncs_of(tmp_path: Path, plan: AnyPlan, find: Finder) -> tuple[JobSyncs, str]:
    log = str(tmp_path / "outputs" / "log.jsonl")
    return JobSyncs(TrainerSyncs(b"k" * 32, tmp_path, find), plan, SyncAccess.path(log)), log


def test_the_sampler_is_told_and_told_anew_when_it_is_another_one_or_gone(tmp_path: Path, session: SessionPlan) -> None:
    first, second = tmp_path / "first.sock", tmp_path / "second.sock"
    first.touch()
    syncs, log = syncs_of(tmp_path, session, Finder(None, grant(first), grant(second, "10.0.0.2:99"), None))
    syncs.begin()
    assert not SyncAccess.path(log).exists(), "nobody has asked"
    syncs.look()
    access = SyncAccess.read(log)
    assert access.target is not None and access.target.sockets == (str(first),) and access.secret is None
    assert stat.S_IMODE(SyncAccess.path(log).stat().st_mode) == 0o600
    syncs.look()
    access = SyncAccess.read(log)
    assert access.target is not None and access.target.addresses == ("10.0.0.2:99",) and access.secret is not None
    syncs.look()
    assert SyncAccess.read(log) == SyncAccess()


def test_a_sampler_out_of_reach_or_that_takes_no_weights_is_not_told(tmp_path: Path, session: SessionPlan) -> None:
    syncs, log = syncs_of(tmp_path, session, Finder(grant(tmp_path / "elsewhere.sock"), grant(None)))
    syncs.begin()
    syncs.look()
    assert not SyncAccess.path(log).exists()


def test_nothing_is_written_once_the_job_has_ended(tmp_path: Path, session: SessionPlan) -> None:
    socket = tmp_path / "a.sock"
    socket.touch()
    syncs, log = syncs_of(tmp_path, session, Finder(grant(socket)))
    syncs.end()
    syncs.look()
    assert not Path(log).parent.exists()


def test_nobody_is_looked_for_where_no_client_samples_what_is_trained(tmp_path: Path, session: SessionPlan) -> None:
    find = Finder()
    supervised = job_plan(session.model)
    for plan in (session.model_copy(update={"trainable": Full()}), supervised):
        syncs_of(tmp_path, plan, find)[0].begin()
    assert find.num_asked == 0
    syncs_of(tmp_path, session, find)[0].begin()
    assert find.num_asked == 1
