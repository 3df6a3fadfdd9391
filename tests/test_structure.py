"""What holds of the whole repository: imports, names, links; and what benchmarks/structure.py measures of it."""

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.structure import branches_on_plans, circles, defined_again, imported, longest_chain, measure, room_graph

ROOT = Path(__file__).parents[1]
PACKAGES = ("longshore", "shared", "workflows", "activities", "megatron_worker", "service", "examples", "benchmarks")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def files() -> list[Path]:
    """Everything that git knows, or would know after an `add`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


@pytest.mark.parametrize("package", ["shared", "workflows", "activities"])
def test_import_loads_nothing_heavy(package: str) -> None:
    heavy = ["torch", "transformers", "megatron", "pyarrow", "boto3", "wandb", "tokenizers", "fastapi"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / package).rglob("[!_]*.py")]
    assert modules
    code = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\n"
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"


def parsed(path: Path) -> ast.Module:
    """Without garbage collection: hypothesis hooks into it, and CPython 3.11 then loses count of the parser's depth."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def test_no_name_says_nothing() -> None:
    empty = {"utils", "helpers", "common", "manager", "handler", "base", "misc"}
    assert not [str(path) for path in MODULES if empty & set(path.stem.split("_"))]
    assert not [str(path) for path in MODULES if empty & set(path.parent.relative_to(ROOT).parts)]
    for path in MODULES:
        classes = [node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
        assert not [name for name in classes if re.search(r"(Utils|Helper|Manager|Misc)$", name)], path


def test_no_private_module_of_another_package_is_imported() -> None:
    found = set()
    for path in MODULES:
        modules = {node.module or "" for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)}
        found |= {module for module in modules if "._" in module}
    assert found == {"torch.utils._python_dispatch"}, "torch documents its dispatch modes under this name alone"


def test_every_module_says_what_it_is() -> None:
    written = [path for path in MODULES if path.stat().st_size]
    assert not [str(path) for path in written if not ast.get_docstring(parsed(path))]


def test_no_pickle() -> None:
    for path in MODULES:
        text = path.read_text()
        assert not re.search(r"^\s*(import|from) pickle|torch\.load\(|allow_pickle=True", text, re.MULTILINE), path


def test_no_file_names_a_package_or_image_registry() -> None:
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "docker" + ".io", "ghcr" + ".io", "nvcr" + ".io", "quay" + ".io"]
    pattern = re.compile("|".join(re.escape(host) for host in [*hosts, "download.pytorch" + ".org"]))
    found = [str(path) for path in files() if pattern.search(path.read_text(errors="ignore"))]
    assert not found


def test_files_that_documents_name_exist() -> None:
    """By their path, or by the end of it where the folder is clear from the text."""
    known = [f"/{path.relative_to(ROOT).as_posix()}" for path in files()]
    missing = []
    for page in DOCUMENTS:
        for named in re.findall(r"`((?:\.\./)*[\w./-]+\.(?:py|sh|js|css|html))`", page.read_text()):
            if named.startswith(("verl/", "trl/", "vllm/")):  # other people's repositories
                continue
            end = "/" + re.sub(r"^(\.\./)+", "", named)
            if not any(path.endswith(end) for path in known):
                missing.append(f"{page.relative_to(ROOT)} names {named}")
    assert not missing


def test_functions_that_documents_name_beside_their_file_exist() -> None:
    """Named as "`file.py`, `Class.method`"."""
    known = {path.as_posix(): path for path in files() if path.suffix == ".py"}
    num_named, missing = 0, []
    for page in DOCUMENTS:
        for end, name in re.findall(r"`([\w/]+\.py)`, `([A-Za-z_][\w.]*)`", page.read_text()):
            if name.endswith(".py"):
                continue
            num_named += 1
            nodes: list[ast.AST] = [ast.parse(known[path].read_text()) for path in known if path.endswith("/" + end)]
            for part in name.split("."):
                nodes = [
                    each for node in nodes for each in ast.iter_child_nodes(node) if vars(each).get("name") == part
                ]
            if not nodes:
                missing.append(f"{page.name} names {name} of {end}")
    assert num_named > 20
    assert not missing


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_prose_has_lines_of_120_characters_at_most() -> None:
    """Tables, and code in fences or behind four spaces, may have longer ones."""
    long = []
    for page in DOCUMENTS:
        text = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), page.read_text(), flags=re.M | re.S)
        lines = enumerate(text.splitlines(), 1)
        long += [f"{page.name}:{n}" for n, line in lines if len(line) > 120 and not line.startswith(("|", "    "))]
    assert not [place for place in long if not place.startswith("CHANGELOG.md")]


