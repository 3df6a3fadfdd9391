"""The files of an open project against the repository: licence, workflows, hooks, templates, what is packaged."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def steps(path: Path) -> list[dict]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_licence_is_named_and_not_copied() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert f"SPDX-License-Identifier: {PROJECT['project']['license']}" in text
    [author] = PROJECT["project"]["authors"]
    assert author["name"] in text and "apache.org/licenses/LICENSE-2.0" in text
    assert len(text) < 1000, "the full text is not ours"


def test_changelog_has_a_part_for_this_version_and_for_what_comes() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    kinds = set(re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_client_depends_on_httpx_and_pydantic_alone_and_is_typed() -> None:
    names = {re.split(r"[^\w-]", wanted)[0] for wanted in PROJECT["project"]["dependencies"]}
    assert names == {"httpx", "pydantic"}
    assert (ROOT / "longshore" / "py.typed").exists()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_exists(path: Path) -> None:
    for step in steps(path):
        command = step.get("run", "")
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= make_targets()
        for name in re.findall(r"bash (\S+)", command):
            assert (ROOT / name).exists(), name
        for image in re.findall(r"infra/Containerfile\S*matrix\.image", command):
            assert image and {p.suffix for p in (ROOT / "infra").glob("Containerfile.*")} == {".service", ".worker"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_few_rights_and_pinned_actions(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] == {"contents": "read"}
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), "GitHub's own actions, of a named version"
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
        assert "${{ github.event" not in step.get("run", ""), "an event's text in a shell is a stranger's command"


def test_ci_is_a_quick_check_then_the_suite_in_parts_and_documentation_and_wheel_once() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    jobs = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {"quick": None, "suite": "quick", "whole": "quick"}
    matrix = jobs["suite"]["strategy"]["matrix"]
    assert matrix == {"python": ["3.11", "3.12"], "part": ["1/3", "2/3", "3/3"]}


def test_commits_have_subjects_of_72_characters_at_most(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    (tmp_path / "infra").mkdir()
    shutil.copy(ROOT / "infra" / "check_subjects.sh", tmp_path / "infra")
    git("init", "--quiet")
    for subject, status in (("Begin", 0), ("é" * 72, 0), ("Merge " + "x" * 70, 1)):
        git("commit", "--quiet", "--allow-empty", "--message", subject)
        done = subprocess.run(["bash", "infra/check_subjects.sh", ":/Begin"], cwd=tmp_path, capture_output=True)
        assert done.returncode == status, subject


def test_a_release_has_the_notes_of_its_version_alone() -> None:
    def notes(version: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", ROOT / "infra" / "release_notes.sh", version]
        return subprocess.run(command, capture_output=True, text=True)

    mine = notes("Unreleased")
    assert mine.returncode == 0 and "### Added" in mine.stdout and "## [" not in mine.stdout
    assert notes("0.0.0").returncode == 1 and "0.0.0" in notes("0.0.0").stderr


def test_a_tag_releases_wheel_images_and_docs() -> None:
    assert "bash .ci/run" in [step.get("run") for step in steps(WORKFLOWS[1])]
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert set(release["jobs"]) == {"check", "wheel", "images", "docs"}
    assert all(job["needs"] == "check" for name, job in release["jobs"].items() if name != "check")
    [images] = [job["strategy"]["matrix"]["image"] for job in release["jobs"].values() if "strategy" in job]
    assert {f"Containerfile.{image}" for image in images} == {p.name for p in (ROOT / "infra").glob("Containerfile.*")}
    assert "make wheel" in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "make docs" in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_hooks_are_the_tools_of_the_environment() -> None:
    document = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in document["repos"]] == ["local"]
    tools = {Path(hook["entry"].split()[0]) for repo in document["repos"] for hook in repo["hooks"]}
    assert tools == {Path(".venv/bin") / name for name in ("ruff", "mypy", "lint-imports")}
    assert all((ROOT / tool).exists() for tool in tools)


@pytest.mark.parametrize("path", [p for p in TEMPLATES if p.name != "config.yml"], ids=lambda path: path.name)
def test_issue_templates_are_forms_and_name_commands_that_exist(path: Path) -> None:
    import typer

    from service.cli.main import app

    document = yaml.safe_load(path.read_text())
    assert document["name"] and document["description"]
    assert len({part["id"] for part in document["body"]}) == len(document["body"])
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"`longshore ([a-z]+)", path.read_text())) <= commands


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_and_commands_of_the_root_pages_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    assert set(re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)) <= make_targets()
