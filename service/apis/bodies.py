"""Bodies of requests and answers that several APIs share: JSON, pages of lists, published files."""

import asyncio
import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Protocol, Self, TypeVar, cast, get_args, runtime_checkable
from urllib.parse import quote

from fastapi import APIRouter, Header, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from longshore.fields import Frozen
from longshore.runs import Kind, Run
from service.accounts.keys import Asking, Demand, principal
from service.backend import Backed
from service.decoding import SMALL_BYTES, Decoding
from service.files import PublishedFiles
from shared.errors import InvalidInput, LongshoreError
from shared.field_rules import location_of, rule_in_words

# --- What is wrong with a request, in words ---

# Tags of unions, which pydantic puts into locations after the field. (As the last part it is a field.)
_TAGS = ("lora", "full", "function_tool", "custom_tool", "foreign_tool")
_KINDS = get_args(Kind)
_MOST_RULES = 20
UNREADABLE = "the body is no JSON that can be read here"
_RUN_FIELDS = frozenset(name for model in get_args(get_args(Run)[0]) for name in model.model_fields)


class ApiProblem(Frozen):
    """An error. `place` is the field, file or line at fault, if known."""

    type: str
    message: str
    place: str | None = None


def validation_problem(errors: Sequence[Any]) -> ApiProblem:
    """Join pydantic's errors to one problem: the first one's field, and every rule that is broken.

    `errors`: `error.errors()` of a ValidationError.
    """
    told = [dict(error) | {"loc": _without_kind(error["loc"])} for error in errors[:_MOST_RULES]]
    found = [(_place(location_of(error, _RUN_FIELDS)), rule_in_words(error)) for error in told]
    if errors[0]["type"] == "missing" and errors[0]["loc"] == ("body",):
        found[0] = ("body", found[0][1])
    first, rule = found[0]
    rest = "".join(f"; {place or 'the request'}: {text}" for place, text in found[1:])
    if len(errors) > _MOST_RULES:
        rest += f"; and {len(errors) - _MOST_RULES:,} more"
    return ApiProblem(type="invalid_input", message=rule + rest, place=first)


