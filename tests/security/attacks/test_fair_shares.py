"""What one tenant occupies, the others still have: checks of data, tries of graders, questions, commands."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.events import Applied
from service.accounts.limits import FairShare
from service.errors import Busy
from shared.settings import Settings
from shared.storage.paths import RunKeys
from tests.activities.web_server import Page, WebServer, serve_pages
from tests.end_to_end.stack import Stack, wait_until
from tests.megatron_worker.workshop import read_log
from tests.security.attacks.tenants import Tenant

ROW = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n'
_NUM_SLOW = 36
BIN_TOKENS = 2048
NUM_HEAVY = 40


@pytest.fixture
def slow() -> Iterator[WebServer]:
    """A server of the attacker's, whose file takes ten minutes to come."""
    with serve_pages() as web:
        web.pages["/slow.jsonl"] = Page(ROW * 60_000, trickles=True)
        yield web


@pytest.mark.deep
def test_slow_previews_of_one_tenant_leave_others_their_answers(
    attacker: Tenant, victim: Tenant, slow: WebServer, tiny_model: Path
) -> None:
    body = {"source": {"uri": f"{slow.uri}/slow.jsonl"}, "model_uri": str(tiny_model), "max_rows": 1}
    answers: list[int] = []

    def ask() -> None:
        answers.append(attacker.http.post("/api/v1/preview", json=body, timeout=120).status_code)

    askers = [threading.Thread(target=ask, daemon=True) for _ in range(_NUM_SLOW)]
    for asker in askers:
        asker.start()
    mine = {"source": {"uri": victim.upload("mine.jsonl", ROW)}, "model_uri": str(tiny_model)}
    assert victim.http.post("/api/v1/preview", json=mine).status_code == 200
    grader = {"type": "string_check", "name": "g", "operation": "eq", "input": "a", "reference": "a"}
    assert victim.http.post("/api/v1/graders/run", json={"grader": grader}).status_code == 200
    # Others wait at the door, and no thread with them.
    assert len(slow.asked) <= Settings().tenant_limits.checks
    slow.pages["/slow.jsonl"].trickles = False
    for asker in askers:
        asker.join(120)
    assert set(answers) <= {200, 429}, answers


@pytest.fixture
def sharing(operator: Tenant, attacker: Tenant, victim: Tenant) -> Iterator[None]:
    """Both tenants' runs may be on one worker."""
    for quotas in ({"worker_sharing": "all"}, {}):
        for tenant in (attacker, victim):
            answer = operator.http.put(f"/api/v1/tenants/{tenant.name}/quotas", json=quotas)
            assert answer.status_code == 200, answer.text
        if quotas:
            yield


def submitted(tenant: Tenant, model: Path, steps: int, **run: object) -> str:
    uri = tenant.upload("rows.jsonl", ROW * 4)
    answer = tenant.submit("sft", model=str(model), dataset={"uri": uri}, steps=steps, batch_size=2, **run)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["run_id"])


def heavy_command() -> bytes:
    """A `forward_backward` of one pass of eight bins, which takes many times what a host needs to hand it on."""
    data = [{"tokens": [(number * 7 + place) % 400 + 3 for place in range(BIN_TOKENS)]} for number in range(8)]
    return json.dumps({"kind": "forward_backward", "data": data}).encode()


