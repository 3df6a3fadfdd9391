"""Cost of a garbage collection: seconds, requests and bytes, for many runs on a file store and on S3.

    python -m benchmarks.retention [--runs 1000] [--store file|s3|both] [--out FILE.json]

Fills a store with records, checkpoints, logs and shared data of `--runs` runs of two tenants (the store of the tests),
and collects three times: to measure usage only, as a dry run, and to delete objects that policies of 5 to 30 days
expire. S3 is moto's server in a thread of this process.
"""

import argparse
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance, tell
from longshore.automation import GarbageReport
from service.automation.retention import collect
from service.database import engine
from service.database.engine import Database
from shared.settings import RetentionSettings, S3Settings
from shared.storage.store import LocalStore, ObjectInfo, ObjectStore, S3Store
from tests.service.retention.stored_runs import DAY_S, fill

POLICY = RetentionSettings(checkpoints_days=30, data_days=20, logs_days=10, samples_days=5, models_days=40)
_LISTED_AT_ONCE = 1000  # objects that S3 lists in one response


class Counted:
    """A store that counts its requests, as S3 would bill them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.requests = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method) or name == "list":
            return method

        def counted(*arguments: Any) -> Any:
            self.requests[name] += 1
            return method(*arguments)

        return counted

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.requests["list"] += 1
        for number, info in enumerate(self._store.list(prefix), 1):
            self.requests["list"] += number % _LISTED_AT_ONCE == 0
            yield info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--store", choices=("file", "s3", "both"), default="both")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stores = {"file": _file_store, "s3": _s3_store}
    wanted = stores if options.store == "both" else {options.store: stores[options.store]}
    result: dict[str, Any] = {"what": "a collection of garbage", "runs": options.runs}
    for name, opened in wanted.items():
        with opened() as store:
            result[name] = _measured(store, options.runs)
    tell(result | provenance(), options.out)


def _measured(store: ObjectStore, num_runs: int) -> dict[str, Any]:
    now, is_file = time.time() + 100 * DAY_S, isinstance(store, LocalStore)
    database = Database(f"sqlite:///{tempfile.mkdtemp()}/rows.db")
    engine.upgrade(database)
    fill(store, database, num_runs, now)
    parts: dict[str, Callable[[ObjectStore], GarbageReport]] = {
        "measure": lambda store: collect(store, database, RetentionSettings(), is_dry=False, now=now)[0],
        "dry run": lambda store: collect(store, database, POLICY, is_dry=True, now=now)[0],
        # moto fails at a listing during a deletion.
        "delete": lambda store: collect(store, database, POLICY, is_dry=False, now=now, at_once=8 if is_file else 1)[0],
    }
    found: dict[str, Any] = {"objects": sum(1 for _ in store.list(""))}
    for name, part in parts.items():
        counted = Counted(store)
        began = time.perf_counter()
        report = part(counted)
        found[name] = {
            "seconds": round(time.perf_counter() - began, 2),
            "requests": dict(counted.requests),
            "objects": sum(row.num_objects for row in report.freed),
            "bytes": sum(row.num_bytes for row in report.freed),
        }
    return found


@contextmanager
def _file_store() -> Iterator[ObjectStore]:
    with tempfile.TemporaryDirectory() as folder:
        yield LocalStore(Path(folder))


@contextmanager
def _s3_store() -> Iterator[ObjectStore]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    import boto3
    from moto.server import ThreadedMotoServer

    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test-secret", AWS_DEFAULT_REGION="us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint_url = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint_url).create_bucket(Bucket="longshore")
    try:
        yield S3Store("longshore", "garbage", S3Settings(endpoint_url=endpoint_url, region="us-east-1"))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
