"""Template strings of graders: `{{ sample.output_text }}` becomes a value of the row. Substitution, never code.

A reference is `sample` or `item`, then fields (`.name`) and list indices (`[0]`). There are no filters, calls or loops,
and inserted text is not expanded again.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

JSON = object  # a result of json.loads: dict, list, str, int, float, bool or None

MAX_TEMPLATE_CHARS = 64 << 10
MAX_RENDERED_CHARS = 16 << 20
_NAMESPACES = ("sample", "item")
_REFERENCE = re.compile(r"\s*(?P<namespace>[A-Za-z_]+)(?P<path>(?:\.[A-Za-z_][\w-]*|\[\d{1,6}\])+)\s*")
_STEP = re.compile(r"\.(?P<field>[A-Za-z_][\w-]*)|\[(?P<place>\d+)\]")


class TemplateError(ValueError):
    """A template cannot be parsed, or names a value that a row does not have."""


@dataclass(frozen=True)
class Reference:
    """`item.answers[0].text` is Reference("item", ("answers", 0, "text"))."""

    namespace: str
    steps: tuple[str | int, ...]

    def __str__(self) -> str:
        return self.namespace + "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in self.steps)


def parse_template(template: str) -> tuple[str | Reference, ...]:
    """Parse a template into literal pieces and references, in order.

    Raises:
        TemplateError: `{{` without `}}`, something other than a reference between them, or too long a template.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"a template has at most {MAX_TEMPLATE_CHARS:,} characters; this one has {len(template):,}")
    pieces: list[str | Reference] = []
    end = 0
    while (start := template.find("{{", end)) >= 0:
        close = template.find("}}", start + 2)
        if close < 0:
            raise TemplateError(f"the {{{{ at character {start + 1} is never closed by }}}}")
        if start > end:
            pieces.append(template[end:start])
        pieces.append(_reference(template[start + 2 : close]))
        end = close + 2
    return (*pieces, template[end:]) if end < len(template) else tuple(pieces)


def _reference(text: str) -> Reference:
    match = _REFERENCE.fullmatch(text)
    if match is None or match["namespace"] not in _NAMESPACES:
        shown = text.strip()[:80]
        raise TemplateError(f"{{{{ {shown} }}}} is no reference: write sample.output_text, item.field or item.list[0]")
    steps = (_step(found) for found in _STEP.finditer(match["path"]))
    return Reference(match["namespace"], tuple(steps))


def _step(found: re.Match[str]) -> str | int:
    return found["field"] if found["field"] is not None else int(found["place"])


def render(template: str, namespaces: Mapping[str, JSON]) -> str:
    """Return the template with every reference replaced: strings unchanged, other values as JSON.

    Raises:
        TemplateError: a field or list place that the row does not have, or too long a result.
    """
    texts: list[str] = []
    num_chars = 0
    for piece in parse_template(template):
        texts.append(piece if isinstance(piece, str) else _text(lookup(piece, namespaces)))
        num_chars += len(texts[-1])
        if num_chars > MAX_RENDERED_CHARS:
            raise TemplateError(f"the rendered template is longer than {MAX_RENDERED_CHARS:,} characters")
    return "".join(texts)


def lookup(reference: Reference, namespaces: Mapping[str, JSON]) -> JSON:
    """Return the value that a reference names. Raises TemplateError if there is none."""
    value = namespaces[reference.namespace]
    for number, step in enumerate(reference.steps):
        match value, step:
            case dict(), str() if step in value:
                value = value[step]
            case list(), int() if step < len(value):
                value = value[step]
            case _:
                known = Reference(reference.namespace, reference.steps[:number])
                raise TemplateError(f"{reference} is not in this row: {known} has no {_shown(step)}")
    return value


def _shown(step: str | int) -> str:
    return f"place {step}" if isinstance(step, int) else f"field '{step}'"


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
