"""What failed in a round of the suite: how many tests and errors, in how many files, and whether to try them again.

A failed fixture is an error of each test that wanted it: 72 errors may have one cause, and are not one failure.

python -m tests.failures FILE     says it of a round; exits with 1 when there is too much for a second one
"""

import json
import sys
from collections import Counter
from pathlib import Path

# Beside others a test may be short of the machine. So many are not: a change has broken them.
MAX_FILES, MAX_CAUSES = 4, 8
KEY = "longshore/failures"
"""Of pytest's cache: kinds ("failed" or "error") by test."""


def told(kinds: dict[str, str]) -> str:
    """Numbers of failed tests, errors and files; then those of each file."""
    lines = [f"{_numbers(Counter(kinds.values()))} in {_many(len(_by_file(kinds)), 'file')}:"]
    lines += [f"  {file}: {_numbers(counts)}" for file, counts in sorted(_by_file(kinds).items())]
    return "\n".join(lines)


def is_worth_a_second_round(kinds: dict[str, str]) -> bool:
    """Whether few enough causes, in few enough files, are behind it; all errors of a file count as one cause."""
    by_file = _by_file(kinds)
    num_causes = sum(counts["failed"] + (counts["error"] > 0) for counts in by_file.values())
    return len(by_file) <= MAX_FILES and num_causes <= MAX_CAUSES


def _by_file(kinds: dict[str, str]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for test, kind in kinds.items():
        found.setdefault(test.partition("::")[0], Counter())[kind] += 1
    return found


def _numbers(counts: Counter[str]) -> str:
    names = {"failed": "failed test", "error": "error"}
    return ", ".join(_many(counts[kind], name) for kind, name in names.items() if counts[kind])


def _many(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def main() -> None:
    kinds = json.loads(Path(sys.argv[1]).read_text())
    print(told(kinds))
    sys.exit(not is_worth_a_second_round(kinds))


if __name__ == "__main__":
    main()
