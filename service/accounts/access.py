"""Check a tenant's URIs: those into our own store must lead into the tenant's own folder."""

from collections.abc import Iterator

from pydantic import BaseModel, JsonValue

from shared.errors import InvalidInput
from shared.settings import Settings
from shared.storage.places import OpenPlaces
from shared.storage.store import ObjectStore

_MODEL_FIELDS = ("model", "model_uri", "initial_adapter", "reference")


class Access:
    """Checks every string of a request for URIs and paths, whatever its field, so that no new field is forgotten."""

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self._places = OpenPlaces(settings, store)

    def check(self, tenant: str, request: BaseModel) -> None:
        """Check every string of a request. Blocking: paths are resolved.

        Raises InvalidInput: a URI or a path leads to files of the installation or of another tenant, whether they exist
        or not, or has a scheme that is not supported.
        """
        self.check_value(tenant, request.model_dump(mode="json"))

    def check_value(self, tenant: str, value: JsonValue, place: str = "") -> None:
        """Check every string of a field's value, as `check` does. `place`: the field."""
        for at, text in _strings(value, place):
            _check_scheme(text, at)
            self._places.check_named(tenant, text, at)


def _check_scheme(text: str, place: str) -> None:
    """Refuse a scheme that no host reads, before a run waits for a host."""
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    field = place.rpartition(".")[2]
    if field == "uri" and scheme not in ("file", "http", "https", "s3"):
        raise InvalidInput("a dataset's URI starts with file://, http://, https:// or s3://", place)
    if field in _MODEL_FIELDS and scheme not in ("", "file", "s3"):
        raise InvalidInput("give an absolute path, a file:// or s3:// URI, or a hub id such as org/name", place)


def _strings(value: JsonValue, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a document, with its place."""
    match value:
        case str():
            yield place, value
        case list():
            for number, item in enumerate(value):
                yield from _strings(item, f"{place}.{number}" if place else str(number))
        case dict():
            for name, item in value.items():
                yield from _strings(item, f"{place}.{name}" if place else name)
