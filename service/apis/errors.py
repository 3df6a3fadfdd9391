"""Errors of the API: `{"error": {"type", "message", "place"}}`, below /v1 OpenAI's shape, and never a stack trace."""

import errno
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path

from longshore.dataset_runs import TrainedRun
from longshore.fields import Frozen
from service.apis.bodies import UNREADABLE, ApiProblem, validation_problem
from service.apis.tinker.wire import error_body, is_tinker
from shared.errors import (
    Busy,
    Conflict,
    DatabaseUnavailable,
    DiskFull,
    Forbidden,
    InvalidInput,
    LongshoreError,
    NotFound,
    QueueFull,
    QuotaExceeded,
    SamplerUnavailable,
    StoreUnavailable,
    TemporalUnavailable,
)


class ErrorBody(Frozen):
    """The body of every answer from 400 on."""

    error: ApiProblem


class ForeignProblem(Frozen):
    """An error as OpenAI's clients read it. `param`: the field that is at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ForeignErrorBody(Frozen):
    """The body of every answer from 400 on, below /v1."""

    error: ForeignProblem


class MessageProblem(Frozen):
    """An error as Anthropic's clients read it. The message begins with the field that is at fault."""

    type: str
    message: str


class MessageErrorBody(Frozen):
    """The body of every answer from 400 on, of /v1/messages."""

    type: Literal["error"] = "error"
    error: MessageProblem


# Malformed HTTP (two lengths, a length that is no number) is refused with a text by uvicorn itself.
_NO_HTTP = {"text/plain": {"schema": {"type": "string"}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "content": _NO_HTTP},
    **{code: {"model": ErrorBody} for code in (401, 403, 404, 408, 409, 413, 422, 429, 503, 507)},
}
"""Error responses of each operation of the native API, for its description."""
FOREIGN_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ForeignErrorBody, "content": _NO_HTTP},
    **{code: {"model": ForeignErrorBody} for code in ("4XX", "5XX")},
}
"""Error responses of each operation below /v1, for its description."""
MESSAGE_RESPONSES = {status: {**told, "model": MessageErrorBody} for status, told in FOREIGN_RESPONSES.items()}
"""Error responses of Anthropic's operations, for their description."""

# Resources that paths name: an id of the wrong form is answered with 404, as there is no such resource.
_IN_PATHS = {"run_id": "run", "webhook_id": "webhook", "name": "schedule", "tenant": "tenant"}
_NO_RETRY = {"x-should-retry": "false"}
_BY_STATUS = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    422: "invalid_input",
    499: "hung_up",
    429: "rate_limited",
    503: "unavailable",
    507: "disk_full",
}


def error_response(
    status: int,
    message: str,
    place: str | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    path: str = "",
    kind: str | None = None,
) -> JSONResponse:
    """Make the response of an error.

    Args:
        path: the request's: below /v1 errors have OpenAI's shape, of /v1/messages Anthropic's.
        kind: the error's type, where the status does not say it.
    """
    kind = kind or _BY_STATUS.get(status, "error")
    if is_tinker(path):
        status, told = error_body(status, kind, message, place)
    elif is_messages(path):
        status = 400 if status == 422 else status
        theirs = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        text = f"{place}: {message}" if place else message
        told = MessageErrorBody(error=MessageProblem(type=theirs, message=text)).model_dump()
    elif is_foreign(path):
        status = 400 if status == 422 else status
        general = "server_error" if status >= 500 else "invalid_request_error"
        theirs = "insufficient_quota" if kind == "quota_exceeded" else _OPENAI_TYPES.get(status, general)
        error = {"message": message, "type": theirs, "param": place, "code": _OPENAI_CODES.get(kind, kind)}
        told = {"error": error}
    else:
        told = ErrorBody(error=ApiProblem(type=kind, message=message, place=place)).model_dump()
    return JSONResponse(told, status_code=status, headers=dict(headers or {}))


def is_foreign(path: str) -> bool:
    """True for a path of OpenAI's, Anthropic's or ART's API."""
    return path == "/v1" or path.startswith("/v1/")


def is_messages(path: str) -> bool:
    """True for a path of Anthropic's API, whose errors have a shape of their own."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


_OPENAI_CODES = {
    "unauthorized": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "quota_exceeded": "insufficient_quota",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def install(app: FastAPI) -> None:
    """Install an app's error handlers. If one re-raises an error, that is a bug: the edge logs it and answers 500."""
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(LongshoreError, _ours)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(OSError, _os)
    app.add_exception_handler(ClientDisconnect, _left)


