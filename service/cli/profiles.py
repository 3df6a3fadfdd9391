"""Where the command line's settings come from: profiles of services, environment, files."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, SecretStr, ValidationError
from pydantic_settings import TomlConfigSettingsSource

from longshore.fields import Frozen
from service.cli.render import USAGE, Stop
from shared.settings import FROM_FILE, Environment, Settings, user_config_path
from shared.storage.files import write_atomically

# --- Profiles ---
# The URLs and keys of services that the user logged in to, in a file that only its owner can read.

FIRST_PROFILE = "default"


class Profile(Frozen):
    """A service, and the key to ask it with. The key is sent to no other address."""

    api_url: str
    api_key: str


class Profiles(Frozen):
    """`credentials.json` in the user's configuration folder. `current`: the profile that commands use by default."""

    current: str | None = None
    profiles: dict[str, Profile] = Field(default_factory=dict)

    @classmethod
    def read(cls) -> "Profiles":
        """Read the file, or return no profiles if there is none. Raises Stop for a file of another format."""
        path = credentials_path()
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls()
        if path.stat().st_mode & 0o077:
            sys.stderr.write(f"{path} can be read by others: chmod 600 {path}\n")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise Stop(f"{path} cannot be read: {error.errors()[0]['msg']}", USAGE, f"rm {path}, and log in") from None

    def write(self) -> None:
        """Write the file, readable by its owner only from its first byte on."""
        previous = os.umask(0o077)
        try:
            path = credentials_path()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self.model_dump_json(indent=1).encode() + b"\n")
        finally:
            os.umask(previous)

    def named(self, name: str) -> Profile:
        """Return a profile. Raises Stop if there is none of this name."""
        if name not in self.profiles:
            there_are = f"there are {', '.join(sorted(self.profiles))}" if self.profiles else "there is none"
            advice = f"longshore --profile {name} login makes it"
            raise Stop(f"there is no profile {name}: {there_are}", USAGE, advice)
        return self.profiles[name]

    def having(self, name: str, profile: Profile) -> "Profiles":
        """Return the profiles with this one added as the current one."""
        return Profiles(current=name, profiles={**self.profiles, name: profile})

    def without(self, name: str) -> "Profiles":
        left = {each: profile for each, profile in self.profiles.items() if each != name}
        return Profiles(current=None if self.current == name else self.current, profiles=left)


def credentials_path() -> Path:
    return user_config_path().with_name("credentials.json")


# --- Find the origin of each setting of this machine, and the part of its value that may be shown ---

PROJECT_FILE = Path("longshore.toml")
DEFAULT = "default"
_PREFIX = "LONGSHORE_"
_SECRET = re.compile(r"key|secret|password|token")
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
    is_secret = isinstance(value, SecretStr) or _SECRET.search(name) is not None
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
    return DEFAULT


def _says(values: object, name: tuple[str, ...]) -> bool:
    for part in name:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
