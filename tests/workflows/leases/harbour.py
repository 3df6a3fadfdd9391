"""A store in which two names have versions beside one model, hosts that answer questions to them, and a question."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.client import Client

from longshore.fields import Artifact
from service.accounts.limits import FairShare
from service.accounts.tenants import Documents, Quotas
from service.database import engine
from service.database.engine import open_database
from service.host import serve_host
from service.host_http.connections import HostClients
from service.inference.art_models import ArtModel, ArtModels, UntrainedModels
from service.inference.published_models import PublishedModels
from service.inference.questions import Inference
from service.temporal import Temporal, connect_temporal
from shared.chat.completions import SamplerReady
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.settings import ServingSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import HostPaths
from shared.storage.store import ObjectStore, open_store
from tests.megatron_worker.sampler_process import write_adapter
from tests.workflows.published import publish
from tests.workflows.rows import recording

IDLE_S = 4.0
NUM_TOKENS = 24
MESSAGES = [
    {"role": "system", "content": "You count crates."},
    {"role": "user", "content": [{"type": "text", "text": "How many crates "}, {"type": "text", "text": "are there?"}]},
]
TARGETS = ("q_proj", "v_proj", "down_proj")


@dataclass(frozen=True)
class Harbour:
    """A store in which `north` has two versions and `south` one, all beside one model, and a stack to ask them."""

    settings: Settings
    store: ObjectStore
    model: Path
    artifact: Artifact
    adapters: dict[str, Path]
    client: Client

    def inference(self, **changes: Any) -> Inference:
        settings = self.settings.model_copy(update=changes)
        published, temporal = PublishedModels(self.store), Temporal(settings)
        database = open_database(settings)
        engine.upgrade(database)
        quotas = Quotas(settings.quotas, self.store, database)
        untrained = UntrainedModels(settings, temporal, self.store, quotas)
        models = ArtModels(self.store, Documents(database, quotas, "model", ArtModel), published, untrained)
        questions, hosts = FairShare("questions", 16, 10), HostClients(settings, settings.heartbeat_timeout_s)
        return Inference(settings, self.store, published, models, untrained, temporal, questions, hosts)

    def samplers(self) -> list[str]:
        """The ids of sampler processes."""
        return [folder.name for folder in HostPaths(self.settings.root_path).workers.glob("*")]

    def ready(self) -> SamplerReady:
        [sampler] = self.samplers()
        file = HostPaths(self.settings.root_path).worker(sampler).ready
        return SamplerReady.model_validate_json(file.read_bytes())


def settings_of(root: Path, temporal_address: str) -> Settings:
    name = f"s-{uuid.uuid4().hex[:6]}"
    return Settings(
        root=root,
        temporal_address=temporal_address,
        shape=name,
        control_queue=f"control-{name}",
        cpu_threads=1,
        worker_idle_s=0,
        heartbeat_timeout_s=10,
        serving=ServingSettings(idle_s=IDLE_S, patience_s=150, max_model_len=2048, slots=4),
    )


@asynccontextmanager
async def started(temporal_address: str, model: Path, folder: Path) -> AsyncIterator[Harbour]:
    """Hosts of a shape of their own, in this process; samplers are processes."""
    settings = settings_of(folder / "root", temporal_address)
    store = open_store(settings.store, settings.s3)
    shutil.copytree(model, folder / "tiny")
    seal(folder / "tiny")
    artifact = upload_artifact(open_store((folder / "given").as_uri(), settings.s3), "tiny", folder / "tiny")
    adapters = {
        id: write_adapter(folder / id, model, seed, TARGETS) for seed, id in enumerate(["north:v1", "north", "south"])
    }
    assert [publish(store, path, id.partition(":")[0], artifact) for id, path in adapters.items()] == [1, 2, 1]
    stopped = asyncio.Event()
    hosts = [asyncio.create_task(serve_host(role, settings, stopped)) for role in ("control", "sampler")]
    client = await connect_temporal(settings)
    async with recording(client, settings):
        try:
            yield Harbour(settings, store, model, artifact, adapters, client)
        finally:
            stopped.set()
            await asyncio.gather(*hosts)


async def there_is(look: Any, is_enough: Any = bool, timeout_s: float = 300) -> Any:
    """Poll until what is seen is enough."""
    for _ in range(int(timeout_s / 0.05)):
        seen = look()
        if asyncio.iscoroutine(seen):
            seen = await seen
        if is_enough(seen):
            return seen
        await asyncio.sleep(0.05)
    raise TimeoutError(f"not within {timeout_s} s: {seen}")


def greedy(model: str, **changes: Any) -> ChatRequest:
    fields = {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return ChatRequest(model=model, **fields | changes)


def said(answer: ChatCompletion) -> str:
    [choice] = answer.choices
    return choice.message.content
