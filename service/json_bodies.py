"""Bodies of requests, taken as JSON means them: "5" is no number, 1 is no truth, and 2.0 is an integer."""

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

T = TypeVar("T")
_TYPES = ("int_type", "float_type", "bool_type", "string_type")


class _AsJson:
    """Validates as models do, and then refuses what was guessed.

    Models themselves stay lax. They are also made of settings, options and forms, where everything is a string.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        adapter = TypeAdapter[Any](source)

        def check(value: Any, _: core_schema.ValidatorFunctionWrapHandler) -> Any:
            text = _text(value)
            try:
                return adapter.validate_json(text, strict=True)
            except ValidationError as error:
                guessed = _guessed(error)
            found = adapter.validate_json(text)
            if guessed:
                raise ValidationError.from_exception_data("body", guessed)
            return found

        return core_schema.no_info_wrap_validator_function(check, handler(source))


def _text(value: Any) -> str:
    """A body as FastAPI read it, as text again. Bytes are a body that was not sent as JSON."""
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
    """The places of floats that JSON cannot say."""
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
    """Of what strictness refuses, the values of another type.

    It refuses more: lists for tuples behind validators that look at a whole model, and floats that are whole.
    """
    return [
        InitErrorDetails(type=found["type"], loc=found["loc"], input=found["input"])
        for found in error.errors(include_url=False, include_context=False)
        if found["type"] in _TYPES and isinstance(found["input"], str | bool | int)
    ]


JsonBody = Annotated[T, _AsJson()]
"""`JsonBody[Model]`: the type of an endpoint's body. Its description is the model's."""
