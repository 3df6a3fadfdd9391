"""The service rings at a session's host for commands, and hears of results, and hardly asks the store meanwhile."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from activities.hosts.session import Bells
from service.host_http.answers import bell_routes
from service.host_http.clients import HostClients, SessionBells
from service.host_http.server import serving
from shared.errors import StoreUnavailable
from shared.runs.start import MOST_TOLD_BYTES
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore, ObjectStore

RUN = "session-0123456789abcde"


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
async def service(settings: Settings, tmp_path: Path) -> AsyncIterator[tuple[SessionBells, CountingStore]]:
    store, clients = CountingStore(tmp_path / "store"), HostClients(settings, 30.0)
    yield SessionBells(store, clients), store
    await clients.close()


@contextmanager
def host(settings: Settings, store: ObjectStore, queue: str) -> Iterator[Bells]:
    """A host that has told that the session is on it."""
    bells = Bells()
    with serving(settings, queue, bell_routes(bells)) as at:
        store.put_bytes(RunKeys(RUN).host, at.model_dump_json().encode())
        yield bells


async def test_a_command_is_rung_for_and_its_result_is_heard_of(
    settings: Settings, service: tuple[SessionBells, CountingStore]
) -> None:
    bells, store = service
    with host(settings, store, "one") as here, here.attended(RUN, 5) as session:
        await bells.ring(RUN)
        assert session.rung.is_set()
        await asyncio.wait_for(bells.wait(RUN, 4, 3600), 300)  # it is in the store already
        waiting = asyncio.create_task(bells.wait(RUN, 5, 3600))
        done, _ = await asyncio.wait([waiting], timeout=2.5)  # signs of life come
        assert not done
        session.stored(6, "a\u2028result".encode())  # which is no end of its line
        await asyncio.wait_for(waiting, 300)
        assert (bells.result(RUN, 5), bells.result(RUN, 5)) == ("a\u2028result".encode(), None), "it came along, once"
        await bells.ring(RUN, 6, b"a command")
        await bells.ring(RUN, 7, b"x" * (MOST_TOLD_BYTES + 1))
        assert (session.command(6), session.command(7)) == (b"a command", None)
        assert store.num_reads == 1, "for the host alone"
        other = asyncio.create_task(bells.wait(RUN, 6, 3600))
        await asyncio.sleep(0)
    await asyncio.wait_for(other, 300)  # the host attends to it no more: it is time to look


async def test_a_session_that_has_gone_to_another_host_is_found(
    settings: Settings, service: tuple[SessionBells, CountingStore]
) -> None:
    bells, store = service
    with host(settings, store, "one") as first, first.attended(RUN, 1):
        await bells.ring(RUN)
    with host(settings, store, "two") as second, second.attended(RUN, 3) as session:
        until = time.monotonic() + 60
        while not session.rung.is_set():
            assert time.monotonic() < until
            await bells.ring(RUN)
            await asyncio.sleep(0.05)
        await asyncio.wait_for(bells.wait(RUN, 2, 3600), 300)


async def test_without_a_host_the_store_is_asked_once_a_second_and_less_often_than_waiters_wait(
    service: tuple[SessionBells, CountingStore],
) -> None:
    bells, store = service
    began = time.monotonic()
    while time.monotonic() < began + 3:
        await asyncio.gather(*(bells.wait(RUN, number, 0.5) for number in range(1, 20)))
    took_s = time.monotonic() - began
    assert store.num_reads <= 6 + took_s  # at first sooner


def test_what_is_stored_while_nobody_listens_is_told_to_who_comes_later() -> None:
    bells, heard = Bells(), list[int | None]()
    assert bells.find(RUN) is None
    with bells.attended(RUN, 1) as session:
        session.stored(8, b"")
        assert bells.find(RUN) is session
        end = session.listen(lambda next, _: heard.append(next))
        thread = threading.Thread(target=session.stored, args=(9, b""))
        thread.start()
        thread.join()
        end()
        session.stored(10, b"")
    assert heard == [8, 9]


def test_whoever_was_followed_by_another_goes_on_and_leaves_that_one_alone() -> None:
    """Of an activity that Temporal has given up, the thread may not have noticed yet."""
    bells = Bells()
    with bells.attended(RUN, 1) as before:
        with bells.attended(RUN, 2) as after:
            assert bells.find(RUN) is after
        before.stored(2, b"")
    with bells.attended(RUN, 1), bells.attended(RUN, 2):
        pass
    assert bells.find(RUN) is None


async def test_a_store_that_is_away_is_no_trouble_of_who_rings_or_waits(
    service: tuple[SessionBells, CountingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    bells, store = service

    def away(key: str) -> bytes:
        raise StoreUnavailable("the store does not answer")

    monkeypatch.setattr(store, "get_bytes", away)
    await bells.ring(RUN)
    await asyncio.wait_for(bells.wait(RUN, 1, 3600), 300)
