"""The headings of `longshore --help`, and the module that defines each command.

A module is imported when one of its commands is asked for: `longshore ls` loads nothing of `submit`.
"""

from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from service.cli.command import LONGEST_HELP

# Heading: {command: module of service.cli.commands}.
HEADINGS = {
    "Before a run": {"validate": "data", "preview": "data", "estimate": "data", "grader": "graders", "files": "files"},
    "Start runs": {
        "submit": "submit",
        **dict.fromkeys(("step", "finish"), "runs"),
        **{"sweep": "schedules", "schedule": "schedules", "import": "importing"},
    },
    "Look at runs": {
        **dict.fromkeys(("ls", "get", "watch", "logs", "events", "steps", "metrics", "compare"), "runs"),
        **dict.fromkeys(("checkpoints", "profile"), "runs"),
        "session": "runs",
        "webhook": "webhooks",
    },
    "Change runs": dict.fromkeys(("pause", "cancel", "resume", "retry", "rm"), "runs"),
    "Use what they published": dict.fromkeys(("models", "chat", "download", "export", "verify"), "models"),
    "Services, keys, tenants": {
        **{"login": "sign_in", "logout": "sign_in"},
        **dict.fromkeys(("whoami", "usage", "keys", "tenants", "audit", "gc"), "account"),
        "config": "sign_in",
    },
    "This machine": dict.fromkeys(("dev", "doctor", "db", "builds"), "stack"),
}
COMMANDS = {command: module for modules in HEADINGS.values() for command, module in modules.items()}


class HeadedHelp(TyperGroup):
    """Lists commands as HEADINGS has them. (Typer's own headings need Rich, which takes long to load.)"""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names alone: `get_command` loads one

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command of its module's `app`, or the app itself if that is the group of this name."""
        if cmd_name not in COMMANDS:
            return None
        group = _group(COMMANDS[cmd_name])
        return group if group.name == cmd_name else group.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in HEADINGS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl([(name, each.get_short_help_str(LONGEST_HELP)) for name, each in found if each])


@cache
def _group(module: str) -> TyperGroup:
    return typer.main.get_group(import_module(f"service.cli.commands.{module}").app)
