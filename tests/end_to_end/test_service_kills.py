"""Every process of a stack is killed in turn while clients poll: what they see of it, and that no job is made twice."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from service.dev import Connection
from tests.depth import IS_DEEP, drawn, one_of
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.victims import Victim, control_host, gpu_host, kill, sampler_host, temporal_server, web_service

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NUM_JOBS, MOST_KILLS = (8, 6) if IS_DEEP else (4, 3)
ALL_VICTIMS: list[Victim] = [web_service, temporal_server, control_host, gpu_host, sampler_host]
CLIENTS = ("poll", "retry")
VICTIMS = drawn(ALL_VICTIMS, 1, always=[web_service, temporal_server])


@dataclass
class Poll:
    """One question of a client's, and what it was told: a status, or the name of an error."""

    path: str
    asked: float
    answered: float
    status: int | str

    @property
    def is_bad(self) -> bool:
        return isinstance(self.status, str) or self.status >= 500


@dataclass
class Poller:
    """Clients that ask what people and programs ask all the time."""

    api_url: str
    headers: dict[str, str]
    paths: tuple[str, ...]
    polls: list[Poll] = field(default_factory=list)

    @contextmanager
    def polling(self) -> Iterator[None]:
        stopped = threading.Event()
        threads = [threading.Thread(target=self._poll, args=(path, stopped)) for path in self.paths]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join()

    def _poll(self, path: str, stopped: threading.Event) -> None:
        with httpx.Client(base_url=self.api_url, headers=self.headers, timeout=300, trust_env=False) as client:
            while not stopped.wait(0.25):
                asked = time.monotonic()
                try:
                    status: int | str = client.get(path).status_code
                except httpx.TransportError as error:
                    status = type(error).__name__
                self.polls.append(Poll(path, asked, time.monotonic(), status))

    def bad(self, since: float, until: float) -> list[Poll]:
        """What went wrong of the questions that were asked within a span."""
        return [poll for poll in self.polls if since <= poll.asked < until and poll.is_bad]


@pytest.fixture(scope="module")
def connection(stack: Stack) -> Connection:
    return stack.connection


def is_well(connection: Connection) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{connection.api_url}/api/v1/health", timeout=10, trust_env=False).status_code == 200
    return False


@one_of(CLIENTS, "poll")
def test_clients_that_poll_hardly_notice(stack: Stack, connection: Connection, options: list[str]) -> None:
    """Of a host's death nothing, of Temporal's nothing either when they read; of the service's its restart alone."""
    run_id = stack.cli(*options).json["run_id"]
    wait_until(lambda: is_well(connection), "the service is well")
    headers = {"authorization": f"Bearer {connection.api_key}"}
    paths = ("/api/v1/runs", f"/api/v1/runs/{run_id}", "/v1/fine_tuning/jobs", f"/api/v1/runs/{run_id}/metrics")
    poller = Poller(connection.api_url, headers, paths)
    spans: list[tuple[Victim, float, float, float]] = []
    with poller.polling():
        for victim in VICTIMS:
            killed_at = time.monotonic()
            kill(stack, victim)
            wait_until(lambda: is_well(connection), f"the stack is well without a {victim.__name__}", every_s=0.1)
            wait_until(lambda: victim(stack), f"a new {victim.__name__}")  # noqa: B023
            well_at = time.monotonic()
            wait_until(lambda: _has_polled(poller, well_at), "every client has asked again", every_s=0.1)  # noqa: B023
            spans.append((victim, killed_at, well_at, time.monotonic()))
    for victim, killed_at, well_at, end in spans:
        during, after = poller.bad(killed_at, well_at), poller.bad(well_at, end)
        print(f"{victim.__name__}: well after {well_at - killed_at:.1f} s, {len(during)} bad answers until then")
        assert after == [], victim.__name__
        if victim is web_service:
            assert during, "it was killed, and nobody noticed"
            assert not [poll for poll in during if isinstance(poll.status, int)], "no answer is better than a 5xx"
        else:
            assert during == [], victim.__name__
    stack.cli("watch", run_id, "--json")


def _has_polled(poller: Poller, since: float) -> bool:
    """Whether each client has had two answers to what it asked since then."""
    recent = [poll.path for poll in list(poller.polls) if poll.asked > since]
    return all(recent.count(path) >= 2 for path in poller.paths)


@one_of(CLIENTS, "retry")
def test_a_clients_retry_makes_no_second_job(
    stack: Stack, connection: Connection, chance: random.Random, tmp_path: Path
) -> None:
    """OpenAI's client makes jobs while the service dies under it, again and again, at any moment of a request."""
    client = ROOT / ".venv" / "clients" / "openai-3"
    assert client.is_dir(), "the clients are not installed: requirements/clients.sh"
    wait_until(lambda: is_well(connection), "the service is well")
    session = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.end_to_end.openai_retries", f"{connection.api_url}/v1"),
            *(connection.api_key, "org/tiny", (tmp_path / "nothing.jsonl").as_uri(), str(NUM_JOBS)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(client), str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    num_kills = 0
    try:
        while session.poll() is None and num_kills < MOST_KILLS:
            time.sleep(chance.uniform(0, 0.8))
            kill(stack, web_service, patience_s=0)
            num_kills += 1
            wait_until(lambda: session.poll() is not None or is_well(connection), "the service is back", every_s=0.02)
        stdout, stderr = session.communicate(timeout=200)
    finally:
        session.kill()
    assert session.returncode == 0, stderr[-2000:]
    assert num_kills >= 1
    wait_until(lambda: is_well(connection), "the service is well")
    headers = {"authorization": f"Bearer {connection.api_key}"}
    with httpx.Client(base_url=connection.api_url, headers=headers, timeout=300, trust_env=False) as api:
        told = json.loads(stdout)
        assert len(set(told.values())) == NUM_JOBS
        for number, job_id in told.items():
            jobs = api.get("/v1/fine_tuning/jobs", params={"metadata[number]": number}).json()["data"]
            assert [job["id"] for job in jobs] == [job_id], (number, num_kills)
            records = list((stack.root / "store" / "runs").glob("*/run.json"))
            made = [path for path in records if f'"number": "{number}"' in path.read_text()]
            assert [path.parent.name for path in made] == [job_id]
            api.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")
