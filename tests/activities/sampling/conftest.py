"""A sampler with a model, adapters and prompts, a proxy before it, and requests for samples."""

import dataclasses
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.exceptions import CancelledError
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.sampling.completions import Rows, SampledGroup, read_sampled_groups
from activities.sampling.sample import PolicySampleRequest, Sampled, SamplerActivities
from activities.sampling.samplers import Samplers
from activities.tokenizing.render_prompts import Prompts, PromptsRequest, RenderPrompts
from longshore.fields import Artifact
from shared.chat.completions import SamplerReady, Sampling
from shared.serving import ServedSampler
from shared.settings import SamplingSettings, Settings
from shared.storage.artifacts import seal, stage, upload_artifact
from shared.storage.store import LocalStore
from tests.megatron_worker.sampler_process import running, write_adapter


class SamplerProxy(ThreadingHTTPServer):
    """Passes every request on to `target`, and its answer back.

    Attributes:
        asked: path and body of every POST, in the order in which they came.
        answered: how many completions their clients were sent.
        hold_after: completions beyond this number are kept back until `released` is set.
        said: changes the answer to a completion.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passed)
        self.target = httpx.Client(base_url=target, timeout=300, trust_env=False)
        self.lock = threading.Lock()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answered = 0
        self.hold_after = 1 << 62
        self.released = threading.Event()
        self.said: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def prompts(self) -> list[tuple[int, ...]]:
        """The prompts of all completions that were asked for."""
        return [tuple(body["prompt"]) for path, body in self.asked if path == "/v1/completions"]


class _Passed(BaseHTTPRequestHandler):
    server: SamplerProxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.asked.append((self.path, json.loads(body)))
        self._pass_on(body)

    def _pass_on(self, body: bytes) -> None:
        headers = {"Authorization": self.headers.get("Authorization", "")}
        answer = self.server.target.request(self.command, self.path, content=body, headers=headers)
        if self.path == "/v1/completions":
            with self.server.lock:
                self.server.answered += 1
                is_held = self.server.answered > self.server.hold_after
            if is_held:
                self.server.released.wait(300)
        content = answer.content
        if self.server.said is not None and self.path == "/v1/completions":
            content = json.dumps(self.server.said(json.loads(body), answer.json())).encode()
        try:
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True  # the client has left

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def proxy_of(target: str) -> Iterator[SamplerProxy]:
    server = SamplerProxy(target)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
        server.target.close()


NUM_PROMPTS, GROUP_SIZE = 12, 4
GRADER = {
    "type": "string_check",
    "name": "has",
    "operation": "like",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.letter }}",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """A model, adapters of it, and prompts, as artifacts; and a sampler that serves the model."""

    model: Artifact
    adapters: tuple[Artifact, ...]
    dataset: Artifact
    sampler: SamplerReady


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("sampling")
    store = LocalStore(folder / "given")
    adapters = []
    for seed in (1, 2, 3):
        seal(write_adapter(folder / f"adapter-{seed}", tiny_model, seed, ("q_proj", "v_proj", "down_proj")))
        adapters.append(upload_artifact(store, f"adapters/{seed}", folder / f"adapter-{seed}"))
    (folder / "rows").mkdir()
    rows = [
        {"messages": [{"role": "user", "content": f"How many crates, {i}?"}], "letter": "aeinrt"[i % 6]}
        for i in range(NUM_PROMPTS)
    ]
    (folder / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seal(folder / "rows")
    shutil.copytree(tiny_model, folder / "model")
    seal(folder / "model")
    options = ("--logprobs-mode", "processed_logprobs", "--max-model-len", "256")
    with running(tiny_model, folder, *options) as sampler:
        yield Place(
            upload_artifact(store, "model", folder / "model"),
            tuple(adapters),
            upload_artifact(store, "dataset", folder / "rows"),
            sampler,
        )


def settings_of(root: Path, place: Place, url: str | None = None) -> Settings:
    return Settings(root=root, sampling=SamplingSettings(url=url or place.sampler.url, api_key=place.sampler.api_key))


def rendered(settings: Settings, place: Place) -> Prompts:
    request = PromptsRequest(
        dataset=place.dataset, source={"uri": "file:///rows"}, model=place.model, max_prompt_tokens=200
    )
    found: Prompts = ActivityEnvironment().run(RenderPrompts(HostContext(settings)).render_prompts, request)
    return found


def request_of(place: Place, rendered: Prompts, /, **changes: Any) -> PolicySampleRequest:
    return PolicySampleRequest.model_validate(
        {
            "run_id": "r1",
            "model": place.model,
            "prompts": rendered.prompts,
            "rows": Rows(count=NUM_PROMPTS, seed=5),
            "group_size": GROUP_SIZE,
            "sampling": Sampling(temperature=1.3, max_tokens=24, stop=("q",)),
            "seed": 11,
            "adapter": place.adapters[0],
            "policy_version": 3,
            "place": ServedSampler(),
        }
        | changes
    )


def sampled(
    settings: Settings, request: PolicySampleRequest, environment: ActivityEnvironment | None = None
) -> Sampled:
    found: Sampled = (environment or ActivityEnvironment()).run(
        SamplerActivities(HostContext(settings), Samplers(settings)).sample, request
    )
    return found


def cancelled_when(is_ready: Callable[[], bool], play: Callable[[ActivityEnvironment], object]) -> None:
    """Play in an activity, and cancel it as soon as that is true. It ends soon, though its sampler says nothing."""
    environment, ended = ActivityEnvironment(), list[BaseException]()

    def attempt() -> None:
        try:
            play(environment)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    while not is_ready():
        assert thread.is_alive(), ended
        thread.join(0.02)
    environment.cancel()
    thread.join(60)
    assert not thread.is_alive(), "it waits for answers that nobody wants"
    assert isinstance(ended[0], CancelledError)


def groups_in(settings: Settings, found: Sampled) -> list[SampledGroup]:
    return list(read_sampled_groups(stage(found.completions, settings.root_path / "cache", settings.s3)))
