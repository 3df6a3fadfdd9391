"""Receivers of webhooks, and a stack that tells them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

from sqlalchemy import func, select
from temporalio.client import Client

from longshore.automation import Delivery
from longshore.dataset_runs import SFTRun
from longshore.runs import RunRecord, Source
from longshore.views import RunStatus, State
from service.accounts.tenants import Quotas
from service.automation.webhooks import Webhooks
from service.database.engine import Database, OutboxRow, open_database, upgrade
from service.host import control_workers
from service.runs.rows import notice_of
from service.temporal import Temporal, connect_temporal
from shared.automation import Notice
from shared.settings import Settings, WebhookSettings
from shared.storage.store import open_store
from tests.served import ANY_PORT, Quiet, served
from tests.waiting import eventually, meanwhile
from workflows.services import WebhookWorkflow

TENANT = "acme"


TOKEN = "canary-in-a-path"


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Answers with `answers` in turn, then 200; a redirect leads to /elsewhere."""

    url: str
    answers: list[int] = field(default_factory=list)
    retry_after: str | None = None
    received: list[Received] = field(default_factory=list)


class _Handler(Quiet):
    server: "_Server"

    def do_POST(self) -> None:
        receiver = self.server.receiver
        receiver.received.append(Received(self.path, dict(self.headers), self.body()))
        status = receiver.answers.pop(0) if receiver.answers else 200
        headers = {"location": "/elsewhere"} if status == 302 else {}
        if status >= 400 and receiver.retry_after is not None:
            headers["retry-after"] = receiver.retry_after
        self.answer(status, headers=headers)


class _Server(ThreadingHTTPServer):
    receiver: Receiver


@contextmanager
def receiving() -> Iterator[Receiver]:
    server = _Server(ANY_PORT, _Handler)
    server.receiver = Receiver(f"http://127.0.0.1:{server.server_port}/{TOKEN}?v=1")
    with served(server):
        yield server.receiver


def webhooks_of(settings: Settings, database: Database | None = None) -> Webhooks:
    """What a service of these settings has."""
    if database is None:
        upgrade(database := open_database(settings))
    quotas = Quotas(settings.quotas, open_store(settings.store, settings.s3), database)
    return Webhooks(settings, database, Temporal(settings), quotas)


@dataclass
class Stack:
    """Webhooks of a service, and the outbox."""

    settings: Settings
    webhooks: Webhooks
    database: Database
    temporal: Temporal
    client: Client

    async def deliveries(self, webhook_id: str) -> tuple[Delivery, ...]:
        return await self.webhooks.deliveries(TENANT, webhook_id, 20)

    async def ended(self, webhook_id: str, number: int = 1) -> tuple[Delivery, ...]:
        """Deliveries, when so many have been made, and none is pending."""

        async def look() -> tuple[Delivery, ...] | None:
            found = await self.deliveries(webhook_id)
            return found if len(found) == number and all(d.state != "pending" for d in found) else None

        return await eventually(look, f"{number} deliveries")

    async def tell(self, status: RunStatus, before: State | None = "running", api: str = "native") -> Notice:
        """A change of a run's state, as the index leaves it in the outbox."""
        notice = notice_of(record(api), status, before)
        assert notice is not None
        await self.put(notice)
        await self.webhooks.send_outbox()
        return notice

    async def put(self, notice: Notice) -> None:
        row = OutboxRow(
            id=notice.notice_id,
            tenant=notice.tenant,
            type=notice.type,
            run_id=notice.data["id"],
            payload=notice.data,
            created_at=notice.created_at,
        )
        await self.database.writing(lambda session: session.add(row))

    async def num_waiting(self) -> int:
        return await self.database.reading(lambda session: session.scalar(select(func.count(OutboxRow.id))))


def record(api: str = "native") -> RunRecord:
    run = SFTRun(
        model="m", dataset={"uri": "file:///d/train.jsonl"}, steps=4, batch_size=2, name="nightly", learning_rate=1e-4
    )
    source = Source(api=api, metadata={"team": "blue"})
    return RunRecord(run_id="sft-01", tenant=TENANT, run=run, source=source, created_at=1.0)


def status(state: State, **changes: object) -> RunStatus:
    return RunStatus(run_id="sft-01", state=state, step=4, **changes)


@asynccontextmanager
async def started(address: str, root: Path) -> AsyncIterator[Stack]:
    settings = Settings(
        root=root,
        temporal_address=address,
        control_queue=f"control-{root.name}",
        webhooks=WebhookSettings(allow_private_addresses=True, timeout_s=5, first_retry_s=0.05),
    )
    temporal, database = Temporal(settings), open_database(settings)
    await asyncio.to_thread(upgrade, database)
    client = await connect_temporal(settings)
    webhooks = webhooks_of(settings, database)
    async with control_workers(client, settings.control_queue, [], [WebhookWorkflow]), meanwhile(webhooks.serve()):
        yield Stack(settings, webhooks, database, temporal, client)
    database.close()
