"""Errors of the API: one JSON shape, `{"error": {"type", "message", "place"}}`, and never a stack trace."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from shared.errors import InvalidInput, LongshoreError, NotFound, StoreUnavailable
from shared.models import Frozen

logger = logging.getLogger("longshore.service")


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


def body_of(status: int, message: str, place: str | None = None) -> dict[str, Any]:
    """The JSON body of an error."""
    return {"error": {"type": _BY_STATUS.get(status, "error"), "message": message, "place": place}}


def answer(
    status: int, message: str, place: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error as a response."""
    return JSONResponse(body_of(status, message, place), status_code=status, headers=dict(headers or {}))


def install(app: FastAPI) -> None:
    """Give an app its error handlers."""
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(ValidationError, _unexpected)
    app.add_exception_handler(LongshoreError, _ours)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(OSError, _os)
    app.add_exception_handler(Exception, _unexpected)


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
        case StoreUnavailable() | TemporalUnavailable():
            return answer(503, str(error), headers={"retry-after": "2"})
        case _:
            return await _unexpected(_, error)


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return answer(error.status_code, str(error.detail), headers=error.headers)


async def _os(request: Request, error: Exception) -> JSONResponse:
    import errno

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return answer(507, "the disk of the service is full")
    return await _unexpected(request, error)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer(500, "the service failed; its log has the reason under this answer's x-request-id")
