"""Structured outputs: an answer must be JSON, JSON of a schema, or tool calls.

Chat clients use OpenAI's fields (`response_format`, `tool_choice`); samplers get vLLM's (`structured_outputs`).
Schemas are untrusted: their length and depth are bounded here, the resources to compile them by the sampler
(megatron_worker/sampler/grammars).
"""

import json
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from shared.field_rules import first_rule

MAX_SCHEMA_CHARACTERS = 64 << 10
MAX_SCHEMA_DEPTH = 64
MAX_TAGS = 128


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, serialize_by_alias=True)


def _bounded(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    level: list[JsonValue] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [item for part in level if isinstance(part, dict | list) for item in _items(part)]
    if level:
        raise ValueError(f"a schema may be nested {MAX_SCHEMA_DEPTH} deep")
    if (size := len(json.dumps(schema))) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"a schema may have {MAX_SCHEMA_CHARACTERS:,} characters, and this has {size:,}")
    return schema


def _items(part: dict[str, JsonValue] | list[JsonValue]) -> Iterable[JsonValue]:
    return part.values() if isinstance(part, dict) else part


Schema = Annotated[dict[str, JsonValue], AfterValidator(_bounded)]
"""A JSON Schema of bounded size and depth."""


class NamedSchema(_Told):
    """`strict` has no effect: an answer always follows the schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Told):
    """OpenAI's `response_format` for chats: `text`, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required with the type json_schema, and allowed with no other")
        return self

    @property
    def wanted(self) -> "StructuredOutputs | None":
        """The sampler's form of this; None for text."""
        match self.type, self.json_schema:
            case "json_schema", NamedSchema() as named:
                return StructuredOutputs(json=named.schema_)
            case "json_object", _:
                return StructuredOutputs(json_object=True)
        return None


class TagContent(_Told):
    type: Literal["json_schema"] = "json_schema"
    json_schema: Schema


class Tag(_Told):
    """JSON that follows a schema, between two texts."""

    type: Literal["tag"] = "tag"
    begin: str = Field(min_length=1, max_length=256)
    content: TagContent
    end: str = Field(min_length=1, max_length=256)


class Tags(_Told):
    """One of these tags, or one or more of them with the separator in between."""

    type: Literal["tags_with_separator"] = "tags_with_separator"
    tags: list[Tag] = Field(min_length=1, max_length=MAX_TAGS)
    separator: str = Field(default="\n", min_length=1, max_length=16)
    at_least_one: Literal[True] = True
    stop_after_first: bool = False


class StructuralTag(_Told):
    """The supported structural tags: an answer only consists of tags, like forced tool calls."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Tags


class StructuredOutputs(_Told):
    """vLLM's field of this name; exactly one of these is set. Its other kinds (regex, choice, grammar) are refused.

    `structural_tag` is a StructuralTag as JSON text.
    """

    json_: Schema | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    structural_tag: str | None = Field(default=None, max_length=MAX_SCHEMA_CHARACTERS)

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        if sum(each is not None for each in (self.json_, self.json_object, self.structural_tag)) != 1:
            raise ValueError("give one of json, json_object and structural_tag")
        if self.structural_tag is not None:
            try:
                self.tags()
            except ValidationError as error:
                raise ValueError(f"structural_tag: {first_rule(error)}") from None
        return self

    def tags(self) -> Tags:
        assert self.structural_tag is not None
        return StructuralTag.model_validate_json(self.structural_tag).format