RunT = TypeVar("RunT", bound=TrainedRun)


def made(kind: type[RunT], fields: Mapping[str, Any], names: Mapping[str, str]) -> RunT:
    """Make a job's run. Raises InvalidInput: names the client's field, as `client_place` does."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problem = validation_problem(error.errors())
        raise InvalidInput(problem.message, client_place(problem.place, names)) from None


def client_place(place: str | None, names: Mapping[str, str]) -> str:
    """Return the client's name of a run's field: its own by `names`, else the setting's below `longshore`.

    An item of a list has the list's name.
    """
    if place is None:
        return "longshore"
    known = [name for name in names if place == name or place.startswith(f"{name}.")]
    if known:
        longest = max(known, key=len)
        rest = place[len(longest) :]
        return names[longest] + (rest if rest.strip(".0123456789") else "")
    for prefix in ("trainable.", "rollouts.held_out.", "rollouts.", "dataset."):
        place = place.removeprefix(prefix)
    return f"longshore.{place}"


async def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    path = request.url.path
    for each in error.errors():
        if each["loc"][0] == "path" and (thing := _IN_PATHS.get(str(each["loc"][-1]))):
            return error_response(404, f"there is no {thing} {each['input']}", path=path)
    problem = validation_problem(error.errors())
    return error_response(422, problem.message, problem.place, path=path)


async def _ours(request: Request, error: Exception) -> JSONResponse:
    path, text = request.url.path, str(error)
    match error:
        case InvalidInput(message=message, place=place):
            return error_response(422, message, place, path=path)
        case Forbidden():
            return error_response(403, text, path=path)
        case NotFound():
            return error_response(404, text, path=path)
        case QueueFull() if is_tinker(path):
            return error_response(429, text, headers={"retry-after": "1"}, path=path)
        case Conflict():
            return error_response(409, text, headers=_NO_RETRY, path=path)
        case QuotaExceeded():
            return error_response(429, text, headers=_NO_RETRY, path=path, kind="quota_exceeded")
        case Busy():
            return error_response(429, text, headers={"retry-after": "5"}, path=path)
        case DiskFull():
            return error_response(507, text, path=path)
        case StoreUnavailable() | TemporalUnavailable() | DatabaseUnavailable() | SamplerUnavailable():
            return error_response(503, text, headers={"retry-after": "2"}, path=path)
        case _:
            raise error


async def http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, LongshoreError):
        return await _ours(request, error.__cause__)
    if isinstance(error.__cause__, ClientDisconnect):
        return await _left(request, error.__cause__)
    if isinstance(error.__cause__, (UnicodeDecodeError, RecursionError)):
        # FastAPI answers malformed JSON with 422, but bodies that cannot be decoded at all with 400.
        return error_response(422, UNREADABLE, path=request.url.path)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 405 and (methods := _methods(request)):
        headers["allow"] = ", ".join(methods)
    message = str(error.detail)
    if error.status_code == 404 and message == HTTPStatus.NOT_FOUND.phrase:  # of no operation, but of the router
        message = f"there is nothing at {request.method} {request.url.path[:200]}"
        if is_foreign(request.url.path):
            message += ": of OpenAI's operations some are served here (docs/openai_api.md), and this is none of them"
    return error_response(error.status_code, message, headers=headers, path=request.url.path)


def _methods(request: Request) -> list[str]:
    """Return the methods of the routes that match the request's path; of exact matches alone where there are any."""
    path, found = request.url.path, dict[str, set[str]]()
    for route in iter_route_contexts(request.app.routes):
        if route.path is not None and route.methods and compile_path(route.path)[0].match(path):
            found.setdefault(route.path, set()).update(route.methods)
    return sorted(found.get(path) or set().union(*found.values()))  # `/runs/sft` also matches `/runs/{run_id}`


async def _left(request: Request, _: Exception) -> JSONResponse:
    """Count a request whose client has hung up as the client's, as nginx does. Nobody reads the answer."""
    return error_response(499, "the client has hung up", path=request.url.path)


async def _os(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return error_response(507, "the disk of the service is full", path=request.url.path)
    raise error
