"""Webhooks on a real Temporal server, told to a real HTTP server, their signatures checked by somebody else's code."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select
from standardwebhooks import Webhook as Verifier
from standardwebhooks.webhooks import WebhookVerificationError
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from longshore.automation import Rotation, WebhookChange, WebhookChoice
from longshore.views import Problem
from service.automation import webhooks as webhooks_module
from service.automation.webhooks import NotDelivered, retry_after_s
from service.database.engine import DocumentRow, OutboxRow
from service.host import control_workers
from service.runs.rows import notice_of
from service.temporal import connect_temporal
from shared.automation import DeliverRequest, Notice
from shared.errors import Conflict, InvalidInput, NotFound
from shared.settings import Settings, WebhookSettings
from tests.opened import opened
from tests.service.apis.native.webhook_stack import (
    TENANT,
    TOKEN,
    Received,
    Receiver,
    Stack,
    receiving,
    record,
    started,
    status,
    webhooks_of,
)
from tests.waiting import eventually, meanwhile
from workflows.policies import webhook_retry
from workflows.services import WebhookWorkflow


@pytest.fixture(scope="module")
async def stack(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path_factory.mktemp("webhooks")) as stack:
        yield stack


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(autouse=True)
async def _no_webhooks(stack: Stack) -> AsyncIterator[None]:
    yield
    for view in await stack.webhooks.of(TENANT):
        await stack.webhooks.delete(TENANT, view.id)


async def test_told_until_it_is_taken_and_signed_each_time(stack: Stack, receiver: Receiver, caplog) -> None:
    receiver.answers = [500, 503]
    made = await stack.webhooks.create(TENANT, "key-1", WebhookChoice(url=receiver.url))
    notice = await stack.tell(status("succeeded", adapter="file:///tenants/acme/adapters/nightly/v000001"))
    [delivery] = await stack.ended(made.id)

    assert [attempt.status for attempt in delivery.attempts] == [500, 503, 200]
    assert (delivery.state, delivery.type, delivery.run_id) == ("delivered", "run.succeeded", "sft-01")
    assert len({(r.body, r.headers["webhook-id"]) for r in receiver.received}) == 1
    for received in receiver.received:
        said = Verifier(made.secret).verify(received.body, received.headers)
    assert said["type"] == "run.succeeded" and said["id"] == notice.notice_id == received.headers["webhook-id"]
    assert said["data"]["id"] == "sft-01" and said["data"]["state"] == "succeeded"
    assert said["data"]["metadata"] == {"team": "blue"} and said["data"]["adapter"].endswith("v000001")
    assert received.path.endswith("?v=1")
    with pytest.raises(WebhookVerificationError):
        Verifier(made.secret).verify(received.body.replace(b"succeeded", b"failed"), received.headers)
    other = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    with pytest.raises(WebhookVerificationError):
        Verifier(other.secret).verify(received.body, received.headers)

    history = await _history(stack, notice)
    for secret in (made.secret, made.secret.removeprefix("whsec_"), TOKEN):
        assert secret not in history and secret not in caplog.text
    assert "run.succeeded" in history and made.id in history and "answered 503" in caplog.text  # they were searched


async def _history(stack: Stack, notice: Notice) -> str:
    """Every event of a workflow, its payloads as text."""
    async with stack.temporal.client() as client:
        history = await client.get_workflow_handle(notice.notice_id).fetch_history()
    return "\n".join(str(opened(event, stack.settings)) for event in history.events)


async def test_the_outbox_is_emptied_and_told_once(stack: Stack, receiver: Receiver) -> None:
    made = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    notice = await stack.tell(status("failed", problem=Problem(kind="invalid_input", message="train.jsonl:3: no")))
    assert await stack.num_waiting() == 0
    await stack.ended(made.id)
    await stack.put(notice)  # as if the service had died before the row went
    assert await stack.webhooks.send_outbox() == 1
    await stack.tell(status("paused"))
    await stack.ended(made.id, 2)
    bodies = [json.loads(received.body) for received in receiver.received]
    assert [body["type"] for body in bodies] == ["run.failed", "run.paused"]
    assert bodies[0]["data"]["problem"] == "train.jsonl:3: no"


async def test_a_row_that_cannot_be_read_holds_up_nobody(stack: Stack, receiver: Receiver) -> None:
    made = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    row = OutboxRow(id="evt-old", tenant=TENANT, type="run.exploded", run_id="x", payload={}, created_at=0.0)
    await stack.database.writing(lambda session: session.add(row))
    await stack.tell(status("cancelled"))
    assert await stack.num_waiting() == 0
    assert [d.type for d in await stack.ended(made.id)] == ["run.cancelled"]


async def test_a_webhook_that_cannot_be_read_holds_up_nobody(stack: Stack, receiver: Receiver, caplog) -> None:
    """A record of another version; what it holds is kept out of the log."""
    made = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    other = {"webhook_id": "wh-other", "secret": [TOKEN]}
    row = DocumentRow(
        tenant=TENANT, kind="webhook", key="wh-other", body=json.dumps(other), num_bytes=1, written_at=1.0
    )
    await stack.database.writing(lambda session: session.add(row))
    try:
        await stack.tell(status("cancelled"))
        assert await stack.num_waiting() == 0
        assert [d.type for d in await stack.ended(made.id)] == ["run.cancelled"]
        assert [view.id for view in await stack.webhooks.of(TENANT)] == [made.id]
    finally:
        await stack.database.writing(lambda session: session.delete(row))
    said = [entry.getMessage() for entry in caplog.records if "wh-other" in entry.getMessage()]
    assert said and "secret" in said[0] and TOKEN not in "".join(said)


async def test_changes_of_one_webhook_at_once_are_all_made(stack: Stack, receiver: Receiver) -> None:
    made = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    services = [webhooks_of(stack.settings, stack.database) for _ in range(4)]
    rotated, *_ = await asyncio.gather(
        services[0].rotate(TENANT, made.id, Rotation()),
        services[1].change(TENANT, made.id, WebhookChange(events=("run.failed",))),
        services[2].change(TENANT, made.id, WebhookChange(url="http://127.0.0.1:9/")),
        services[3].change(TENANT, made.id, WebhookChange(enabled=False)),
    )
    kept = await stack.webhooks._records.get(TENANT, made.id)
    assert (kept.secret, kept.previous_secret) == (rotated.secret, made.secret)
    assert (kept.events, kept.url, kept.enabled) == (("run.failed",), "http://127.0.0.1:9/", False)
    await services[0].delete(TENANT, made.id)
    with pytest.raises(NotFound):
        await services[1].change(TENANT, made.id, WebhookChange(enabled=True))


def request_of(webhook_id: str, digit: str = "0") -> DeliverRequest:
    notice = Notice(notice_id=f"evt-{digit * 23}", tenant=TENANT, type="ping", created_at=1.0, data={})
    return DeliverRequest(webhook_id=webhook_id, notice=notice)


async def test_only_what_it_wants_and_only_its_tenant(stack: Stack, receiver: Receiver) -> None:
    wants = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url, events=("run.failed",)))
    others = await stack.webhooks.create("other", None, WebhookChoice(url=receiver.url))
    await stack.tell(status("succeeded"))
    await stack.tell(status("failed"))
    assert [d.type for d in await stack.ended(wants.id)] == ["run.failed"]
    assert await stack.webhooks.deliveries("other", others.id, 20) == ()
    for ask in (stack.webhooks.show, stack.webhooks.delete, stack.webhooks.ping):
        with pytest.raises(NotFound):
            await ask("other", wants.id)
    assert [view.id for view in await stack.webhooks.of("other")] == [others.id]
    await stack.webhooks.delete("other", others.id)


async def test_a_redirect_is_not_followed_and_a_receiver_that_is_gone_not_asked_again(
    stack: Stack, receiver: Receiver
) -> None:
    receiver.answers = [302, 410]
    made = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    await stack.tell(status("succeeded"))
    [delivery] = await stack.ended(made.id)
    assert (delivery.state, [a.status for a in delivery.attempts]) == ("failed", [302, 410])
    assert all(received.path.startswith(f"/{TOKEN}") for received in receiver.received)


async def test_ping_change_disable_and_delete(stack: Stack, receiver: Receiver) -> None:
    made = await stack.webhooks.create(TENANT, None, WebhookChoice(url="http://127.0.0.1:9/", events=("run.failed",)))
    assert "secret" not in dict(await stack.webhooks.show(TENANT, made.id))
    pinged = await stack.webhooks.ping(TENANT, made.id)

    async def refused() -> bool:
        return any(d.num_attempts >= 1 and d.attempts[0].status is None for d in await stack.deliveries(made.id))

    await eventually(refused, "an attempt")
    await stack.webhooks.change(TENANT, made.id, WebhookChange(url=receiver.url))  # also for what is on its way
    [delivery] = await stack.ended(made.id)
    assert delivery.notice_id == pinged.notice_id and delivery.attempts[-1].status == 200
    assert json.loads(receiver.received[0].body)["type"] == "ping"

    await stack.webhooks.change(TENANT, made.id, WebhookChange(enabled=False))
    await stack.tell(status("failed"))
    with pytest.raises(Conflict):
        await stack.webhooks.ping(TENANT, made.id)
    assert len(receiver.received) == 1
    await stack.webhooks.delete(TENANT, made.id)
    left = select(DocumentRow.kind).where(DocumentRow.tenant == TENANT)
    assert not await stack.database.reading(lambda session: session.scalars(left).all())


async def test_a_rotated_secret_signs_beside_the_old_one_while_its_time_lasts(stack: Stack, receiver: Receiver) -> None:
    made = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    second = await stack.webhooks.rotate(TENANT, made.id, Rotation())
    assert second.secret != made.secret and second.previous_until == pytest.approx(time.time() + 86_400, abs=60)
    await stack.tell(status("succeeded"))
    await stack.ended(made.id, 1)
    third = await stack.webhooks.rotate(TENANT, made.id, Rotation())
    await stack.tell(status("failed"))
    await stack.ended(made.id, 2)
    fourth = await stack.webhooks.rotate(TENANT, made.id, Rotation(overlap_s=0))
    await stack.tell(status("paused"))
    await stack.ended(made.id, 3)
    fifth = await stack.webhooks.rotate(TENANT, made.id, Rotation(overlap_s=1e-3))  # over when a message is signed
    await stack.tell(status("cancelled"))
    await stack.ended(made.id, 4)

    def signers(received: Received) -> list[int]:
        return [n for n, one in enumerate((made, second, third, fourth, fifth), 1) if _verifies(one.secret, received)]

    assert [signers(received) for received in receiver.received] == [[1, 2], [2, 3], [4], [5]]
    shown = (await stack.webhooks.show(TENANT, made.id)).model_dump_json()
    assert not any(one.secret in shown for one in (made, second, third, fourth, fifth))


def _verifies(secret: str, received: Received) -> bool:
    try:
        Verifier(secret).verify(received.body, received.headers)
    except WebhookVerificationError:
        return False
    return True


async def test_a_receiver_that_asks_for_time_is_given_it(stack: Stack, receiver: Receiver) -> None:
    """More than the retry policy would give; less than that changes nothing."""
    receiver.answers, receiver.retry_after = [503], "2"
    made = await stack.webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    await stack.tell(status("succeeded"))
    [delivery] = await stack.ended(made.id)
    first, second = delivery.attempts
    assert (first.retry_after_s, second.status, second.retry_after_s) == (2.0, 200, None)
    assert second.at - first.at >= 2.0  # by itself it would be told after 0.05 s

    receiver.answers, receiver.retry_after = [429], "0"
    notice = await stack.tell(status("failed"))
    delivery = (await stack.ended(made.id, 2))[0]
    assert (delivery.notice_id, delivery.attempts[0].retry_after_s) == (notice.notice_id, 0.0)
    assert delivery.attempts[1].at - delivery.attempts[0].at >= 0.05


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("9" * 400, 999_999_999.0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Thu, 99 Foo 1970 00:00:00 GMT", None),
    ],
)
def test_how_long_a_receiver_asks_for(header: str | None, wait_s: float | None) -> None:
    assert retry_after_s(header, now=100.0) == wait_s


@pytest.mark.parametrize(("asked", "given_s"), [("10", 0.0), ("30", 30.0), ("1000000", 6 * 3600.0)])
async def test_the_next_attempt_is_put_off_up_to_a_cap(
    tmp_path: Path, receiver: Receiver, asked: str, given_s: float
) -> None:
    """Of the third attempt, which the retry policy would let wait for 16 s; 0: it decides alone."""
    settings = Settings(root=tmp_path, webhooks=WebhookSettings(allow_private_addresses=True))
    webhooks = webhooks_of(settings)
    made = await webhooks.create(TENANT, None, WebhookChoice(url=receiver.url))
    receiver.answers, receiver.retry_after = [503], asked
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=3, retry_policy=webhook_retry(1.0))
    with pytest.raises((ApplicationError, NotDelivered)) as raised:
        await environment.run(webhooks.deliver, request_of(made.id))
    delay = getattr(raised.value, "next_retry_delay", None)
    assert (delay.total_seconds() if delay else 0.0) == given_s


async def test_a_private_address_is_never_reached_unless_it_is_allowed(
    stack: Stack, receiver: Receiver, tmp_path: Path
) -> None:
    """Also by a name, whatever it resolves to at that moment; one attempt says so, and there are no more.

    Made while such addresses were allowed: a new one is refused at once (the test below).
    """
    strict = stack.settings.model_copy(
        update={"webhooks": WebhookSettings(timeout_s=5), "control_queue": tmp_path.name}
    )
    strict_webhooks = webhooks_of(strict, stack.database)
    client = await connect_temporal(strict)
    async with control_workers(client, strict.control_queue, [], [WebhookWorkflow]), meanwhile(strict_webhooks.serve()):
        for url in (receiver.url, receiver.url.replace("127.0.0.1", "localhost")):
            made = await stack.webhooks.create(TENANT, None, WebhookChoice(url=url))
            await strict_webhooks.ping(TENANT, made.id)
            [delivery] = await stack.ended(made.id)
            assert delivery.state == "failed" and delivery.num_attempts == 1
            assert "webhooks.allow_private_addresses" in (delivery.attempts[0].problem or "")
    assert receiver.received == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "0x7f.1", "[::1]:8080", "[::ffff:10.0.0.1]", "169.254.169.254", "localhost"]
)
async def test_what_is_plainly_private_is_refused_when_it_is_named(tmp_path: Path, host: str) -> None:
    settings = Settings(root=tmp_path)
    webhooks = webhooks_of(settings)
    url = f"http://{host}/hook"
    with pytest.raises(InvalidInput, match=r"webhooks\.allow_private_addresses") as refused:
        await webhooks.create(TENANT, None, WebhookChoice(url=url))
    assert (refused.value.place, await webhooks.of(TENANT)) == ("url", ())
    made = await webhooks.create(TENANT, None, WebhookChoice(url="https://example.org/hook"))
    with pytest.raises(InvalidInput, match=r"webhooks\.allow_private_addresses"):
        await webhooks.change(TENANT, made.id, WebhookChange(url=url))
    assert (await webhooks.show(TENANT, made.id)).url == "https://example.org/hook"


async def test_a_webhook_keeps_its_newest_deliveries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks_module, "_KEPT_DELIVERIES", 3)
    webhooks = webhooks_of(Settings(root=tmp_path))
    made = await webhooks.create(TENANT, None, WebhookChoice(url="https://example.org/hook"))
    for digit in "21435":
        await webhooks._note(request_of(made.id, digit), lambda before: before)
    kept = await webhooks.deliveries(TENANT, made.id, 10)
    assert [each.notice_id[-1] for each in kept] == ["5", "4", "3"]
    assert [each.notice_id[-1] for each in await webhooks.deliveries(TENANT, made.id, 1)] == ["5"]


@pytest.mark.parametrize("api", ["native", "openai"])
def test_who_came_by_openai_is_told_in_its_names(api: str) -> None:
    told = {
        (before, state): notice.type if (notice := notice_of(record(api), status(state), before)) else None
        for before, state in [
            (None, "running"),
            ("running", "running"),
            ("running", "succeeded"),
            ("running", "failed"),
            ("running", "cancelled"),
            ("running", "paused"),
            ("paused", "running"),
        ]
    }
    ended = "fine_tuning.job." if api == "openai" else "run."
    assert list(told.values()) == [
        "run.created",
        None,
        f"{ended}succeeded",
        f"{ended}failed",
        f"{ended}cancelled",
        "run.paused",
        "run.resumed",
    ]


@pytest.mark.parametrize(
    "url", ["ftp://h/x", "https://user:pw@h/", "https:///x", "http://h:99999/", "http://h/a b", "http://ü/"]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        WebhookChoice(url=url)
