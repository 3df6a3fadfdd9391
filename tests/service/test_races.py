"""Two at once: files that share their bytes, uploads that are ended twice."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import pytest
from sqlalchemy import select, update

from longshore.accounts import FileView, QuotaSettings
from service.accounts.tenants import Quotas, Tenants
from service.database.engine import Database, DocumentRow, FileRow
from service.files import Files, UploadRecord, Uploads
from shared.errors import Conflict, NotFound
from shared.storage import paths
from shared.storage.files import go_on
from shared.storage.store import Check, LocalStore, ObjectInfo

CONTENT = b'{"text": "a"}\n'


@pytest.fixture
def tenant(database: Database, tmp_path: Path) -> str:
    """A tenant of the test's own: the database is all tests'."""
    name = f"t{time.time_ns()}"
    asyncio.run(Tenants(database).create(name))
    return name


class Meanwhile(LocalStore):
    """A store in which something else happens once: behind a look at a key, or before a part is read or a key goes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._expected: dict[tuple[str, str], Callable[[], object]] = {}

    def once(self, operation: str, prefix: str, work: Callable[[], object]) -> None:
        self._expected[operation, prefix] = work

    def _happens(self, operation: str, key: str) -> None:
        for expected in list(self._expected):
            if expected[0] == operation and key.startswith(expected[1]):
                self._expected.pop(expected)()

    def head(self, key: str) -> ObjectInfo | None:
        found = super().head(key)
        self._happens("head", key)
        return found

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self._happens("read_range", key)
        return super().read_range(key, start, length)

    def put_file(self, key: str, path: Path, check: Check = go_on) -> None:
        self._happens("put_file", key)
        super().put_file(key, path, check)

    def delete(self, key: str) -> None:
        self._happens("delete", key)
        super().delete(key)


@pytest.fixture
def store(tmp_path: Path) -> Meanwhile:
    return Meanwhile(tmp_path)


async def chunks(content: bytes = CONTENT) -> AsyncIterator[bytes]:
    yield content


def files_of(store: LocalStore, database: Database) -> Files:
    return Files(store, database, Quotas(QuotaSettings(), store, database), store.root / "scratch")


def uploads_of(store: LocalStore, database: Database) -> Uploads:
    quotas = Quotas(QuotaSettings(), store, database)
    return Uploads(store, database, files_of(store, database), quotas, store.root / "scratch")


# Files with the same bytes.


@pytest.mark.parametrize("ids", [("file-1", "file-2"), (None, None)], ids=["others", "again"])
async def test_bytes_that_go_behind_an_uploads_look_are_put_again(
    database: Database, store: Meanwhile, tenant: str, ids: tuple[str | None, str | None]
) -> None:
    files = files_of(store, database)
    first = await files.receive(tenant, "a.jsonl", chunks(), file_id=ids[0])
    key = paths.upload(tenant, first.sha256, first.name)
    store.once("head", key, lambda: asyncio.run(files.delete(tenant, first.file_id)))
    second = await files.receive(tenant, "a.jsonl", chunks(), file_id=ids[1])
    assert await files.show(tenant, second.file_id) == second
    assert b"".join(files.content(second)) == CONTENT


@pytest.mark.parametrize("ids", [("file-1", "file-2"), (None, None)], ids=["others", "again"])
async def test_who_uploads_waits_for_the_one_who_deletes_the_same_bytes(
    database: Database, store: Meanwhile, tenant: str, ids: tuple[str | None, str | None]
) -> None:
    """The one who deletes has seen that the bytes are no other's."""
    files = files_of(store, database)
    first = await files.receive(tenant, "a.jsonl", chunks(), file_id=ids[0])
    with ThreadPoolExecutor(1) as thread:
        uploading = []

        def upload() -> None:
            uploading.append(thread.submit(asyncio.run, files.receive(tenant, "a.jsonl", chunks(), file_id=ids[1])))
            wait(uploading, timeout=1)

        store.once("delete", paths.upload(tenant, first.sha256, first.name), upload)
        await files.delete(tenant, first.file_id)
        second: FileView = await asyncio.wrap_future(uploading[0])
    assert await files.show(tenant, second.file_id) == second
    assert b"".join(files.content(second)) == CONTENT


@pytest.mark.parametrize("ended_in", ["put_file", "delete"])
async def test_a_service_that_dies_with_a_file_in_hand_leaves_none_without_bytes(
    database: Database, store: Meanwhile, tenant: str, ended_in: str
) -> None:
    files = files_of(store, database)
    kept = await files.receive(tenant, "a.jsonl", chunks(), file_id="file-kept") if ended_in == "delete" else None

    def dies() -> None:
        raise KeyboardInterrupt

    store.once(ended_in, f"{paths.tenant_folder(tenant)}/uploads", dies)
    with ThreadPoolExecutor(1) as other:  # the interrupt is to end the request's own thread
        work = files.delete(tenant, kept.file_id) if kept else files.receive(tenant, "a.jsonl", chunks())
        with pytest.raises(KeyboardInterrupt):
            await asyncio.wrap_future(other.submit(asyncio.run, work))
    assert (await files.page(tenant, limit=10)).files == ()
    await files.prune()
    rows = select(FileRow).where(FileRow.tenant == tenant)
    assert len(database.write(lambda session: session.scalars(rows).all())) == 1, "it may still be at work"
    late = update(FileRow).where(FileRow.tenant == tenant).values(state_at=time.time() - 100_000)
    database.write(lambda session: session.execute(late) and None)
    await files.prune()
    assert not database.write(lambda session: session.scalars(rows).all())
    assert not list(store.list(paths.tenant_folder(tenant)))
    again = await files.receive(tenant, "a.jsonl", chunks())
    assert b"".join(files.content(again)) == CONTENT


