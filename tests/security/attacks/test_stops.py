"""What one tenant sends does not make the others wait: patterns, expressions, answers of models, bodies of requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_CPU_S = 20
"""Of a child, for what takes a few hundredths of a second of it, and took minutes."""
_BEGIN = (
    f"import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_S}, {_CPU_S})); "
    "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
)


def child(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A process of ours under limits of its own."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500)


def patterns(root: Path, *packages: str) -> tuple[int, list[str]]:
    """How many regular expressions packages have, and those that keep a processor busy."""
    done = child("-m", "tests.security.attacks.patterns", str(root), *packages)
    assert done.returncode == 0, done.stderr
    *slow, last = done.stdout.splitlines()
    return json.loads(last)["tried"], slow


def test_every_pattern_of_ours_is_linear() -> None:
    tried, slow = patterns(ROOT, "shared", "activities", "workflows", "service")
    assert slow == []
    assert tried > 50


@pytest.mark.parametrize(
    "pattern",
    [
        r're.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)',
        r're.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)',
        r're.compile(r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.]))")',
        r're.compile(r"(a|aa)+$")',
    ],
)
def test_a_pattern_that_is_not_is_found(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(f"import re\nX = {pattern}\n")
    assert len(patterns(tmp_path, "package")[1]) >= 1


@pytest.mark.parametrize(
    "code",
    [
        "from shared.expressions import *\ntry: parse_expression('1' * 3990 + 'e1x')\nexcept ExpressionError: pass",
        "from shared.expressions import *\ntry: parse_expression('1+' * 1990 + '1' * 10 + 'e1.')"
        "\nexcept ExpressionError: pass",
        "from activities.grading.score_model import score_in\n"
        "for said in ('```' + ' ' * 500_000, '```' + ' \\n' * 200_000 + 'x', '```json' * 100_000):\n"
        "  try: score_in({'choices': [{'message': {'content': said + 'x```'}}]}, (0, 1))\n"
        "  except Exception as error: assert type(error).__name__ == 'NotGraded'",
        "from activities.tool_calls import told_calls\n"
        "for said in ('<tool_call>' * 200_000, '<tool_call></tool_call' * 100_000): told_calls(said, 'a')",
        "from shared.templates import *\n"
        "for said in ('{{' * 30_000, '{{ ' + 'a.' * 30_000 + '}}', '{{' + ' ' * 60_000 + '}}'):\n"
        "  try: parse_template(said)\n"
        "  except TemplateError: pass",
    ],
    ids=["digits", "terms", "a judge's answer", "tool calls", "templates"],
)
def test_what_a_stranger_writes_is_read_in_linear_time(code: str) -> None:
    done = child("-c", _BEGIN + code)
    assert done.returncode == 0, done.stderr
