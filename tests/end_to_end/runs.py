"""What tests of several kinds of runs share: rows of preferences, steps of a policy that a client sends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.end_to_end.stack import Stack

Groups = Callable[[int], str]
"""The file of a policy's step, by the step's number."""


def pair(number: int) -> dict[str, Any]:
    """A question about the harbour: an answer in crates is preferred to one in sacks."""
    return {
        "input": {"messages": [{"role": "user", "content": f"How much is on quay {number}?"}]},
        "preferred_output": [{"role": "assistant", "content": f"{number * 7 % 50} crates."}],
        "non_preferred_output": [{"role": "assistant", "content": f"A sack of grain, or {number % 9}."}],
    }


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(stack: Stack, run_id: str, groups: Groups, number: int) -> dict:
    """A step to its end, however often it has to be asked for: its key trains once."""
    return stack.cli(*("step", run_id, groups(number), "--key", f"key-{number}", "--wait", "--json")).json


def weights(step: dict) -> bytes:
    return Path(step["adapter"].removeprefix("file://"), "adapter_model.safetensors").read_bytes()
