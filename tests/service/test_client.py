"""The public client: every route has a method, and what the methods do on a service, for both clients alike."""

import asyncio
import inspect
import json
import re
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import longshore
from longshore import (
    AsyncClient,
    Client,
    Conflict,
    Invalid,
    KeyRequest,
    NotFound,
    SFTRun,
    TooMany,
    Unauthorized,
    Unreachable,
    WebhookChange,
    WebhookChoice,
)
from longshore.client import Group, ServiceError
from service.app import create_app
from shared.settings import Settings
from tests.served import ANY_PORT, Quiet, served
from tests.service.conftest import KEY, Service
from tests.service.stand_in import WAITS

# The parameters of methods, by name; other texts are "x", other numbers 1.
SFT = {"model": "org/model", "dataset": {"uri": "s3://b/rows.jsonl"}, "steps": 1, "batch_size": 1}
GRADER = {"type": "string_check", "name": "n", "operation": "eq", "input": "{{ sample.output_text }}", "reference": "x"}
RUN = SFTRun.model_validate(SFT)
BODIES: dict[str, Any] = {
    "EpisodeRequest": {"model": "m"},
    "Sweep": {"name": "s", "run": SFT | {"kind": "sft"}, "sampler": "grid", "parameters": {"seed": {"choices": [1]}}},
    "ScheduledRun": {"name": "s", "run": SFT | {"kind": "sft"}, "every_s": 3600},
    "PreviewRequest": {"model_uri": "org/model", "source": {"uri": "s3://b/rows.jsonl"}, "num_rows": 0},
    "SessionRun": {"model": "org/model"},
    "WebhookChoice": {"url": "https://example.org/hook"},
    "Backfill": {"begin": 1, "end": 2},
    "TenantRequest": {"tenant": "t"},
    "Export": {"format": "merged"},
}
BODIES["Sweep"]["run"] |= {"eval_dataset": {"uri": "s3://b/held-out.jsonl"}}
SAME_AS_RUNS = [f"/api/v1/runs/{kind}" for kind in ("sft", "dpo", "distill", "reward", "rl")]


class Refusing(Quiet):
    """Answers as `answers` says, in order, else with 404; and keeps what was asked."""

    asked: list[tuple[str, str]]
    answers: list[tuple[int, dict[str, str], Any]]

    def refuse(self) -> None:
        self.body()
        self.asked.append((self.command, self.path.partition("?")[0]))
        error = {"error": {"message": "no such thing", "place": None}}
        status, headers, body = self.answers.pop(0) if self.answers else (404, {}, error)
        self.answer(status, json.dumps(body).encode(), headers)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = refuse