def _without_kind(loc: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return a location without the kind of a run, which pydantic puts before the fields of such a union's member."""
    return tuple(
        part for i, part in enumerate(loc) if part not in _KINDS or loc[i - 1 : i] not in (("body",), ("run",))
    )


def _place(loc: Sequence[int | str]) -> str | None:
    """Return the field, without the part of the request that it is in and without the tags of a union's members."""
    inner = loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc
    parts = [str(part) for i, part in enumerate(inner) if part not in _TAGS or i == len(inner) - 1]
    return ".".join(parts) or None


# --- Bodies of requests, validated with JSON's types ---
# "5" is no number, 1 is no boolean, and 2.0 is an integer.
#
# Large bodies are parsed and validated in a child process (service/decoding.py); what it accepts is read here once
# more, or comes packed. Fields, values, depth and errors of a body are limited.

T = TypeVar("T")
_TYPES = ("int_type", "float_type", "bool_type", "string_type")
_OF_NAMES = ("eval_datasets", "sets")  # objects of a user's own names, none of which may be there twice


MAX_DEPTH = 100
"""Of objects and lists. Beyond about 200, a workflow cannot read what the service has read."""
MAX_FIELDS = 1_000
"""Fields of one object."""
MAX_VALUES = 200_000
"""Values of a whole body: about as many token ids of four digits and a comma as fit into 1 MiB."""
MAX_ERRORS = 1_000


_validators: dict[str, Callable[["_Sent"], Sequence[Any]]] = {}
"""Functions that check an endpoint's body, and return pydantic's errors, by the endpoint's module and name."""


class JsonRoute(APIRoute):
    """A route that demands its scope before it reads a body, and reads a large `JsonBody` in a child process."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, body_field = super().get_route_handler(), self.body_field
        endpoint = f"{self.endpoint.__module__}:{self.endpoint.__qualname__}"
        demands = [each.call for each in self.dependant.dependencies if isinstance(each.call, Demand)]

        def validate(sent: "_Sent") -> Sequence[Any]:
            return () if body_field is None else body_field.validate(sent, {}, loc=("body",))[1]

        _validators[endpoint] = validate

        async def read_and_handle(request: Request) -> Response:
            for demand in demands:
                await demand(request)
            return await handle(_Request(request.scope, request.receive, request._send, endpoint))

        return read_and_handle


class _Request(Request):
    """A request whose JSON is a `_Sent`."""

    def __init__(self, *scope_receive_send: Any) -> None:
        *asgi, self._endpoint = scope_receive_send
        super().__init__(*asgi)

    async def json(self) -> Any:
        """Parse the body. Raises json.JSONDecodeError, RecursionError, UnicodeDecodeError, HTTPException."""
        body = await self.body()
        if len(body) <= SMALL_BYTES:
            return _Sent(*_parsed(body))
        decoding: Decoding = self.app.state.decoding
        try:
            if (run_id := self.path_params.get("run_id")) is not None:  # first of all: it may be another tenant's
                asking = await principal(self)
                await self.app.state.backend.runs.record(asking.tenant, run_id)
            found = await decoding.call(self, judged, self._endpoint, body.decode("latin-1"))
        except LongshoreError as error:
            raise HTTPException(422) from error  # FastAPI lets no other exception pass; its cause is answered
        sent = _Sent(text=found.text, packed=found.packed)
        await asyncio.to_thread(_validators[self._endpoint], sent)
        return sent


@dataclass
class _Sent:
    """A body and the cached result of its validation, which is done before FastAPI asks for it.

    `text`: JSON that a child has validated, and whether in strict mode; its rules are not checked again.
    `packed`: a child's binary form of it, for a model that `Packs`.
    """

    value: Any = None
    problem: Exception | None = None
    text: tuple[str, bool] | None = None
    packed: bytes | None = None
    found: Any = None
    is_checked: bool = False

    def checked(self, adapter: TypeAdapter[Any], model: Any) -> Any:
        if self.packed is not None:
            return model.of_packed(self.packed)
        if not self.is_checked and self.problem is None:
            try:
                if self.text is None:
                    self.found, text, is_strict = _accepted(adapter, self.value)
                    self.text = text, is_strict
                else:
                    self.found = adapter.validate_json(self.text[0], strict=self.text[1])
            except (ValidationError, PydanticCustomError) as error:
                self.problem = error
        self.is_checked = True
        if self.problem is not None:
            raise self.problem
        return self.found


@runtime_checkable
class Packs(Protocol):
    """A body's model that a child process can return as bytes; None: as JSON, like other models."""

    def packed(self) -> bytes | None: ...

    @classmethod
    def of_packed(cls, data: bytes) -> Any: ...


class Judged(BaseModel):
    """What a child accepts of a body: its text, and whether strictly; or bytes, of a model that `Packs`."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    packed: bytes | None = None
    text: tuple[str, bool] | None = None


def judged(endpoint: str, body: str) -> Judged:
    """Parse and validate an endpoint's body, each of whose characters is one byte. Raises InvalidInput."""
    importlib.import_module(endpoint.partition(":")[0])
    errors: Sequence[Any]
    try:
        sent = _Sent(*_parsed(body.encode("latin-1")))
        errors = _validators[endpoint](sent)
    except json.JSONDecodeError as error:  # as FastAPI says it of smaller bodies
        errors = [{"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}]
    except (RecursionError, UnicodeDecodeError):
        raise InvalidInput(UNREADABLE) from None
    if errors:
        problem = validation_problem(errors)
        raise InvalidInput(problem.message, problem.place)
    packed = sent.found.packed() if isinstance(sent.found, Packs) else None
    return Judged(packed=packed, text=sent.text if packed is None else None)


class _AsJson:
    """Validates a body as its model does, and then refuses values that were converted from another JSON type.

    Models themselves convert values, as they are also made of settings, options and forms, where all are strings.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        adapter = TypeAdapter[Any](source)

        def check_once(value: Any, _: core_schema.ValidatorFunctionWrapHandler) -> Any:
            return (value if isinstance(value, _Sent) else _Sent(value)).checked(adapter, source)

        return core_schema.no_info_wrap_validator_function(check_once, handler(source))


def _accepted(adapter: TypeAdapter[Any], value: Any) -> tuple[Any, str, bool]:
    """Return the model of a body, its JSON, and whether that is accepted strictly.

    Raises ValidationError, PydanticCustomError.
    """
    text = _text(value)
    try:
        return adapter.validate_json(text, strict=True), text, True
    except ValidationError as error:
        _check_errors(error, 10 * MAX_ERRORS)  # most of these are harmless: whole floats, lists for tuples
        guessed = _guessed(error)
    try:
        found = adapter.validate_json(text)
    except ValidationError as error:
        _check_errors(error, MAX_ERRORS)
        raise
    if guessed:
        raise ValidationError.from_exception_data("body", guessed[:MAX_ERRORS])
    return found, text, False


def _parsed(body: bytes) -> tuple[Any, PydanticCustomError | None]:
    """Parse a body, and check its size in fields, values and depth. Raises json.JSONDecodeError, RecursionError."""
    most_fields, repeats, twice = 0, dict[int, dict[str, Any]](), ""

    def count(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal most_fields, twice
        most_fields, fields = max(most_fields, len(pairs)), dict(pairs)
        if len(fields) < len(pairs):
            repeats[id(fields)] = fields  # held, so that no other object gets its id
        twice = twice or next((name for name in _OF_NAMES if id(fields.get(name)) in repeats), "")
        return fields

    value = json.loads(body, object_pairs_hook=count)
    if twice:
        return value, PydanticCustomError("name_twice", f"{twice}: two evaluations have one name")
    if most_fields > MAX_FIELDS:
        return value, PydanticCustomError("too_many_fields", f"an object has at most {MAX_FIELDS:,} fields here")
    return value, _excess(value)


def _excess(value: Any) -> PydanticCustomError | None:
    """Check depth and number of values, level by level, since recursion could overflow the stack."""
    level, num_values = [value], 0
    for _ in range(MAX_DEPTH):
        inner = [part for part in level if isinstance(part, dict | list)]
        if not inner:
            return None
        level = [item for part in inner for item in (part.values() if isinstance(part, dict) else part)]
        num_values += len(level)
        if num_values > MAX_VALUES:
            return PydanticCustomError("too_many_values", f"a body has at most {MAX_VALUES:,} values here")
    return PydanticCustomError("too_deep", f"this is nested too deep: more than {MAX_DEPTH} objects and lists")


def _check_errors(error: ValidationError, most: int) -> None:
    """If there are too many errors, raise a single one in their place, since each is expensive."""
    if (num_errors := error.error_count()) > most:
        raise PydanticCustomError("too_many_errors", f"{num_errors:,} things are wrong with this: too many to name")


def _text(value: Any) -> str:
    """Return a body that FastAPI has parsed as JSON text again. Bytes are a body that was not sent as JSON."""
    if isinstance(value, bytes):
        raise PydanticCustomError("no_json", "send JSON, and say so: content-type application/json")
    try:
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise PydanticCustomError("too_deep", "this is nested too deep") from None
    except ValueError:
        place = next(_no_numbers(value, ()), ())
        error = PydanticCustomError("no_number", "NaN and Infinity are no numbers of JSON")
        raise ValidationError.from_exception_data(
            "body", [InitErrorDetails(type=error, loc=place, input=None)]
        ) from None


def _no_numbers(value: Any, place: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Return the places of floats that JSON cannot represent (NaN and infinities)."""
    match value:
        case float() if not math.isfinite(value):
            yield place
        case list():
            for i, each in enumerate(value):
                yield from _no_numbers(each, (*place, i))
        case dict():
            for name, each in value.items():
                yield from _no_numbers(each, (*place, name))


def _guessed(error: ValidationError) -> list[InitErrorDetails]:
    """Return the errors of a strict validation that are about values of another type.

    Its other errors are left out: lists for tuples in models with validators of the whole model, and whole floats.
    """
    return [
        InitErrorDetails(type=found["type"], loc=found["loc"], input=found["input"])
        for found in error.errors(include_url=False, include_context=False)
        if found["type"] in _TYPES and isinstance(found["input"], str | bool | int)
    ]


JsonBody = Annotated[T, _AsJson()]
"""`JsonBody[Model]`: the type of an endpoint's body. Its description is the model's."""


# --- Operations that a method of the backend does by itself ---

Operation = tuple[str, str, Callable[..., Any], int]
"""Its name, `METHOD /path`, the method of a part of the backend, and the status of its success."""
_OF_REQUEST = ("tenant", "asking", "owner")


def add_operations(
    router: APIRouter, sent: Mapping[str, Any], *operations: Operation, dependencies: Sequence[Any] = ()
) -> None:
    """Add operations to a router. Each calls a method of the backend, and has its description.

    The method's `tenant`, `asking` and `owner` are those of the request's key. A method with none of them is about a
    run, which must be the tenant's. Its models are bodies. Any other parameter that `sent` does not have stays at its
    default.

    Args:
        sent: types of the parameters in paths and queries, by their names.
        dependencies: FastAPI's, of all of them.
    """
    for name, route, method, status in operations:
        endpoint = _endpoint(method, sent)
        endpoint.__name__ = endpoint.__qualname__ = name
        endpoint.__doc__ = _description(inspect.getdoc(method) or "")
        verb, path = route.split(" ")
        router.add_api_route(path, endpoint, methods=[verb], status_code=status, dependencies=dependencies)


def _endpoint(method: Callable[..., Any], sent: Mapping[str, Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    wanted = inspect.signature(method, eval_str=True)
    names = wanted.parameters.keys() - {"self"}
    is_of_run, kind = names.isdisjoint(_OF_REQUEST), method.__qualname__.partition(".")[0]

    async def call(backend: Backed, asking: Asking, **given: Any) -> Any:
        if is_of_run:
            await backend.runs.record(asking.tenant, given["run_id"])
        known = {"tenant": asking.tenant, "asking": asking, "owner": asking.key_id}
        given |= {name: known[name] for name in names & known.keys()}
        part = next(each for each in vars(backend).values() if type(each).__qualname__ == kind)
        if inspect.iscoroutinefunction(method):
            return await method(part, **given)
        return await asyncio.to_thread(method, part, **given)

    parameters = list(inspect.signature(call, eval_str=True).parameters.values())[:-1]
    for each in wanted.parameters.values():
        type_ = next(iter(get_args(each.annotation)), each.annotation)  # of one that may be None, too
        is_body = isinstance(type_, type) and issubclass(type_, BaseModel)
        if each.name in sent or (is_body and each.name not in _OF_REQUEST):
            told = cast(Any, JsonBody)[each.annotation] if is_body else sent[each.name]
            parameters.append(each.replace(annotation=told, kind=inspect.Parameter.KEYWORD_ONLY))
    call.__signature__ = wanted.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def _description(doc: str) -> str:
    """Return what a method's docstring says to users: its first paragraph. Its Conflict is their 409."""
    conflict = re.search(r"\bRaises Conflict\b([^.;]*)", doc)
    told = " ".join(doc.partition("\n\n")[0].split()).partition(" Raises ")[0].partition(" Blocking")[0]
    return told + (f" 409{conflict[1]}." if conflict else "")


# --- Lists in pages, in the shape that clients of OpenAI and of ART read ---

ItemT = TypeVar("ItemT", bound=BaseModel)
Seconds = Annotated[int, BeforeValidator(int)]
"""Whole seconds since 1970, of a time with fractions."""


RetryCount = Annotated[str | None, Header(alias="x-stainless-retry-count", include_in_schema=False)]
"""The number of times that a client has sent this request before."""


class RecordView(BaseModel):
    """A record as clients see it: the fields are read from its attributes, by their validation aliases."""

    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, record: object) -> Self:
        return cls.model_validate(record)


class ListAnswer(BaseModel, Generic[ItemT]):
    """A page. The `id` of its last item is the `after` of the next one."""

    object: Literal["list"] = "list"
    data: list[ItemT]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


def page_of(items: Sequence[ItemT], has_more: bool) -> ListAnswer[ItemT]:
    ids = [str(item.id) for item in items]  # type: ignore[attr-defined]
    return ListAnswer(
        data=list(items), has_more=has_more, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None
    )


def page_after(items: Sequence[ItemT], after: str | None, limit: int) -> ListAnswer[ItemT]:
    """The page behind an id, of all items in order. Raises InvalidInput: none of them has the id."""
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]  # type: ignore[attr-defined]
        if not places:
            raise InvalidInput("there is no item of this id", "after")
        start = places[0] + 1
    return page_of(items[start : start + limit], has_more=start + limit < len(items))


# --- Published files as answers: one of them, or all as a tar ---


def file_answer(files: PublishedFiles, path: str) -> StreamingResponse:
    """Send one file. Raises NotFound."""
    entry = files.entry(path)
    headers = {"content-length": str(entry.size), "etag": f'"{entry.sha256}"'}
    return StreamingResponse(files.content(entry), media_type="application/octet-stream", headers=headers)


def tar_answer(files: PublishedFiles, folder: str) -> StreamingResponse:
    """Send all files as a tar of one folder, to be saved under its name."""
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(folder)}.tar"}
    return StreamingResponse(files.tar(folder), media_type="application/x-tar", headers=headers)
