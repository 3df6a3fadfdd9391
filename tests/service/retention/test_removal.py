"""What collections and removals delete and leave: beside runs that come, killed at any operation, over real HTTP."""

import asyncio
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from activities.host_context import HostContext
from activities.records import BeginRequest, RunRecords, find_newest
from longshore.automation import Freed
from longshore.fields import Fence
from longshore.views import RunStatus
from service.automation.retention import collect
from service.database.engine import Database, ResultT, UnitRow, UseRow, open_database
from service.host import note_uses
from service.runs.rows import CLAIM_S, BeingDeleted, Uses, run_row
from service.temporal import connect_temporal
from shared.runs.start import result_sha256
from shared.settings import RetentionSettings, Settings
from shared.storage.artifacts import find_artifact, seal, upload_artifact
from shared.storage.paths import RunKeys, model_import, packed, published_version, tokenized, version_claim
from shared.storage.store import LocalStore, ObjectStore, S3Store, uri_of
from shared.storage.stored_bytes import Measurement, UseRequest
from tests.conftest import S3Server
from tests.depth import IS_DEEP, drawn
from tests.service.conftest import Service, ended, polling, serving, settings_below, sft, submitted
from tests.service.retention.stored_runs import (
    DAY_S,
    FENCE,
    STEPS,
    TENANTS,
    Made,
    Writer,
    add_rows,
    damaged,
    fill,
    key_of,
    sizes,
    stored_by,
)
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def settings(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Whatever has ended may go."""
    settings = settings_below(tmp_path_factory.mktemp("service"), temporal_address)
    policy = RetentionSettings(checkpoints_days=0, checkpoints_kept=0, logs_days=0, data_days=0)
    return settings.model_copy(update={"retention": policy})


def _put_checkpoint(service: Service, run_id: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(b"w" * 1000)
    seal(folder)
    key = f"{RunKeys(run_id).checkpoints}/e000001-a01/step-00000004"
    upload_artifact(service.store, key, folder)
    return key


def _left(service: Service, run_id: str) -> list[str]:
    return [info.key for info in service.store.list(f"{RunKeys(run_id).prefix}/")]


def test_a_removed_run_is_gone_from_lists_and_from_the_store(api, service: Service, tmp_path: Path) -> None:
    headers = {"idempotency-key": "once"}
    run_id = api.post("/runs/sft", json=sft(seed=SUCCEEDS), headers=headers).json()["run_id"]
    ended(api, run_id)
    before = api.get("/usage").json()["stored_bytes"]
    _put_checkpoint(service, run_id, tmp_path / "made")
    gone = api.delete(f"/runs/{run_id}")
    assert gone.status_code == 200, gone.text
    assert (gone.json()["stays_published"], gone.json()["num_bytes"] > 1000) == (False, True)
    assert _left(service, run_id) == []
    assert api.get("/usage").json()["stored_bytes"] < before
    service.rebuild()
    assert [api.request(method, f"/runs/{run_id}").status_code for method in ("GET", "DELETE")] == [404, 404]
    assert run_id not in api.get("/runs").text
    again = api.post("/runs/sft", json=sft(seed=SUCCEEDS), headers=headers)
    assert again.status_code == 409 and "was removed" in again.text


def test_the_hours_of_a_removed_run_still_count(api, service: Service) -> None:
    run_id = submitted(api, seed=SUCCEEDS).run_id
    ended(api, run_id)
    keys, before = RunKeys(run_id), api.get("/usage").json()["gpu_hours"]
    result = json.loads(service.store.get_bytes(keys.result)) | {"gpu_seconds": 7200.0, "ended_at": 4e9}
    service.store.put_bytes(keys.result, json.dumps(result).encode())
    service.rebuild()
    assert api.get("/usage").json()["gpu_hours"] == before + 2
    assert api.delete(f"/runs/{run_id}").status_code == 200
    assert api.get("/usage").json()["gpu_hours"] == before + 2
    service.rebuild()
    assert api.get("/usage").json()["gpu_hours"] == before + 2


def test_what_it_published_stays_and_its_record(api, service: Service, tmp_path: Path) -> None:
    run_id = submitted(api, seed=SUCCEEDS, name="harbour").run_id
    ended(api, run_id)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x").write_text("weights")
    seal(tmp_path / "made")
    version = published_version("default", "adapters", "harbour", 1)
    service.store.put_bytes(version_claim("default", "adapters", "harbour", 1), json.dumps({"run_id": run_id}).encode())
    upload_artifact(service.store, version, tmp_path / "made")
    job = f"{RunKeys(run_id).logs}/000001/e000001-a01/job.json"
    service.store.put_bytes(job, b'{"plan":{}}')
    _put_checkpoint(service, run_id, tmp_path / "checkpoint")
    assert api.delete(f"/runs/{run_id}").json()["stays_published"]
    assert sorted(_left(service, run_id)) == sorted([RunKeys(run_id).record, RunKeys(run_id).result, job])
    assert api.get("/models/harbour").json()["run_id"] == run_id
    assert api.get(f"/runs/{run_id}").status_code == 404
    service.rebuild()
    assert run_id not in api.get("/runs").text


def test_what_is_needed_is_not_removed(api, service: Service) -> None:
    running = submitted(api, seed=WAITS).run_id
    refused = api.delete(f"/runs/{running}")
    assert refused.status_code == 409 and "cancel it" in refused.text
    source = submitted(api, seed=SUCCEEDS).run_id
    ended(api, source)
    service.note_use(RunKeys(source).prefix, running)
    refused = api.delete(f"/runs/{source}")
    assert refused.status_code == 409 and running in refused.text
    api.post(f"/runs/{running}/cancel")
    ended(api, running)
    assert api.delete(f"/runs/{source}").status_code == 200


def test_a_run_whose_state_a_policy_deleted_is_not_resumed_afresh(api, service: Service, tmp_path: Path) -> None:
    run_id = submitted(api, seed=FAILS).run_id
    ended(api, run_id)
    key = _put_checkpoint(service, run_id, tmp_path / "made")
    live = submitted(api, seed=WAITS).run_id
    kept = _put_checkpoint(service, live, tmp_path / "made")
    dry = api.post("/gc").json()
    assert dry["state"] == "done" and dry["report"]["is_dry"], dry
    assert service.store.head(f"{key}/weights") is not None
    report = api.post("/gc", params={"dry_run": False}).json()["report"]
    assert [row["what"] for row in report["freed"]] == [row["what"] for row in dry["report"]["freed"]]
    assert service.store.head(f"{key}/weights") is None and service.store.head(f"{kept}/weights") is not None
    refused = api.post(f"/runs/{run_id}/resume")
    assert refused.status_code == 409 and "deleted" in refused.text
    api.post(f"/runs/{live}/cancel")


def test_the_bytes_of_runs_are_shown_and_count(api, service: Service, cli, tmp_path: Path) -> None:
    run_id = submitted(api, seed=WAITS).run_id
    assert api.post("/gc", params={"dry_run": False}).json()["report"]
    before = api.get("/usage").json()
    key = _put_checkpoint(service, run_id, tmp_path / "made")
    size = sum(info.size for info in service.store.list(key))
    assert api.post("/gc", params={"dry_run": False}).json()["report"]
    after = api.get("/usage").json()
    assert after["measured"]["num_bytes"]["checkpoints"] >= size
    assert after["stored_bytes"] - before["stored_bytes"] >= size
    assert "of it checkpoints of runs" in cli("usage").stdout
    shown = cli("gc", "--dry-run")
    assert shown.code == 0 and "stores, beside its files" in shown.stdout
    api.post(f"/runs/{run_id}/cancel")
    ended(api, run_id)
    removed = cli("rm", run_id)
    assert (removed.code, "is removed" in removed.stderr) == (0, True), removed


async def test_what_a_host_uses_is_not_deleted_also_by_a_restored_database(service: Service) -> None:
    """It waits for a deletion that is going on; and Temporal remembers what the database has forgotten."""
    client = await connect_temporal(service.settings)
    note, request = note_uses(client, service.settings), UseRequest(unit=tokenized("0" * 32), run_id="sft-other")
    database = open_database(service.settings)
    users = select(UseRow.run_id).where(UseRow.unit == request.unit)

    def used() -> list[str]:
        return list(database.read(lambda session: session.scalars(users).all()))

    def claim() -> None:
        with Uses(database).claiming(request.unit) as (claim,):
            assert claim is not None and not claim.users
            noting = threads.submit(note, request)
            with pytest.raises(TimeoutError):
                noting.result(2)
            assert used() == []
        noting.result(60)

    with ThreadPoolExecutor(2) as threads:
        await asyncio.wrap_future(threads.submit(claim))
    assert used() == [request.run_id]
    database.write(lambda session: session.execute(delete(UseRow)))
    with serving(service.settings):
        await asyncio.to_thread(wait_until, lambda: used() == [request.run_id], "the use is known again")
    database.close()


def test_it_is_done_by_itself(temporal_address: str, tmp_path: Path) -> None:
    settings = settings_below(tmp_path / "service", temporal_address)
    settings = settings.model_copy(update={"retention": RetentionSettings(every_s=0.01)})
    with serving(settings) as service, polling(settings), service.http() as api:
        run_id = submitted(api, seed=WAITS).run_id
        wait_until(lambda: api.get("/usage").json()["measured"]["num_bytes"], "it was measured")
        api.post(f"/runs/{run_id}/cancel")


ALL = RetentionSettings(checkpoints_days=1, data_days=1, samples_days=1, logs_days=1, sessions_days=1, models_days=1)
NOTHING_LEFT = ALL.model_copy(update={"checkpoints_kept": 0})
AHEAD_S = 100 * DAY_S
UNIT = tokenized(key_of(1))


class Killed(BaseException):
    """A process that was killed: it does nothing more, not even what it does at its end."""


class Moments:
    """Calls something before each change of the store or the database, with how many there were before."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self._before = before
        self.num_done = 0
        self._lock = threading.Lock()

    def next(self) -> None:
        with self._lock:  # a collection has several threads
            self._before(self.num_done)
            self.num_done += 1


class WatchedStore(LocalStore):
    def __init__(self, root: Path, moments: Moments) -> None:
        super().__init__(root)
        self._moments = moments

    def put_bytes(self, key: str, data: bytes) -> None:
        self._moments.next()
        super().put_bytes(key, data)

    def delete(self, key: str) -> None:
        self._moments.next()
        super().delete(key)


class WatchedDatabase(Database):
    def __init__(self, url: str, moments: Moments) -> None:
        super().__init__(url)
        self._moments = moments

    def write(self, work: Callable[[Session], ResultT]) -> ResultT:
        self._moments.next()
        return super().write(work)


class Installation:
    """A store and a database in a folder, as a collection and a run see them."""

    def __init__(self, root: Path, url_of: Callable[[Path], str]) -> None:
        self.store = LocalStore(root / "store")
        self._url = url_of(root / "rows.db")
        self.database = Database(self._url)
        self.uses = Uses(self.database)
        self.writer = Writer(self.store)

    def collect(self, policy: RetentionSettings, now: float, before: Callable[[int], None] = lambda _: None) -> int:
        """Collect; returns how many changes there were."""
        moments = Moments(before)
        database = WatchedDatabase(self._url, moments)
        self.report, _ = collect(
            WatchedStore(self.store.root, moments), database, policy, is_dry=False, now=now, at_once=1
        )
        database.close()
        return moments.num_done

    def note(self, unit: str, run_id: str) -> None:
        asyncio.run(self.uses.note(unit, run_id))

    def forget_claims(self) -> None:
        """Let the claims of a killed process be as old as they are when another may take them over."""
        age = update(UnitRow).values(claimed_at=UnitRow.claimed_at - CLAIM_S - 1)
        self.database.write(lambda session: session.execute(age))

    def claimed(self) -> list[str]:
        claims = select(UnitRow.unit).where(UnitRow.claimed_at > 0)
        return list(self.database.read(lambda session: session.scalars(claims).all()))


@pytest.fixture
def make(url_of: Callable[[Path], str], tmp_path: Path) -> Callable[[str], Installation]:
    return lambda name: Installation(tmp_path / name, url_of)


def dies_at(number: int) -> Callable[[int], None]:
    def before(done: int) -> None:
        if done >= number:
            raise Killed

    return before


def test_of_two_that_want_a_unit_one_has_it_and_a_dead_ones_claim_is_taken_over(make) -> None:
    here = make("both")
    with here.uses.claiming(UNIT) as (first,):
        assert first is not None
        with here.uses.claiming(UNIT, packed(key_of(1))) as (second, other):
            assert second is None and other is not None
        with pytest.raises(BeingDeleted):
            here.note(UNIT, "sft-new")
        here.forget_claims()
        with here.uses.claiming(UNIT) as (second,):
            assert second is not None
    assert not here.claimed()
    here.note(UNIT, "sft-new")


def test_a_claim_that_was_held_for_too_long_is_not_given_back(make) -> None:
    """It is another's."""
    here = make("one")
    with here.uses.claiming(UNIT):
        here.forget_claims()
        other = here.uses.claiming(UNIT)
        assert other.__enter__() != (None,)
    assert here.claimed() == [UNIT]
    other.__exit__(None, None, None)
    assert not here.claimed()


@pytest.mark.drawn
def test_killed_at_any_operation_it_is_done_again_and_nothing_is_damaged(make) -> None:
    now = time.time() + AHEAD_S
    whole = make("whole")
    runs = fill(whole.store, whole.database, 10, now)
    before = sizes(whole.store).keys()
    num_done = whole.collect(ALL, now)
    expected = sizes(whole.store).keys()
    needed = {run.run_id for run in runs if run.state in (None, "paused")}
    assert len(expected) < len(before)
    for number in drawn(list(range(0, num_done, 3)), 12):
        here = make(f"killed-{number}")
        fill(here.store, here.database, 10, now)
        with pytest.raises(Killed):
            here.collect(ALL, now, dies_at(number))
        found = sizes(here.store).keys()
        assert not damaged(here.store), number
        assert {k for k in before if k.split("/")[1] in needed} <= found
        here.forget_claims()
        here.collect(ALL, now)
        assert sizes(here.store).keys() == expected, number


def _an_old_artifact(here: Installation, is_on_record: bool) -> None:
    here.writer.artifact(UNIT, a=b"a" * 10, b=b"b" * 10)
    if is_on_record:
        here.writer.put(RunKeys("sft-new").record, "{}")


def _use_it(here: Installation) -> bool:
    """Do as an activity of a run does: note, look, make. False: it has to wait."""
    try:
        here.note(UNIT, "sft-new")
    except BeingDeleted:
        return False
    if find_artifact(here.store, UNIT) is None:
        here.writer.artifact(UNIT, a=b"a" * 10, b=b"b" * 10)
    return True


@pytest.mark.parametrize("is_on_record", [True, False], ids=["on record", "on its way to be"])
def test_a_run_that_comes_at_any_moment_has_what_it_uses_and_it_stays(make, is_on_record: bool) -> None:
    """At each operation of a collection that deletes what it needs: it waits, finds it whole, or makes it anew.

    The database has no row of the run, as one that was restored from a backup.
    """
    now, outcomes = time.time() + AHEAD_S, list[bool]()
    undisturbed = make("alone")
    _an_old_artifact(undisturbed, is_on_record)
    num_done = undisturbed.collect(ALL, now)
    assert find_artifact(undisturbed.store, UNIT) is None
    for number in range(num_done):
        here = make(str(number))
        _an_old_artifact(here, is_on_record)

        def come(done: int, here: Installation = here, number: int = number) -> None:
            if done == number:
                outcomes.append(_use_it(here))

        here.collect(ALL, now, come)
        assert outcomes[-1] or _use_it(here), "the claim was given back"
        here.collect(ALL, now)
        assert find_artifact(here.store, UNIT) is not None, number
        assert not damaged(here.store), number
    assert set(outcomes) == {True, False}


def test_a_run_that_came_and_published_during_a_collection_keeps_its_model(make) -> None:
    """It began after all was counted, and has ended before the collection comes to the model that it trained."""
    here, model = make("one"), model_import(key_of(1))
    here.writer.artifact(model, weights=b"w")
    (old,) = fill(LocalStore(here.store.root.parent / "other"), make("other").database, 1, time.time())

    def ended(run_id: str, **fields: object) -> None:
        record = old.record.model_copy(update={"run_id": run_id})
        end = RunStatus(run_id=run_id, state="succeeded", ended_at=1.0, **fields)
        here.writer.put(RunKeys(run_id).record, record.model_dump_json())
        here.writer.put(RunKeys(run_id).result, end.model_dump_json())
        here.note(model, run_id)
        here.database.write(lambda session: session.add(run_row(record, end)))

    def come(done: int) -> None:
        if done == 0:  # the first claim
            plan = {"plan": {"model": {"uri": uri_of(here.store, model), "sha256": "0" * 64}}}
            here.writer.put(RunKeys("sft-new").job("000001", Fence(epoch=1)), json.dumps(plan))
            ended("sft-new", adapter="file:///v1")

    ended("sft-old")
    here.collect(ALL, time.time() + AHEAD_S, come)
    assert find_artifact(here.store, model) is not None and here.report.num_withdrawn == 1
    here.collect(ALL, time.time())
    assert not [row for row in here.report.freed if row.what == "models"]


def _resume(here: Installation) -> str:
    """Ask for a run to be resumed, as the service does."""
    try:
        here.note(RunKeys(RUN).prefix, RUN)
    except BeingDeleted:
        return "waits"
    return "resumed" if here.store.head(RunKeys(RUN).is_expired) is None else "refused"


RUN = f"sft-{2:017d}"  # of `fill`: it failed two days ago


@pytest.mark.drawn
def test_a_run_that_is_resumed_at_any_moment_has_its_checkpoint_or_is_refused(make, tmp_path: Path) -> None:
    """Its workflow begins when the collection is over."""
    now, outcomes = time.time() + AHEAD_S, list[str]()
    undisturbed = make("alone")
    fill(undisturbed.store, undisturbed.database, 4, time.time())
    num_done = undisturbed.collect(NOTHING_LEFT, now)
    assert find_newest(undisturbed.store, RUN).checkpoint is None
    for number in drawn(list(range(num_done)), 16):
        here = make(str(number))
        fill(here.store, here.database, 4, time.time())
        ended = result_sha256(here.store, RUN)

        def come(done: int, here: Installation = here, number: int = number) -> None:
            if done == number:
                outcomes.append(_resume(here))

        here.collect(NOTHING_LEFT, now, come)
        if (outcome := outcomes[-1]) == "waits":  # as its client tries again
            outcome = _resume(here)
        if outcome == "resumed":
            host = HostContext(Settings(root=tmp_path / str(number), store_uri=here.store.uri))
            request = BeginRequest(run_id=RUN, start_id="ab", execution="e-2", resumed=True, goes_on_from=ended)
            assert RunRecords(host).begin(request).refusal is None
            here.collect(NOTHING_LEFT, now)
            checkpoint = find_newest(here.store, RUN).checkpoint
            assert checkpoint is not None and checkpoint.step == STEPS[-1], number
        else:
            assert (outcome, result_sha256(here.store, RUN)) == ("refused", ended), "its end stands"
        assert not damaged(here.store)
    assert not IS_DEEP or set(outcomes) == {"resumed", "waits", "refused"}


def test_beside_a_database_of_before_nothing_goes_that_runs_in_the_store_go_on_with(make) -> None:
    """It was restored from a backup: it says of one run that it has ended, which was resumed since, and has no row of
    another, which is newer.
    """
    now = time.time() + AHEAD_S
    here = make("restored")
    whole = make("whole")
    runs = fill(here.store, whole.database, 10, now)
    resumed, newer = runs[2], runs[4]
    for run in (resumed, newer):
        here.store.delete(RunKeys(run.run_id).result)
    known: list[Made] = [run for run in runs if run is not newer]
    here.database.write(lambda session: add_rows(session, known))
    before = sizes(here.store).keys()
    here.collect(NOTHING_LEFT, now)
    gone = before - sizes(here.store).keys()
    assert gone and not [key for key in gone if key.startswith((f"runs/{resumed.run_id}/", f"runs/{newer.run_id}/"))]
    assert not [key for key in gone if key.startswith(resumed.shared)]


POLICY = RetentionSettings(checkpoints_days=30, data_days=20, logs_days=10, samples_days=5, models_days=40)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ObjectStore, int]:
    """A store, and the number of runs for it: moto takes a hundred times as long as a folder."""
    if request.param == "file":
        return LocalStore(tmp_path), 300
    server: S3Server = request.getfixturevalue("s3_server")
    return S3Store(server.bucket, f"garbage-{tmp_path.name}", server.settings), 10