@pytest.fixture
def refusing() -> Iterator[tuple[str, type[Refusing]]]:
    handler = type("Handler", (Refusing,), {"asked": [], "answers": []})
    with served(ThreadingHTTPServer(ANY_PORT, handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}", handler


def groups_of(client: Any) -> Iterator[tuple[Any, str]]:
    """The client's public methods, with those of its groups, that are made of coroutines."""
    for group in (client, *(each for each in vars(client).values() if isinstance(each, Group) and each is not client)):
        for name, found in inspect.getmembers(type(group)):
            if hasattr(found, "function") and not name.startswith("_"):
                yield group, name


def arguments_of(function: Any, tmp_path: Path) -> list[Any]:
    """Arguments for the parameters that a method cannot do without."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    return [value_of(each, tmp_path) for each in parameters if each.default is inspect.Parameter.empty]


def value_of(parameter: inspect.Parameter, tmp_path: Path) -> Any:
    kind = parameter.annotation
    if parameter.name == "path":
        return tmp_path / "rows.jsonl"
    if parameter.name in ("into", "file"):
        return str(tmp_path / "into")
    if parameter.name == "grader":
        return longshore.grading.StringCheckGrader.model_validate(GRADER)
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return kind.model_validate(BODIES.get(kind.__name__, {}))
    if parameter.name == "run":
        return RUN
    return 1 if kind is int else {} if kind == dict[str, Any] else ["x"] if "Sequence" in str(kind) else "x"


def test_every_route_has_a_method(refusing: tuple[str, type[Refusing]], tmp_path: Path) -> None:
    url, handler = refusing
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with Client(url, "ls-key") as client:
        for group, name in groups_of(client):
            function = getattr(type(group), name).function
            if name in ("call", "chat"):
                continue
            with pytest.raises(ServiceError):
                found = getattr(group, name)(*arguments_of(function, tmp_path))
                list(found) if inspect.isgenerator(found) else None
        with pytest.raises(NotFound):
            client.sessions.send("x", 1, longshore.commands.SaveState()).result()
        for method in (client.models.download, client.models.save_archive):
            with pytest.raises(NotFound):
                method("x", tmp_path / "into", "merged")
    described = create_app(Settings(root=tmp_path / "root", api_key=KEY, temporal_codec=True)).openapi()["paths"]
    wanted = {
        (method.upper(), path)
        for path, methods in described.items()
        for method in methods
        if path.startswith("/api/v1") and path not in SAME_AS_RUNS
    }
    missing = {
        (method, path)
        for method, path in wanted
        if not any(
            method == asked and re.fullmatch(re.sub(r"\{[^}]*\}", ".+" if "{path}" in path else "[^/]+", path), at)
            for asked, at in handler.asked
        )
    }
    assert not missing, "give `longshore.Client` a method for them"


def test_both_clients_have_the_same_methods() -> None:
    ours, others = Client("http://127.0.0.1:1", "k"), AsyncClient("http://127.0.0.1:1", "k")
    names = [[(type(group).__name__, name) for group, name in groups_of(each)] for each in (ours, others)]
    of_groups = [[pair for pair in found if not pair[0].endswith("Client")] for found in names]
    assert of_groups[0] == of_groups[1] and len(of_groups[0]) > 60
    assert all(name in dir(longshore) or getattr(longshore, name) for name in longshore.__all__)


def test_what_passes_is_asked_again_and_what_does_not_is_told(refusing: tuple[str, type[Refusing]]) -> None:
    url, handler = refusing
    error = {"error": {"message": "the rule", "place": "the.field"}}
    with Client(url, "k", patience_s=30) as client:
        handler.answers = [(503, {}, error), (429, {"retry-after": "1"}, error), (200, {}, [])]
        assert client.models.list() == () and len(handler.asked) == 3
        for status, kind in ((401, Unauthorized), (404, NotFound), (409, Conflict), (422, Invalid)):
            handler.answers = [(status, {}, error)]
            with pytest.raises(kind, match=r"the\.field: the rule") as caught:
                client.models.list()
            assert (caught.value.status, caught.value.place, caught.value.rule) == (status, "the.field", "the rule")
        handler.answers = [(429, {"x-should-retry": "false"}, error)]
        with pytest.raises(TooMany) as quota:
            client.models.list()
        assert quota.value.is_quota
        handler.answers, handler.asked[:] = [(503, {}, error)], []
        with pytest.raises(Unreachable):  # it may have been done
            client.runs.cancel("sft-1")
        assert len(handler.asked) == 1
    with Client("http://127.0.0.1:1", "k", patience_s=0) as client, pytest.raises(Unreachable):
        client.whoami()


def test_runs_files_and_the_rest_by_both_clients(service: Service, tmp_path: Path) -> None:
    rows = tmp_path / "train set.jsonl"
    rows.write_text('{"text": "one"}\n')
    said: list[str] = []
    with Client(service.url, KEY) as client:
        file = client.files.upload(rows)
        assert client.files.get(file.file_id) == file and file in client.files.list().files
        assert client.files.download(file.file_id, tmp_path / "copy").read_bytes() == rows.read_bytes()
        run = SFTRun.model_validate(SFT | {"dataset": {"uri": file.uri}, "steps": 4})
        first = client.runs.submit(run, "one key")
        assert client.runs.submit(run, "one key").run_id == first.run_id
        view = client.runs.wait(first.run_id, progress=lambda view: said.append(view.state))
        assert (view.state, said[-1]) == ("succeeded", "succeeded")
        assert list(client.runs.follow(first.run_id)) == list(client.runs.events(first.run_id).events)
        assert list(client.runs.logs(first.run_id))[-1] == "the run succeeded"
        assert first.run_id in [each.run_id for each in client.runs.list(5).runs]
        waits = client.runs.submit(run.model_copy(update={"seed": WAITS}))
        with pytest.raises(TimeoutError):
            client.runs.wait(waits.run_id, timeout_s=0.1)
        client.runs.cancel(waits.run_id)
        key = client.keys.create(KeyRequest(title="mine", scopes=frozenset(("read",))))
        assert client.keys.revoke(key.key_id).revoked_at
        hook = client.webhooks.create(WebhookChoice(url="https://example.org/hook"))
        assert not client.webhooks.change(hook.id, WebhookChange(enabled=False)).enabled
        assert client.webhooks.get(hook.id).url == hook.url
        client.webhooks.delete(hook.id)
        assert client.call("GET", "/whoami")["tenant"] == client.whoami().tenant == "default"
        assert client.health().temporal == "ok"
        with pytest.raises(NotFound, match="there is no run sft-none"):
            client.runs.get("sft-none")

    async def the_same() -> None:
        async with AsyncClient(service.url, KEY) as client:
            found, page, record = await asyncio.gather(
                client.runs.wait(first.run_id), client.runs.list(5), client.files.upload(rows)
            )
            assert found == view and record == file and page.runs
            assert [event async for event in client.runs.follow(first.run_id)] == []
            assert [line async for line in client.runs.logs(first.run_id)][-1] == "the run succeeded"
            path = await client.files.download(file.file_id, tmp_path / "another")
            assert path.read_bytes() == rows.read_bytes()
            with pytest.raises(NotFound, match="there is no run sft-none"):
                await client.runs.get("sft-none")

    asyncio.run(the_same())
