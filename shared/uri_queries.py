"""Keeps the query strings of users' http(s) URIs secret, since presigned signatures and tokens are in them.

A query is stored in one record. Run records, Temporal, the database, schedules and W&B only hold
`https://host/path?longshore-query=ID`. The activity that downloads the file reads the query from the store.
"""

import hashlib
import operator
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from longshore.fields import Frozen
from shared.errors import InvalidInput, NotFound
from shared.storage.paths import query_record
from shared.storage.store import ObjectStore

_NAME = "longshore-query="
_LONGEST = 2048
_FIELDS = ("uri", "groups", "training_file", "validation_file")
F = TypeVar("F", bound=Frozen)


def without_queries(request: F) -> tuple[F, Mapping[str, bytes]]:
    """Return a request with each URI's query replaced by an id, and the records of the queries by their ids.

    The records are to be put at `query_record`.

    Raises InvalidInput: a URI would be too long.
    """
    records: dict[str, bytes] = {}
    changed: F = _cut(records, request, "")
    return changed, records


def _cut(records: dict[str, bytes], value: Any, name: str) -> Any:
    match value:
        case str() if name in _FIELDS:
            return _named(records, value, name)
        case Frozen():
            found = {field: getattr(value, field) for field in type(value).model_fields}
            changes = {field: new for field, old in found.items() if (new := _cut(records, old, field)) is not old}
            return value.model_copy(update=changes) if changes else value
        case dict():
            cut = {key: _cut(records, old, str(key)) for key, old in value.items()}
            return cut if any(cut[key] is not value[key] for key in value) else value
        case tuple() | list():
            items = [_cut(records, item, name) for item in value]
            return type(value)(items) if any(map(operator.is_not, items, value)) else value
        case _:
            return value


def _named(records: dict[str, bytes], uri: str, place: str) -> str:
    """Replace a URI's query by an id: a hash of the whole URI, so only whoever knows the URI can name it."""
    if "?" not in uri:
        return uri
    try:
        scheme = urlsplit(uri).scheme.lower()
    except ValueError as error:
        raise InvalidInput("this is no URI", place) from error
    if scheme not in ("http", "https"):
        return uri
    address, _, query = uri.partition("?")
    if query.startswith(_NAME):
        return uri
    query_id = hashlib.sha256(uri.encode(errors="replace")).hexdigest()[:32]
    named = f"{address}?{_NAME}{query_id}"
    if len(named) > _LONGEST:
        raise InvalidInput(f"a URI with a query has at most {_LONGEST - len(named) + len(address)} characters", place)
    records[query_id] = uri.encode(errors="replace")
    return named


def with_query(store: ObjectStore, uri: str) -> str:
    """The URI that a user sent. A query is only ever sent to the address that it came with.

    Raises InvalidInput: it is not on record.
    """
    address, _, query = uri.partition("?")
    if not query.startswith(_NAME):
        return uri
    try:
        kept = store.get_bytes(query_record(query.removeprefix(_NAME))).decode()
    except (NotFound, ValueError):
        kept = ""
    if kept.partition("?")[0] != address:
        parts = urlsplit(uri)
        raise InvalidInput("this URI's query is not known here: give it again", f"{parts.scheme}://{parts.netloc}")
    return kept