@pytest.mark.deep
def test_a_command_waits_for_two_passes_of_another_tenant_s_many(
    attacker: Tenant, victim: Tenant, sharing: None, stack: Stack, tiny_model: Path
) -> None:
    """The attacker's wait in three sessions beside the victim's one, on one worker: turns are the tenants'."""

    def opened(tenant: Tenant) -> str:
        body = {"model": str(tiny_model), "trainable": {"kind": "lora", "rank": 4}, "max_tokens": BIN_TOKENS}
        answer = tenant.http.post("/api/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run_id"])

    def send(tenant: Tenant, run_id: str, number: int, command: bytes, wait_s: float) -> dict[str, Any]:
        path, headers = f"/api/v1/sessions/{run_id}/commands/{number}", {"content-type": "application/json"}
        answer = tenant.http.put(path, content=command, headers=headers, params={"wait_s": wait_s})
        assert answer.is_success, answer.text
        return dict(answer.json())

    def applied(run_id: str) -> dict[int, float]:
        """When each command of a session had taken effect, as the worker says."""
        (log,) = stack.host_paths.workers.rglob(f"{run_id}/**/log.jsonl")
        return {event.command: event.time for event in read_log(log) if isinstance(event, Applied)}

    light = b'{"kind": "forward", "data": [{"tokens": [5, 6, 7]}]}'
    theirs, mine = [opened(attacker) for _ in range(3)], opened(victim)
    for tenant, run_id in [*((attacker, run_id) for run_id in theirs), (victim, mine)]:
        assert send(tenant, run_id, 1, light, 60)["state"] == "done"
    for number in range(NUM_HEAVY):
        send(attacker, theirs[number % 3], 2 + number // 3, heavy_command(), 0)
    answers = [send(victim, mine, number, light, 60) for number in range(2, 7)]
    assert {answer["state"] for answer in answers} == {"done"}
    effects = [time for run_id in theirs for time in applied(run_id).values()]
    store, done = stack.host_paths.root / "store", applied(mine)
    between = []
    for number in range(2, 7):
        accepted = (store / RunKeys(mine).command(number)).stat().st_mtime
        between.append(sum(accepted < time < done[number] for time in effects))
    print("the attacker's commands between the victim's and their effects:", between)
    assert max(between) <= 2
    assert sum(between) >= 3, "the attacker's were done meanwhile"
    num_before = sum(time < done[6] for time in effects)
    assert num_before < len(theirs) + NUM_HEAVY, "some of the attacker's still waited when the victim's last was done"
    for tenant, run_id in [*((attacker, run_id) for run_id in theirs), (victim, mine)]:
        assert tenant.http.post(f"/api/v1/runs/{run_id}/cancel").status_code == 202
        tenant.ended(run_id)


@pytest.mark.deep
def test_runs_that_wait_for_a_worker_get_it_tenant_by_tenant(
    attacker: Tenant, victim: Tenant, tiny_model: Path
) -> None:
    """One GPU host, and six runs of the attacker's before the victim's one. They train all weights: each is alone."""

    def submit(tenant: Tenant, steps: int) -> str:
        return submitted(tenant, tiny_model, steps, trainable={"kind": "full"})

    def waits(tenant: Tenant, run_id: str) -> bool:
        return bool(tenant.http.get(f"/api/v1/runs/{run_id}").json()["phase"] == "waiting_for_worker")

    first = submit(attacker, 20_000)
    wait_until(lambda: attacker.http.get(f"/api/v1/runs/{first}").json()["step"] > 0, "the first one trains")
    theirs = [submit(attacker, 1) for _ in range(6)]
    wait_until(lambda: all(waits(attacker, run_id) for run_id in theirs), "the attacker's runs wait")
    mine = submit(victim, 1)
    wait_until(lambda: waits(victim, mine), "the victim's run waits")
    assert attacker.http.post(f"/api/v1/runs/{first}/cancel").status_code == 202
    done = victim.ended(mine)
    ended_before = [attacker.ended(run_id)["ended_at"] < done["ended_at"] for run_id in theirs]
    assert done["state"] == "succeeded" and sum(ended_before) <= 3, ended_before


def test_a_share_is_a_tenants_own_and_comes_back() -> None:
    async def scene() -> None:
        share = FairShare("questions", places=2, patience_s=0.05)
        released = asyncio.Event()

        async def hold() -> None:
            async with share.place("attacker"):
                await released.wait()

        holding = [asyncio.create_task(hold()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            async with share.place("attacker"):
                pass
        async with share.place("victim"):
            pass
        released.set()
        await asyncio.gather(*holding)
        async with share.place("attacker"):
            pass

    asyncio.run(scene())


def test_a_line_has_an_end() -> None:
    """Requests that wait cost memory and connections too."""

    async def scene() -> None:
        share = FairShare("questions", places=1, patience_s=3600)
        waiting = [asyncio.create_task(_pass(share)) for _ in range(100)]
        await asyncio.sleep(0)
        refused = [task for task in waiting if task.done()]
        for task in waiting:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert len(refused) == sum(isinstance(result, Busy) for result in results) > 0

    async def _pass(share: FairShare) -> None:
        async with share.place("attacker"):
            await asyncio.sleep(3600)

    asyncio.run(scene())


def test_a_line_has_a_size() -> None:
    """One thing alone may be as large as it likes; together they may not."""

    async def scene() -> None:
        share = FairShare("questions", places=4, patience_s=3600, max_bytes=100)
        for _ in range(2):  # what has been given back counts no more
            async with share.place("attacker", 200), share.place("victim", 90), share.place("victim", 10):
                for tenant in ("attacker", "victim"):
                    with pytest.raises(Busy):
                        async with share.place(tenant, 1):
                            pass

    asyncio.run(scene())
