"""Bodies that cost a service the most, made from its description: each list, map and text of a body grown to a limit.

Used by the tests of this folder, and by `python -m benchmarks.tenant_attacks`.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from longshore.training import _translated
from service.apis import bodies as json_bodies
from service.apis.bodies import _parsed, _Sent, judged
from service.decoding import SMALL_BYTES
from shared.errors import InvalidInput
from tests.security.belongings import BODIES

FILLS = ("a", r"\w+", "(a*)*", ".*|", "{{a}}", "[[", "é", "/../")
"""Texts that are repeated: plain ones, and what parsers of patterns, templates and paths may choke on."""
_TRIED = (
    *("a", "0", "0" * 64, "file:///data/rows.jsonl", "org/tiny", "learning_rate", "sft-0000000000000-000000"),
    *("https://example.invalid/a", "0 2 1 1 *", "key", "MQ==", "grader", "wh-000000000000000000000000"),
)
_MOST_TRIED, _DEEPEST = 3000, 7


@dataclass(frozen=True)
class Tried:
    """A body, the CPU seconds that its route's validation takes, and whether it is accepted."""

    body: bytes
    cpu_s: float
    is_valid: bool


def tried(endpoint: str, body: bytes) -> Tried:
    """Validate a body of an endpoint (`module:name`), and take the time of the part that the web process does."""
    found, is_valid = None, False
    if len(body) > SMALL_BYTES:
        with suppress(InvalidInput):
            found = judged(endpoint, body.decode("latin-1"))  # a child's work
        if found is None:
            return Tried(body, 0.0, is_valid)
    _translated.cache_clear()
    began = time.thread_time()
    try:
        sent = _Sent(*_parsed(body)) if found is None else _Sent(text=found.text, packed=found.packed)
        is_valid = not json_bodies._validators[endpoint](sent)
    except (ValueError, RecursionError):
        pass
    return Tried(body, time.thread_time() - began, is_valid)


def endpoints(app: FastAPI) -> dict[tuple[str, str], str]:
    """Every operation that takes JSON, by method and path, and its endpoint."""
    found, described = {}, app.openapi()["paths"]
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not isinstance(route, APIRoute) or context.path is None or context.path not in described:
            continue
        endpoint = f"{route.endpoint.__module__}:{route.endpoint.__qualname__}"
        for method in context.methods or ():
            body = described[context.path].get(method.lower(), {}).get("requestBody", {})
            if "application/json" in body.get("content", {}) and endpoint in json_bodies._validators:
                found[method, context.path] = endpoint
    return found


