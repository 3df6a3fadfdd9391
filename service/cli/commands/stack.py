"""Commands about the stack: run it on this machine, and look whether it is well."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.connection import Json, address, read_settings, wants_json
from service.cli.exits import FAILED, USAGE, Stop
from service.cli.output.render import print_json, say

Root = Annotated[Path | None, typer.Option(help="Where the stack keeps its state; LONGSHORE_ROOT, or ~/.longshore.")]


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command()(dev)
    app.command()(doctor)


def dev(
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running in the background.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the stack of this root.")] = False,
    root: Root = None,
    opened: Annotated[
        list[Path] | None,
        typer.Option("--open", help="A folder whose files runs may read, by path; the current one if absent."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The web service's port; the next free one if it is taken.")] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Temporal's own pages too, which ask for no key.")] = False,
) -> None:
    """Run the whole stack on this machine: Temporal, the web service, hosts."""
    from service.dev import supervisor as stack
    from service.errors import DevError

    settings = read_settings()
    if root is not None:
        settings = settings.model_copy(update={"root": root})
    if detach and stop:
        raise Stop("--detach starts a stack and --stop ends one: give one of them", USAGE)
    try:
        if stop:
            say("stopped" if stack.stop(settings.root_path) else f"no stack was running in {settings.root_path}")
        elif detach:
            say(stack.banner(stack.detach(settings.root_path, port, ui, opened or ())))
        else:
            stack.Stack(settings, port, ui, opened or ()).run()
    except DevError as error:
        raise Stop(str(error)) from None


def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Check this machine and the service, and say what to do about what is wrong."""
    from service.cli.doctor import checks

    service = address(context.obj)
    found = []
    for check in checks(read_settings(), service.url, service.key):
        found.append(check)
        if not wants_json(context, as_json):
            print(f"{check.verdict:<5} {check.name}: {check.text}")
            if check.advice:
                print(f"      {check.advice}")
    if wants_json(context, as_json):
        print_json([vars(check) for check in found])
    if any(check.verdict == "fail" for check in found):
        raise typer.Exit(FAILED)
