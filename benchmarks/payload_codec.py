"""Cost of a payload's encryption: microseconds to seal and to open one.

    python -m benchmarks.payload_codec [--seconds 0.5] [--out FILE]

Payloads have the sizes that go through Temporal: a signal, an activity's request, a run's request. Figures are medians
of repeated batches in CPU time, with a new activity context each time, as in the SDK. Prints JSON.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.converter import ActivitySerializationContext

from benchmarks.machine import provenance, tell
from service.sealing import Sealing, SealKeys
from shared.settings import Settings

SIZES = {"signal": 200, "request of an activity": 2_000, "request of a run": 20_000}
CONTEXT = ActivitySerializationContext(
    "default", "1", "run_job", "control", "sft-019a5c1b2f3000000", "SFTWorkflow", False
)
_BATCH = 200


async def _us(codec: Sealing, does: str, payload: Payload, seconds: float) -> float:
    """Return the median microseconds of one call of a codec's method, over batches."""
    found: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(found) < 3:
        begin = time.process_time()
        for _ in range(_BATCH):
            await getattr(codec.with_context(CONTEXT), does)([payload])
        found.append((time.process_time() - begin) / _BATCH * 1e6)
    return round(statistics.median(found), 1)


async def _measure(seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        keys = SealKeys.of(Settings(root=Path(root)))
        ours = Sealing(keys)
        for name, size in SIZES.items():
            plain = Payload(metadata={"encoding": b"json/plain"}, data=json.dumps("x" * (size - 2)).encode())
            [sealed] = await ours.with_context(CONTEXT).encode([plain])
            result[name] = {
                "bytes": plain.ByteSize(),
                "sealed_bytes": sealed.ByteSize(),
                "seal_us": await _us(ours, "encode", plain, seconds),
                "open_us": await _us(ours, "decode", sealed, seconds),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--out", type=Path, help="a file for the JSON")
    given = parser.parse_args()
    tell({"payloads": asyncio.run(_measure(given.seconds)), **provenance()}, given.out)


if __name__ == "__main__":
    main()