def test_of_many_runs_what_a_policy_lets_go_is_deleted_and_nothing_else(
    store: tuple[ObjectStore, int], database: Database
) -> None:
    """The rule is told here once more, run by run; and tenants' usage is what lies in the store, before and after."""
    kept, num_runs = store
    now = time.time() + AHEAD_S
    runs = fill(kept, database, num_runs, now)
    _, measured = collect(kept, database, RetentionSettings(), is_dry=False, now=now)
    before = sizes(kept)
    assert _by_tenant(measured) == {t: stored_by(before, t, runs) for t in TENANTS}

    dry, _ = collect(kept, database, POLICY, is_dry=True, now=now)
    # moto fails at a listing beside a deletion.
    at_once = 8 if isinstance(kept, LocalStore) else 1
    report, measured = collect(kept, database, POLICY, is_dry=False, now=now, at_once=at_once)
    assert report.num_withdrawn == 0
    assert (report.num_runs, report.num_going_on) == (num_runs, num_runs // 5)

    after = sizes(kept)
    gone = before.keys() - after.keys()
    assert gone == _expected(set(before), runs)
    assert gone and not damaged(kept)
    assert _told(report.freed) == _told(dry.freed)
    assert sum(row.num_bytes for row in report.freed) == sum(before[key] for key in gone)
    assert _by_tenant(measured) == {t: stored_by(after, t, runs) for t in TENANTS}
    shared = {unit for run in runs for unit in run.shared}
    used = set(database.read(lambda session: session.scalars(select(UseRow.unit)).all()))
    assert {unit for unit in shared if unit in used} == {unit for unit in shared if f"{unit}/manifest.json" in after}
    for run in runs[::37]:
        checkpoint = find_newest(kept, run.run_id).checkpoint
        assert checkpoint is not None and checkpoint.step == STEPS[-1]


def _told(freed: tuple[Freed, ...]) -> list[tuple[str, str, int, int]]:
    return [(row.what, row.tenant or "", row.num_objects, row.num_bytes) for row in freed]


def _by_tenant(measurement: Measurement) -> Counter[str]:
    found = Counter[str]()
    for each in measurement.stored:
        found[each.tenant] += each.num_bytes
    return found


def _expected(before: set[str], runs: list[Made]) -> set[str]:
    """The keys that POLICY lets go, by each run."""
    below: dict[str, set[str]] = defaultdict(set)
    for key in before:
        parts = key.split("/")
        below["/".join(parts[: 3 if parts[0] == "models" else 2])].add(key)
    gone, users = set[str](), defaultdict[str, list[Made]](list)
    for run in runs:
        for unit in run.shared:
            users[unit].append(run)
        if run.state in (None, "paused"):
            continue
        keys = RunKeys(run.run_id)
        own = below[keys.prefix]
        if run.days > 30:
            gone |= {k for k in own if k.startswith(f"{keys.checkpoints}/{FENCE}/step-{STEPS[0]:08d}/")}
        if run.days > 20:
            gone |= {k for k in own if k.startswith(f"{keys.prefix}/dataset/")}
        if run.days > 10:
            gone |= {k for k in own if k.startswith(f"{keys.logs}/")} - {keys.job("000001", Fence.from_label(FENCE))}
    # Every run here has checkpoints: of models those alone go that no run has.
    models = {run.model for run in runs}
    days = {"tokenized": 20, "packed": 20, "graded": 5}
    for place, found in below.items():
        kind = place.partition("/")[0]
        used = users[place]
        if kind in days and all(run.state not in (None, "paused") and run.days > days[kind] for run in used):
            gone |= found
        if kind == "models" and place not in models:
            gone |= found
    return gone
