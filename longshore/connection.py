"""Finds the service that a client talks to, and the key for it. The command line and `Client()` both use it.

Each of the two is taken from the first of these that has it: the arguments, the named profile, the environment,
`./longshore.toml`, the profile of the last `longshore login`, the user's configuration file, the stack of
`longshore dev`. The key of a profile or of a stack is only sent to that profile's or stack's own address.
"""

import json
import os
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8484"
FIRST_PROFILE = "default"
PROJECT_FILE = Path("longshore.toml")
_URL, _KEY = "LONGSHORE_API_URL", "LONGSHORE_API_KEY"


class ConnectionProblem(Exception):
    """A file or variable that says where the service is cannot be read, or names what is not there."""

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice


@dataclass(frozen=True)
class Profile:
    """A service, and the key for it."""

    api_url: str
    api_key: str


@dataclass(frozen=True)
class Address:
    """A service and the key for it, each with the place that names it."""

    url: str
    url_origin: str
    key: str | None
    key_origin: str | None


@dataclass(frozen=True)
class _Place:
    """The URL and key that one place gives. `is_bound`: its key is only sent to its own URL."""

    url: str | None
    key: str | None
    origin: str
    key_origin: str | None = None
    is_bound: bool = False


def find_address(api_url: str | None = None, api_key: str | None = None, profile: str | None = None) -> Address:
    """Find the URL and key of the service. Raises ConnectionProblem."""
    places = list(_places(api_url, api_key, profile))
    url, url_origin = next(((p.url, p.origin) for p in places if p.url), (DEFAULT_URL, "default"))
    for place in places:
        if place.key and (not place.is_bound or place.url == url):
            return Address(url, url_origin, place.key, place.key_origin or place.origin)
    return Address(url, url_origin, None, None)


def _places(api_url: str | None, api_key: str | None, profile: str | None) -> Iterator[_Place]:
    yield _Place(api_url, api_key, "--api-url", "--api-key")
    profiles = Profiles.read()
    if profile:
        named = profiles.named(profile)
        yield _Place(named.api_url, named.api_key, f"profile {profile}", is_bound=True)
    yield _Place(_variable(_URL), _variable(_KEY), _URL, _KEY)
    project = _table(PROJECT_FILE)
    yield _Place(project.get("api_url"), project.get("api_key"), f"./{PROJECT_FILE}")
    current = profiles.profiles.get(profiles.current or "")
    if current and not profile:
        yield _Place(current.api_url, current.api_key, f"profile {profiles.current}", is_bound=True)
    user = _table(user_config_path())
    yield _Place(user.get("api_url"), user.get("api_key"), str(user_config_path()))
    root = _variable("LONGSHORE_ROOT") or project.get("root") or user.get("root") or "~/.longshore"
    root_path = Path(root).expanduser().resolve()
    if stack := _document(root_path / "dev.json"):
        yield _Place(stack["api_url"], stack["api_key"], f"the dev stack of {root_path}", is_bound=True)


def _variable(name: str) -> str | None:
    """Return a variable of the environment, or the content of the file that NAME_FILE names."""
    if (value := os.environ.get(name)) is not None:
        return value or None
    path = os.environ.get(f"{name}_FILE")
    try:
        return Path(path).read_text().strip() if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConnectionProblem(f"{name}_FILE: {path} cannot be read: {error}") from None


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConnectionProblem(f"the settings cannot be read: {path}: {error}") from None


def _document(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def user_config_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "longshore" / "config.toml"


# --- Profiles: the services that the user logged in to, in a file that only its owner can read ---


def credentials_path() -> Path:
    return user_config_path().with_name("credentials.json")


@dataclass(frozen=True)
class Profiles:
    """`credentials.json` in the user's configuration folder. `current`: the profile that is used by default."""

    current: str | None
    profiles: dict[str, Profile]

    @classmethod
    def read(cls) -> "Profiles":
        """Read the file; no profiles if there is none. Raises ConnectionProblem for a file of another format."""
        path = credentials_path()
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return cls(None, {})
        except (OSError, ValueError) as error:
            raise ConnectionProblem(f"{path} cannot be read: {error}", f"rm {path}, and log in") from None
        if path.stat().st_mode & 0o077:
            sys.stderr.write(f"{path} can be read by others: chmod 600 {path}\n")
        try:
            return cls(found["current"], {name: Profile(**each) for name, each in found["profiles"].items()})
        except (LookupError, TypeError, AttributeError) as error:
            raise ConnectionProblem(f"{path} cannot be read: {error}", f"rm {path}, and log in") from None

    def write(self) -> None:
        """Write the file, readable by its owner only from its first byte on."""
        path = credentials_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        profiles = {name: vars(each) for name, each in self.profiles.items()}
        part = path.with_suffix(f".{os.getpid()}")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(json.dumps({"current": self.current, "profiles": profiles}, indent=1) + "\n")
        part.replace(path)

    def named(self, name: str) -> Profile:
        """Return a profile. Raises ConnectionProblem if there is none of this name."""
        if name not in self.profiles:
            there_are = f"there are {', '.join(sorted(self.profiles))}" if self.profiles else "there is none"
            advice = f"longshore --profile {name} login makes it"
            raise ConnectionProblem(f"there is no profile {name}: {there_are}", advice)
        return self.profiles[name]

    def having(self, name: str, profile: Profile) -> "Profiles":
        """Return the profiles with this one added as the current one."""
        return Profiles(name, {**self.profiles, name: profile})

    def without(self, name: str) -> "Profiles":
        left = {each: profile for each, profile in self.profiles.items() if each != name}
        return Profiles(None if self.current == name else self.current, left)