@pytest.mark.parametrize("oldest_first", [False, True])
async def test_pages_go_on_behind_a_file_that_was_deleted(
    database: Database, store: Meanwhile, tenant: str, oldest_first: bool
) -> None:
    files = files_of(store, database)
    made = [await files.receive(tenant, f"{number}.jsonl", chunks()) for number in range(4)]
    expected = made if oldest_first else made[::-1]
    page = await files.page(tenant, limit=2, oldest_first=oldest_first)
    assert page.files == tuple(expected[:2]) and page.next is not None
    assert len(page.next) <= 64, "the API takes no longer one"
    by_id = await files.page(tenant, limit=2, after=expected[1].file_id, oldest_first=oldest_first)
    await files.delete(tenant, expected[1].file_id)
    behind = await files.page(tenant, limit=2, after=page.next, oldest_first=oldest_first)
    assert behind == by_id and behind.files == tuple(expected[2:]) and not behind.has_more
    with pytest.raises(NotFound):
        await files.page(tenant, limit=2, after=expected[1].file_id)


# Uploads in parts.


async def pending(uploads: Uploads, tenant: str) -> tuple[UploadRecord, str]:
    """An upload whose only part is there, and the part's id."""
    upload = await uploads.create(tenant, name="a.jsonl", purpose="fine-tune", size=len(CONTENT))
    return upload, (await uploads.add_part(tenant, upload.upload_id, chunks())).part_id


def put(database: Database, record: UploadRecord) -> None:
    values = update(DocumentRow).where(DocumentRow.kind == "upload", DocumentRow.key == record.upload_id)
    database.write(lambda session: session.execute(values.values(body=record.model_dump_json())) and None)


def parts_of(store: LocalStore, record: UploadRecord) -> list[ObjectInfo]:
    return list(store.list(paths.upload_part(record.tenant, record.upload_id)))


@pytest.mark.parametrize("state", ["completed", "cancelled"])
async def test_parts_of_an_upload_that_ended_are_pruned_before_what_is_known_of_it(
    database: Database, store: Meanwhile, tenant: str, state: str
) -> None:
    """The service died before it dropped them, or one came late."""
    uploads = uploads_of(store, database)
    (recent, _), (old, _) = await pending(uploads, tenant), await pending(uploads, tenant)
    waiting, _ = await pending(uploads, tenant)
    put(database, recent.model_copy(update={"state": state}))
    put(database, old.model_copy(update={"state": state, "expires_at": time.time() - 90_000}))
    await uploads.prune()
    assert not parts_of(store, recent) and (await uploads.show(tenant, recent.upload_id)).state == state
    assert not parts_of(store, old)
    with pytest.raises(NotFound):
        await uploads.show(tenant, old.upload_id)
    assert parts_of(store, waiting)


async def test_parts_are_not_pruned_while_they_are_joined(database: Database, store: Meanwhile, tenant: str) -> None:
    uploads = uploads_of(store, database)
    upload, part = await pending(uploads, tenant)
    put(database, upload.model_copy(update={"expires_at": time.time() + 300}))

    def ten_minutes_later() -> None:
        known = asyncio.run(uploads.show(tenant, upload.upload_id))
        put(database, known.model_copy(update={"expires_at": known.expires_at - 600}))
        asyncio.run(uploads.prune())

    store.once("read_range", paths.upload_part(tenant, upload.upload_id), ten_minutes_later)
    record, file = await uploads.complete(tenant, upload.upload_id, [part])
    assert (record.state, file.size) == ("completed", len(CONTENT))


async def test_an_upload_is_completed_once_and_not_cancelled_meanwhile(
    database: Database, store: Meanwhile, tenant: str
) -> None:
    uploads, others = uploads_of(store, database), uploads_of(store, database)
    upload, part = await pending(uploads, tenant)
    joining, go_on = Event(), Event()

    def join_slowly() -> None:
        joining.set()
        assert go_on.wait(60)

    store.once("read_range", paths.upload_part(tenant, upload.upload_id), join_slowly)
    first = asyncio.create_task(uploads.complete(tenant, upload.upload_id, [part]))
    assert await asyncio.to_thread(joining.wait, 60)
    for each in (uploads, others):
        with pytest.raises(Conflict, match="is being completed"):
            await each.cancel(tenant, upload.upload_id)
    second = await others.complete(tenant, upload.upload_id, [part])
    go_on.set()
    assert (await first)[1] == second[1]
    with pytest.raises(Conflict, match="is completed"):
        await others.cancel(tenant, upload.upload_id)


async def test_an_upload_that_another_process_completed_is_answered(
    database: Database, store: Meanwhile, tenant: str
) -> None:
    uploads, others = uploads_of(store, database), uploads_of(store, database)
    upload, part = await pending(uploads, tenant)
    answers: list[tuple[UploadRecord, FileView]] = []

    def complete() -> None:
        answers.append(asyncio.run(others.complete(tenant, upload.upload_id, [part])))

    store.once("read_range", paths.upload_part(tenant, upload.upload_id), complete)
    record, file = await uploads.complete(tenant, upload.upload_id, [part])
    assert (record.state, file) == ("completed", answers[0][1])
    assert (await uploads.show(tenant, upload.upload_id)).state == "completed"
