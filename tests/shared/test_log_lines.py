"""No process writes a control character of a user's into its log."""

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTILE = "a\n2026-01-01 00:00:00 INFO forged\r\x1b[2J\x9b\u2028\u202eb"
LOGS = f"""
import logging, sys
from shared.log_lines import escape_output, start_logging
escape_output()
start_logging()
text = {HOSTILE!r}
logging.getLogger("x").warning("from %s", text)
try:
    raise ValueError(text)
except ValueError:
    logging.getLogger("x").exception("failed")
print(text)
raise ValueError(text)
"""
# What these write is an answer for their parent, or for who runs them.
ANSWERS_ALONE = {
    "activities/grading/open_grader.py",
    "activities/hosts/health.py",
    "activities/sandbox/child.py",
    "megatron_worker/sampler/grammars/trial.py",
    "megatron_worker/training/trial.py",
    "megatron_worker/weight_sync/__main__.py",
    "service/cli/main.py",
    "service/cli/run_options.py",
}


def test_control_characters_are_escaped_in_messages_tracebacks_and_prints() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, timeout=60)
    first, *rest = done.stderr.split("\n")
    assert first.endswith(r"x: from a\n2026-01-01 00:00:00 INFO forged\r\x1b[2J\x9b\u2028\u202eb")
    logged = rest[: next(n for n, line in enumerate(rest) if line.startswith("Traceback"))]
    assert [line for line in logged if "INFO forged" in line and not line.startswith("  ")] == []
    assert not set(done.stdout + done.stderr) & set("\r\x1b\x9b\u2028\u202e")
    assert r"\x1b[2J" in done.stdout


def test_every_process_of_ours_begins_so() -> None:
    """Each module that is run as a process, and writes a log, calls it under `if __name__`."""
    entries = [
        path
        for package in ("service", "activities", "megatron_worker")
        for path in (ROOT / package).rglob("*.py")
        if any(
            isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            for node in ast.parse(path.read_text()).body
        )
    ]
    missing = [
        str(path.relative_to(ROOT))
        for path in entries
        if "escape_output()" not in path.read_text() and str(path.relative_to(ROOT)) not in ANSWERS_ALONE
    ]
    assert len(entries) > 5
    assert missing == []


def test_as_json_a_message_is_one_line_with_its_ids() -> None:
    logs = LOGS.replace("start_logging()", 'start_logging("json", lambda: {"run_id": "sft-1"})', 1)
    logs = logs.replace('import start_logging("json", lambda: {"run_id": "sft-1"})', "import start_logging")
    done = subprocess.run([sys.executable, "-c", logs], capture_output=True, text=True, timeout=60)
    lines = done.stderr.split("\nTraceback")[0].splitlines()
    first, second = map(json.loads, lines)
    assert first["message"] == f"from {HOSTILE}" and first["run_id"] == "sft-1"
    assert "ValueError" in second["exception"] and second["level"] == "ERROR"
    assert not set(done.stderr) & set("\r\x1b\x9b\u2028\u202e")
