"""The service sends commands to a session's host, which returns their results, and hardly asks the store meanwhile."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from activities.hosts.session import ServedSessions
from service.database.engine import Recent
from service.host_http.answers import session_routes
from service.host_http.connections import HostClients, HostReply, SessionHosts, serving
from service.runs.sessions import ASK_AT_ONCE, ResultLine
from shared.errors import StoreUnavailable
from shared.runs.start import MOST_TOLD_BYTES
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore, ObjectStore

RUN = "session-0123456789abcde"
NO_HOST, SERVED = HostReply(is_served=False), HostReply(is_served=True)


class CountingStore(LocalStore):
    """Counts reads."""

    num_reads = 0

    def get_bytes(self, key: str) -> bytes:
        self.num_reads += 1
        return super().get_bytes(key)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"root": tmp_path, "seal_key": "k" * 32})


@pytest.fixture
async def service(settings: Settings, tmp_path: Path) -> AsyncIterator[tuple[SessionHosts, CountingStore]]:
    store, clients = CountingStore(tmp_path / "store"), HostClients(settings, 30.0)
    yield SessionHosts(store, clients), store
    await clients.close()


@contextmanager
def host(settings: Settings, store: ObjectStore, queue: str) -> Iterator[ServedSessions]:
    """A host whose address is the session's in the store."""
    sessions = ServedSessions()
    with serving(settings, queue, session_routes(sessions)) as at:
        store.put_bytes(RunKeys(RUN).host, at.model_dump_json().encode())
        yield sessions


async def test_a_command_goes_to_the_host_and_its_result_comes_back(
    settings: Settings, service: tuple[SessionHosts, CountingStore]
) -> None:
    hosts, store = service
    with host(settings, store, "one") as here, here.serving(RUN, 5) as session:
        assert await hosts.ask(RUN, 0, 0) == NO_HOST and session.has_news.is_set(), "the session was closed, perhaps"
        assert await hosts.ask(RUN, 4, 3600) == NO_HOST, "its result is in the store already"
        assert await hosts.ask(RUN, 5, 0.2, b"a command") == SERVED, "it takes longer"
        assert session.command(5) == b"a command"
        waiting = [asyncio.create_task(hosts.ask(RUN, number, 3600)) for number in (5, 5, 6)]
        done, _ = await asyncio.wait(waiting, timeout=1)
        assert not done
        session.stored(6, "a\u2028result".encode())
        assert await waiting[0] == await waiting[1] == HostReply(is_served=True, result="a\u2028result".encode())
        assert await hosts.ask(RUN, 7, 0, b"x" * (MOST_TOLD_BYTES + 1)) == SERVED
        assert session.command(7) is None, "the host reads large ones from the store"
        assert store.num_reads == 1, "for the host alone"
    assert await waiting[2] == NO_HOST, "the host serves it no more: the service tells the session's workflow"


async def test_a_session_that_has_gone_to_another_host_is_found(
    settings: Settings, service: tuple[SessionHosts, CountingStore]
) -> None:
    hosts, store = service
    with host(settings, store, "one") as first, first.serving(RUN, 1):
        assert await hosts.ask(RUN, 1, 0) == SERVED
    with host(settings, store, "two") as second, second.serving(RUN, 3):
        until = time.monotonic() + 60
        while await hosts.ask(RUN, 3, 0) != SERVED:
            assert time.monotonic() < until
            await asyncio.sleep(hosts.pause_s(RUN))


async def test_without_a_host_the_store_is_asked_once_a_second_and_less_often_than_waiters_wait(
    service: tuple[SessionHosts, CountingStore],
) -> None:
    hosts, store = service

    async def wait(number: int) -> None:
        assert await hosts.ask(RUN, number, 0.5) == NO_HOST
        await asyncio.sleep(hosts.pause_s(RUN))

    began = time.monotonic()
    while time.monotonic() < began + 3:
        await asyncio.gather(*(wait(number) for number in range(1, 20)))
    assert store.num_reads <= 6 + (time.monotonic() - began)  # at first sooner


async def test_of_those_who_wait_the_first_ask_the_host() -> None:
    line, at_front, ends = ResultLine(), asyncio.Queue[int](), {number: asyncio.Event() for number in range(12)}

    async def wait(number: int) -> None:
        async with line.place(number, 3600) as is_at_front:
            assert is_at_front
            at_front.put_nowait(number)
            await ends[number].wait()

    waiting = {number: asyncio.create_task(wait(number)) for number in range(1, 12)}
    assert [await at_front.get() for _ in range(ASK_AT_ONCE)] == [1, 2, 3, 4] and at_front.empty()
    ends[2].set()
    assert await at_front.get() == 5 and at_front.empty()
    late = asyncio.create_task(wait(0))
    assert await at_front.get() == 0, "an earlier command passes those who have asked before"
    async with line.place(7, 0.01) as is_at_front:
        assert not is_at_front, "it takes longer"
    for end in ends.values():
        end.set()
    await asyncio.gather(late, *waiting.values())
    assert {at_front.get_nowait() for _ in range(6)} == set(range(6, 12)) and not line.places


async def test_what_was_found_a_moment_ago_is_not_read_again() -> None:
    reads, found = list[str](), dict[str, str]()

    async def find(key: str) -> str | None:
        reads.append(key)
        return found.get(key)

    recent = Recent[str](trusted_s=3600)
    for _ in range(2):
        assert await recent.of("a", find=partial(find, "a")) is None
    found["a"] = "first"
    for _ in range(3):
        assert await recent.of("a", find=partial(find, "a")) == "first"
    assert reads == ["a"] * 3, "that there is none is not remembered"
    found["a"] = "second"
    recent.forget("a")
    assert await recent.of("a", find=partial(find, "a")) == "second"
    stale = Recent[str](trusted_s=0)
    assert [await stale.of("a", find=partial(find, "a")) for _ in range(2)] == ["second"] * 2 and len(reads) == 6


def test_results_reach_whoever_waits_in_any_thread() -> None:
    sessions = ServedSessions()
    assert sessions.find(RUN) is None
    with sessions.serving(RUN, 1) as session:
        gone, eighth, tenth = session.ask(8, b""), session.ask(8, b""), session.ask(10, b"")
        gone.cancel()
        threading.Thread(target=session.stored, args=(9, b"the eighth")).start()
        assert eighth.result(300) == b"the eighth" and session.ask(8, b"").result(0) is None
        assert not tenth.done()
    assert tenth.result(0) is None and session.ask(11, b"").result(0) is None


def test_whoever_was_followed_by_another_goes_on_and_leaves_that_one_alone() -> None:
    """The thread of an activity that Temporal has given up may not have noticed yet."""
    sessions = ServedSessions()
    with sessions.serving(RUN, 1) as before:
        with sessions.serving(RUN, 2) as after:
            assert sessions.find(RUN) is after
        before.stored(2, b"")
    with sessions.serving(RUN, 1), sessions.serving(RUN, 2):
        pass
    assert sessions.find(RUN) is None


async def test_a_store_that_is_away_is_no_trouble_of_whoever_asks(
    service: tuple[SessionHosts, CountingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, store = service

    def away(key: str) -> bytes:
        raise StoreUnavailable("the store does not answer")

    monkeypatch.setattr(store, "get_bytes", away)
    assert await hosts.ask(RUN, 1, 3600) == NO_HOST
