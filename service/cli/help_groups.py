"""The help of `longshore`: its many commands under headings, each with the first sentence of its own help."""

from typing import TYPE_CHECKING

from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

HEADINGS = {
    "Before a run": ("validate", "preview", "estimate", "grader", "files"),
    "Start runs": ("submit", "step", "finish", "schedule"),
    "Look at runs": ("ls", "get", "watch", "logs", "events", "steps", "metrics", "checkpoints", "webhook"),
    "Change runs, fetch what they published": ("pause", "cancel", "resume", "retry", "download"),
    "Services, keys, tenants": ("login", "logout", "whoami", "usage", "keys", "tenants", "audit", "config"),
    "This machine": ("dev", "doctor", "db"),
}
_LONGEST = 200


class HeadedHelp(TyperGroup):
    """Lists commands as HEADINGS has them. (Typer's own headings need Rich, which takes long to load.)"""

    def list_commands(self, ctx: "Context") -> list[str]:
        """Those of the headings, then others: also in the order that a shell completes them in."""
        headed = [name for names in HEADINGS.values() for name in names if name in self.commands]
        return headed + [name for name in self.commands if name not in headed]

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(_LONGEST)) for name in names])
