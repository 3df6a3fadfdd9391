"""One service for the whole folder, runs of every kind and state on it, and one Chromium."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from longshore.views import FileEntry
from shared.settings import PriceSettings, Settings, WebhookSettings
from shared.storage import artifacts
from shared.storage.artifacts import Manifest, refer
from shared.storage.paths import RunKeys
from tests.page import measured
from tests.service.conftest import (
    Service,
    api,  # noqa: F401 - fixtures
    key_of_acme,
    polling,
    postgres_server,  # noqa: F401
    reaches,
    serving,
    settings_below,
    sft,
    started,
    theirs,  # noqa: F401
)
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS
from tests.waiting import wait_until
from tests.workflows.published import publish

if TYPE_CHECKING:
    from tests.page.guest import Browser, Guest

QWEN = "file:///models/Qwen3-0.6B"
_HERE = Path(__file__).parent
_shared = ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop all behind the last test of this folder: while Playwright lives, no other test's event loop runs."""
    if nextitem is None or not nextitem.path.is_relative_to(_HERE):
        _shared.close()


@pytest.fixture(scope="session")
def settings(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    found = settings_below(tmp_path_factory.mktemp("page"), temporal_address)
    webhooks = WebhookSettings(allow_private_addresses=True)
    return found.model_copy(update={"prices": PriceSettings(gpu_hour=2.5), "webhooks": webhooks})


@pytest.fixture(scope="session")
def service(settings: Settings) -> Iterator[Service]:
    with _shared:
        service = _shared.enter_context(serving(settings))
        _shared.enter_context(polling(settings))
        yield service


@pytest.fixture(scope="session")
def acme(service: Service) -> str:
    return key_of_acme(service)


@pytest.fixture(scope="session")
def browser(service: Service) -> Iterator["Browser"]:
    """Behind the service: Temporal's client needs an event loop of its own before it answers."""
    with _shared:
        from tests.page.guest import chromium

        yield _shared.enter_context(chromium())


@pytest.fixture(scope="session")
def trained(service: Service, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs of every kind and state, by what they are for."""

    def on_record(run_id: str) -> None:
        """A workflow says that it has ended a moment before."""
        wait_until(lambda: service.store.head(RunKeys(run_id).result), "its result is on record")

    with service.http() as client:
        runs = {
            "sft": started(client, seed=SUCCEEDS, name="harbour-chat", model=QWEN, steps=240),
            "failed": started(client, seed=FAILS, name="bad-rows", model=QWEN),
            "running": started(client, seed=WAITS, name="night-shift", model=QWEN),
            "evil": started(client, seed=SUCCEEDS, model=f"file:///models/{measured.XSS}"),
            "rl": client.post("/runs/rl", json={"model": QWEN, "name": "arithmetic"}).json()["run_id"],
        }
        for name in ("sft", "evil"):
            reaches(client, runs[name], "succeeded")
            on_record(runs[name])
        reaches(client, runs["failed"], "failed")
        on_record(runs["failed"])
        for name in ("sft", "evil"):
            measured.sft_course(service.store, runs[name])
        measured.finish(service.store, runs["sft"], tmp_path_factory.mktemp("adapter"))
        tokenizer = tiny_model / "tokenizer.json"
        entry = FileEntry(path="tokenizer.json", size=tokenizer.stat().st_size, sha256=artifacts.sha256_file(tokenizer))
        model = refer(service.store, "models/imported/tiny", Manifest(files=(entry,), root=tiny_model.as_uri()))
        asked = f"<|im_start|>user\nHow many crates? {measured.XSS}<|im_end|>\n<|im_start|>assistant\n"
        prompt, answer = (
            Tokenizer.from_file(str(tokenizer)).encode(text).ids for text in (asked, "42 crates.<|im_end|>")
        )
        measured.rl_course(service.store, runs["rl"], model, prompt, answer)
        client.post(f"/runs/{runs['rl']}/finish")
        reaches(client, runs["rl"], "succeeded")
        on_record(runs["rl"])
        times = {"started_at": measured.BEGAN, "ended_at": measured.BEGAN + 214, "gpu_seconds": 171.0}
        client.post("/keys", json={"title": f"nightly {measured.XSS}", "scopes": ["read", "write"]})
        client.post("/webhooks", json={"url": "http://127.0.0.1:9/told", "events": ["run.failed", "run.paused"]})
        client.post("/files", params={"name": "boarding-chats.jsonl"}, content=b'{"text": "a"}\n' * 2000)
        for _ in range(2):
            publish(service.store, tmp_path_factory.mktemp("published"), "harbour-chat", model)
        lost = {"trajectories": 32.0, "broken_trajectories": 3.0, "dropped_for_differs": 3.0}
        measured.ended_as(service.store, runs["rl"], step=30, num_steps=30, epoch=1, metrics=lost, **times)
    service.rebuild()
    return runs


@pytest.fixture(scope="session")
def sweeper(service: Service) -> str:
    """The key of a tenant that starts sweeps, so that their runs are in no list that other tests count."""
    with service.http() as client:
        made = client.post("/tenants", json={"tenant": "sweepers", "title": "Sweepers"})
        assert made.status_code == 201, made.text
        return made.json()["key"]["key"]


@pytest.fixture(scope="session")
def swept(service: Service, sweeper: str) -> dict[str, Any]:
    """A sweep of four trials that has ended, three of them with a metric."""
    run = {"kind": "sft", **sft(dataset={"uri": f"file:///data/tenants/acme/uploads/{'0d' * 32}/tide-tables.jsonl"})}
    body = {"name": "tides", "run": run, "metric": "loss", "sampler": "random", "trials": 4, "seed": 1}
    rates, ranks = {"choices": [0.001, 0.01]}, {"min": 4, "max": 64, "integer": True, "log": True}
    with service.http(sweeper) as client:
        answer = client.post("/sweeps", json=body | {"parameters": {"learning_rate": rates, "trainable.rank": ranks}})
        assert answer.status_code == 201, answer.text
        path = f"/sweeps/{answer.json()['sweep_id']}"
        wait_until(lambda: client.get(path).json()["state"] != "running", "the sweep's end")
        *measured_trials, other = client.get(path).json()["trials"]
        for trial in measured_trials:
            loss = 1 / trial["values"]["trainable.rank"] + trial["values"]["learning_rate"]
            measured.ended_as(service.store, trial["run_id"], metrics={"loss": loss})
        measured.ended_as(service.store, other["run_id"], metrics={})
        service.rebuild()
        return client.get(path).json()


@pytest.fixture
def guest(browser: "Browser", service: Service, trained: dict[str, str]) -> Iterator["Guest"]:
    """Signed in; whatever a test does, the browser must have had nothing to complain of, and have asked nobody else."""
    from tests.page.guest import Guest

    one = Guest(browser, service.url)
    yield one
    troubles = list(one.troubles)
    one.context.close()
    assert troubles == []
