"""The headings of `longshore --help`, and the module that defines each command.

A module is imported when one of its commands is asked for: `longshore ls` loads nothing of `submit`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

# Heading: {command: module of service.cli.commands}.
HEADINGS = {
    "Before a run": {
        "validate": "data",
        "preview": "data",
        "estimate": "estimate",
        "grader": "graders",
        "files": "files",
    },
    "Start runs": {"submit": "submit", "step": "rl", "finish": "rl", "schedule": "schedules"},
    "Look at runs": {
        **dict.fromkeys(("ls", "get", "watch", "logs", "events", "steps", "metrics", "checkpoints"), "runs"),
        "webhook": "webhooks",
    },
    "Change runs, fetch what they published": dict.fromkeys(("pause", "cancel", "resume", "retry", "download"), "runs"),
    "Services, keys, tenants": {
        **{"login": "sign_in", "logout": "sign_in"},
        **dict.fromkeys(("whoami", "usage", "keys", "tenants", "audit"), "account"),
        "config": "sign_in",
    },
    "This machine": dict.fromkeys(("dev", "doctor", "db"), "stack"),
}
_MODULES = {command: module for modules in HEADINGS.values() for command, module in modules.items()}
_LONGEST = 200


class LazyCommands(Mapping[str, "Command"]):
    """The `commands` of a Typer group, each made when it is first asked for.

    Args:
        names: in the order in which help and completion list them.
        make: the command of a name.
    """

    def __init__(self, names: Iterable[str], make: "Callable[[str], Command]") -> None:
        self._names = tuple(names)
        self._make = make
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> "Command":
        if name not in self._names:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class HeadedHelp(TyperGroup):
    """Lists commands as HEADINGS has them. (Typer's own headings need Rich, which takes long to load.)"""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LazyCommands(_MODULES, _loaded)  # type: ignore[assignment]

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(_LONGEST)) for name in names])


def _loaded(name: str) -> "Command":
    """A command of its module's `app`, or the app itself where that is the group of this name."""
    group = _group(_MODULES[name])
    return group if group.name == name else group.commands[name]


@cache
def _group(module: str) -> TyperGroup:
    return typer.main.get_group(import_module(f"service.cli.commands.{module}").app)
