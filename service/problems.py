"""Errors of the API: one JSON shape, `{"error": {"type", "message", "place"}}`, and never a stack trace."""

import errno
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.errors import DiskFull, InvalidInput, LongshoreError, NotFound, StoreUnavailable
from shared.models import Frozen


class Conflict(LongshoreError):
    """The run's state forbids what was asked."""


class TemporalUnavailable(LongshoreError):
    """The Temporal server, or a worker behind it, does not answer."""


class ApiProblem(Frozen):
    """What went wrong. `place` is the field, file or line that is at fault, where there is one."""

    type: str
    message: str
    place: str | None = None


class ErrorBody(Frozen):
    """The body of every answer from 400 on."""

    error: ApiProblem


_BY_STATUS = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    422: "invalid_input",
    503: "unavailable",
    507: "disk_full",
}


def answer(
    status: int, message: str, place: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error as a response."""
    body = ErrorBody(error=ApiProblem(type=_BY_STATUS.get(status, "error"), message=message, place=place))
    return JSONResponse(body.model_dump(), status_code=status, headers=dict(headers or {}))


def install(app: FastAPI) -> None:
    """Give an app its error handlers. What they raise again is a bug, which the edge logs and answers with 500."""
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(LongshoreError, _ours)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(OSError, _os)


def describe(errors: Sequence[Any]) -> ApiProblem:
    """Pydantic's errors as one problem: the first one's field, and every rule that is broken.

    Args:
        errors: `error.errors()` of a ValidationError.
    """
    found = [(_place(e["loc"]), _rule(e)) for e in errors]
    first, rule = found[0]
    rest = "".join(f"; {place or 'the request'}: {text}" for place, text in found[1:])
    return ApiProblem(type="invalid_input", message=rule + rest, place=first)


def _place(loc: Sequence[int | str]) -> str | None:
    parts = [str(part) for part in loc if part not in ("body", "query", "path", "header", "lora", "full")]
    return ".".join(parts) or None


def _rule(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such field"
    return str(error["msg"]).removeprefix("Value error, ")


async def _validation(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if unknown := [e["input"] for e in error.errors() if e["loc"] == ("path", "run_id")]:
        return answer(404, f"there is no run {unknown[0]}")
    problem = describe(error.errors())
    return answer(422, problem.message, problem.place)


async def _ours(_: Request, error: Exception) -> JSONResponse:
    match error:
        case InvalidInput(message=message, place=place):
            return answer(422, message, place)
        case NotFound():
            return answer(404, str(error))
        case Conflict():
            return answer(409, str(error), headers={"x-should-retry": "false"})
        case DiskFull():
            return answer(507, str(error))
        case StoreUnavailable() | TemporalUnavailable():
            return answer(503, str(error), headers={"retry-after": "2"})
        case _:
            raise error


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return answer(error.status_code, str(error.detail), headers=error.headers)


async def _os(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return answer(507, "the disk of the service is full")
    raise error
