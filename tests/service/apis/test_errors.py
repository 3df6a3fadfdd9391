"""Errors as answers: status, field and option of each; what nobody foresaw is found in the log by its request id."""

import ast
import errno
import inspect
import logging
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.middleware import Middleware

from longshore.runs import Run
from service.accounts.limits import RateLimit
from service.apis import errors as problems
from service.apis.bodies import validation_problem
from service.apis.edge import Edge
from service.backend import Backend
from service.cli.command import Stop
from service.cli.run_options import option_at, options_of
from service.cli.runs import validated_request
from service.database import engine
from service.database.engine import Database
from shared.errors import (
    Conflict,
    CorruptArtifact,
    DatabaseUnavailable,
    DiskFull,
    Forbidden,
    InvalidInput,
    NotFound,
    QuotaExceeded,
    StoreUnavailable,
    TemporalUnavailable,
    WorkerLost,
)
from shared.field_rules import location_of
from shared.settings import Settings
from shared.storage.store import LocalStore


async def answer_to(error: Exception, tmp_path, path: str = "/") -> httpx.Response:
    """What a client gets when an endpoint raises this."""
    database = Database(f"sqlite:///{tmp_path}/service.db")
    engine.upgrade(database)
    backend = Backend(Settings(root=tmp_path, api_key="key"), LocalStore(tmp_path / "store"), database)
    edge = Middleware(
        Edge,
        keys=backend.keys,
        sign_ins=backend.sign_ins,
        episodes=backend.episodes,
        audit=backend.audit,
        rate_limit=RateLimit(1, 1),
        allowed_hosts=None,
        max_body_bytes=1,
        max_upload_bytes=1,
        in_hand=set(),
    )
    app = FastAPI(middleware=[edge])
    problems.install(app)

    @app.get(path)
    async def fail() -> None:
        raise error

    transport = httpx.ASGITransport(app)
    headers = {"authorization": "Bearer key", "x-request-id": "mine-1"}
    async with httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers) as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidInput("bad", "field"), 422, "invalid_input"),
        (CorruptArtifact("spoilt", "s3://b/k"), 422, "invalid_input"),
        (NotFound("no run"), 404, "not_found"),
        (Conflict("ended"), 409, "conflict"),
        (Forbidden("no scope"), 403, "forbidden"),
        (QuotaExceeded("gpu_hours", "used up"), 429, "quota_exceeded"),
        (DatabaseUnavailable("away"), 503, "unavailable"),
        (StoreUnavailable("away"), 503, "unavailable"),
        (TemporalUnavailable("away"), 503, "unavailable"),
        (DiskFull("no space"), 507, "disk_full"),
        (OSError(errno.ENOSPC, "no space"), 507, "disk_full"),
    ],
    ids=repr,
)
async def test_an_error_has_its_status(error: Exception, status: int, kind: str, tmp_path) -> None:
    answer = await answer_to(error, tmp_path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


@pytest.mark.parametrize("error", [ValueError("a bug"), WorkerLost("a bug"), OSError(errno.EIO, "a bug")], ids=repr)
async def test_a_bug_is_found_in_the_log_and_not_in_the_answer(error, tmp_path, caplog) -> None:
    with caplog.at_level(logging.ERROR, "longshore.service"):
        answer = await answer_to(error, tmp_path)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine-1")
    assert "a bug" not in answer.text and "x-request-id" in answer.json()["error"]["message"]
    [record] = caplog.records
    assert "mine-1 GET / failed" in record.getMessage() and record.exc_info is not None


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidInput("bad", "field"), 400, "invalid_request_error", "invalid_input"),
        (NotFound("no job"), 404, "invalid_request_error", "not_found"),
        (QuotaExceeded("gpu_hours", "used up"), 429, "insufficient_quota", "insufficient_quota"),
        (StoreUnavailable("away"), 503, "server_error", "unavailable"),
        (ValueError("a bug"), 500, "server_error", "error"),
    ],
    ids=repr,
)
async def test_below_v1_an_error_has_the_shape_of_openai(error, status: int, kind: str, code: str, tmp_path) -> None:
    answer = await answer_to(error, tmp_path, "/v1/things")
    said = answer.json()["error"]
    assert (answer.status_code, said["type"], said["code"]) == (status, kind, code)
    assert set(said) == {"message", "type", "param", "code"}
    assert said["param"] == ("field" if status == 400 else None)
    assert answer.headers.get("x-should-retry") == ("false" if status == 429 else None)


MODELS: tuple[type[BaseModel], ...] = tuple(model for model in get_args(get_args(Run)[0]))
BASE: dict[str, Any] = {"model": "m", "dataset": {"uri": "u"}, "epochs": 1, "batch_size": 1}
BROKEN = [
    ("sft", {"epochs": None}, "epochs"),
    ("sft", {"steps": 3}, "epochs"),
    ("sft", {"num_samples": 3}, "num_samples"),
    ("sft", {"initial_adapter": "a", "trainable": {"kind": "full"}}, "initial_adapter"),
    ("sft", {"engine": "fsdp", "layout": {"pp": 2}}, "engine"),
    ("dpo", {"objective": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
    ("distill", {"teacher": "base", "tokens": "all", "top_k": 3}, "top_k"),
    ("reward", {"per_turn": True}, "per_turn"),
]


def rules_of(model: type[BaseModel]) -> Iterator[str]:
    """The words with which the model's own validators refuse; `{}` stands for what is put in."""
    for validator in model.__pydantic_decorators__.model_validators.values():
        source = textwrap.dedent(inspect.getsource(getattr(validator.func, "__func__", validator.func)))
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and not isinstance(node.exc.args[0], ast.Name)
            ):
                [words] = node.exc.args
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts(words))


def parts(words: ast.expr) -> list[ast.expr]:
    return words.values if isinstance(words, ast.JoinedStr) else [words]


@pytest.mark.parametrize("model", MODELS)
def test_every_rule_on_several_fields_says_one(model: type[BaseModel]) -> None:
    for rule in rules_of(model):
        place = location_of({"loc": (), "type": "value_error", "msg": rule}, model.model_fields.keys())
        if place != ("",):
            field = next(iter(place))
            assert field in model.model_fields, rule
        else:
            assert rule.startswith("{} would be ignored"), rule  # by the field's name


@pytest.mark.parametrize(("kind", "fields", "place"), BROKEN)
def test_errors_of_several_fields_name_one_in_the_api_and_on_the_command_line(
    kind: str, fields: dict[str, Any], place: str
) -> None:
    model = next(each for each in MODELS if each.model_fields["kind"].default == kind)
    with pytest.raises(ValidationError) as refused:
        model.model_validate(BASE | fields)
    assert validation_problem(refused.value.errors()).place == place
    with pytest.raises(Stop) as stopped:
        validated_request(model, BASE | fields, options_of(model))
    option = option_at(options_of(model), (place,))
    assert option is not None and str(stopped.value).startswith(f"--{option.flag}: ")
