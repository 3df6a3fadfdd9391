"""What the OpenAPI document says beyond what FastAPI finds out for itself."""

from typing import Any

from fastapi import FastAPI


class DescribedApp(FastAPI):
    """A FastAPI whose description names the fields by which the members of unions are told apart."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            _require_tags(super().openapi())
        return super().openapi()


def _require_tags(part: Any) -> None:
    """Each member of a tagged union has a default for its tag, and yet within the union the tag must be there."""
    match part:
        case {"oneOf": _, "discriminator": {"propertyName": tag}}:
            part.setdefault("required", [tag])
    match part:
        case dict():
            for inner in part.values():
                _require_tags(inner)
        case list():
            for inner in part:
                _require_tags(inner)
