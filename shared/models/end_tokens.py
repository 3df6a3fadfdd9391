"""End tokens as a model's folder names them: `eos_token_id` of `generation_config.json` and `config.json`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from longshore.fields import Frozen
from shared.errors import CorruptArtifact
from shared.field_rules import first_rule

GENERATION = "generation_config.json"
_CONFIG = "config.json"
_KEPT = ("bos_token_id", "pad_token_id")  # libraries read these from config.json if there is no generation_config.json


class _Ends(Frozen, extra="ignore"):
    eos_token_id: int | list[int] | None = None


_ends: TypeAdapter[_Ends] = TypeAdapter(_Ends)


def with_decoder(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json`; those of `text_config`, if there is one, override the others."""
    text = values.get("text_config")
    told = text.items() if isinstance(text, dict) else ()
    return values | {name: value for name, value in told if value is not None}


def read_end_ids(model: Path) -> tuple[int, ...]:
    """Return every end token that the files of a model's folder name. Raises CorruptArtifact for a damaged file."""
    found = [*_end_ids(model / GENERATION), *_end_ids(model / _CONFIG)]
    return tuple(dict.fromkeys(found))


def with_end_ids(model: Path, end_ids: Iterable[int]) -> dict[str, Any] | None:
    """Return the content of a `generation_config.json` that makes libraries end answers with these ids.

    Returns None if the file names them all already. Their order in the file is kept: some libraries take the first.
    """
    named, wanted = _end_ids(model / GENERATION), dict.fromkeys([*read_end_ids(model), *end_ids])
    if set(wanted) <= set(named):
        return None
    config = _object(model / _CONFIG)
    began = _object(model / GENERATION) or {name: config[name] for name in _KEPT if config.get(name) is not None}
    return began | {"eos_token_id": list(wanted)}


def end_ids_in(values: dict[str, Any], place: str) -> list[int]:
    """Return the end tokens that a file of this content names. Raises CorruptArtifact for a damaged one."""
    try:
        found = _ends.validate_python(values).eos_token_id
    except ValidationError as error:
        raise CorruptArtifact(first_rule(error), place) from error
    return [found] if isinstance(found, int) else found or []


def _end_ids(path: Path) -> list[int]:
    return end_ids_in(_object(path), str(path))


def _object(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise CorruptArtifact(f"no JSON: {error}", str(path)) from error
    return with_decoder(value)
