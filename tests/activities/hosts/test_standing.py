"""When a host leaves its lease queue to others, and what it answers when there are none."""

from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError

from activities.hosts.standing import Standing
from shared.errors import AVOIDED, UNFIT, HostLeft, InvalidInput, LeaseLost, WorkerLost
from shared.storage.host_states import MAX_LOST, HostState, LeasingRole, read_fast_bf16, read_states
from shared.storage.store import LocalStore

DIED = WorkerLost("the worker process ended with exit code 1")


class Yard:
    """Hosts of one store."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)

    def host(
        self,
        name: str,
        *lacks: str,
        alone_s: float = 0.0,
        shape: str = "cpu",
        role: LeasingRole = "gpu",
        bf16=True,
        num_warm=0,
    ) -> Standing:
        state = HostState(
            role=role, shape=shape, name=name, queue=f"host-{name}", seen_at=0.0, lacks=("unknown",), fast_bf16=bf16
        )
        standing = Standing(self.store, state, lambda: lacks, alone_s, num_warm)
        standing.examine()
        standing.beat()
        return standing


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


def test_of_hosts_without_a_lease_a_number_stays_and_the_others_leave(yard: Yard) -> None:
    def left(*hosts: Standing) -> list[str]:
        for host in hosts:
            host.beat()
        return [host.state.name for host in hosts if host.is_idle(0.0)]

    hosts = first, second, third = [yard.host(name, num_warm=1) for name in ("a", "b", "c")]
    assert left(*hosts) == ["b", "c"]
    with first.offered("run", ()):
        assert left(*hosts) == ["c"], "the first is at work, so that the second stays"
    assert left(*hosts) == ["b", "c"]
    first._check = lambda: ("torch is not installed",)
    first.examine()
    assert left(*hosts) == ["a", "c"], "one that is of no use does not stay"
    for host in (first, second):
        host.retire()
    assert left(third) == []
    assert left(yard.host("d", shape="other")) == ["d"], "none is to stay there"


def refusal(standing: Standing, *avoid: str) -> ApplicationError | None:
    try:
        with standing.offered("run", avoid):
            return None
    except ApplicationError as error:
        return error


def lose(standing: Standing, *runs: str) -> None:
    for run in runs:
        standing.lost(run, DIED, at_start=True)


def test_a_host_that_lacks_something_leaves_its_queue_to_others_until_it_is_mended(yard: Yard) -> None:
    good, bad = yard.host("good"), yard.host("bad", "torch is not installed")
    assert good.polls and not bad.polls
    assert {state.name: state.lacks for state in read_states(yard.store, "cpu")} == {
        "good": (),
        "bad": ("torch is not installed",),
    }
    [state] = [state for state in read_states(yard.store, "cpu") if state.name == "bad"]
    assert state.why_not(state.seen_at, by_name=True) == ("bad (bad): torch is not installed",)
    assert state.why_not(state.seen_at, by_name=False) == ("torch is not installed",)
    bad._check = lambda: ()
    bad.examine()
    assert bad.polls and refusal(bad) is None


def test_where_there_is_no_other_a_host_answers_runs_with_what_it_lacks(yard: Yard) -> None:
    yard.host("elsewhere", shape="other")
    alone = yard.host("alone", "torch is not installed")
    assert alone.polls
    error = refusal(alone)
    assert error is not None and error.type == UNFIT and "gpu host alone" in str(error)
    assert "torch is not installed" in str(error)
    assert not yard.host("patient", "torch is not installed", alone_s=60).polls, "another one may be just starting"


def test_a_run_avoids_the_host_of_its_loss_while_there_is_another(yard: Yard) -> None:
    first = yard.host("first")
    assert refusal(first, "host-first") is None, "it is alone"
    second = yard.host("second")
    error = refusal(first, "host-first")
    assert error is not None and error.type == AVOIDED
    assert refusal(second, "host-first") is None
    assert refusal(first, "host-first", "host-second") is None, "no other is left"
    lose(second, "a", "b", "c")
    assert refusal(first, "host-first") is None, "the other is quarantined"


def test_losses_at_the_start_end_in_quarantine_and_a_step_ends_it(yard: Yard) -> None:
    good, bad = yard.host("good"), yard.host("bad")
    lose(bad, "a")
    assert not bad.polls, "it rests, so that another host takes the run"
    lose(bad, *"bc"[: MAX_LOST - 1])
    [why] = bad.state.why_not(bad.state.seen_at, by_name=False)
    assert why == "it lost the workers of 3 runs at their start: others go first"
    assert bad.state.num_lost == MAX_LOST and bad.state.quarantined_until - bad.state.seen_at > 500
    bad.worked()
    assert bad.polls and bad.state.lost_runs == () and bad.state.num_lost == MAX_LOST
    lose(bad, "d", "e", "f")
    good.retire()
    bad.beat()
    assert bad.polls, "nobody else would"


def test_a_run_that_kills_its_worker_everywhere_puts_no_host_into_quarantine(yard: Yard) -> None:
    first, second = yard.host("first"), yard.host("second")
    lose(first, "a", "b", "c")
    assert not first.polls
    lose(second, "a", "b", "c")
    assert second.polls
    first.beat()
    assert first.polls


@pytest.mark.parametrize("error", [LeaseLost("its host was killed"), HostLeft("the host is shutting down")])
def test_what_is_lost_outside_a_process_counts_against_no_host(yard: Yard, error: WorkerLost) -> None:
    host = yard.host("host")
    host.lost("a", error, at_start=True)
    assert (host.state.num_lost, host.state.lost_runs, host.is_doubtful) == (0, (), False)


def test_a_loss_names_its_host_to_the_run_and_has_the_host_checked(yard: Yard) -> None:
    host, left = yard.host("host"), []
    host._leave_queue = lambda: left.append(True)  # type: ignore[method-assign]
    with pytest.raises(ApplicationError) as caught, host.offered("a", ()):
        lose(host, "a")
        raise DIED
    assert caught.value.type == "WorkerLost" and caught.value.details == ("host-host",)
    assert left == [True]
    host.examine()
    with pytest.raises(InvalidInput), host.offered("b", ()):
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
