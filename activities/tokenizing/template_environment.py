"""The environment that chat templates are written for: jinja2's sandbox, with what transformers adds and no more."""

import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Unrendered(Exception):
    """A row or a template cannot be rendered with exact spans; the text says why."""


class Raised(Unrendered):
    """The template raises an error at a row: its own refusal, as of roles that do not alternate, or a fault."""


class _GenerationBlocks(Extension):
    """The tag `{% generation %}` around an assistant's words. Renders its body, between marks if those are wanted."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _body(self, _: nodes.EvalContext, caller: Callable[[], str]) -> str:
        body = caller()
        start, end = getattr(self.environment, "generation_marks", ("", ""))
        return f"{start}{body}{end}"


@contextmanager
def tracking_generation(environment: ImmutableSandboxedEnvironment, marks: tuple[str, str]) -> Iterator[None]:
    """Put these marks around `{% generation %}` blocks that are rendered meanwhile."""
    environment.generation_marks = marks  # type: ignore[attr-defined]
    try:
        yield
    finally:
        environment.generation_marks = ("", "")  # type: ignore[attr-defined]


class _SafeNamespace(Namespace):
    """A namespace whose names cannot reach into Python."""

    def __init__(*args: Any, **names: Any) -> None:  # `self` may be a name in it
        self, *rest = args
        for name in dict(*rest, **names):
            _refuse_private(name)
        Namespace.__init__(self, *rest, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template's namespace may not hold {name!r}")


# Filters and globals that models' templates use. The others could reach into objects, or take much memory.
_FILTERS = frozenset(
    "abs batch capitalize count d default dictsort e escape first float indent int items join last length list lower "
    "map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum title tojson "
    "trim unique upper wordcount".split()
)
_GLOBALS = frozenset({"range", "cycler", "joiner"})


def load_everything() -> None:
    """Import the modules that rendering would import later, since the sandbox cannot open files."""
    for name in ("jinja2.constants", "jinja2.debug", "jinja2.ext", "jinja2.sandbox"):
        importlib.import_module(name)
    time.localtime()
    with suppress(Exception):
        template_environment().from_string("{{ 1 | tojson }}{{ strftime_now('%d %B') }}{{ missing.more }}").render()


def template_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters = {name: environment.filters[name] for name in _FILTERS} | {"tojson": _tojson}
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": dict}
    environment.globals["namespace"] = _SafeNamespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