def worst(
    document: dict[str, Any], operation: tuple[str, str], endpoint: str, limit: int, most: int = _MOST_TRIED
) -> list[Tried]:
    """Return the two worst bodies of an operation, of at most `limit` bytes: of all, and of those that are accepted.

    `most`: how many are tried, taken evenly from all that there are.
    """
    method, path = operation
    schema = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    # Grown small at first, to see how many there are: a body of a mebibyte takes a while to be made.
    number = sum(1 for _ in islice(_bodies(document, schema, BODIES.get(path), min(limit, 4096)), _MOST_TRIED))
    bodies = islice(_bodies(document, schema, BODIES.get(path), limit), 0, _MOST_TRIED, max(1, number // most))
    found = sorted((tried(endpoint, body) for body in bodies if len(body) <= limit), key=lambda each: -each.cpu_s)
    valid = [each for each in found if each.is_valid]
    return found[:1] + [each for each in valid[:1] if each is not found[0]]


def _bodies(document: dict[str, Any], schema: Any, example: Any, limit: int) -> Iterator[bytes]:
    yield json.dumps({"prompt": [{"a": 1}] * (limit // 12)}).encode()
    yield json.dumps(dict.fromkeys(map(str, range(min(900, limit // 10))), 1)).encode()
    for member in _members(document, schema):
        base = _minimal(document, member, 0)
        if isinstance(base, dict) and isinstance(example, dict) and _fits(document, member, example):
            base = base | example
        for value in _grown(document, member, limit - len(json.dumps(base)) - 64, 0):
            grown = base | value if isinstance(base, dict) and isinstance(value, dict) else value
            yield json.dumps(grown, ensure_ascii=False).encode()


def _fits(document: dict[str, Any], schema: Any, example: dict[str, Any]) -> bool:
    parts = _resolved(document, schema).get("properties", {})
    return all(parts[name].get("const", value) == value for name, value in example.items() if name in parts)


def _resolved(document: dict[str, Any], schema: Any) -> dict[str, Any]:
    while isinstance(schema, dict) and "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema if isinstance(schema, dict) else {}


def _members(document: dict[str, Any], schema: Any) -> list[dict[str, Any]]:
    """The members of a union that are no null; else the schema itself."""
    found = _resolved(document, schema)
    members = found.get("anyOf") or found.get("oneOf") or found.get("allOf")
    if not members:
        return [] if found.get("type") == "null" else [found]
    return [each for member in members for each in _members(document, member)]


def _minimal(document: dict[str, Any], schema: Any, depth: int) -> Any:
    found = next(iter(_members(document, schema)), {})
    if "const" in found:
        return found["const"]
    if "enum" in found:
        return found["enum"][0]
    match found.get("type"):
        case "string":
            fitting = (text for text in _TRIED if re.search(found.get("pattern", ""), text))
            return next(fitting, "a").ljust(found.get("minLength", 0), "a")
        case "integer" | "number":
            return found.get("minimum", found.get("exclusiveMinimum", 0) + 1)
        case "boolean":
            return True
        case "array":
            return [_minimal(document, found.get("items", {}), depth + 1)] * found.get("minItems", 0)
        case "object" if depth < _DEEPEST:
            parts = found.get("properties", {})
            return {name: _minimal(document, parts[name], depth + 1) for name in found.get("required", ())}
    return {} if found.get("type") == "object" else 1


def _grown(document: dict[str, Any], schema: Any, limit: int, depth: int) -> Iterator[Any]:
    """Yield values of a schema of about `limit` bytes, in each of which one list, map or text has grown."""
    if depth > _DEEPEST or limit < 8:
        return
    for found in _members(document, schema):
        match found.get("type"):
            case "string" if "const" not in found and "enum" not in found:
                yield from ((fill * limit)[: min(found.get("maxLength", limit), limit)] for fill in FILLS)
            case "array":
                item = found.get("items", {})
                small = _minimal(document, item, depth + 1)
                most = min(found.get("maxItems", limit), limit)
                yield [small] * min(most, limit // (len(json.dumps(small)) + 2))
                yield from ([each] for each in _grown(document, item, limit - 4, depth + 1))
                for number in {min(most, 4), min(most, 32)}:
                    yield from ([each] * number for each in _grown(document, item, limit // number - 4, depth + 1))
            case "object":
                parts = found.get("properties", {})
                base = _minimal(document, found, depth)
                for name, part in parts.items():
                    yield from (base | {name: each} for each in _grown(document, part, limit, depth + 1))
                if (rest := found.get("additionalProperties")) is not False:
                    rest = rest if isinstance(rest, dict) else {}
                    yield from _maps(document, rest, limit, depth)


def _maps(document: dict[str, Any], rest: dict[str, Any], limit: int, depth: int) -> Iterator[Any]:
    """Maps of many keys, of long keys, and of one large value."""
    small = _minimal(document, rest, depth + 1)
    yield {f"k{i}": small for i in range(min(900, limit // (len(json.dumps(small)) + 10)))}
    for fill in FILLS:
        number = max(1, min(32, limit // 1000))
        length = min(990, limit // number - 12)
        yield {(fill * length)[:length] + "b" * i: small for i in range(number)}
    yield from ({"k": each} for each in _grown(document, rest, limit - 8, depth + 1))
