"""Keep files that a release has written, for the next one to read, one of each kind, of the stores of its tests; and
the names of the fields that it knows.

python -m tests.shared.releases tests/shared/released_files.json STORE…
python -m tests.shared.releases tests/shared/released_fields.json
"""

import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from longshore.fields import Frozen

_MOST_BYTES = 20_000
_IDS = (
    (r"\b(rl|sft|dpo|distill|reward|session|preview|sweep)-[0-9a-f]{12,}", r"\1-ID"),
    (r"/adapters/[^/]+/", "/adapters/NAME/"),
    (r"[0-9a-f]{16,}", "HASH"),
    (r"\d{5,}", "N"),
)
# What is not ours, or what others read by single fields, pass on, or read as users' rows.
_LEFT_OUT = re.compile(
    r"tokenizer|/(dataset|uploads|imported)/|/weights/|/models/|/exports/|index/|shapes/|adapter_config"
    r"|tokenized/HASH/(report|prompts)|/(samples|groups|prompts)\.jsonl"
)


def kind_of(key: str, content: str) -> str:
    """A key without what differs from run to run; of a session's commands and results, each kind is one of its own."""
    for pattern, name in _IDS:
        key = re.sub(pattern, name, key)
    named = re.search(r'"kind": ?"(\w+)"', content) if re.search(r"/(commands|results)/", key) else None
    return key if named is None else f"{key} {named[1]}"


def recorded(stores: list[Path]) -> dict[str, str]:
    """Contents by kind. Bytes are as Latin-1 has them: stored commands hold arrays."""
    kept: dict[str, str] = {}
    for store in stores:
        for path in sorted(store.rglob("*")):
            if path.suffix in (".json", ".jsonl") and path.stat().st_size <= _MOST_BYTES:
                content = path.read_bytes().decode("latin-1")
                kind = kind_of(path.relative_to(store).as_posix(), content)
                if not _LEFT_OUT.search(kind):
                    kept.setdefault(kind, re.sub(r"file:///tmp/[^\"]*?/(?=[^/\"]+\")", "file:///there/", content))
    return dict(sorted(kept.items()))


def exchanged() -> dict[str, list[type[Frozen]]]:
    """Models that hosts and services of two releases exchange, by name, wherever they are defined."""
    for name in ("longshore", "shared", "activities", "workflows"):
        package = import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            import_module(module.name)
    found: dict[str, list[type[Frozen]]] = {}
    for model in _below(Frozen):
        if model.__module__.partition(".")[0] in ("longshore", "shared", "activities", "workflows"):
            found.setdefault(model.__qualname__, []).append(model)
    return found


def _below(parent: type[Frozen]) -> Iterator[type[Frozen]]:
    for model in parent.__subclasses__():
        yield model
        yield from _below(model)


def fields() -> dict[str, list[str]]:
    """The names of their fields."""
    return {
        name: sorted({each for model in models for each in model.model_fields})
        for name, models in sorted(exchanged().items())
    }


def _lines(found: Mapping[str, object]) -> str:
    """JSON with a line for each name."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()) + "\n}\n"


if __name__ == "__main__":
    stores = [Path(each) for each in sys.argv[2:]]
    Path(sys.argv[1]).write_text(_lines(recorded(stores) if stores else fields()))
