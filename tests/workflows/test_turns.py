"""Many runs at once: those that are further go first, so that the first ones end long before the last is prepared."""

import asyncio
import time
from pathlib import Path
from typing import Any

from temporalio import activity

from activities.packing.pack import Packed, PackRequest
from activities.sources.download import Downloaded, DownloadRequest
from activities.tokenizing.tokenize import Tokenized, TokenizeRequest
from shared.storage.store import ObjectStore
from tests.waiting import eventually
from tests.workflows.stack import started
from tests.workflows.stand_in_activities import StandInData

NUM_RUNS = 110  # a control host does 32 such activities at once
_WORK_S = 0.4


class Noted(StandInData):
    """Data activities that take a moment each, and note when they begin."""

    def __init__(self, store: ObjectStore, scratch: Path) -> None:
        super().__init__(store, scratch)
        self.begun: list[str] = []

    def _work(self, name: str) -> None:
        self.begun.append(name)
        time.sleep(_WORK_S)

    @activity.defn(name="download")
    def download(self, request: DownloadRequest) -> Downloaded:
        self._work("download")
        return super().download(request)

    @activity.defn(name="tokenize")
    def tokenize(self, request: TokenizeRequest) -> Tokenized:
        self._work("tokenize")
        return super().tokenize(request)

    @activity.defn(name="pack")
    def pack(self, request: PackRequest) -> Packed:
        self._work("pack")
        return super().pack(request)


async def test_runs_that_are_further_go_first(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path, has_control=False) as stack:
        stack.data = noted = Noted(stack.store, tmp_path / "noted")
        starting = (stack.start(is_tracked=False) for _ in range(NUM_RUNS))
        handles: list[Any] = await asyncio.gather(*starting)
        async with stack.control_host():
            await eventually(lambda: noted.begun.count("pack") == NUM_RUNS, "all are prepared", timeout_s=120)
            await asyncio.gather(*(handle.terminate() for handle in handles))
    before = noted.begun[: noted.begun.index("pack")]
    # Without turns nearly all are downloaded before any is packed.
    assert before.count("download") < NUM_RUNS * 0.9, noted.begun
    last_download = len(noted.begun) - 1 - noted.begun[::-1].index("download")
    assert noted.begun[:last_download].count("pack") > 10, noted.begun
