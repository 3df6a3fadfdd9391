"""Keep files that a release has written, for the next one to read: one of each kind, of the stores of its tests.

python -m tests.shared.releases FILE.json STORE…
"""

import json
import re
import sys
from pathlib import Path

_MOST_BYTES = 20_000
_IDS = (
    (r"\b(rl|sft|dpo|distill|reward|session|preview|sweep)-[0-9a-f]{12,}", r"\1-ID"),
    (r"/adapters/[^/]+/", "/adapters/NAME/"),
    (r"[0-9a-f]{16,}", "HASH"),
    (r"\d{5,}", "N"),
)
_LEFT_OUT = re.compile(r"tokenizer|/(dataset|uploads|imported)/|/weights/(?!adapter_config)|/models/|/exports/")


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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(recorded([Path(each) for each in sys.argv[2:]]), indent=0) + "\n")
