"""What a collection deletes of a store of many runs, and what it leaves; the bytes that tenants are told."""

import time
from collections import defaultdict
from pathlib import Path

import pytest

from activities.records.run_records import find_newest
from activities.retention import collect
from shared.automation import Freed
from shared.limits import RetentionSettings
from shared.storage.paths import Fence, RunKeys
from shared.storage.store import LocalStore, ObjectStore, S3Store
from shared.storage.stored_bytes import Ledger
from tests.activities.retention.stored_runs import (
    DAY_S,
    FENCE,
    STEPS,
    TENANTS,
    Made,
    damaged,
    fill,
    sizes,
    stored_by,
)
from tests.conftest import S3Server

POLICY = RetentionSettings(checkpoints_days=30, data_days=20, logs_days=10, samples_days=5, models_days=40)
AHEAD_S = 100 * DAY_S  # days are counted from then, so that all objects are old


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ObjectStore, int]:
    """A store, and the number of runs for it: moto takes a hundred times as long as a folder."""
    if request.param == "file":
        return LocalStore(tmp_path), 1000
    server: S3Server = request.getfixturevalue("s3_server")
    return S3Store(server.bucket, f"garbage-{tmp_path.name}", server.settings), 10


def test_of_many_runs_what_a_policy_lets_go_is_deleted_and_nothing_else(store: tuple[ObjectStore, int]) -> None:
    """The rule is told here once more, run by run; and tenants' usage is what lies in the store, before and after."""
    kept, num_runs = store
    now = time.time() + AHEAD_S
    runs = fill(kept, num_runs, now)
    collect(kept, RetentionSettings(), is_dry=False, now=now)
    before = sizes(kept)
    assert {t: Ledger(kept, t).count().num_bytes for t in TENANTS} == {t: stored_by(before, t, runs) for t in TENANTS}

    dry = collect(kept, POLICY, is_dry=True, now=now)
    # moto fails at a listing beside a deletion.
    at_once = 8 if isinstance(kept, LocalStore) else 1
    report = collect(kept, POLICY, is_dry=False, now=now, at_once=at_once)
    assert report.num_withdrawn == 0
    assert (report.num_runs, report.num_going_on) == (num_runs, num_runs // 5)

    after = sizes(kept)
    gone = _without_marks(before) - _without_marks(after)
    assert gone == _expected(set(before), runs)
    assert gone and not damaged(kept)
    assert _told(report.freed) == _told(dry.freed)
    assert sum(row.num_bytes for row in report.freed) == sum(before[key] for key in gone if _is_told(key))
    assert {t: Ledger(kept, t).count().num_bytes for t in TENANTS} == {t: stored_by(after, t, runs) for t in TENANTS}
    for run in runs[::37]:
        checkpoint = find_newest(kept, run.run_id).checkpoint
        assert checkpoint is not None and checkpoint.step == STEPS[-1]


def _told(freed: tuple[Freed, ...]) -> list[tuple[str, str, int, int]]:
    return [(row.what, row.tenant or "", row.num_objects, row.num_bytes) for row in freed]


def _without_marks(found: dict[str, int]) -> set[str]:
    return {key for key in found if not key.startswith(("uses/", "records/measured/"))}


def _is_told(key: str) -> bool:
    return not key.startswith("records/brought/")


def _expected(before: set[str], runs: list[Made]) -> set[str]:
    """The keys that POLICY lets go, by each run."""
    below: dict[str, set[str]] = defaultdict(set)
    for key in before:
        parts = key.split("/")
        below["/".join(parts[: {"records": 4, "models": 3}.get(parts[0], 2)])].add(key)
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
            gone |= below[f"records/brought/{run.tenant}/{run.run_id}"]
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
