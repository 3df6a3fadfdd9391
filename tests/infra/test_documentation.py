"""The documentation against the repository: figures, folders, the site."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("shared", "workflows", "activities", "megatron_worker", "service")


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_readme_is_short_and_its_figures_are_those_that_were_measured() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    ratios = result("peers")["parts"]["sft"]["real"]["ratios"]["cpu_s"]
    assert re.findall(r"(\d\.\d\d) times", text) == [f"{ratios[peer]:.2f}" for peer in ("peft", "sft")]
    [row] = re.findall(r"^.*benchmarks\.tokenize.*$", text, re.MULTILINE)
    assert f"| {result('tokenize')['tokens_per_s_median'] / 1e6:.2f} million tokens" in row
    [row] = re.findall(r"^.*benchmarks\.control_plane.*$", text, re.MULTILINE)
    assert f"| {result('control_plane')['median']:.2f} s" in row


def test_figures_of_readme_are_of_one_kind_of_machine_and_of_commits_that_their_files_name() -> None:
    text = (ROOT / "README.md").read_text()
    measured = [result(name) for name in re.findall(r"^\|.*`python -m benchmarks\.(\w+)`", text, re.MULTILINE)]
    [(cpu, cpus)] = {(m["hardware"]["cpu"], m["hardware"]["cpus"]) for m in measured}
    words = " ".join(text.split())
    assert len(measured) == 2 and cpus == 2 and all(m["commit"] for m in measured)
    assert f"measured on two cores of an {cpu}" in words and "Each figure is a JSON file" in words


def test_the_table_of_kills_is_what_was_measured() -> None:
    text, median = (ROOT / "docs" / "survives_a_kill.md").read_text(), result("recovery")["median"]
    given = re.findall(r"^\| .+ \| .+ \| ([\d.]+) s \|$", text, re.MULTILINE)
    killed = ("web_service", "temporal", "rank", "control_host", "gpu_host", "sampler_host", "everything")
    assert given == [f"{median[name]:.1f}" for name in killed]
    assert f"A step takes {median['nothing']:.1f} s" in text


def test_each_folder_has_a_line_and_the_glossary_is_short() -> None:
    text = (ROOT / "docs" / "code_map.md").read_text()
    named = set(re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE))
    top = {path for package in PACKAGES for path in (package, *_folders_below(package))}
    assert named >= top, f"without a line: {sorted(top - named)}"
    assert all((ROOT / name).is_dir() for name in named), named
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^\| ([\w, -]+) \| [^-]", glossary, re.MULTILINE)[1:]
    assert 10 <= len(words) <= 15


def _folders_below(package: str) -> list[str]:
    return [path.parent.relative_to(ROOT).as_posix() for path in (ROOT / package).glob("*/__init__.py")]


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: object) -> list[str]:
        match entry:
            case str():
                return [entry]
            case dict():
                return [page for value in entry.values() for page in pages(value)]
            case list():
                return [page for value in entry for page in pages(value)]
        raise AssertionError(entry)

    shown = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(shown) == sorted(there)


def test_each_client_that_is_installed_has_rows_of_tests_that_exist() -> None:
    text = (ROOT / "docs" / "clients.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in text.splitlines() if line.startswith("| ")][1:]
    named = {
        (re.sub(r"[\[\]]|\(.*\)", "", client), version)
        for client, versions, *_ in rows
        for version in versions.split(", ")
    }
    lines = (ROOT / "requirements" / "clients.txt").read_text().splitlines()
    installed = {
        tuple(next(word for word in line.split()[1:] if "==" in word).split("=="))
        for line in lines
        if not line.startswith(("#", "axe", "transports"))  # rules that the page's tests read, and ways of weights
    }
    pinned = (ROOT / "requirements" / "constraints.txt").read_text()
    assert named == installed | {("standardwebhooks", *re.findall(r"^standardwebhooks==(.*)$", pinned, re.MULTILINE))}
    for *_, test in rows:
        path, _, name = test.strip("`").partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


@pytest.mark.slow
def test_programs_of_the_server_start_outside_a_checkout(tmp_path: Path) -> None:
    """As the pages call them; `python -m service.host` finds nothing where Longshore is installed as a package."""
    pages = {page.name: page.read_text() for page in (ROOT / "docs").glob("*.md")}
    ours = "service|activities|megatron_worker|shared|workflows"
    for name, text in pages.items():
        bare = set(re.findall(rf"python -m (?:{ours})\.[\w.]+", text))
        assert not bare, f"{name}: python -P -m longshore.server"
    named = rf"longshore\.server\s((?:{ours})\.[\w.]+)"
    modules = {each for text in pages.values() for each in re.findall(named, text)}
    assert {"service.host", "service.app", "service.launching"} <= modules
    for module in sorted(modules):
        command = [sys.executable, "-P", "-m", "longshore.server", module, "--help"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "usage: " in done.stdout, f"{module}: {done.stderr[-500:]}"


def test_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path) -> None:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    loads = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*href=["']?(?:https?:)?//"""
    )
    for page in pages:
        text = page.read_text()
        assert not loads.search(text), page.name
        assert 'class="mermaid"' not in text, f"{page.name}: the theme would load mermaid from a CDN"
    reference = (tmp_path / "reference" / "trainer_rank.html").read_text()
    assert 'id="megatron_worker.trainer_rank.TrainerRank.forward"' in reference
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", style.read_text()), style.name
