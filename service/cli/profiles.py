"""Profiles: the URLs and keys of services that the user logged in to, in a file that only its owner can read."""

import os
import sys
from pathlib import Path

from pydantic import Field, ValidationError

from longshore.fields import Frozen
from service.cli.exits import USAGE, Stop
from shared.settings import user_config_path
from shared.storage.files import write_atomically

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
