"""Hosts of a worker's machines meet by mutual TLS and a token, lead ranks to torch's store, and miss each other."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from service.host_http import gangs
from service.host_http.gangs import GangMeeting, Gangs
from service.host_http.server import Trust
from shared.jobs.job import GangLeader
from shared.settings import Settings
from shared.storage.paths import Fence, HostPaths, WorkerPaths
from tests.waiting import wait_until

KEY, OTHER_KEY = "k" * 64, "o" * 64


def settings_of(folder: Path, key: str = KEY, address: str | None = "127.0.0.1") -> Settings:
    return Settings(root=folder, seal_key=SecretStr(key), host_address=address)


def worker_of(settings: Settings, worker_id: str) -> WorkerPaths:
    paths = HostPaths(settings.root_path).worker(worker_id)
    paths.root.mkdir(parents=True)
    return paths


@contextmanager
def led(tmp_path: Path, num_nodes: int, address: str | None = "127.0.0.1") -> Iterator[tuple[GangMeeting, GangLeader]]:
    settings = settings_of(tmp_path / "machine-0", address=address)
    paths = worker_of(settings, "0" * 32)
    with Gangs(settings).leading(paths, num_nodes) as meeting:
        yield meeting, GangLeader(fence=Fence(epoch=1), worker_id=paths.root.name, at=meeting.at)


def followed(opened: ExitStack, folder: Path, node: int, leader: GangLeader, **how: str | None) -> GangMeeting:
    settings = settings_of(folder, **how)
    return opened.enter_context(Gangs(settings).following(worker_of(settings, f"{node}" * 32), node, leader))


@pytest.mark.parametrize("address", ["127.0.0.1", None], ids=["tls", "socket"])
def test_a_gang_is_whole_when_all_have_come_and_broken_when_one_has_gone(tmp_path: Path, address: str | None) -> None:
    with ExitStack() as opened:
        with led(tmp_path, 3, address) as (meeting, leader):
            assert (leader.at.address is not None) == (address is not None)
            first = followed(opened, tmp_path / "machine-1", 1, leader, address=address)
            wait_until(lambda: meeting._present, "the first")
            assert not meeting.is_whole
            with ExitStack() as leaves:
                second = followed(leaves, tmp_path / "machine-2", 2, leader, address=address)
                wait_until(lambda: meeting.is_whole, "the second")
                assert meeting.broken is None and first.broken is None and not meeting.leaves
                second.is_leaving = True
                wait_until(lambda: meeting.leaves, "what it says")
            assert wait_until(lambda: meeting.broken, "its end") == "the host of machine 2 is gone: it has ended"
            assert first.broken is None
        wait_until(lambda: first.broken, "the end of the first machine's host")


def test_ranks_reach_the_store_of_rank_0_by_a_port_of_their_own_machine(tmp_path: Path) -> None:
    with led(tmp_path, 2) as (meeting, leader), ExitStack() as opened:
        there = followed(opened, tmp_path / "machine-1", 1, leader)
        port = int(there._paths.meeting.read_bytes())
        with socket.create_connection(("127.0.0.1", port)) as rank:
            rank.sendall(b"question")  # before rank 0 serves a store
            with socket.create_server(("127.0.0.1", 0)) as store:
                meeting._paths.meeting.write_text(str(store.getsockname()[1]))
                served, _ = store.accept()
                with served:
                    assert served.recv(64) == b"question"
                    served.sendall(b"answer")
                    assert rank.recv(64) == b"answer"
        assert meeting.has_met and there.has_met


def test_a_silent_host_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "_SILENT_S", 0.5)
    monkeypatch.setattr(gangs, "_BEAT_S", 60.0)  # after the first one
    with led(tmp_path, 2) as (meeting, leader), ExitStack() as opened:
        there = followed(opened, tmp_path / "machine-1", 1, leader)
        ends = wait_until(lambda: meeting.broken and there.broken and (meeting.broken, there.broken), "the silence")
        assert any("was silent for 0.5 s" in end for end in ends), "whoever noticed first"


def test_strangers_are_not_served(tmp_path: Path) -> None:
    """One without the installation's key, one with a certificate and no token, and one that says too much."""
    with led(tmp_path, 2) as (meeting, leader), ExitStack() as opened:
        with pytest.raises(ssl.SSLError):
            followed(opened, tmp_path / "stranger", 1, leader, key=OTHER_KEY)
        assert leader.at.address is not None
        host, _, port = leader.at.address.rpartition(":")
        tls = Trust.of(settings_of(tmp_path / "own")).client_context()
        hello = '{"token": "%s", "node": 1, "rank": false}\n'
        words = [hello % ("0" * 64), "GET / HTTP/1.1\r\n\r\n", hello % "", "x" * 200_000 + "\n"]
        for said in words:
            with tls.wrap_socket(socket.create_connection((host, int(port)))) as connection:
                connection.sendall(said.encode())
                assert _until_end(connection) == b"", said[:80]
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall((hello % ("0" * 64)).encode())
            assert b"." not in _until_end(plain), "without TLS"
        assert not meeting.is_whole and meeting.broken is None
        followed(opened, tmp_path / "machine-1", 1, leader)
        wait_until(lambda: meeting.is_whole, "the one who belongs to it")


def test_hosts_of_several_machines_need_an_address(tmp_path: Path) -> None:
    with led(tmp_path, 2, None) as (meeting, leader), ExitStack() as opened:
        elsewhere = leader.model_copy(update={"at": leader.at.model_copy(update={"socket": "/nowhere"})})
        with pytest.raises(OSError, match="LONGSHORE_HOST_ADDRESS, which the first one lacks"):
            followed(opened, tmp_path / "machine-1", 1, elsewhere)
        assert not meeting.is_whole


def _until_end(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(4096):
            data += piece
    except OSError:
        pass
    return data
