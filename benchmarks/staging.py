"""Fetching a model from S3 to a worker: seconds, CPU seconds and memory.

    python -m benchmarks.staging --rclone PROGRAM [--gigabytes 1] [--mb-a-second 40] [--out FILE.json]

`rclone serve s3` serves each request at `--mb-a-second`, like the connection limits of real stores, or without a limit
(0). Each way of fetching runs in a separate process:

    ranges n     what hosts do (shared/storage/artifacts.py): n ranges at a time, hashed as they arrive
    boto3        its `download_file` of the same file, and two readings of it for its hash: what hosts did before

`memory` is the growth of peak private memory (RssAnon) in MB; it excludes pages of files, which the kernel may drop.
`read` is the same for an engine that reads the fetched weights in float32, and includes the engine's copy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cold_start import Place, s3_of, sized_model
from benchmarks.machine import field, provenance, tell

WAYS = ("ranges 1", "ranges 8", "boto3", "read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rclone", required=True)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--mb-a-second", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way is not None:
        print(json.dumps(_measured(given.way, given.model, given.endpoint)))
        return
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        models = Path(name) / "models"
        models.mkdir()
        model = sized_model(models / "sized", given.gigabytes)
        limit = ["--bwlimit-file", f"{given.mb_a_second}M"] if given.mb_a_second else []
        place = s3_of(stack, models, given.rclone, *limit)
        found = {way: _in_a_process(way, model, place) for way in WAYS}
    told = {"what": "a model from S3 to a worker", "mb_a_second_of_a_connection": given.mb_a_second, "ways": found}
    tell(told | provenance(), given.out)


def _in_a_process(way: str, model: Path, place: Place) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.staging", "--rclone", "-", "--way", way, "--model", str(model)]
    environment = {**os.environ, **place.settings}
    done = subprocess.run(
        [*command, "--endpoint", str(place.endpoint)], stdout=subprocess.PIPE, check=True, env=environment
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(way, found, file=sys.stderr, flush=True)
    return found


def _measured(way: str, model: Path, endpoint: str) -> dict[str, float]:
    weights = next(model.glob("*.safetensors"))
    with tempfile.TemporaryDirectory(dir=model.parent.parent) as scratch:
        act = _prepared(way, model, weights, endpoint, Path(scratch) / "copy")
        before, most, ended = _private_mb(), [0.0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.005):
                most[0] = max(most[0], _private_mb())

        watching = threading.Thread(target=watch)
        watching.start()
        began, used = time.perf_counter(), time.process_time()
        act()
        told = {"seconds": time.perf_counter() - began, "processor_s": time.process_time() - used}
        ended.set()
        watching.join()
    told |= {"memory": most[0] - before, "weights_mb": weights.stat().st_size / 1e6}
    return {name: round(value, 2) for name, value in told.items()}


def _prepared(way: str, model: Path, weights: Path, endpoint: str, copy: Path) -> Callable[[], object]:
    """Return a way of fetching, with all that it needs imported and connected."""
    from shared.settings import S3Settings
    from shared.storage.artifacts import Fetched, fetch, open_store, sha256_file
    from shared.storage.files import go_on

    if way == "read":
        import torch

        from longshore.training import Layout
        from megatron_worker.megatron.engine import MegatronEngine

        torch.ones(2, 2) @ torch.ones(2, 2)
        return lambda: MegatronEngine(model, Layout(), "float32")
    store = open_store(f"s3://{model.parent.name}/{model.name}", S3Settings(endpoint_url=endpoint))
    assert store.head(weights.name) is not None
    if way == "boto3":

        def by_boto3() -> None:
            store.get_file(weights.name, copy)
            assert sha256_file(copy) == sha256_file(copy)

        return by_boto3
    size, number = weights.stat().st_size, int(way.removeprefix("ranges "))
    return lambda: list(fetch(store, [Fetched(weights.name, size, copy)], number, go_on))


def _private_mb() -> float:
    return int(field("/proc/self/status", "RssAnon").removesuffix("kB")) / 1000


if __name__ == "__main__":
    main()
