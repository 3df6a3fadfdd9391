"""Whatever text a client sends where we read one: it is understood, or refused in words, and never more than that."""

import asyncio
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from longshore.accounts import FilePage, QuotaSettings, hash_key
from longshore.automation import NoticeId, ScheduledRun, WebhookId, WebhookUrl
from longshore.dataset_runs import SFTRun
from longshore.events import Step
from longshore.fields import Fence, Frozen, Name
from longshore.runs import MetadataKey, MetadataValue, RunId, RunRecord, Source, Tenant
from longshore.views import RunStatus
from service.accounts.keys import Keys, SignIns
from service.accounts.tenants import Access, Quotas
from service.apis.openai.files import plain_name
from service.database.engine import Database
from service.files import Files
from service.runs.rows import RunRows
from shared.automation import Webhook, new_secret
from shared.errors import InvalidInput, NotFound
from shared.runs.events import EventCursor, read_run_events
from shared.settings import Settings
from shared.storage.artifacts import CheckpointName
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore, open_store

# Letters that mean something to somebody: to paths, to SQL, to JSON, to headers, to terminals.
ODD = st.text(st.sampled_from("a0-_./\\%\"'`$*?[]{}():;@#&=+,~ \t\r\n\0\x1b\u202e٣é😀"), max_size=40)
TEXT = st.one_of(st.text(max_size=80), ODD)
QUIET = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# Ids and names: what is accepted is a plain segment of a path, of a URL and of a key of the store.


def near(pattern: str) -> st.SearchStrategy[str]:
    """Texts that a pattern matches, or nearly does: with something odd before, behind or within."""
    good = st.from_regex(pattern, fullmatch=True)
    return st.one_of(TEXT, good, st.tuples(ODD, good, ODD).map("".join), good.map(lambda text: text + "\n"))


@pytest.mark.parametrize("kind", [RunId, Tenant, Name, WebhookId, NoticeId], ids=str)
def test_an_id_is_a_plain_segment(kind: object) -> None:
    adapter: TypeAdapter[str] = TypeAdapter(kind)
    pattern = adapter.json_schema()["pattern"].removeprefix("^").removesuffix("$")

    @QUIET
    @given(near(pattern))
    def check(text: str) -> None:
        try:
            accepted = adapter.validate_python(text)
        except ValidationError:
            return
        assert re.fullmatch(pattern, accepted) and quote(accepted, safe="") == accepted
        assert accepted not in (".", "..") and len(accepted) <= 64

    check()


