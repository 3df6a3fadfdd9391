"""The settings of this machine: where each comes from, and the part of its value that may be shown."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_settings import TomlConfigSettingsSource

from longshore.connection import PROJECT_FILE, user_config_path
from shared.settings import FROM_FILE, Environment, Settings

_PREFIX = "LONGSHORE_"
_IS_SECRET = re.compile(r"key|secret|password|token")
_OUR_KEY = re.compile(r"^(ls-[0-9a-f]{12})-")
_LEAST_SHOWN = 12


@dataclass(frozen=True)
class SettingValue:
    """A setting by its dotted name. `value` may be shown: secrets are cut to their beginning."""

    name: str
    value: str | None
    origin: str


def layers() -> list[tuple[str, Mapping[str, Any]]]:
    """Return the values of the environment and of each file, by place. The first place wins."""
    return [
        ("environment", Environment(Settings)()),
        (f"./{PROJECT_FILE}", TomlConfigSettingsSource(Settings, PROJECT_FILE)()),
        (str(user_config_path()), TomlConfigSettingsSource(Settings, user_config_path())()),
    ]


def setting_values(settings: Settings) -> Iterator[SettingValue]:
    """Return every setting, in the order of definition."""
    said = layers()
    for name, value in _flat(settings, ()):
        yield SettingValue(".".join(name), shown(name[-1], value), _origin(name, said))


def variable(*name: str) -> str:
    """Return the environment variable that set a setting: its own, or that of its group."""
    known = {variable.upper() for variable in os.environ}
    own = [_PREFIX + "__".join(name[:length]).upper() for length in range(len(name), 0, -1)]
    wanted = [variable + suffix for variable in own for suffix in ("", FROM_FILE.upper())]
    return next((each for each in wanted if each in known), wanted[0])


def shown(name: str, value: object) -> str | None:
    """Return a value as it may be shown: the prefix of a key, a URL without its password."""
    if value is None:
        return None
    is_secret = isinstance(value, SecretStr) or _IS_SECRET.search(name) is not None
    text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    if isinstance(value, tuple):
        text = ", ".join(str(each) for each in value)
    if "://" in text:
        text = re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:…@", text)
        return text.partition("?")[0] + "?…" if is_secret and "?" in text else text
    return prefix(text) if is_secret else text


def prefix(key: str) -> str:
    """Return the first characters of a key, enough for its holder to recognise it."""
    if ours := _OUR_KEY.match(key):
        return f"{ours[1]}…"
    return f"{key[:4]}…" if len(key) >= _LEAST_SHOWN else "…"


def _flat(model: BaseModel, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _flat(value, (*above, name))
        else:
            yield (*above, name), value


def _origin(name: tuple[str, ...], said: list[tuple[str, Mapping[str, Any]]]) -> str:
    for place, values in said:
        if _says(values, name):
            return variable(*name) if place == "environment" else place
    return "default"


def _says(values: object, name: tuple[str, ...]) -> bool:
    for part in name:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
