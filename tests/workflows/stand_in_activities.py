"""The data activities' places, filled by quick ones of the same names and types, for tests of what comes after them."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from temporalio import activity

from activities.sources.download import Downloaded, DownloadRequest
from activities.tokenizing.tokenize import Tokenized, TokenizeRequest
from activities.tokenizing.units import Packed, PackRequest
from activities.tracking.track import Tracked, TrackRequest
from longshore.fields import Artifact
from shared.errors import InvalidInput
from shared.models.shape import ModelShape
from shared.runs.start import ModelRequest, ResolvedModel
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore, uri_of
from tests.workflows.stand_in import artifact

SHAPE = ModelShape(
    family="qwen3", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=128, vocab_size=512
)


class StandInData:
    """Every dataset is one small artifact. One whose URI holds `bad` cannot be tokenized."""

    def __init__(self, store: ObjectStore, scratch: Path) -> None:
        self._store = store
        self._any = artifact(store, scratch, "any", x_json="{}")
        store.put_bytes("report.json", b'{"num_rows": 3}')
        self.num_tokenize_calls = 0
        self.models_asked_for: list[ModelRequest] = []

    @property
    def all(self) -> list[Callable]:
        return [self.resolve_model, self.download, self.tokenize, self.pack, self.track]

    @activity.defn(name="resolve_model")
    def resolve_model(self, request: ModelRequest) -> ResolvedModel:
        self.models_asked_for.append(request)
        return ResolvedModel(model=self._any, shape=SHAPE)

    @activity.defn(name="download")
    def download(self, request: DownloadRequest) -> Downloaded:
        notices = ("validation.jsonl was left",) if "hub" in request.source.uri else ()
        dataset = Artifact(uri=request.source.uri, sha256="0" * 64)
        return Downloaded(dataset=dataset, num_files=1, num_bytes=1, notices=notices)

    @activity.defn(name="tokenize")
    def tokenize(self, request: TokenizeRequest) -> Tokenized:
        self.num_tokenize_calls += 1
        if "bad" in request.dataset.uri:
            raise InvalidInput("the last message must be the assistant's", "rows.jsonl:3")
        report_uri = uri_of(self._store, "report.json")
        return Tokenized(units=self._any, report_uri=report_uri, num_units=3, num_tokens=9, num_targets=6)

    @activity.defn(name="pack")
    def pack(self, request: PackRequest) -> Packed:
        return Packed(plan=self._any, num_steps=request.steps or 1, num_bins=1, packing_efficiency=1.0)

    @activity.defn(name="track")
    async def track(self, request: TrackRequest) -> Tracked:
        """Follows the run to its result, as the real one does, and takes a moment more."""
        result = RunKeys(request.run_id).result
        while await asyncio.to_thread(self._store.head, result) is None and not activity.is_worker_shutdown():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(activity.wait_for_worker_shutdown(), 1.0)
        return Tracked()