@QUIET
@given(near(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"))
def test_a_files_name_is_a_plain_segment_or_refused(tmp_path: Path, name: str) -> None:
    database = Database("sqlite://")
    files = Files(LocalStore(tmp_path), database, Quotas(QuotaSettings(), LocalStore(tmp_path), database), tmp_path)

    async def nothing() -> Iterator[bytes]:
        for piece in ():
            yield piece

    with pytest.raises((InvalidInput, Exception)) as refused:
        asyncio.run(files.receive("acme", name, nothing()))
    plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name)
    if plain is None:
        assert isinstance(refused.value, InvalidInput) and refused.value.place == "name"
    assert plain_name(name) == plain_name(plain_name(name))


@QUIET
@given(near(r"[a-z0-9][a-z0-9-]{0,62}:step-[0-9]{1,8}"))
def test_a_checkpoints_name_says_what_it_was_read_from(text: str) -> None:
    found = CheckpointName.parse(text)
    if found is not None:
        assert TypeAdapter(RunId).validate_python(found.run_id) and 0 <= found.step < 10**8
        assert CheckpointName.parse(str(found)) == found


# Cursors.


@QUIET
@given(near(r"[0-9]{6}/e[0-9]{6}-a[0-9]{2}/[0-9]{1,25}"))
def test_a_cursor_is_read_as_it_was_written_or_refused(text: str) -> None:
    try:
        cursor = EventCursor.parse(text)
    except InvalidInput as error:
        assert error.place == "cursor"
        return
    assert EventCursor.parse(str(cursor)) == cursor and 0 <= cursor.offset < 2**63


@QUIET
@given(
    st.sampled_from(["", "000001", "999999", "x"]),
    st.sampled_from(["", "e000001-a00", "e9", ".."]),
    st.integers(0, 400),
)
def test_a_cursor_that_was_made_up_shows_whole_events_or_is_refused(
    tmp_path: Path, job_id: str, label: str, offset: int
) -> None:
    store = LocalStore(tmp_path)
    steps = [Step(seq=n, time=1.0, step=n, metrics={"loss": 1 / n}) for n in (1, 2, 3)]
    lines = [step.model_dump_json().encode() + b"\n" for step in steps]
    store.put_bytes(RunKeys("sft-1").log("000001", Fence(epoch=1)), b"".join(lines))
    try:
        found, _ = read_run_events(store, "sft-1", EventCursor.parse(f"{job_id}/{label}/{offset}"))
    except InvalidInput:
        assert (job_id, label) == ("000001", "e000001-a00")
        assert offset not in (0, len(lines[0]), len(lines[0]) + len(lines[1]))
        return
    assert [item.event for item in found] == steps[len(steps) - len(found) :]


# What the database is asked with: either kind takes any text.


def recorded(run_id: str, metadata: dict[str, str]) -> tuple[RunRecord, RunStatus]:
    run = SFTRun.model_validate({"model": "m", "dataset": {"uri": "u"}, "steps": 1, "batch_size": 1})
    record = RunRecord(run_id=run_id, tenant="acme", run=run, source=Source(metadata=metadata), created_at=1.0)
    return record, RunStatus(run_id=run_id, name=run_id)


class Labels(Frozen):
    """Metadata as a client may send it."""

    metadata: dict[MetadataKey, MetadataValue]


def test_a_run_is_found_by_any_metadata_that_it_may_have(database: Database, tmp_path: Path) -> None:
    rows = RunRows(database, Quotas(QuotaSettings(), LocalStore(tmp_path), database))
    pairs = st.dictionaries(st.one_of(ODD, st.text(max_size=64)), st.one_of(ODD, st.text(max_size=80)), max_size=3)
    number = iter(range(10_000))

    @settings(QUIET, max_examples=40)
    @given(pairs, ODD, ODD)
    def check(metadata: dict[str, str], name: str, value: str) -> None:
        async def ask() -> None:
            try:
                Labels(metadata=metadata)
            except ValidationError:
                return
            run_id = f"sft-{next(number)}"
            await rows.add(*recorded(run_id, metadata))
            found = await rows.page("acme", 200, metadata=metadata)
            assert run_id in [run.run_id for run in found]
            assert all(metadata.items() <= run.record.source.metadata.items() for run in found)
            if "\0" in name + value:
                return  # asked with below
            found = await rows.page("acme", 200, metadata={name: value})
            assert all(run.record.source.metadata.get(name) == value for run in found)

        asyncio.run(ask())

    check()


def test_the_database_is_asked_with_any_text(database: Database, tmp_path: Path) -> None:
    """Ids, cursors, words and keys: nothing is found, and nothing breaks. A NUL may be refused, as PostgreSQL does."""
    store = LocalStore(tmp_path)
    quotas = Quotas(QuotaSettings(), store, database)
    rows, files = RunRows(database, quotas), Files(store, database, quotas, tmp_path)
    keys = Keys(Settings(root=tmp_path), database)
    sessions = SignIns(database, keys)

    @settings(QUIET, max_examples=40)
    @given(TEXT)
    def check(text: str) -> None:
        async def ask() -> None:
            assert await keys.find(text) is None and await keys.find(f"Bearer {text}") is None
            assert await sessions.find(text) is None and await sessions.begin(hash_key(text)) is None
            lists = (
                rows.page("other", 10, words=text),
                rows.page("other", 10, after=text),
                rows.page("other", 10, metadata={text: text}),
                files.page("other", limit=10, after=text, purpose=text),
            )
            missing = (files.show("other", text), files.delete("other", text), keys.revoke("other", text))
            answers = await asyncio.gather(*lists, *missing, return_exceptions=True)
            if "\0" in text:
                answers = [answer for answer in answers if not isinstance(answer, InvalidInput)]
            assert all(answer == () or isinstance(answer, NotFound | FilePage) for answer in answers), answers

        asyncio.run(ask())

    check()


# Schedules, webhooks, URIs.


@QUIET
@given(near(r"[0-9*/,-]{1,3}( [0-9*/,-]{1,3}){4}|@[a-z]{1,8}"), TEXT)
def test_a_cron_has_five_fields_or_a_name_and_a_zone_is_known(cron: str, zone: str) -> None:
    run = {"kind": "sft", "model": "m", "dataset": {"uri": "u"}, "steps": 1, "batch_size": 1}
    try:
        scheduled = ScheduledRun.model_validate({"name": "n", "run": run, "cron": cron, "timezone": zone or "UTC"})
    except ValidationError as error:
        assert {str(e["loc"][0]) for e in error.errors()} <= {"cron", "timezone"}
        return
    assert scheduled.cron is not None and "\n" not in scheduled.cron and "\0" not in scheduled.timezone
    assert len(scheduled.cron.split()) == 5 or scheduled.cron.startswith("@")


@QUIET
@given(near(r"https?://[a-z0-9.\[\]:@-]{1,12}(/[!-~]{0,12})?"))
def test_a_webhooks_url_leads_to_a_host_by_http(url: str) -> None:
    try:
        accepted = TypeAdapter(WebhookUrl).validate_python(url)
    except ValidationError:
        return
    assert re.fullmatch(r"[!-~]+", accepted) and re.match(r"(?i)https?://[^/@]+", accepted)
    webhook = Webhook(webhook_id=f"wh-{'0' * 24}", tenant="acme", url=url, secret=new_secret(), created_at=1.0)
    [key] = webhook.keys(0.0)
    assert len(key) == 32 and base64.b64encode(key).decode() in webhook.secret


SEGMENTS = ("", ".", "..", "%2e%2e", "%2E.", "store", "tenants", "acme", "other", "service", "runs", "rows", "link")


@QUIET
@given(st.lists(st.sampled_from(SEGMENTS), max_size=8), st.sampled_from(["file://", "file:", "FILE://", ""]))
def test_no_spelling_of_a_path_leads_to_anothers_files(
    tmp_path_factory: pytest.TempPathFactory, segments: list[str], scheme: str
) -> None:
    """Judged by what the system says that the path is."""
    root = _root(tmp_path_factory)
    settings_ = Settings(root=root)
    access = Access(settings_, open_store(settings_.store, settings_.s3))
    text = f"{root}/" + "/".join(segments)
    meant = Path(text if not scheme else unquote(text)).resolve()
    mine, ours = root / "store" / "tenants" / "acme", (root / "store", root / "service")
    try:
        access.check("acme", Labels(metadata={"place": f"{scheme}{text}"[:512]}))
    except InvalidInput as error:
        assert error.place == "metadata.place"
        assert not (meant.is_relative_to(mine) and meant != mine)
    else:
        assert meant.is_relative_to(mine) or not any(meant.is_relative_to(one) and meant != one for one in ours)


_made: list[Path] = []


def _root(factory: pytest.TempPathFactory) -> Path:
    """A stack's folder with two tenants, once."""
    if not _made:
        root = factory.mktemp("access") / "root"
        for folder in ("store/tenants/acme", "store/tenants/other", "service", "store/runs"):
            (root / folder).mkdir(parents=True)
        (root / "link").symlink_to(root / "store" / "tenants" / "other")
        _made.append(root)
    return _made[0]
