"""What one tenant sends does not make the others wait: patterns, expressions, answers of models, bodies of requests."""

import asyncio
import json
import os
import re
import subprocess
import sys
from inspect import getsource
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import Field, model_validator

from longshore.fields import Frozen
from service import decoding
from service.accounts.keys import Demand, Principal
from service.apis import errors as problems
from service.apis.bodies import MAX_FIELDS, JsonBody, JsonRoute, judged
from service.app import create_app
from service.decoding import SMALL_BYTES
from shared.errors import Forbidden, InvalidInput
from shared.settings import Settings
from tests.security.attacks.tenants import Tenant

ROOT = Path(__file__).parents[3]
_CPU_S = 20
"""Of a child, for what takes a few hundredths of a second of it, and took minutes."""
_BEGIN = (
    f"import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_S}, {_CPU_S})); "
    "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
)


def child(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A process of ours under limits of its own."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500)


def patterns(root: Path, *packages: str) -> tuple[int, list[str]]:
    """How many regular expressions packages have, and those that keep a processor busy."""
    done = child("-m", "tests.security.attacks.patterns", str(root), *packages)
    assert done.returncode == 0, done.stderr
    *slow, last = done.stdout.splitlines()
    return json.loads(last)["tried"], slow


def test_every_pattern_of_ours_is_linear() -> None:
    tried, slow = patterns(ROOT, "shared", "activities", "workflows", "service")
    assert slow == []
    assert tried > 40


@pytest.mark.parametrize(
    "pattern",
    [
        r're.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)',
        r're.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)',
        r're.compile(r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.]))")',
        r're.compile(r"(a|aa)+$")',
    ],
)
def test_a_pattern_that_is_not_is_found(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(f"import re\nX = {pattern}\n")
    assert len(patterns(tmp_path, "package")[1]) >= 1


@pytest.mark.parametrize(
    "code",
    [
        "from longshore.grading import *\ntry: parse_expression('1' * 3990 + 'e1x')\nexcept ExpressionError: pass",
        "from longshore.grading import *\ntry: parse_expression('1+' * 1990 + '1' * 10 + 'e1.')"
        "\nexcept ExpressionError: pass",
        "from activities.grading.open_grader import score_in\n"
        "openings = ('```' + ' ' * 500_000, '```' + ' \\n' * 200_000 + 'x', '```json' * 100_000)\n"
        "for said in (opening + end for opening in openings for end in ('x```', 'x')):\n"
        "  try: score_in({'choices': [{'message': {'content': said}}]}, (0, 1))\n"
        "  except Exception as error: assert type(error).__name__ == 'NotGraded'",
        "from activities.sampling.questions import told_calls\n"
        "for said in ('<tool_call>' * 200_000, '<tool_call></tool_call' * 100_000): told_calls(said, 'a')",
        "from longshore.grading import *\n"
        "for said in ('{{' * 30_000, '{{ ' + 'a.' * 30_000 + '}}', '{{' + ' ' * 60_000 + '}}'):\n"
        "  try: parse_template(said)\n"
        "  except TemplateError: pass",
    ],
    ids=["digits", "terms", "a judge's answer", "tool calls", "templates"],
)
def test_what_a_stranger_writes_is_read_in_linear_time(code: str) -> None:
    done = child("-c", _BEGIN + code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{" + ",".join(f'"a{i}":1' for i in range(70_000)) + "}", f"at most {MAX_FIELDS:,} fields"),
        ('{"model":{' + ",".join(f'"a{i}":1' for i in range(70_000)) + "}}", f"at most {MAX_FIELDS:,} fields"),
        ('{"model":[' + ",".join('{"a":1}' for _ in range(110_000)) + "]}", "at most 200,000 values"),
        ('{"model":"m","prompt":[' + ",".join('{"a":1}' for _ in range(50_000)) + "]}", "too many to name"),
        ('{"model":' + '{"a":' * 200 + "1" + "}" * 201, "nested too deep"),
        ("{" + ",".join(f'"a{i}":1' for i in range(900)) + "}", "more"),
    ],
    ids=["fields", "fields within", "values", "errors", "depth", "errors that are told of"],
)
def test_a_body_with_too_much_in_it_is_refused_in_few_words(attacker: Tenant, body: str, said: str) -> None:
    answer = attacker.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text[:300]
    assert said in answer.json()["error"]["message"]
    assert len(answer.content) < 2_000


class Body(Frozen):
    text: str
    pid: int = Field(default_factory=os.getpid)

    @model_validator(mode="before")
    @classmethod
    def _note(cls, given: Any) -> Any:
        if isinstance(given, dict) and str(given.get("text", "")).startswith("where"):
            raise ValueError(f"in {os.getpid()}")
        return given


async def text_of(body: JsonBody[Body]) -> str:
    return body.text[:10]


_app = FastAPI()
_app.router.route_class = JsonRoute
_app.post("/")(text_of)
problems.install(_app)


def test_a_large_body_is_judged_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A child sees the packages of a service, and no tests: this module is imported before the child is made.
    monkeypatch.setattr(decoding._server, "modules", (*decoding._server.modules, __name__))
    _app.state.decoding = decoding.Decoding(Settings(root=tmp_path))

    async def ask(content: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(_app), base_url="http://app") as client:
            return await client.post("/", content=content, headers={"content-type": "application/json"})

    def said(content: str) -> str:
        return asyncio.run(ask(content)).text

    large = "x" * SMALL_BYTES
    assert said(json.dumps({"text": "some text " + large})) == '"some text "'
    assert f"in {os.getpid()}" in said(json.dumps({"text": "where"}))
    elsewhere = said(json.dumps({"text": "where" + large}))
    assert "Value error, in " in elsewhere or "in " in elsewhere
    assert f"in {os.getpid()}" not in elsewhere
    # What is wrong is told as it is of a small body.
    for wrong in ('{"text": 1, "more": "%s"}', '{"text": "%s"', '["%s"]', '{"text": NaN, "more": "%s"}'):
        small, same = asyncio.run(ask(wrong % "x")), asyncio.run(ask(wrong % large))
        assert small.status_code == same.status_code >= 400, same.text


# Operations whose bodies are no JSON: streamed into files, of which children or runs read, or passed over.
STREAMED = {
    *("native.runs:upload_file", "openai.files:create_file", "openai.files:add_part", "art.wandb_artifacts:upload"),
    *("art.training_jobs:create_job", "tinker.routes:forward_backward"),
    *("art.wandb_artifacts:passed_over", "art.wandb_artifacts:_telemetry", "tinker.routes:telemetry"),
}
OF_THE_PAGE = "page:"  # a form of a few fields
READS = re.compile(r"request\.(body|json|form|stream)\(")


def test_every_body_of_every_route_is_read_so(tmp_path: Path) -> None:
    """A new operation finds itself here: a child judges its body, after its scope was checked, or it is streamed."""
    with_body = set()
    for context in iter_route_contexts(create_app(Settings(root=tmp_path)).routes):
        route = context.original_route
        if not isinstance(route, APIRoute) or not (route.methods or set()) - {"GET", "HEAD"}:
            continue
        module, name = route.endpoint.__module__, route.endpoint.__qualname__
        told = f"{module.removeprefix('service.apis.')}:{name}"
        if route.body_field is None:
            body = getsource(route.endpoint)
            assert told in STREAMED or told.startswith(OF_THE_PAGE) or not READS.search(body), told
        elif not told.startswith(OF_THE_PAGE):
            assert isinstance(route, JsonRoute), told
            with_body.add(f"{module}:{name}")
    assert len(with_body) > 45
    for endpoint in with_body:
        for body, rule in (
            ("[" + "1," * 210_000 + "1]", "at most 200,000 values"),
            ('{"a":' * 200 + "1" + "}" * 200, "nested too deep"),
            (json.dumps({f"a{n}": 1 for n in range(1100)}), "at most 1,000 fields"),
        ):
            with pytest.raises(InvalidInput, match=rule):
                judged(endpoint, body)


def test_a_key_without_the_scope_has_no_body_read(tmp_path: Path) -> None:
    """Of each route that names its scope: a body that nobody could parse is refused for the key's sake."""
    app = create_app(Settings(root=tmp_path))
    nobody = Principal(tenant="acme", key_id="key-000000000000", scopes=frozenset())
    tried = 0

    async def refused(route: JsonRoute) -> None:
        async def receive() -> Any:
            raise AssertionError(f"the body of {route.path} is read")

        scope = {"type": "http", "method": "POST", "headers": [], "state": {"principal": nobody}, "app": app}
        with pytest.raises(Forbidden):
            await route.get_route_handler()(Request(scope, receive))

    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if isinstance(route, JsonRoute) and any(isinstance(each.call, Demand) for each in route.dependant.dependencies):
            asyncio.run(refused(route))
            tried += 1
    assert tried > 60