def test_lock_holds_every_direct_dependency() -> None:
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    locked = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    for requirement in map(Requirement, wanted):
        if requirement.name != "longshore":
            version = locked[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is locked to {version}"
            assert "+" not in version, "a local version is no public one"


# The most lines of Python that a room has: a package's own modules, or a folder of it with all below. Modules and
# functions have no limit. Growth beyond this is a decision, which changes the table.
LINES_OF_ROOMS = {
    "activities": 1_130,
    "activities/formats": 1_510,
    "activities/grading": 1_080,
    "activities/hosts": 2_960,
    "activities/models": 1_020,
    "activities/publishing": 920,
    "activities/sampling": 4_620,  # with agents of runs, also at env servers, and prompts that are carried over
    "activities/sandbox": 1_920,  # with the boxes of agents, and their priority
    "activities/sources": 1_240,
    "activities/tokenizing": 3_040,
    "activities/tracking": 580,
    "activities/trajectories": 1_530,
    "longshore": 7_940,  # local.py has an order of steps, as a workflow has; harbor.py reads its tasks
    "megatron_worker": 6_060,  # layers.py is the Megatron engine's and the sampler's
    "megatron_worker/fsdp": 1_060,
    "megatron_worker/head": 1_500,
    "megatron_worker/losses": 860,
    "megatron_worker/megatron": 1_930,
    "megatron_worker/mixers": 940,
    "megatron_worker/process": 900,
    "megatron_worker/sampler": 3_775,  # with versions of the tokens that a vLLM draws
    "megatron_worker/tensors": 1_450,
    "megatron_worker/trainer_rank": 940,
    "megatron_worker/training": 930,
    "megatron_worker/weight_sync": 2_110,  # with a trace of each rank
    "service": 4_160,
    "service/accounts": 1_290,  # with the order of reservations
    "service/apis": 7_790,
    "service/automation": 1_780,
    "service/cli": 4_980,
    "service/database": 530,  # with records that are read once for many requests
    "service/host_http": 960,
    "service/inference": 1_960,
    "service/runs": 2_560,  # with the line of requests that wait for results
    "shared": 1_700,
    "shared/chat": 2_560,  # with the requests of Responses and Messages
    "shared/families": 2_660,  # two families and a kind of layer more than 2,450
    "shared/jobs": 2_040,
    "shared/models": 1_070,
    "shared/runs": 740,
    "shared/storage": 1_980,
    "workflows": 2_120,
    "workflows/rollouts": 1_375,  # also evaluates the checkpoints of runs on datasets
    "workflows/training": 1_260,  # requests and steps as pure functions, which local runs share; a critic beside
}


def test_rooms_have_at_most_their_lines() -> None:
    lines: Counter[str] = Counter()
    for path in MODULES:
        package, *inner = path.relative_to(ROOT).parts
        if package not in ("examples", "benchmarks"):
            lines[f"{package}/{inner[0]}" if len(inner) > 1 else package] += path.read_text().count("\n")
    assert not {room: n for room, n in lines.items() if n > LINES_OF_ROOMS.get(room, 0)}
    assert not LINES_OF_ROOMS.keys() - lines.keys(), "rooms that are gone"


GRAPH = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"f"}, "f": {"e"}}


def test_imports_are_of_modules_and_of_names_in_them() -> None:
    modules = {"p", "p.q", "p.q.r", "s"}
    source = "import json\nimport s\nfrom p.q import r, name\ndef f():\n    from p import q\n"
    assert imported("p.x", ast.parse(source), modules) == {"s", "p.q", "p.q.r"}


def test_circles_and_the_longest_chain() -> None:
    assert circles(GRAPH) == [["e", "f"]]
    assert longest_chain(GRAPH) == ["a", "b", "c", "d"]


def test_rooms_import_rooms() -> None:
    imports = {"p.x.one": {"p.y.two", "p.x.three"}, "p.x.three": {"s"}, "p.y.two": set(), "p.y.four": {"p.y.two"}}
    assert room_graph("p", imports) == {"p.x": {"p.y"}, "p.y": set()}


def test_names_defined_again_and_branches_on_plans() -> None:
    one = ast.parse("class A: ...\ndef _b(): ...\nif isinstance(p, JobPlan | C): ...\n")
    other = ast.parse("class A: ...\ndef _b(): ...\nmatch p:\n    case SessionPlan(): ...\n    case C(): ...\n")
    assert defined_again({"x": one, "y": other, "z": ast.parse("A = 1")}) == {"A": ["x", "y"]}
    assert (branches_on_plans(one), branches_on_plans(other)) == (1, 1)


@pytest.mark.skipif(not Path(__file__).parents[1].joinpath(".git").exists(), reason="no git checkout to measure")
def test_this_revision_is_measured() -> None:
    found = measure("HEAD")
    assert set(found["packages"]) == {"longshore", "shared", "workflows", "activities", "megatron_worker", "service"}
    assert sum(package["lines"] for package in found["packages"].values()) == found["all"]["lines"]
    assert found["all"]["module_circles"] == sum(package["room_circles"] for package in found["packages"].values()) == 0
