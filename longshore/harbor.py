"""Harbor's task folders as rows of prompts, for the agents of runs (docs/agents.md).

A task's image is not built: its box has the programs of the host. Of a Dockerfile WORKDIR, ENV, COPY and ADD of local
files, and RUN are followed; lines that install software are left out, and told, as a box has no network.
"""

import base64
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_INSTALLS = re.compile(
    r"\b(apt(-get)?|apk|dnf|yum|pip3?|uv|npm|pnpm|yarn|conda|mamba|cargo|go|gem)\s+(\S+\s+)*?(install|add|update|upgrade|sync)\b"
    r"|\b(curl|wget)\b|\bgit\s+clone\b"
)
_NO_EFFECT = (
    *("FROM", "EXPOSE", "LABEL", "CMD", "ENTRYPOINT", "USER"),
    *("SHELL", "ARG", "HEALTHCHECK", "MAINTAINER", "VOLUME"),
)


def is_task_folder(path: Path) -> bool:
    """Return True if a folder is a task, or holds tasks."""
    return bool(_tasks(path))


def rows_of(path: Path, notice: Callable[[str], object] = lambda _: None) -> Iterator[dict[str, Any]]:
    """Yield a row for each task of a folder, in order of name.

    Args:
        notice: takes a line about each part that is left out.

    Raises ValueError: names the folder and what cannot be done here.
    """
    for folder in _tasks(path):
        try:
            yield _row(folder, lambda text, folder=folder: notice(f"{folder.name}: {text}"))  # type: ignore[misc]
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: {error}") from error


def write_rows(path: Path, into: Path, notice: Callable[[str], object] = lambda _: None) -> None:
    """Write the rows of a folder's tasks as JSONL. Raises ValueError as `rows_of` does."""
    with into.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows_of(path, notice))


def _tasks(path: Path) -> list[Path]:
    if (path / "task.toml").is_file():
        return [path]
    return sorted(each.parent for each in path.glob("*/task.toml")) if path.is_dir() else []


def _row(folder: Path, notice: Callable[[str], object]) -> dict[str, Any]:
    told = tomllib.loads((folder / "task.toml").read_text())
    environment = told.get("environment", {})
    if told.get("steps"):
        raise ValueError("a task of several steps is several tasks here: give each its folder")
    if environment.get("gpus"):
        raise ValueError("environment.gpus: a box has no accelerator")
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise ValueError("environment/docker-compose.yaml: a box is one machine, without other containers")
    if environment.get("docker_image"):
        notice(f"the programs of {environment['docker_image']} are the host's here")
    row: dict[str, Any] = {"prompt": (folder / "instruction.md").read_text(), "task": folder.name}
    row |= _of_dockerfile(folder / "environment", notice)
    if environment.get("workdir"):
        row["folder"] = environment["workdir"]
    tests = _contents(folder / "tests")
    if "test.sh" not in tests:
        raise ValueError("tests/test.sh is missing")
    times = {"time_s": told.get("agent", {}), "verifier_time_s": told.get("verifier", {})}
    row |= {name: float(part["timeout_sec"]) for name, part in times.items() if part.get("timeout_sec")}
    return row | {"tests": tests}


def _of_dockerfile(context: Path, notice: Callable[[str], object]) -> dict[str, Any]:
    """Return a box's folder, files and setup as a Dockerfile says them. Raises ValueError: names an unknown line."""
    folder, files, setup, variables = "/", dict[str, Any](), list[str](), dict[str, str]()
    path = context / "Dockerfile"
    text = path.read_text() if path.exists() else ""
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        match word.upper():
            case "":
                continue
            case name if name in _NO_EFFECT or name.startswith("#"):
                continue
            case "WORKDIR":
                folder = rest.strip() if rest.strip().startswith("/") else f"{folder.rstrip('/')}/{rest.strip()}"
            case "ENV":
                pairs = shlex.split(rest if "=" in rest.split(" ")[0] else rest.replace(" ", "=", 1))
                variables |= dict(pair.split("=", 1) for pair in pairs)
            case "COPY" | "ADD":
                files |= _copied(context, [w for w in shlex.split(rest) if not w.startswith("--")], folder)
            case "RUN" if _INSTALLS.search(rest):
                notice(f"left out, as a box has no network: RUN {rest.strip()[:100]}")
            case "RUN":
                setup.append(f"cd {shlex.quote(folder)}\n{rest.strip()}")
            case _:
                raise ValueError(f"environment/Dockerfile: {word} cannot be followed here")
    found = {"folder": folder if folder != "/" else "/work", "files": files, "variables": variables}
    return found | ({"setup": "\n".join(["set -e", *setup])} if setup else {})


def _copied(context: Path, words: list[str], folder: str) -> dict[str, Any]:
    *sources, target = words
    found: dict[str, Any] = {}
    for source in sources:
        if "://" in source:
            raise ValueError(f"environment/Dockerfile: {source}: a box has no network")
        path = (context / source.lstrip("/")).resolve()
        if not path.is_relative_to(context.resolve()) or not path.exists():
            raise ValueError(f"environment/Dockerfile: there is no {source} in environment")
        base = target if target.startswith("/") else f"{folder.rstrip('/')}/{target.removeprefix('./')}"
        if path.is_dir():
            found |= {f"{base.rstrip('/')}/{name}": content for name, content in _contents(path).items()}
        else:
            is_folder = base.endswith("/") or target in (".", "./") or len(sources) > 1
            found[f"{base.rstrip('/').removesuffix('/.')}/{path.name}" if is_folder else base] = _content(path)
    return found


def _contents(folder: Path) -> dict[str, Any]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return {path.relative_to(folder).as_posix(): _content(path) for path in paths}


def _content(path: Path) -> str | dict[str, str]:
    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
