"""The file tree of the README, made from the first sentence of every module.

python tests/readme_tree.py      writes it between the README's markers
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "workflows", "activities", "megatron_worker", "service", "examples", "benchmarks")
OTHERS = {
    "infra/": "how it runs on machines that matter; no Python",
    "infra/Containerfile.service": "service and control host, without torch",
    "infra/Containerfile.worker": "GPU host and workers",
    "infra/compose.yaml": "the production shape on one machine",
    "infra/env.example": "the secrets that compose asks for",
    "infra/kubernetes/": "the same processes in a cluster",
    "docs/": "what the code cannot say",
    "docs/api.md": "the native API: keys, errors, endpoints",
    "docs/architecture.md": "the layers, the way of the data, where state lives, how a kill is survived",
    "docs/art_api.md": "the API that OpenPipe ART's client speaks: models, training jobs, events",
    "docs/cli.md": "the commands, and what their exit codes mean",
    "docs/datasets.md": "the rows that are taken, and what becomes of them",
    "docs/graders.md": "what turns a sample into a number, and the sandbox of python graders",
    "docs/inference.md": "chat with what was published: what is answered, where it is drawn",
    "docs/job_protocol.md": "what the two worlds say to each other, file by file",
    "docs/layouts.md": "every parallel layout against one rank, measured",
    "docs/losses.md": "what a run optimises: formula, source and metrics of every loss",
    "docs/openai_api.md": "fine-tuning with OpenAI's clients: what every field means here, what auto means",
    "docs/operations.md": "settings, upgrade, backup, what to do when",
    "docs/page.md": "what a browser shows, how it signs in, how it is made",
    "docs/rollouts.md": "from prompts to trajectory groups: what a server-driven RL run does",
    "docs/sampler.md": "where completions come from: the protocol, what logprobs mean, which bits are equal",
    "docs/schedules_and_webhooks.md": "runs that are started by the clock, and messages about runs",
    "docs/trainer_rank.md": "training code of your own on a rank",
    "docs/trajectories.md": "the groups that a client sends, as token ids or as conversations",
    "requirements/": "versions, locked",
    "requirements/install.sh": "makes .venv",
    "requirements/pip_install.sh": "pip, tried again: for the other two",
    "requirements/clients.sh": "other people's clients beside it, which the tests drive",
    "requirements/clients.txt": "their versions",
    "requirements/constraints.txt": "every version that was tested",
    "requirements/temporal.txt": "Temporal's server, pinned to the byte",
    "tests/": "mirrors the tree; end_to_end/ kills real processes",
    ".ci/run": "what CI runs",
    "Makefile": "setup, demo, test, gpu-check, lint",
}
_BEGIN, _END = "<!-- tree -->\n```\n", "```\n<!-- /tree -->"
_COLUMN = 36
_LONGEST = 110
_FOLDERS = {f"{package}/" for package in PACKAGES} | set(OTHERS)


def tree() -> str:
    """One line a file: its name, and what it is."""
    lines = [line for package in PACKAGES for line in _package(ROOT / package)]
    lines += [_line(name, text) for name, text in OTHERS.items()]
    return "".join(f"{line}\n" for line in lines)


def _package(folder: Path) -> Iterator[str]:
    if not list(folder.glob("*.py")):
        return
    init = folder / "__init__.py"
    yield _line(f"{folder.relative_to(ROOT)}/", sentence(init) if init.exists() else "")
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield _line(str(path.relative_to(ROOT)), sentence(path))
    for child in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from _package(child)


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, cut at a clause where it is long."""
    doc = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    text = re.split(r"\.(?:\s+(?=[A-Z`])|$)", doc)[0]
    if len(text) <= _LONGEST:
        return text
    cuts = [text[: match.start()] for match in re.finditer(r"[,;:] ", text)]
    whole = [cut for cut in cuts if len(cut) <= _LONGEST and cut.count("(") == cut.count(")")]
    return whole[-1] if whole else text


def _line(name: str, text: str) -> str:
    depth = name.rstrip("/").count("/") if name.split("/")[0] + "/" in _FOLDERS else 0
    last = name.rstrip("/").rsplit("/", 1)[-1] + ("/" if name.endswith("/") else "")
    return f"{'  ' * depth + (last if depth else name):{_COLUMN}} {text}".rstrip()


def replaced(readme: str) -> str:
    """The README with the tree as it is now."""
    before, rest = readme.split(_BEGIN)
    after = rest.split(_END)[1]
    return before + _BEGIN + tree() + _END + after


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(replaced(path.read_text()))
